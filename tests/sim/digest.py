"""A digest of all that a refused request must leave as it was."""

import hashlib

from hicache.core.world import World


def digest(world: World) -> str:
    """Over rows, blocks, pins, leases, tickets and trees; not over counters and when clients were last heard."""
    residency = world.residency
    hasher = hashlib.blake2b(digest_size=16)
    for column in (
        residency.parent,
        residency.namespace,
        residency.l2,
        residency.l3,
        residency.pins,
        residency.kids,
        residency.in_tree,
        residency.block,
        residency.l3_bytes,
        world.pool.owner,
        *(view.count for view in world.pool.views),
        world.namespaces.rows,
        world.namespaces.l2_pages,
    ):
        hasher.update(column.tobytes())
    leases = [(lease.id, lease.session, lease.rows.tolist(), lease.expires_s) for lease in world.leases.all()]
    tickets = [ticket.id for ticket in world.tickets]
    # Not the ticks: under write_back any event looks for pages to demote, and puts back what it may not have.
    order = [rows.tolist() for _, rows in world.evict_l2.queue]  # type: ignore[attr-defined]
    rest = (leases, tickets, order, world.namespaces.tokens_held, sorted(world.sessions), world.disk.used_bytes)
    hasher.update(repr(rest).encode())
    return hasher.hexdigest()

"""The state in figures: what `status` pages and metrics show."""

from typing import Any

import numpy as np

from hicache.base.ids import SessionId
from hicache.core.residency import ABSENT, FILLING, LEAVING, READY
from hicache.core.world import World

_NAMESPACES = 64  # shown one by one; the totals hold all


def report(world: World) -> dict[str, Any]:
    """A JSON-able tree: sessions, pool, rows, tiers, namespaces, leases, tickets, counters."""
    return {
        "draining": world.draining,
        "sessions": [_session(world, id) for id in world.sessions],
        "pool": _pool(world),
        "rows": _rows(world),
        "l3": {
            "mode": world.disk.mode,
            "reason": world.disk.reason,
            "used_bytes": world.disk.used_bytes,
            "capacity_bytes": world.disk.capacity_bytes,
            "write_policy": world.write_policy,
        },
        "namespaces": _namespaces(world),
        "tenants": _tenants(world),
        "leases": len(world.leases),
        "tickets": _tickets(world),
        "tree_tokens": world.namespaces.tokens_held,
        "counters": world.counters.as_dict(),
    }


def _session(world: World, id: SessionId) -> dict[str, Any]:
    session = world.sessions[id]
    return {
        "session": session.id,
        "instance": session.instance.hex(),
        "epoch": session.epoch,
        "tenant": session.tenant,
        "model": session.model.name,
        "state": session.state,
        "silent_s": round(max(0.0, world.now_s - session.heard_s), 3),
        "leases": len(session.leases),
        "tickets": len(session.tickets),
        "page_tokens": session.shape.page_tokens,
        "page_bytes": session.shape.page_bytes,
    }


def _pool(world: World) -> dict[str, Any]:
    pool = world.pool
    views = [
        {
            "block_bytes": view.block_bytes,
            "packing": view.packing,
            "parents": view.held_parents,
            "used_blocks": view.used_blocks,
            "open_blocks": view.open_blocks,
            "dead_bytes": view.dead_bytes(),
        }
        for view in pool.views
    ]
    return {
        "arena_bytes": pool.arena_bytes,
        "parent_bytes": pool.parent_bytes,
        "parents": pool.parents,
        "free_parents": pool.free_parents,
        "used_bytes": pool.used_bytes(),
        "free_bytes": pool.free_parents * pool.parent_bytes
        + sum(view.open_blocks * view.block_bytes for view in pool.views),
        "views": views,
    }


def _rows(world: World) -> dict[str, Any]:
    residency = world.residency
    l2, l3 = np.bincount(residency.l2, minlength=4), np.bincount(residency.l3, minlength=4)
    names = {FILLING: "filling", READY: "ready", LEAVING: "leaving"}
    live = len(residency)
    homeless = int(np.count_nonzero((residency.namespace >= 0) & (residency.l2 == ABSENT) & (residency.l3 == ABSENT)))
    return {
        "rows": live,
        "capacity": int(residency.parent.size),
        "pinned": int(np.count_nonzero(residency.pins)),
        "without_tier": homeless,
        "l2": {name: int(l2[state]) for state, name in names.items()},
        "l3": {name: int(l3[state]) for state, name in names.items()},
    }


def _namespaces(world: World) -> dict[str, Any]:
    table = world.namespaces
    found = sorted(table.by_id.values(), key=lambda each: -int(table.l2_pages[each.index]))
    shown = [
        {
            "namespace": each.id.hex()[:16],
            "tenant": each.tenant,
            "rows": int(table.rows[each.index]),
            "l2_bytes": _l2_bytes(world, each.index),
            "l3_bytes": int(table.l3_bytes[each.index]),
        }
        for each in found[:_NAMESPACES]
    ]
    return {"count": len(table), "shown": shown}


def _l2_bytes(world: World, index: int) -> int:
    namespace = world.namespaces[index]
    return int(world.namespaces.l2_pages[index]) * namespace.shape.page_bytes if namespace.bound else 0


def _tenants(world: World) -> dict[str, dict[str, int]]:
    table = world.namespaces
    tenants: dict[str, dict[str, int]] = {}
    for each in table.by_id.values():
        sums = tenants.setdefault(each.tenant, {"rows": 0, "l2_bytes": 0, "l3_bytes": 0})
        sums["rows"] += int(table.rows[each.index])
        sums["l2_bytes"] += _l2_bytes(world, each.index)
        sums["l3_bytes"] += int(table.l3_bytes[each.index])
    return tenants


def _tickets(world: World) -> dict[str, int]:
    kinds: dict[str, int] = {"pages": world.tickets.pages}
    for ticket in world.tickets:
        name = type(ticket).__name__.removesuffix("Ticket").lower()
        kinds[name] = kinds.get(name, 0) + 1
    return kinds

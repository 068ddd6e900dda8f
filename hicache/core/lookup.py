"""How far is a prompt known, and how much of it can be resumed?

The tree answers to the token. Pages that only L3 knows are not in the tree after a restart: beyond its match the
key chain is walked until the first unknown key, and what is found is planted in the tree.

    tokens   |-------- known in the tree --------|·· by key ··|  unknown
    pages    | ready | ready | L3 | L3 | filling | filling    |
             |<---- resumable ---->|<---- pending ---------->|
"""

from dataclasses import dataclass, replace

import numpy as np

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.ids import TOKEN_BYTES, LeaseId, NamespaceId
from hicache.core import announce, disk
from hicache.core.commands import Reply
from hicache.core.events import ExtendAsked, LookupAsked
from hicache.core.leases import Lease
from hicache.core.namespaces import Namespace
from hicache.core.residency import FILLING, NO_ROWS, READY, Int32s, Mask
from hicache.core.sessions import Session
from hicache.core.world import World
from hicache.protocol.messages import Match, Scope


@dataclass(frozen=True, slots=True)
class Path:
    """Rows of the known pages of a sequence, page 0 first, and how many tokens the index knows. `next_row`: of a page
    that follows them, of which the sequence's tokens up to the known are the first; -1 if there is none."""

    rows: Int32s
    known_tokens: int
    next_row: int = -1


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a path can be resumed, in pages: `ready` of which `l2` are in L2; `pending` follow them. And the page
    `partial_row` (-1: none), of which only the first `partial_tokens` are the sequence's."""

    ready: int
    l2: int
    pending: int
    partial_row: int = -1
    partial_tokens: int = 0
    partial_l3: bool = False


def count_tokens(world: World, tokens: bytes) -> int:
    """Raises `HiCacheError` for a torn or too long sequence."""
    count, odd = divmod(len(tokens), TOKEN_BYTES)
    if odd:
        raise HiCacheError(ErrorCode.MALFORMED, f"tokens: {len(tokens)} bytes are not whole int32")
    if count > world.limits.tokens_per_request:
        raise HiCacheError(
            ErrorCode.TOO_LARGE, f"tokens: {count}, at most {world.limits.tokens_per_request} per request"
        )
    return count


def namespace_of(world: World, session: Session, scope: Scope) -> tuple[NamespaceId, Namespace | None]:
    """The namespace of a request, if it holds anything; it has the session's shape then."""
    id = session.namespace_of(scope)
    namespace = world.namespaces.get(id)
    if namespace is not None and not namespace.bound:
        give_shape(world, session, namespace)
    return id, namespace if namespace is None else world.namespaces.get(id)


def give_shape(world: World, session: Session, namespace: Namespace) -> None:
    moved = namespace.bind(session.shape, world.namespaces.owners)
    world.namespaces.announced[namespace.index] = announce.concerns(world, session, namespace)
    world.residency.need_groups(len(session.shape.groups))
    disk.drop_incomplete(world, namespace, moved)


def find_path(world: World, namespace: Namespace, tokens: bytes) -> Path:
    """The known pages of `tokens`. Plants in the tree what was found by key."""
    match = namespace.tree.match(tokens)
    rows = match.rows
    size = namespace.shape.page_tokens
    if rows.size == len(tokens) // (TOKEN_BYTES * size):
        return Path(rows, match.known_tokens, namespace.tree.continuation(match))
    last = world.residency.key[rows[-1]] if rows.size else namespace.id
    more = []
    row_of = world.residency.row_of
    for key in namespace.shape.chain.walk(last, tokens, rows.size):
        row = row_of.get(key)
        if row is None:
            break
        more.append(row)
    if not more:
        return Path(rows, match.known_tokens, namespace.tree.continuation(match))
    rows = np.concatenate((rows, np.array(more, np.int32)))
    plant(world, namespace, tokens[: rows.size * size * TOKEN_BYTES], rows)
    return Path(rows, max(match.known_tokens, rows.size * size))


def plant(world: World, namespace: Namespace, tokens: bytes, rows: Int32s) -> None:
    """Make a path known to the tree, within the limit on tokens held. Lookups then need no hashing for it."""
    tree, table = namespace.tree, world.namespaces
    if table.tokens_held + len(tokens) // TOKEN_BYTES > world.limits.tree_tokens:
        return
    before = tree.tokens_held
    tree.insert(tokens, rows)
    table.tokens_held += tree.tokens_held - before
    if world.config.announced is not None:
        pages = np.frombuffer(tokens, "<i4", rows.size * tree.page_tokens).reshape(rows.size, tree.page_tokens)
        world.residency.padded[rows] = pages.min(axis=1, initial=0) < 0
    world.residency.enter_tree(rows)


def reach(world: World, rows: Int32s, most: int) -> Reach:
    """How far `rows` can be resumed, at most `most` pages, every cache group counted.

    A page that a store is filling is pending even if L3 has it (found again meanwhile): a load could neither copy
    it nor read it into another block."""
    l2 = world.residency.l2[rows]
    in_l2 = l2 >= READY
    usable = in_l2 | (world.residency.l3[rows] == READY)
    for at in np.flatnonzero(usable & (l2 == FILLING)).tolist():
        usable[at] = int(rows[at]) in world.tickets.reader_of
    ready = _leading(usable)
    if ready >= most:
        return Reach(most, int(np.count_nonzero(in_l2[:most])), 0)
    pending = _leading((usable | (l2 == FILLING))[ready:])
    return Reach(ready, int(np.count_nonzero(in_l2[:ready])), pending)


def with_partial(world: World, path: Path, found: Reach, limit: int, size: int) -> Reach:
    """The same, and the page beyond if some of its tokens are known and within `limit` (tokens)."""
    at = found.ready
    row = int(path.rows[at]) if at < path.rows.size else path.next_row
    tokens = min(limit, path.known_tokens) - at * size
    if row < 0 or not 0 < tokens < size or found.pending or at < min(limit // size, path.rows.size):
        return found
    page = reach(world, np.array([row], np.int32), 1)
    return replace(found, partial_row=row, partial_tokens=tokens, partial_l3=not page.l2) if page.ready else found


def _leading(mask: Mask) -> int:
    """Number of leading True."""
    if not mask.size:
        return 0
    first = int(mask.argmin())
    return mask.size if mask[first] else first


def lookup(world: World, event: LookupAsked) -> None:
    session = world.worker(event.session)
    count = count_tokens(world, event.tokens)
    if event.lease and len(session.leases) >= world.limits.leases_per_session:
        world.busy(event.session, event.request, f"{len(session.leases)} leases are open, the limit")
        return
    _, namespace = namespace_of(world, session, event.scope)
    path, found, lease = Path(NO_ROWS, 0), Reach(0, 0, 0), None
    size = session.shape.page_tokens
    if namespace is not None:
        path = find_path(world, namespace, event.tokens)
        limit = max(0, min(event.limit_tokens, count))
        found = reach(world, path.rows, limit // size)
        if event.partial:
            found = with_partial(world, path, found, limit, size)
        rows = path.rows[: found.ready]
        if found.partial_tokens:
            rows = np.append(rows, np.int32(found.partial_row))
        if event.lease and rows.size:
            lease = take_lease(world, session, namespace, rows)
            lease.partial_tokens = found.partial_tokens
    if event.lease:
        _count(world, count, found, size)
    else:
        world.counters.probes += 1
    world.out.append(Reply(event.session, event.request, _match(lease, path.known_tokens, found, size)))


def _count(world: World, looked_up: int, found: Reach, size: int) -> None:
    counters = world.counters
    counters.lookups += 1
    counters.tokens_looked_up += looked_up
    partial_l3 = found.partial_tokens if found.partial_l3 else 0
    counters.tokens_l2 += found.l2 * size + found.partial_tokens - partial_l3
    counters.tokens_l3 += (found.ready - found.l2) * size + partial_l3
    counters.tokens_missed += looked_up - found.ready * size - found.partial_tokens


def _match(lease: Lease | None, known_tokens: int, found: Reach, size: int) -> Match:
    return Match(
        lease=0 if lease is None else lease.id,
        known_tokens=known_tokens,
        resumable_tokens=found.ready * size,
        l2_tokens=found.l2 * size,
        l3_tokens=(found.ready - found.l2) * size,
        pending_tokens=found.pending * size,
        partial_tokens=found.partial_tokens,
        partial_l3=found.partial_l3,
    )


def take_lease(world: World, session: Session, namespace: Namespace, rows: Int32s) -> Lease:
    lease = world.leases.add(session.id, namespace.index, rows.copy(), world.now_s + world.limits.lease_ttl_s)
    lease.fingerprint = session.shape.fingerprint
    session.leases.add(lease.id)
    world.pin(lease.rows)
    world.touch(lease.rows)
    world.story.note("leased", lease.rows)
    return lease


def extend(world: World, event: ExtendAsked) -> None:
    """Look further along a leased sequence. `event.tokens` follow the pages that the lease holds."""
    session = world.worker(event.session)
    count = count_tokens(world, event.tokens)
    lease = lease_of(world, session, event.lease)
    if lease.rows.size < lease.promised:
        raise lost_pages(lease)
    if lease.partial_tokens:  # the caller goes on from the last whole page
        world.unpin(lease.rows[-1:])
        lease.rows, lease.partial_tokens, lease.promised = lease.rows[:-1], 0, lease.promised - 1
    namespace = world.namespaces[lease.namespace]
    size, held = namespace.shape.page_tokens, lease.rows.size
    more: list[int] = []
    last = world.residency.key[lease.rows[-1]] if held else namespace.id
    for key in namespace.shape.chain.walk(last, event.tokens):
        row = world.residency.row_of.get(key)
        if row is None:
            break
        more.append(row)
    new = np.array(more, np.int32)
    found = reach(world, new, max(0, min(event.limit_tokens // size - held, count // size)))
    rows = new[: found.ready]
    world.pin(rows)
    lease.rows = np.concatenate((lease.rows, rows))
    lease.promised = lease.rows.size
    world.leases.renew(lease, world.now_s + world.limits.lease_ttl_s)
    world.touch(lease.rows)
    _count(world, count, found, session.shape.page_tokens)
    in_l2 = int(np.count_nonzero(world.residency.l2[lease.rows] >= READY))
    match = _match(lease, (held + new.size) * size, Reach(lease.rows.size, in_l2, found.pending), size)
    world.out.append(Reply(event.session, event.request, match))


def lease_of(world: World, session: Session, id: LeaseId) -> Lease:
    """The lease if it lives, is that session's or its engine's, and of the session's shard: the bytes of another
    model, layout or shard are not this session's. Raises `HiCacheError(UNKNOWN_LEASE | BAD_SPEC)`."""
    lease = world.lease_for(session, id)
    if lease is None:
        raise HiCacheError(
            ErrorCode.UNKNOWN_LEASE,
            f"lease {id} does not exist, has expired or belongs to another session",
            "look up again",
        )
    if lease.fingerprint != session.shape.fingerprint:
        raise HiCacheError(
            ErrorCode.BAD_SPEC,
            f"lease {id} is of another model, layout or shard than this session",
            "look up with the model, layout and shard that loads",
        )
    return lease


def lost_pages(lease: Lease) -> HiCacheError:
    return HiCacheError(
        ErrorCode.TRANSFER_FAILED,
        f"lease {lease.id}: of {lease.promised} pages {lease.promised - lease.rows.size} could not be read",
        "recompute them",
    )

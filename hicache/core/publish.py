"""Store: pages go from L1 to L2, become visible when they are whole, and are written through to L3.

StoreAsked ─► which of the offered pages are missing? ─► make room (evict) ─► blocks, CopyPages, Accepted
CopyEnded ok ─► READY, in the tree ─► Done ─► WriteRecords (write_through)
          else ─► ABSENT, Error: nothing of it was ever visible
"""

import numpy as np

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.ids import TOKEN_BYTES
from hicache.core import disk, lookup
from hicache.core.commands import CopyPages, DoneFence, GroupCopy
from hicache.core.commands import Reply as ReplyCommand
from hicache.core.events import CopyEnded, StoreAsked
from hicache.core.evict import room_for
from hicache.core.namespaces import Namespace
from hicache.core.residency import ABSENT, NO_ROWS, READY, ROOT, Int32s, Int64s
from hicache.core.sessions import Session, Shape
from hicache.core.transfers import StoreTicket
from hicache.core.world import World
from hicache.pool.refs import BlockRefs
from hicache.protocol.messages import Accepted, Done


def check_starts(shape: Shape, blocks: tuple[Int32s, ...]) -> int:
    """Number of pages that `blocks` speak of. Raises `HiCacheError(OUT_OF_RANGE)` for counts that disagree
    or a start outside of the declared layout."""
    if len(blocks) != len(shape.groups):
        raise HiCacheError(
            ErrorCode.OUT_OF_RANGE, f"blocks: {len(blocks)} lists, the model has {len(shape.groups)} cache groups"
        )
    pages = blocks[0].size // shape.groups[0].starts
    for group, starts in zip(shape.groups, blocks, strict=True):
        if starts.size != pages * group.starts:
            raise HiCacheError(
                ErrorCode.OUT_OF_RANGE,
                f"blocks of group {group.name!r}: {starts.size} starts, {pages} pages need {pages * group.starts}",
            )
        if starts.size and not 0 <= int(starts.min()) <= int(starts.max()) < group.l1_starts:
            raise HiCacheError(
                ErrorCode.OUT_OF_RANGE,
                f"blocks of group {group.name!r}: starts {int(starts.min())} to {int(starts.max())}, "
                f"the layout has 0 to {group.l1_starts - 1}",
            )
    return pages


def group_copies(
    shape: Shape,
    refs: list[BlockRefs],
    blocks: tuple[Int32s, ...],
    which: Int64s,
) -> tuple[GroupCopy, ...]:
    """Block pairs of the pages `which` (places in `blocks`); `refs[g].ids[i]` belongs to page which[i]."""
    copies = []
    for index, (group, owned, starts) in enumerate(zip(shape.groups, refs, blocks, strict=True)):
        ids, offsets = owned.ids, owned.view.offset_bytes(owned.ids)
        l1 = starts.reshape(-1, group.starts)[which].reshape(-1)
        if group.starts > 1:
            ids = np.repeat(ids, group.starts)
            steps = np.arange(group.starts, dtype=np.int64) * group.start_bytes
            offsets = (offsets[:, None] + steps).reshape(-1)
        copies.append(GroupCopy(index, ids, offsets, l1))
    return tuple(copies)


def store(world: World, event: StoreAsked) -> None:
    session = world.worker(event.session)
    session.need_memory()
    size = session.shape.page_tokens
    count = lookup.count_tokens(world, event.tokens)
    pages = count // size
    offered = check_starts(session.shape, event.blocks)
    if count % size or not 0 <= event.first_page <= pages or offered != pages - event.first_page:
        raise HiCacheError(
            ErrorCode.OUT_OF_RANGE,
            f"{offered} pages of {size} from page {event.first_page} on do not end where the {count} tokens do",
        )
    if world.crowded(session):
        world.busy(event.session, event.request, "too many transfers are open in this session")
        return
    namespace_id, namespace = lookup.namespace_of(world, session, event.scope)
    path = NO_ROWS if namespace is None else lookup.find_path(world, namespace, event.tokens).rows
    world.counters.stores += 1
    if path.size < event.first_page:  # the pages before are unknown, and a page without them can't be found
        world.counters.refused_pages += offered
        _nothing(world, event)
        return
    made = namespace is None
    if namespace is None:
        namespace = world.namespaces.add(namespace_id, session.tenant)
        lookup.give_shape(world, session, namespace)
    ticket = _begin(world, session, namespace, event, path)
    if ticket is None and made:
        world.namespaces.remove_empty(namespace.index)
    if ticket is None:
        _nothing(world, event)


def _nothing(world: World, event: StoreAsked) -> None:
    """All is there already, or nothing fits."""
    id = world.tickets.new_id()
    world.out.append(DoneFence(event.session, event.fence, event.generation))
    world.out.append(ReplyCommand(event.session, event.request, Accepted(id, 0)))
    world.out.append(ReplyCommand(event.session, event.request, Done(ticket=id)))


def _begin(
    world: World, session: Session, namespace: Namespace, event: StoreAsked, path: Int32s
) -> StoreTicket | None:
    """Reserve what is missing and order the copy; None if there is nothing to do."""
    shape, residency = namespace.shape, world.residency
    pages = len(event.tokens) // TOKEN_BYTES // shape.page_tokens
    known = path[event.first_page :]
    lost = np.flatnonzero((residency.l2[known] == ABSENT) & (residency.l3[known] != READY))
    which = np.concatenate((lost + event.first_page, np.arange(path.size, pages)))  # pages to fill
    world.counters.duplicate_pages += pages - event.first_page - which.size
    world.pin(path)  # making room must not cut the branch that the new pages hang on
    world.touch(path)
    fit = room_for(world, world.views(shape), min(which.size, world.limits.pages_in_flight - world.tickets.pages))
    fit = _within_tree(world, event, which, fit)
    world.unpin(path)
    world.counters.refused_pages += which.size - fit
    which = which[:fit]
    if not fit:
        return None
    new = int(which[-1]) + 1 - path.size
    if new > 0:
        path = _lengthen(world, namespace, event.tokens, path, new)
        # Below a new page there may be pages that L3 kept without it.
        which = which[(residency.l2[path[which]] == ABSENT) & (residency.l3[path[which]] != READY)]
    rows = path[which]
    ticket_id = world.tickets.new_id()
    refs = world.begin_fill(namespace, rows)
    through = path[: int(which[-1]) + 1]
    ticket = StoreTicket(ticket_id, session.id, event.request, namespace.index, event.tokens, through, rows, refs)
    world.tickets.add(ticket)
    session.tickets.add(ticket_id)
    world.story.note("store began", rows, ticket_id)
    world.out.append(
        CopyPages(
            ticket_id,
            session.id,
            False,
            group_copies(shape, refs, event.blocks, which - event.first_page),
            event.fence,
            event.generation,
        )
    )
    world.out.append(ReplyCommand(session.id, event.request, Accepted(ticket_id, which.size)))
    return ticket


def _within_tree(world: World, event: StoreAsked, which: Int64s, fit: int) -> int:
    """Store nothing that the tree has no room for: it would be hashed again in every lookup."""
    if fit and world.namespaces.tokens_held + len(event.tokens) // TOKEN_BYTES > world.limits.tree_tokens:
        return 0
    return max(0, fit)


def _lengthen(world: World, namespace: Namespace, tokens: bytes, path: Int32s, new: int) -> Int32s:
    """Rows for `new` pages behind `path`: new ones, and those that were found at start without their parents."""
    residency = world.residency
    last = residency.key[path[-1]] if path.size else namespace.id
    size = namespace.shape.page_tokens * TOKEN_BYTES
    keys = namespace.shape.chain.keys(last, tokens[: (path.size + new) * size], path.size)
    parent = int(path[-1]) if path.size else ROOT
    if not residency.awaited:
        return np.concatenate((path, world.add_rows(namespace, keys, parent)))
    rows = []
    for key in keys:
        row = residency.row_of.get(key)
        if row is None:
            row = int(world.add_rows(namespace, [key], parent)[0])
        rows.append(row)
        parent = row
    return np.concatenate((path, np.array(rows, np.int32)))


def store_copied(world: World, ticket: StoreTicket, event: CopyEnded) -> None:
    """The lane is done with both ends of a store."""
    world.tickets.close(ticket)
    session = world.sessions.get(ticket.session)
    if session is not None:
        session.tickets.discard(ticket.id)
    namespace = world.namespaces[ticket.namespace]
    if not event.ok:
        world.counters.failed_copies += 1
        world.story.note(f"store failed: {event.reason}", ticket.rows, ticket.id)
        world.abort_fill(ticket.namespace, ticket.rows, ticket.refs)
        error = HiCacheError(ErrorCode.TRANSFER_FAILED, f"the store's copy failed: {event.reason}", "store again")
        world.fail(ticket.session, ticket.request, error)
        return
    world.finish_fill(ticket.rows, ticket.refs)
    world.story.note("stored", ticket.rows, ticket.id)
    size = namespace.shape.page_tokens * TOKEN_BYTES
    lookup.plant(world, namespace, ticket.tokens[: ticket.path.size * size], ticket.path)
    world.touch(ticket.path)
    world.counters.stored_pages += ticket.rows.size
    world.reply(ticket.session, ticket.request, Done(ticket=ticket.id, pages=ticket.rows.size))
    if world.write_policy == "write_through" and world.disk.mode == "rw":
        rows = ticket.rows[world.residency.l3[ticket.rows] == ABSENT]
        disk.write(world, rows)

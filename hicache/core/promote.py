"""Load and Prefetch: pages go from L3 to L2 and from L2 to L1.

    LoadAsked ─► pages only in L3: blocks, ReadRecords ─► READING ─ all read ─► CopyPages ─► COPYING ─► Done
                 pages in L2: pinned                        │ one failed            │ failed
                                                            ▼                       ▼
                                                   Error, FailFence             Error (the lane failed the fence)

A page that is being read already is not read twice: whoever wants it waits for the same ticket.
"""

from typing import Literal

import numpy as np

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.ids import TicketId
from hicache.core import disk, lookup
from hicache.core.commands import CopyPages, DoneFence, FailFence, ReadRecords
from hicache.core.commands import Reply as ReplyCommand
from hicache.core.events import CopyEnded, LoadAsked, PrefetchAsked, StoreRead
from hicache.core.evict import room_for
from hicache.core.namespaces import Namespace
from hicache.core.publish import check_starts, group_copies
from hicache.core.residency import ABSENT, NO_ROWS, READY, Int32s, Mask
from hicache.core.sessions import Session
from hicache.core.transfers import COPYING, LoadTicket, PrefetchTicket, ReadTicket
from hicache.core.world import World
from hicache.protocol.messages import Accepted, Done


def load(world: World, event: LoadAsked) -> None:
    session = world.worker(event.session)
    session.need_memory()
    lease = lookup.lease_of(world, session, event.lease)
    pages = check_starts(session.shape, event.blocks)
    if event.first_page < 0 or event.first_page + pages > lease.promised:
        raise HiCacheError(
            ErrorCode.OUT_OF_RANGE,
            f"pages {event.first_page} to {event.first_page + pages} of a lease that holds {lease.promised}",
        )
    if event.first_page + pages > lease.rows.size:
        raise lookup.lost_pages(lease)
    rows = lease.rows[event.first_page : event.first_page + pages]
    missing = rows[world.residency.l2[rows] == ABSENT]
    if not _admitted(world, session, event, pages + missing.size):
        return
    ticket_id = world.tickets.new_id()
    if not pages:
        world.out.append(DoneFence(session.id, event.fence, event.generation))
        world.out.append(ReplyCommand(session.id, event.request, Accepted(ticket_id, 0)))
        world.out.append(ReplyCommand(session.id, event.request, Done(ticket=ticket_id)))
        return
    namespace = world.namespaces[lease.namespace]
    if room_for(world, world.views(namespace.shape), missing.size) < missing.size:
        world.out.append(FailFence(session.id, event.fence, event.generation, ErrorCode.NO_SPACE.value))
        raise HiCacheError(
            ErrorCode.NO_SPACE,
            f"{missing.size} pages come from disk and do not fit into L2: all else is pinned",
            "recompute, or raise l2.size",
        )
    ticket = LoadTicket(
        ticket_id,
        session.id,
        event.request,
        lease.id,
        lease.namespace,
        rows.copy(),
        event.blocks,
        event.fence,
        event.generation,
    )
    world.pin(ticket.rows)
    world.tickets.add(ticket)
    session.tickets.add(ticket_id)
    lease.tickets += 1
    world.counters.loads += 1
    world.out.append(ReplyCommand(session.id, event.request, Accepted(ticket_id, pages)))
    ticket.waits_for = _reads_for(world, namespace, ticket.rows, missing, ticket_id)
    world.story.note("load began", ticket.rows, ticket_id)
    if not ticket.waits_for:
        _copy(world, ticket)


def _admitted(world: World, session: Session, event: LoadAsked, pages: int) -> bool:
    """Are `pages` more in flight within bounds? Else Busy, or TOO_LARGE if they never will be."""
    if pages > world.limits.pages_in_flight:
        raise HiCacheError(
            ErrorCode.TOO_LARGE, f"{pages} pages, at most {world.limits.pages_in_flight} at once", "load in parts"
        )
    if world.crowded(session) or world.tickets.pages + pages > world.limits.pages_in_flight:
        world.busy(event.session, event.request, "too many transfers are open")
        return False
    return True


def _reads_for(world: World, namespace: Namespace, rows: Int32s, missing: Int32s, waiter: TicketId) -> set[TicketId]:
    """Read `missing` (they fit) and join the reads that bring others of `rows` already."""
    waits_for: set[TicketId] = set()
    reader_of = world.tickets.reader_of
    if reader_of:
        for row in rows.tolist():
            reader = reader_of.get(row)
            if reader is not None and reader not in waits_for:
                waits_for.add(reader)
                ticket = world.tickets.find(reader, ReadTicket)
                assert ticket is not None, "reader_of names open reads"
                ticket.waiters.append(waiter)
    urgency: Literal["load", "prefetch"] = "load" if world.tickets.find(waiter, LoadTicket) else "prefetch"
    batch = max(1, world.limits.io_batch_pages)
    for at in range(0, missing.size, batch):
        part = missing[at : at + batch]
        refs = world.begin_fill(namespace, part)
        world.residency.pins[part] += 1
        read = ReadTicket(world.tickets.new_id(), namespace.index, part, refs, [waiter])
        world.tickets.add(read)
        waits_for.add(read.id)
        offsets = [each.view.offset_bytes(each.ids).tolist() for each in refs]
        world.story.note("read ordered", part, read.id)
        world.out.append(ReadRecords(read.id, disk.records_at(world, namespace, part, offsets), urgency))
    return waits_for


def store_read(world: World, event: StoreRead) -> None:
    ticket = world.tickets.find(event.ticket, ReadTicket)
    if ticket is None:
        world.counters.late_answers += 1
        return
    world.tickets.close(ticket)
    rows = ticket.rows
    groups = len(ticket.refs)
    shaped = event.ok.size == rows.size * groups == event.corrupt.size
    answered = event.ok if shaped else np.zeros(rows.size * groups, np.bool_)
    ok: Mask = np.logical_and.reduce(answered.reshape(-1, groups), axis=1)
    if shaped:
        world.counters.corrupt_records += int(np.count_nonzero(event.corrupt))
    good, bad = rows[ok], rows[~ok]
    if not bad.size:
        world.finish_fill(rows, ticket.refs)
    else:
        _part_read(world, ticket, ok)
    world.story.note("read", good, ticket.id)
    world.counters.promoted_pages += good.size
    if bad.size:
        world.story.note("read failed", bad, ticket.id)
        world.counters.failed_reads += bad.size
        disk.delete(world, bad[world.residency.l3[bad] == READY])
    world.unpin(rows)
    if bad.size:
        world.cut_leases(bad)
    for waiter in ticket.waiters:
        _read_landed(world, waiter, ticket, good, bad)


def _part_read(world: World, ticket: ReadTicket, ok: Mask) -> None:
    """Some of a batch came: those are READY, the blocks of the others go back without ever being visible."""
    kept, lost = [], []
    for each in ticket.refs:
        view, ids = each.view, each.surrender()
        kept.append(view.adopt(ids[ok]))
        lost.append(view.adopt(ids[~ok]))
    world.finish_fill(ticket.rows[ok], kept)
    world.abort_fill(ticket.namespace, ticket.rows[~ok], lost)


def _read_landed(world: World, waiter: TicketId, read: ReadTicket, good: Int32s, bad: Int32s) -> None:
    prefetch = world.tickets.find(waiter, PrefetchTicket)
    if prefetch is not None:
        prefetch.waits_for.discard(read.id)
        prefetch.landed += good.size
        if not prefetch.waits_for:
            _end_prefetch(world, prefetch)
        return
    load_ticket = world.tickets.find(waiter, LoadTicket)
    if load_ticket is None:  # its session has gone, or another of its reads failed before
        return
    load_ticket.waits_for.discard(read.id)
    if bad.size and np.isin(load_ticket.rows, bad).any():
        _fail_load(world, load_ticket)
    elif not load_ticket.waits_for:
        _copy(world, load_ticket)


def _fail_load(world: World, ticket: LoadTicket) -> None:
    """Its first leg failed; nothing was copied to L1."""
    world.out.append(FailFence(ticket.session, ticket.fence, ticket.generation, ErrorCode.TRANSFER_FAILED.value))
    error = HiCacheError(ErrorCode.TRANSFER_FAILED, "a page could not be read from L3", "recompute")
    world.fail(ticket.session, ticket.request, error)
    world.counters.tokens_failed += ticket.rows.size * world.namespaces[ticket.namespace].shape.page_tokens
    close_load(world, ticket)


def _copy(world: World, ticket: LoadTicket) -> None:
    """All pages are in L2: own their blocks and order the copy."""
    namespace = world.namespaces[ticket.namespace]
    shape = namespace.shape
    blocks = world.residency.block
    ticket.refs = [view.share(blocks[g, ticket.rows]) for g, view in enumerate(world.views(shape))]
    ticket.phase = COPYING
    pairs = group_copies(shape, ticket.refs, ticket.l1, np.arange(ticket.rows.size))
    world.out.append(CopyPages(ticket.id, ticket.session, True, pairs, ticket.fence, ticket.generation))


def load_copied(world: World, ticket: LoadTicket, event: CopyEnded) -> None:
    """The lane is done with both ends of a load."""
    tokens = ticket.rows.size * world.namespaces[ticket.namespace].shape.page_tokens
    if event.ok:
        world.counters.tokens_loaded += tokens
        world.reply(ticket.session, ticket.request, Done(ticket=ticket.id, pages=ticket.rows.size))
    else:
        world.counters.failed_copies += 1
        world.counters.tokens_failed += tokens
        error = HiCacheError(ErrorCode.TRANSFER_FAILED, f"the load's copy failed: {event.reason}", "recompute")
        world.fail(ticket.session, ticket.request, error)
    close_load(world, ticket)


def close_load(world: World, ticket: LoadTicket) -> None:
    """Let go of all that a load owns."""
    world.tickets.close(ticket)
    for each in ticket.refs:
        each.release()
    world.unpin(ticket.rows)
    session = world.sessions.get(ticket.session)
    if session is not None:
        session.tickets.discard(ticket.id)
    lease = world.leases.get(ticket.lease)
    if lease is not None:
        lease.tickets -= 1
        world.leases.renew(lease, world.now_s + world.limits.lease_ttl_s)


def prefetch(world: World, event: PrefetchAsked) -> None:
    """Bring to L2 what only L3 has of a prompt, shortened to what fits."""
    session = world.worker(event.session)
    count = lookup.count_tokens(world, event.tokens)
    if world.crowded(session):
        world.busy(event.session, event.request, "too many transfers are open in this session")
        return
    _, namespace = lookup.namespace_of(world, session, event.scope)
    ticket = PrefetchTicket(world.tickets.new_id(), session.id, event.request)
    rows = missing = NO_ROWS
    if namespace is not None:
        path, size = lookup.find_path(world, namespace, event.tokens), session.shape.page_tokens
        found = lookup.with_partial(world, path, lookup.reach(world, path.rows, count // size), count, size)
        rows = path.rows[: found.ready]
        if found.partial_tokens:
            rows = np.append(rows, np.int32(found.partial_row))
        missing = rows[world.residency.l2[rows] == ABSENT]
        world.pin(rows)
        world.touch(rows)
        budget = max(0, world.limits.pages_in_flight - world.tickets.pages)
        missing = missing[: room_for(world, world.views(namespace.shape), min(missing.size, budget))]
    world.out.append(ReplyCommand(session.id, event.request, Accepted(ticket.id, missing.size)))
    world.tickets.add(ticket)
    session.tickets.add(ticket.id)
    if namespace is not None:
        ticket.waits_for = _reads_for(world, namespace, rows, missing, ticket.id)
        world.unpin(rows)
    if not ticket.waits_for:
        _end_prefetch(world, ticket)


def _end_prefetch(world: World, ticket: PrefetchTicket) -> None:
    world.counters.prefetched_pages += ticket.landed
    world.reply(ticket.session, ticket.request, Done(ticket=ticket.id, pages=ticket.landed))
    close_prefetch(world, ticket)


def close_prefetch(world: World, ticket: PrefetchTicket) -> None:
    world.tickets.close(ticket)
    session = world.sessions.get(ticket.session)
    if session is not None:
        session.tickets.discard(ticket.id)

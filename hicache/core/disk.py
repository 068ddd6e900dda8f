"""L3 as the state machine sees it: records written, deleted, found at start; the tier's mode and its capacity.

    row in L3:  ABSENT ─ write ─► FILLING ─ StoreWritten ok ─► READY ─ delete ─► LEAVING ─ StoreDeleted ─► ABSENT
                   ▲                 └ failed ─► ABSENT, or LEAVING when some of its groups were written
                   └──────────────────── mode off: whatever the store still holds is out of reach

Space is counted in allocated bytes. The store does in order what it is told, so that the space of a page counts as
free once its deletion is ordered, and a write ordered after that may use it.
"""

from itertools import chain

import numpy as np

from hicache.base.ids import NamespaceId
from hicache.core.commands import DeleteRecords, Record, WriteRecords
from hicache.core.events import StoreDeleted, StoreModeChanged, StoreRecovered, StoreWritten
from hicache.core.leaves import pick_victims
from hicache.core.namespaces import Namespace
from hicache.core.residency import ABSENT, FILLING, LEAVING, NO_ROWS, READY, Int32s
from hicache.core.transfers import DeleteTicket, WriteTicket
from hicache.core.world import World
from hicache.store.record import allocated_bytes


def records(world: World, namespace: Namespace, rows: Int32s) -> tuple[Record, ...]:
    """Records of `rows`, page by page and within a page group by group; bytes in the rows' L2 blocks."""
    shape, residency = namespace.shape, world.residency
    views = world.views(shape)
    offsets = [view.offset_bytes(residency.block[g, rows]).tolist() for g, view in enumerate(views)]
    return records_at(world, namespace, rows, offsets)


def records_at(world: World, namespace: Namespace, rows: Int32s, offsets: list[list[int]]) -> tuple[Record, ...]:
    """As `records`; `offsets[g][i]` says where the block of group g of `rows[i]` lies in the arena."""
    shape, key = namespace.shape, world.residency.key
    keys = [key[row] for row in rows.tolist()]
    parents = [key[row] if row >= 0 else None for row in world.residency.parent[rows].tolist()]
    id, tenant, fingerprint = namespace.id, namespace.tenant, shape.fingerprint
    by_group = [
        [
            Record(own, above, id, tenant, name, offset, length, fingerprint)
            for own, above, offset in zip(keys, parents, offsets[g], strict=True)
        ]
        for g, (name, length) in enumerate((group.name, group.block_bytes) for group in shape.groups)
    ]
    return tuple(by_group[0]) if len(by_group) == 1 else tuple(chain.from_iterable(zip(*by_group, strict=True)))


# ---- writes -------------------------------------------------------------------------------------------


def write(world: World, rows: Int32s, *, demote: bool = False) -> Int32s:
    """Order `rows` (READY in L2, ABSENT in L3) to be written, in batches; return those for which L3 has no room.

    With `demote` they are LEAVING L2 until StoreWritten."""
    left: list[Int32s] = []
    where = world.residency.namespace[rows]
    for index in np.unique(where).tolist():
        mine = rows[where == index]
        batch = max(1, world.limits.io_batch_pages)
        for at in range(0, mine.size, batch):
            if not _write_batch(world, world.namespaces[index], mine[at : at + batch], demote):
                left.append(mine[at:])
                break
    unwritten = np.concatenate(left) if left else rows[:0]
    world.counters.unwritten_pages += unwritten.size
    return unwritten


def _write_batch(world: World, namespace: Namespace, rows: Int32s, demote: bool) -> bool:
    each = sum(allocated_bytes(group.block_bytes) for group in namespace.shape.groups)
    if world.tickets.pages + rows.size > world.limits.pages_in_flight:
        return False
    residency = world.residency
    residency.pins[rows] += 1  # before room is made: these must not be what makes it
    if not evict_l3(world, each * rows.size):
        residency.pins[rows] -= 1
        return False
    ticket = WriteTicket(world.tickets.new_id(), namespace.index, rows, demote)
    world.tickets.add(ticket)
    residency.begin_write(rows, each)
    _count_bytes(world, rows, 1)
    if demote:
        residency.leave_l2(rows)
    world.story.note("demotion ordered" if demote else "write ordered", rows, ticket.id)
    world.out.append(WriteRecords(ticket.id, records(world, namespace, rows)))
    return True


def store_written(world: World, event: StoreWritten) -> None:
    ticket = world.tickets.find(event.ticket, WriteTicket)
    if ticket is None:
        world.counters.late_answers += 1
        return
    world.tickets.close(ticket)
    rows, residency = ticket.rows, world.residency
    groups = len(world.namespaces[ticket.namespace].shape.groups)
    ok = event.ok if event.ok.size == rows.size * groups else np.zeros(rows.size * groups, np.bool_)
    by_page = ok.reshape(-1, groups)
    whole = by_page.all(axis=1)
    if world.disk.mode == "off":
        whole = np.zeros_like(whole)
    good, bad = rows[whole], rows[~whole]
    residency.finish_write(good, groups)
    world.evict_l3.insert(good if ticket.demote else good[::-1])  # victims come leaf first already
    if bad.size:
        world.counters.failed_writes += bad.size
        partly = rows[~whole & by_page.any(axis=1)]
        delete(world, partly)
        gone = bad[residency.l3[bad] == FILLING]
        _count_bytes(world, gone, -1)
        residency.drop_l3(gone)
    world.counters.written_pages += good.size
    world.story.note("written", good, ticket.id)
    world.story.note("write failed", bad, ticket.id)
    world.unpin(rows)
    if ticket.demote:
        going = rows[residency.l2[rows] == LEAVING]  # the others are in use again
        world.story.note("demoted", going, ticket.id)
        world.counters.evicted_l2 += going.size
        world.drop_l2(going)


# ---- deletions ----------------------------------------------------------------------------------------


def delete(world: World, rows: Int32s) -> None:
    """Order the records of `rows` (READY, or partly written) to be deleted.

    While the tier takes no writes they are forgotten at once, and their deletion is owed."""
    if not rows.size:
        return
    world.evict_l3.remove(rows)
    _count_bytes(world, rows, -1)
    world.maybe_dead.append(rows)
    if world.disk.mode != "rw":
        if world.disk.mode == "ro":
            world.disk.owed.extend(world.record_keys(rows))
        world.residency.drop_l3(rows)
        return
    ticket = DeleteTicket(world.tickets.new_id(), rows)
    world.tickets.add(ticket)
    world.residency.leave_l3(rows)
    world.story.note("deletion ordered", rows, ticket.id)
    world.out.append(DeleteRecords(ticket.id, tuple(world.record_keys(rows))))


def store_deleted(world: World, event: StoreDeleted) -> None:
    ticket = world.tickets.find(event.ticket, DeleteTicket)
    if ticket is None:
        world.counters.late_answers += 1
        return
    world.tickets.close(ticket)
    world.story.note("deleted", ticket.rows, ticket.id)
    world.residency.drop_l3(ticket.rows)
    world.maybe_dead.append(ticket.rows)


def evict_l3(world: World, need_bytes: int) -> bool:
    """Order deletions until `need_bytes` more fit into L3. False if they can't, or the tier takes no writes."""
    residency, tier = world.residency, world.disk
    if tier.mode != "rw" or need_bytes > tier.capacity_bytes:
        return False
    while tier.used_bytes + need_bytes > tier.capacity_bytes:
        over = tier.used_bytes + need_bytes - tier.capacity_bytes
        average = max(1, tier.used_bytes // max(1, len(world.evict_l3)))
        rows = pick_victims(residency, residency.kids_l3, world.evict_l3, -(-over // average))
        if not rows.size:
            return False
        world.story.note("evicted from L3", rows)
        world.counters.evicted_l3 += rows.size
        delete(world, rows)
    return True


def _count_bytes(world: World, rows: Int32s, sign: int) -> None:
    """Add or take the rows' allocated bytes from the totals."""
    if not rows.size:
        return
    sizes = world.residency.l3_bytes[rows] * sign
    np.add.at(world.namespaces.l3_bytes, world.residency.namespace[rows], sizes)
    world.disk.used_bytes += int(sizes.sum())


# ---- start and mode -----------------------------------------------------------------------------------


def store_recovered(world: World, event: StoreRecovered) -> None:
    """Take over what the store found, oldest use first. Pages whose parent is missing age out like any other."""
    if world.disk.mode == "off":
        return
    residency, namespaces = world.residency, world.namespaces
    order: dict[int, None] = {}
    for found in event.rows:
        row = residency.row_of.get(found.key)
        namespace = namespaces.get(NamespaceId(found.namespace))
        if row is not None and (namespace is None or residency.namespace[row] != namespace.index):
            continue  # one key in two namespaces: a forged or damaged row
        if namespace is None:
            namespace = namespaces.add(NamespaceId(found.namespace), found.tenant)
        group = namespace.group_bit(found.group)
        if group is None:
            continue
        if row is None:
            row = residency.add_found(found.key, found.parent, namespace.index)
            namespaces.rows[namespace.index] += 1
        if residency.l3[row] in (FILLING, LEAVING) or residency.l3_groups[row] & (1 << group):
            continue
        residency.found_l3(row, group, found.frame_bytes)
        namespaces.l3_bytes[namespace.index] += found.frame_bytes
        world.disk.used_bytes += found.frame_bytes
        world.counters.recovered_records += 1
        order[row] = None
    rows = np.fromiter(order, np.int32, len(order))
    world.evict_l3.insert(rows)
    world.story.note("found in L3", rows)
    for index in np.unique(residency.namespace[rows]).tolist():
        if namespaces[index].bound:  # sessions are open already: lookups must not see a part of a page
            mine = rows[residency.namespace[rows] == index]
            every = (1 << len(namespaces[index].shape.groups)) - 1
            delete(world, mine[residency.l3_groups[mine] != every])
    shrink(world)


def drop_incomplete(world: World, namespace: Namespace, moved: list[int]) -> None:
    """A namespace got its shape: renumber the groups found at start, delete pages that lack one."""
    residency = world.residency
    rows = np.flatnonzero((residency.namespace == namespace.index) & (residency.l3 == READY)).astype(np.int32)
    if not rows.size:
        return
    before = residency.l3_groups[rows]
    after = np.zeros_like(before)
    for bit, group in enumerate(moved):
        if group >= 0:
            after |= ((before >> bit) & 1) << group
    residency.l3_groups[rows] = after
    delete(world, rows[after != (1 << len(namespace.shape.groups)) - 1])


def _pay(world: World) -> None:
    """Order the deletions that could not be ordered while the tier took no writes."""
    owed, world.disk.owed = world.disk.owed, []
    if owed:
        ticket = DeleteTicket(world.tickets.new_id(), NO_ROWS)
        world.tickets.add(ticket)
        world.out.append(DeleteRecords(ticket.id, tuple(owed)))


def store_mode_changed(world: World, event: StoreModeChanged) -> None:
    """After `off` the tier is empty for us: what it holds comes back only if its rows are streamed again.

    That must happen under `ro`: a write ordered before we know what is there could exceed the capacity."""
    world.disk.mode = event.mode
    world.disk.reason = event.reason
    if event.mode == "rw":
        _pay(world)
        shrink(world)
    if event.mode != "off":
        return
    world.disk.owed.clear()
    residency = world.residency
    rows = np.flatnonzero(residency.l3 == READY).astype(np.int32)
    world.evict_l3.remove(rows)
    _count_bytes(world, rows, -1)
    residency.drop_l3(rows)
    world.story.note("L3 went off", rows)
    world.cut_leases(rows[residency.l2[rows] == ABSENT])
    world.maybe_dead.append(rows)


def write_all(world: World) -> None:
    """Order everything that only L2 has to be written, parents first."""
    residency = world.residency
    rows = np.flatnonzero((residency.l2 == READY) & (residency.l3 == ABSENT)).astype(np.int32)
    write(world, rows)


def shrink(world: World) -> None:
    """More may be in L3 than it has room for: found so at start, or its capacity was lowered. Delete what may go."""
    tier = world.disk
    tier.bound_bytes = max(tier.capacity_bytes, tier.used_bytes)
    evict_l3(world, 0)


def settle(world: World) -> None:
    """After an event: what was above the capacity may shrink and never grow."""
    tier = world.disk
    tier.bound_bytes = max(tier.capacity_bytes, min(tier.bound_bytes, tier.used_bytes))

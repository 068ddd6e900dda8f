"""The laws of the cache's state, each with its number. Checked after every event in tests, when idle in production.

 1 free + owned = capacity, per pool                   2 a block is free, has one writer, or n ≥ 1 owners
 3 what is READY was whole before; FILLING and         4 a lease's pages are pinned and can be had
   LEAVING have exactly one ticket behind them           and only its engine loads them, in their shape
 5 a ticket owns its ends; a session outlives its copies, and moves nothing without memory
 6 a page hangs on its parent, in columns and tree     7 READY means READY for every cache group
 8 bytes and pages add up per namespace                9 tokens by tier + missed = tokens looked up
10 policies order what is in their tiers, L3 fits     12 everything stays within `limits`
13 routers were told what lookups find
"""

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from hicache.base.errors import LawBroken
from hicache.core.announce import KNOWN, TIERS, found
from hicache.core.residency import ABSENT, FILLING, LEAVING, ORPHAN, READY, Int32s
from hicache.core.sessions import CLOSING
from hicache.core.transfers import (
    COPYING,
    DeleteTicket,
    LoadTicket,
    PrefetchTicket,
    ReadTicket,
    StoreTicket,
    WriteTicket,
    pages_of,
)
from hicache.core.world import World

_Bools = npt.NDArray[np.bool_]


def _broken(world: World, law: int, text: str, row: int = -1) -> LawBroken:
    story = f"\n{world.story.of_row(world.residency, row)}" if row >= 0 else ""
    return LawBroken(f"law {law}: {text}{story}")


def _none(world: World, law: int, wrong: _Bools, text: str) -> None:
    """No row may be marked in `wrong`."""
    if wrong.any():
        rows = np.flatnonzero(wrong)
        raise _broken(world, law, f"{text}: rows {rows[:8].tolist()}", int(rows[0]))


def _count_rows(world: World, runs: Iterable[Int32s]) -> npt.NDArray[np.int64]:
    """How often each row stands in `runs`."""
    counts = np.zeros(world.residency.parent.size, np.int64)
    for rows in runs:
        np.add.at(counts, rows, 1)
    return counts


def blocks_are_owned(world: World) -> None:
    """Laws 1 and 2: counts are exactly those of the columns and of tickets."""
    world.pool.check()
    residency = world.residency
    expected = [np.zeros(view.count.size, np.int64) for view in world.pool.views]
    rows = np.flatnonzero(residency.l2 >= READY)
    where = residency.namespace[rows]
    for index in np.unique(where).tolist():
        for group, view in enumerate(world.views(world.namespaces[index].shape)):
            np.add.at(expected[view.index], residency.block[group, rows[where == index]], 1)
    for ticket in world.tickets:
        if isinstance(ticket, StoreTicket | ReadTicket | LoadTicket):
            for owned in ticket.refs:
                ids = owned.ids
                np.add.at(expected[owned.view.index], ids, 1)
                alone = isinstance(ticket, LoadTicket) or bool((owned.view.count[ids] == 1).all())
                if not alone:
                    raise _broken(world, 2, f"blocks being written by ticket {ticket.id} have other owners")
    for view in world.pool.views:
        if not (view.count == expected[view.index]).all():
            block = int(np.flatnonzero(view.count != expected[view.index])[0])
            text = (
                f"block {block} of view {view.index}: {view.count[block]} counted, {expected[view.index][block]} own"
            )
            row = np.flatnonzero((residency.block == block).any(axis=0))
            raise _broken(world, 2, text, int(row[0]) if row.size else -1)


def states_have_tickets(world: World) -> None:
    """Law 3."""
    residency, tickets = world.residency, list(world.tickets)
    fills = _count_rows(world, (t.rows for t in tickets if isinstance(t, StoreTicket | ReadTicket)))
    writes = _count_rows(world, (t.rows for t in tickets if isinstance(t, WriteTicket)))
    demotes = _count_rows(world, (t.rows for t in tickets if isinstance(t, WriteTicket) and t.demote))
    deletes = _count_rows(world, (t.rows for t in tickets if isinstance(t, DeleteTicket)))
    _none(world, 3, fills != (residency.l2 == FILLING), "FILLING in L2 and tickets that fill disagree")
    _none(world, 3, writes != (residency.l3 == FILLING), "FILLING in L3 and tickets that write disagree")
    _none(world, 3, deletes != (residency.l3 == LEAVING), "LEAVING L3 and tickets that delete disagree")
    _none(world, 3, (residency.l2 == LEAVING) & (demotes != 1), "LEAVING L2 without a ticket that demotes")
    unfilled = (residency.l2 == ABSENT) | (residency.l2 == FILLING)
    _none(world, 3, unfilled & (residency.block >= 0).any(axis=0), "visible blocks in a row that is not READY")
    _none(world, 3, (residency.l3 == FILLING) & (residency.l2 < READY), "written to L3 without being in L2")
    readers = {row: t.id for t in tickets if isinstance(t, ReadTicket) for row in t.rows.tolist()}
    if readers != world.tickets.reader_of:
        raise _broken(world, 3, "reader_of and the open reads disagree")


def pins_are_owned(world: World) -> None:
    """Law 4: pins are exactly those of leases and tickets, and what a lease promises can be had."""
    residency = world.residency
    leases = world.leases.all()
    runs = [lease.rows for lease in leases]
    runs += [t.rows for t in world.tickets if isinstance(t, LoadTicket | ReadTicket | WriteTicket)]
    _none(world, 4, _count_rows(world, runs) != residency.pins, "pins and their owners disagree")
    for lease in leases:
        rows = lease.rows
        for row in rows[residency.l2[rows] == FILLING].tolist():  # a read that ends badly cuts the lease
            if row not in world.tickets.reader_of:
                raise _broken(world, 4, f"lease {lease.id} holds a page that a store is still filling", row)
        gone = rows[(residency.l2[rows] != READY) & (residency.l2[rows] != FILLING) & (residency.l3[rows] != READY)]
        if gone.size:
            raise _broken(world, 4, f"lease {lease.id} holds pages that no tier has", int(gone[0]))
        session = world.sessions.get(lease.session)
        if session is None or session.state == CLOSING or lease.id not in session.leases:
            raise _broken(world, 4, f"lease {lease.id} has no session")
        running = sum(isinstance(t, LoadTicket) and t.lease == lease.id for t in world.tickets)
        if running != lease.tickets:
            raise _broken(world, 4, f"lease {lease.id} counts {lease.tickets} loads, {running} run")
    if sum(len(session.leases) for session in world.sessions.values()) != len(leases):
        raise _broken(world, 4, "sessions name leases that do not exist")


def loads_are_of_one_engine(world: World) -> None:
    """Laws 4 and 5: a load runs on a lease that is its session's to use, and of its shape."""
    for session in world.sessions.values():
        for ticket in (world.tickets.get(id) for id in session.tickets):
            if not session.memory and not isinstance(ticket, PrefetchTicket):
                raise _broken(world, 5, f"session {session.id} has no memory and moves bytes")
            if not isinstance(ticket, LoadTicket):
                continue
            if world.namespaces[ticket.namespace].shape.fingerprint != session.shape.fingerprint:
                raise _broken(world, 4, f"ticket {ticket.id} loads pages of another shape than its session's")
            lease = world.leases.get(ticket.lease)
            owner = None if lease is None else world.sessions.get(lease.session)
            if owner is None or owner is session:  # law 4 above: a lease has a session
                continue
            if not session.group or (owner.tenant, owner.group) != (session.tenant, session.group):
                raise _broken(world, 4, f"ticket {ticket.id} loads on the lease of session {owner.id}, a stranger")


def tickets_own_both_ends(world: World) -> None:
    """Law 5."""
    owned = {ticket for session in world.sessions.values() for ticket in session.tickets}
    of_clients = set()
    for ticket in world.tickets:
        if isinstance(ticket, ReadTicket | WriteTicket | DeleteTicket):
            continue
        of_clients.add(ticket.id)
        session = world.sessions.get(ticket.session)
        if session is None or ticket.id not in session.tickets:
            raise _broken(world, 5, f"ticket {ticket.id} outlived its session")
        copying = isinstance(ticket, StoreTicket) or (isinstance(ticket, LoadTicket) and ticket.phase == COPYING)
        if session.state == CLOSING and not copying:
            raise _broken(world, 5, f"ticket {ticket.id} of a closed session waits for something else than a copy")
        if isinstance(ticket, StoreTicket | LoadTicket) and copying:
            sizes = {each.ids.size for each in ticket.refs}
            if sizes != {ticket.rows.size}:
                raise _broken(world, 5, f"ticket {ticket.id} copies {ticket.rows.size} pages and owns {sizes}")
        if isinstance(ticket, LoadTicket) and not copying and not ticket.waits_for:
            raise _broken(world, 5, f"ticket {ticket.id} waits for nothing")
        if not isinstance(ticket, StoreTicket):
            for read in ticket.waits_for:
                found = world.tickets.find(read, ReadTicket)
                if found is None or ticket.id not in found.waiters:
                    raise _broken(world, 5, f"ticket {ticket.id} waits for read {read}, which does not know it")
    if owned != of_clients:
        raise _broken(world, 5, f"sessions name tickets {owned - of_clients} that are not open")
    for session in world.sessions.values():
        if session.state == CLOSING and (session.leases or not session.tickets):
            raise _broken(world, 5, f"session {session.id} is closed, keeps leases or waits for nothing")


def pages_hang_on_parents(world: World) -> None:
    """Law 6."""
    residency = world.residency
    live = residency.namespace >= 0
    rows = np.flatnonzero(live)
    parents = residency.parent[rows]
    below = parents >= 0
    astray = np.zeros_like(live)
    astray[rows[below]] = residency.namespace[parents[below]] != residency.namespace[rows[below]]
    _none(world, 6, astray, "a page in another namespace than its parent, or without parent")
    for name, column, counted in (
        ("kids", residency.kids, live),
        ("kids_l2", residency.kids_l2, (residency.l2 == FILLING) | (residency.l2 == READY)),
        ("kids_l3", residency.kids_l3, (residency.l3 == FILLING) | (residency.l3 == READY)),
    ):
        some = residency.parent[live & counted]
        right = np.bincount(some[some >= 0], minlength=live.size)
        _none(world, 6, right != column, f"{name} is miscounted")
    orphans = set(np.flatnonzero(live & (residency.parent == ORPHAN)).tolist())
    awaited = [row for waiting in residency.awaited.values() for row in waiting]
    if orphans != set(residency.parent_key) or orphans != set(awaited) or len(orphans) != len(awaited):
        raise _broken(world, 6, "orphans and the keys that they wait for disagree")
    if any(key in residency.row_of for key in residency.awaited):
        raise _broken(world, 6, "a key is awaited and has a row")
    if len(residency.row_of) != rows.size or any(residency.row_of.get(residency.key[r]) != r for r in rows.tolist()):
        raise _broken(world, 6, "keys and rows disagree")
    _none(world, 6, ~live & ((residency.l2 > 0) | (residency.l3 > 0) | (residency.pins != 0)), "a free row in use")
    idle = live & (residency.l2 == ABSENT) & (residency.l3 == ABSENT) & (residency.pins == 0) & (residency.kids == 0)
    _none(world, 6, idle, "rows that nothing keeps")
    _trees_hold_paths(world)


def _trees_hold_paths(world: World) -> None:
    residency, table = world.residency, world.namespaces
    planted = np.flatnonzero(residency.in_tree)
    parents = residency.parent[planted]
    bare = np.zeros_like(residency.in_tree)
    bare[planted] = (parents == ORPHAN) | ((parents >= 0) & ~residency.in_tree[parents])
    _none(world, 6, bare, "a page in the tree without its parent")
    _none(world, 6, residency.in_tree & (residency.namespace < 0), "a free row in a tree")
    held = 0
    for namespace in table.by_id.values():
        tree = namespace.tree_or_none
        mine = int(np.count_nonzero(residency.in_tree & (residency.namespace == namespace.index)))
        if tree is None:
            if mine:
                raise _broken(world, 6, "rows in a tree that is not there")
            continue
        tree.check()
        held += tree.tokens_held
        if tree.pages_held != mine:
            raise _broken(world, 6, f"a tree holds {tree.pages_held} pages, {mine} rows say so")
    if held != table.tokens_held:
        raise _broken(world, 6, f"trees hold {held} tokens, {table.tokens_held} counted")


def ready_means_every_group(world: World) -> None:
    """Law 7."""
    residency = world.residency
    for namespace in world.namespaces.by_id.values():
        if not namespace.bound:
            continue
        mine = residency.namespace == namespace.index
        groups = len(namespace.shape.groups)
        lacks = (residency.block[:groups] < 0).any(axis=0)
        _none(world, 7, mine & (residency.l2 >= READY) & lacks, "READY in L2 without a block in every group")
        partly = residency.l3_groups != (1 << groups) - 1
        _none(world, 7, mine & (residency.l3 == READY) & partly, "READY in L3 without a record in every group")
    stray = (residency.l3 == ABSENT) & ((residency.l3_groups != 0) | (residency.l3_bytes != 0))
    _none(world, 7, stray, "records of a page that is not in L3")


def bytes_add_up(world: World) -> None:
    """Law 8."""
    residency, table = world.residency, world.namespaces
    live = residency.namespace >= 0
    size = len(table.table)
    where = residency.namespace[live]
    counted = (residency.l3[live] == READY) | (residency.l3[live] == FILLING)
    rows = np.bincount(where, minlength=size)
    pages = np.bincount(where[residency.l2[live] != ABSENT], minlength=size)
    sizes = np.zeros(size, np.int64)
    np.add.at(sizes, where[counted], residency.l3_bytes[live][counted])
    for name, right, column in (("rows", rows, table.rows), ("l2_pages", pages, table.l2_pages)):
        if not (right == column[:size]).all():
            raise _broken(world, 8, f"{name} of namespaces: {column[:size].tolist()}, should be {right.tolist()}")
    if not (sizes == table.l3_bytes[:size]).all() or int(sizes.sum()) != world.disk.used_bytes:
        raise _broken(
            world, 8, f"L3 bytes {table.l3_bytes[:size].tolist()}, used {world.disk.used_bytes}: not {sizes}"
        )
    for namespace in table.by_id.values():
        if not rows[namespace.index] or table.table[namespace.index] is not namespace:
            raise _broken(world, 8, f"namespace {namespace.index} is kept without rows")
    used = sum(int(pages[ns.index]) * ns.shape.page_bytes for ns in table.by_id.values() if pages[ns.index])
    if used != world.pool.used_bytes():
        raise _broken(world, 8, f"namespaces use {used} bytes of L2, the pool {world.pool.used_bytes()}")


def tokens_add_up(world: World) -> None:
    """Law 9."""
    counters = world.counters
    if counters.tokens_l2 + counters.tokens_l3 + counters.tokens_missed != counters.tokens_looked_up:
        raise _broken(world, 9, f"tokens by tier do not sum up: {counters}")
    if min(counters.as_dict().values()) < 0:
        raise _broken(world, 9, f"a counter is negative: {counters}")


def policies_know_their_tier(world: World) -> None:
    """Law 12: a policy that forgets a page leaks its block, one that keeps a stranger evicts what is not there."""
    residency = world.residency
    every = np.arange(residency.parent.size, dtype=np.int32)
    for tier, evictor, column in (("L2", world.evict_l2, residency.l2), ("L3", world.evict_l3, residency.l3)):
        evictor.check()
        _none(world, 12, evictor.members(every) != (column == READY), f"the policy of {tier} and its rows disagree")
    if world.disk.used_bytes > world.disk.bound_bytes:
        raise _broken(world, 12, f"L3 uses {world.disk.used_bytes} bytes of {world.disk.bound_bytes}")
    if world.disk.mode == "off" and (residency.l3 == READY).any():
        raise _broken(world, 12, "pages are READY in an L3 that is off")


def limits_hold(world: World) -> None:
    """Law 12."""
    limits = world.limits
    pages = sum(pages_of(ticket) for ticket in world.tickets)
    if pages != world.tickets.pages:
        raise _broken(world, 12, f"tickets hold {pages} pages, {world.tickets.pages} counted")
    for what, size, bound in (
        ("sessions", len(world.sessions), limits.sessions),
        ("pages in flight", world.tickets.pages, limits.pages_in_flight),
        ("tokens in trees", world.namespaces.tokens_held, limits.tree_tokens),
        (
            "leases of a session",
            max([0, *(len(s.leases) for s in world.sessions.values())]),
            limits.leases_per_session,
        ),
        (
            "tickets of a session",
            max([0, *(len(s.tickets) for s in world.sessions.values())]),
            limits.requests_in_flight,
        ),
    ):
        if size > bound:
            raise _broken(world, 12, f"{size} {what}, at most {bound}")
    if world.residency.scratch.any():
        raise _broken(world, 12, "scratch space was left dirty")
    if world.maybe_dead:
        raise _broken(world, 12, "rows wait to be freed after the event")


def routers_know_what_lookups_find(world: World) -> None:
    """Law 13. After a bug in the middle of an event what moved in it is not told yet."""
    residency, announced = world.residency, world.namespaces.announced
    if residency.moved:
        return
    every = np.arange(residency.parent.size, dtype=np.int32)
    heard = residency.in_tree & ~residency.padded & announced[residency.namespace] & (residency.namespace >= 0)
    there = np.where(heard, found(residency, every), np.uint8(0))
    _none(world, 13, residency.told & TIERS & ~there > 0, "routers were told of pages that are not there")
    known = residency.told & KNOWN > 0
    _none(world, 13, known & ~heard, "routers know pages that they must not hear of")
    _none(world, 13, (residency.told & TIERS > 0) & ~known, "routers were told of pages that they don't know")
    orphans = known & (residency.parent >= 0) & ~known[residency.parent]
    _none(world, 13, orphans, "routers were told of pages without their parents")
    untold = there & ~residency.told > 0
    _none(world, 13, untold & ((residency.parent < 0) | known[residency.parent]), "routers were not told of pages")
    waiting = {below for rows in world.withheld.values() for below in rows}
    missing = set(np.flatnonzero(untold).tolist()) - waiting
    if missing:
        raise _broken(world, 13, f"rows {sorted(missing)[:8]} are withheld and wait for nobody", min(missing))


LAWS: tuple[Callable[[World], None], ...] = (
    states_have_tickets,
    ready_means_every_group,
    blocks_are_owned,
    pins_are_owned,
    loads_are_of_one_engine,
    tickets_own_both_ends,
    pages_hang_on_parents,
    bytes_add_up,
    tokens_add_up,
    policies_know_their_tier,
    limits_hold,
    routers_know_what_lookups_find,
)


def check(world: World) -> None:
    """Raise `LawBroken` naming the law, the numbers and the story of the first offending row. O(rows)."""
    for law in LAWS:
        law(world)

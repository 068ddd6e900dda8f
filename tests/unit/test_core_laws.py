"""Each law finds its violation: plant one in a state that is sound, and see LawBroken name it."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from core_world import Hand, tokens

from hicache.base.errors import LawBroken
from hicache.base.ids import LeaseId, NamespaceId, PageKey, SessionId, TicketId
from hicache.core.announce import IN_L2, KNOWN
from hicache.core.commands import CopyPages
from hicache.core.invariants import routers_know_what_lookups_find
from hicache.core.residency import ABSENT, READY, Residency
from hicache.core.transfers import LoadTicket, StoreTicket
from hicache.core.world import Announced, World


def _busy_world() -> Hand:
    """Two sessions, pages in both tiers, a lease, a load and a store in flight, a write outstanding."""
    hand = Hand(pages=16, l3_pages=50, announced=Announced(frozenset("t")))
    hand.open()
    hand.open(2, instance=b"j" * 16)
    hand.stored(1, 2, 3)
    hand.stored(5, salt="x")
    hand.load(hand.look(1, 2, 3).lease, 2)
    hand.store(1, 2, 7)
    hand.store(8, 9)
    copy = hand.one(CopyPages)
    hand.out = [copy]
    hand.copied()  # its write stays outstanding
    return hand


def _row(world: World, *pages: int) -> int:
    """Row of the last page of a path."""
    namespace = world.namespaces[0]
    keys = namespace.shape.chain.keys(namespace.id, tokens(*pages))
    return world.residency.row_of[keys[-1]]


def _ticket(world: World, kind: type) -> StoreTicket | LoadTicket:  # type: ignore[type-arg]
    found: StoreTicket | LoadTicket = next(t for t in world.tickets if isinstance(t, kind))  # type: ignore[assignment]
    return found


def leak_a_block(w: World) -> None:
    w.pool.view(128).allocate(1)


def free_a_block_in_use(w: World) -> None:
    view = w.pool.view(128)
    view.drop(w.residency.block[0, [_row(w, 1, 2, 3)]])


def share_a_block_being_written(w: World) -> None:
    _ticket(w, StoreTicket).refs[0].share()


def two_rows_on_one_block(w: World) -> None:
    r = w.residency
    r.block[0, _row(w, 1)] = r.block[0, _row(w, 1, 2)]


def visible_while_filling(w: World) -> None:
    w.residency.l2[_ticket(w, StoreTicket).rows] = READY


def filling_without_a_ticket(w: World) -> None:
    ticket = _ticket(w, StoreTicket)
    ticket.rows = ticket.rows[:0]


def leaving_without_a_ticket(w: World) -> None:
    w.residency.l3[_row(w, 1, 2, 3)] = 3


def unpin_a_lease(w: World) -> None:
    w.residency.pins[_row(w, 1, 2, 3)] = 0


def pin_for_nobody(w: World) -> None:
    w.residency.pins[_row(w, 8)] += 1


def lease_without_session(w: World) -> None:
    w.sessions[SessionId(1)].leases.clear()


def lease_of_a_lost_page(w: World) -> None:
    lease = w.leases.all()[0]
    w.leases.add(SessionId(1), 0, lease.rows, 99.0)


def ticket_without_session(w: World) -> None:
    w.sessions[SessionId(1)].tickets.clear()


def ticket_that_let_go(w: World) -> None:
    _ticket(w, LoadTicket).refs[0].release()


def session_with_a_ghost_ticket(w: World) -> None:
    w.sessions[SessionId(2)].tickets.add(TicketId(1 << 30))


def page_on_a_wrong_parent(w: World) -> None:
    w.residency.parent[_row(w, 1, 2, 3)] = _row(w, 8)


def page_in_another_namespace(w: World) -> None:
    w.residency.namespace[_row(w, 8, 9)] = 1


def tree_with_a_hole(w: World) -> None:
    w.residency.in_tree[_row(w, 1, 2)] = False


def key_of_another_row(w: World) -> None:
    w.residency.row_of[w.residency.key[_row(w, 1)]] = _row(w, 8)


def child_miscounted(w: World) -> None:
    w.residency.kids_l2[_row(w, 1)] += 1


def a_row_that_nothing_keeps(w: World) -> None:
    w.residency.add_run([PageKey(b"k" * 32)], -1, 0)
    w.namespaces.rows[0] += 1


def ready_in_one_group_only(w: World) -> None:
    w.residency.block[0, _row(w, 8)] = -1


def record_lacks_a_group(w: World) -> None:
    w.residency.l3_groups[_row(w, 1)] = 0


def namespace_bytes_drift(w: World) -> None:
    w.namespaces.l2_pages[0] += 1


def l3_bytes_drift(w: World) -> None:
    w.disk.used_bytes -= 1


def empty_namespace_stays(w: World) -> None:
    w.namespaces.add(NamespaceId(b"n" * 32), "t")


def tokens_vanish(w: World) -> None:
    w.counters.tokens_missed -= 1


def counter_runs_back(w: World) -> None:
    w.counters.evicted_l2 = -1


def policy_forgets_a_page(w: World) -> None:
    w.evict_l2.remove(np.array([_row(w, 8)], np.int32))


def policy_keeps_a_stranger(w: World) -> None:
    w.evict_l3.insert(np.array([_row(w, 8)], np.int32))


def l3_over_capacity(w: World) -> None:
    w.disk.bound_bytes = 1


def pages_in_flight_drift(w: World) -> None:
    w.tickets.pages += 1


def too_many_leases(w: World) -> None:
    lease = w.leases.all()[0]
    for _ in range(w.limits.leases_per_session):
        more = w.leases.add(SessionId(1), lease.namespace, lease.rows[:1].copy(), 99.0)
        w.sessions[SessionId(1)].leases.add(LeaseId(more.id))
        w.residency.pins[more.rows] += 1


def dirty_scratch(w: World) -> None:
    w.residency.scratch[3] = 1


def rows_left_to_free(w: World) -> None:
    w.maybe_dead.append(np.zeros(1, np.int32))


def told_of_a_page_that_is_not_there(w: World) -> None:
    w.residency.told[_ticket(w, StoreTicket).rows] = IN_L2 | KNOWN


def told_of_a_salted_page(w: World) -> None:
    w.residency.told[w.residency.namespace == 1] = KNOWN


def told_of_without_being_known(w: World) -> None:
    w.residency.told[_row(w, 8, 9)] = IN_L2


def told_of_without_its_parent(w: World) -> None:
    w.residency.told[_row(w, 1)] = 0


def not_told_of(w: World) -> None:
    w.residency.told[_row(w, 8, 9)] = KNOWN


def withheld_for_ever(w: World) -> None:
    w.residency.told[_row(w, 8)] = 0
    w.residency.told[_row(w, 8, 9)] = 0
    w.residency.l2[_row(w, 8)], w.residency.l3[_row(w, 8)] = ABSENT, ABSENT


def load_on_a_strangers_lease(w: World) -> None:
    lease = w.leases.all()[0]
    w.sessions[SessionId(1)].leases.discard(lease.id)
    w.sessions[SessionId(2)].leases.add(lease.id)
    lease.session = SessionId(2)


def load_of_another_shape(w: World) -> None:
    session = w.sessions[SessionId(1)]
    session.shape = replace(session.shape, fingerprint=b"another")


def load_without_memory(w: World) -> None:
    w.sessions[SessionId(1)].memory = False


VIOLATIONS: dict[int, tuple[Callable[[World], object], ...]] = {
    2: (leak_a_block, free_a_block_in_use, share_a_block_being_written, two_rows_on_one_block),
    3: (visible_while_filling, filling_without_a_ticket, leaving_without_a_ticket),
    4: (
        unpin_a_lease,
        pin_for_nobody,
        lease_without_session,
        lease_of_a_lost_page,
        load_on_a_strangers_lease,
        load_of_another_shape,
    ),
    5: (ticket_without_session, session_with_a_ghost_ticket, load_without_memory),
    6: (
        page_on_a_wrong_parent,
        page_in_another_namespace,
        tree_with_a_hole,
        key_of_another_row,
        child_miscounted,
        a_row_that_nothing_keeps,
    ),
    7: (ready_in_one_group_only, record_lacks_a_group),
    8: (namespace_bytes_drift, l3_bytes_drift, empty_namespace_stays),
    9: (tokens_vanish, counter_runs_back),
    12: (
        policy_forgets_a_page,
        policy_keeps_a_stranger,
        l3_over_capacity,
        pages_in_flight_drift,
        too_many_leases,
        dirty_scratch,
        rows_left_to_free,
    ),
    13: (
        told_of_a_page_that_is_not_there,
        told_of_a_salted_page,
        told_of_without_being_known,
        told_of_without_its_parent,
        not_told_of,
    ),
}
CASES = [(law, plant) for law, plants in VIOLATIONS.items() for plant in plants]


def test_the_world_is_sound_before() -> None:
    _busy_world().state.check()


def test_a_load_on_the_lease_of_the_same_engine_is_sound() -> None:
    hand = _busy_world()
    world = hand.state.world
    load_on_a_strangers_lease(world)
    for session in world.sessions.values():
        session.group = b"g" * 16
    hand.state.check()
    world.sessions[SessionId(2)].tenant = "other"
    with pytest.raises(LawBroken, match=r"law 4: ticket \d+ loads on the lease of session 2, a stranger"):
        hand.state.check()


@pytest.mark.parametrize(("law", "plant"), CASES, ids=lambda case: getattr(case, "__name__", str(case)))
def test_a_planted_violation_is_named(law: int, plant: Callable[[World], object]) -> None:
    hand = _busy_world()
    plant(hand.state.world)
    with pytest.raises(LawBroken) as caught:
        hand.state.check()
    assert str(caught.value).startswith(f"law {law}"), str(caught.value)


def test_a_page_that_is_withheld_waits_for_its_parent() -> None:
    hand = _busy_world()
    withheld_for_ever(hand.state.world)
    with pytest.raises(LawBroken, match="wait for nobody"):
        routers_know_what_lookups_find(hand.state.world)


def test_capacity_that_does_not_add_up() -> None:
    hand = _busy_world()
    hand.state.world.pool.free_parents -= 1
    with pytest.raises(LawBroken, match="law 1"):
        hand.state.check()


def test_a_ticket_must_not_let_go_of_its_blocks() -> None:
    hand = _busy_world()
    ticket_that_let_go(hand.state.world)
    with pytest.raises(LawBroken, match="law 2"):
        hand.state.check()


def test_the_story_of_the_row_is_told() -> None:
    hand = _busy_world()
    world = hand.state.world
    row = _row(world, 1, 2, 3)
    world.residency.pins[row] = 0
    with pytest.raises(LawBroken) as caught:
        hand.state.check()
    text = str(caught.value)
    assert f"story of row {row}" in text
    for word in ("store began", "stored", "written", "leased", "now (event"):
        assert word in text


@pytest.mark.parametrize(
    "act",
    [
        lambda r, rows: r.begin_fill(rows),
        lambda r, rows: r.finish_fill(rows, [rows]),
        lambda r, rows: r.abort_fill(rows),
        lambda r, rows: r.rescue(rows),
        lambda r, rows: r.finish_write(rows, 1),
        lambda r, rows: r.leave_l3(rows),
    ],
)
def test_transitions_have_a_before(act: Callable[[Residency, np.ndarray], None]) -> None:  # type: ignore[type-arg]
    """A READY page that L3 does not have: none of these may be done to it."""
    residency = Residency(rows=4)
    rows = residency.add_run([PageKey(bytes([i]) * 32) for i in range(5)], -1, 0)
    residency.begin_fill(rows)
    residency.finish_fill(rows, [rows])
    assert residency.l3[rows].tolist() == [ABSENT] * 5
    with pytest.raises(LawBroken, match="law 3"):
        act(residency, rows)


def test_a_row_that_the_tree_keeps_is_never_freed() -> None:
    """A freed row is given to the next page; were it still in the tree, that would be another prompt's KV."""
    world = _busy_world().state.world
    with pytest.raises(LawBroken, match="law 6"):
        world._forget(np.array([_row(world, 1, 2)], np.int32))  # its child stays

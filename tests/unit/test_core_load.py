"""Lookup, Extend, Load, Prefetch: leases, promotion, failures on each leg."""

import numpy as np
from core_world import BLOCK, Hand, starts, tokens

from hicache.base.ids import LeaseId, PageKey, SessionId, TicketId
from hicache.core.commands import CopyPages, DeleteRecords, FailFence, ReadRecords, Reply, TouchRecords
from hicache.core.events import (
    CopyEnded,
    ExtendAsked,
    LoadAsked,
    LookupAsked,
    PrefetchAsked,
    RecoveredRow,
    RenewAsked,
    StoreDeleted,
    StoreModeChanged,
    StoreRead,
    StoreRecovered,
    Tick,
)
from hicache.core.state import CacheState
from hicache.protocol.messages import Accepted, Busy, Done, Error, Match, Scope
from tests.sim.contents import LIMITS, MODELS, Truth


def _in_l3(pages: int = 3, l2_pages: int = 4) -> Hand:
    """Pages 1 … `pages` are in L3 only; L2 holds one other page."""
    hand = Hand(pages=l2_pages, l3_pages=100)
    hand.open()
    hand.stored(*range(1, pages + 1))
    hand.stored(*range(90, 90 + l2_pages))
    assert hand.look(*range(1, pages + 1), lease=False).l3_tokens == 4 * pages
    return hand


def _read(hand: Hand, read: ReadRecords, *bad: int, corrupt: bool = True) -> None:
    ok = np.ones(len(read.records), np.bool_)
    ok[list(bad)] = False
    hand.feed(StoreRead(read.ticket, ok, ~ok if corrupt else np.zeros_like(ok)))


def _error(hand: Hand) -> Error:
    found = [each.message for each in hand.out if isinstance(each, Reply) and isinstance(each.message, Error)]
    assert len(found) == 1, hand.out
    return found[0]


def test_a_load_from_l2_copies_and_answers() -> None:
    hand = Hand()
    hand.open()
    hand.stored(1, 2, 3)
    match = hand.look(1, 2, 3)
    hand.load(match.lease, 2, first=1)
    copy = hand.one(CopyPages)
    assert hand.kinds() == ["Accepted", "CopyPages"]
    assert copy.to_l1
    assert copy.copies[0].l2_offsets.tolist() == [BLOCK, 2 * BLOCK]
    hand.copied()
    assert hand.message() == Done(ticket=copy.ticket, pages=2)
    assert hand.counters["tokens_loaded"] == 8


def test_a_load_of_nothing_is_done_at_once() -> None:
    hand = Hand()
    hand.open()
    hand.stored(1)
    hand.load(hand.look(1).lease, 0)
    assert hand.kinds() == ["DoneFence", "Accepted", "Done"]


def test_a_failed_copy_is_an_error_and_the_pages_stay() -> None:
    hand = Hand()
    hand.open()
    hand.stored(1)
    hand.load(hand.look(1).lease, 1)
    hand.copied(ok=False)
    assert _error(hand).code == "transfer_failed"
    assert hand.counters["tokens_failed"] == 4
    assert hand.look(1, lease=False).resumable_tokens == 4


def test_pages_of_l3_are_read_and_then_copied_together() -> None:
    hand = _in_l3(pages=2)
    match = hand.look(1, 2)
    hand.load(match.lease, 2)
    read = hand.one(ReadRecords)
    assert read.urgency == "load"
    assert hand.kinds() == ["Accepted", "ReadRecords"]
    _read(hand, read)
    assert hand.one(CopyPages).copies[0].l2_offsets.tolist() == [record.offset for record in read.records]
    hand.copied()
    assert hand.look(1, 2, lease=False).l2_tokens == 8


def test_two_loads_of_one_page_read_it_once() -> None:
    hand = _in_l3(pages=2)
    hand.open(2, instance=b"j" * 16)
    hand.load(hand.look(1, 2).lease, 2)
    read = hand.one(ReadRecords)
    hand.load(hand.look(1, 2, session=2).lease, 2, session=2)
    assert hand.kinds() == ["Accepted"]
    _read(hand, read)
    assert [each.session for each in hand.out if isinstance(each, CopyPages)] == [1, 2]


def test_a_corrupt_record_fails_every_load_that_waits_and_leaves_l3() -> None:
    hand = _in_l3(pages=3)
    hand.open(2, instance=b"j" * 16)
    first = hand.look(1, 2, 3).lease
    hand.load(first, 3)
    read = hand.one(ReadRecords)
    second = hand.look(1, 2, 3, session=2).lease
    hand.load(second, 1, session=2)  # of page 0 alone, which is sound
    _read(hand, read, 1)
    assert [each.session for each in hand.out if isinstance(each, CopyPages)] == [2]
    assert hand.one(FailFence).session == 1
    assert _error(hand).code == "transfer_failed"
    assert len(hand.one(DeleteRecords).keys) == 1
    deleted = hand.one(DeleteRecords).ticket
    assert hand.counters["corrupt_records"] == 1
    match = hand.look(1, 2, 3, lease=False)
    assert match.resumable_tokens == 4  # the page behind the bad one can't be reached
    hand.load(first, 3)
    assert _error(hand).code == "transfer_failed"
    hand.load(first, 1)
    assert "CopyPages" in hand.kinds()
    hand.feed(StoreDeleted(deleted))


def test_a_page_that_was_lost_is_stored_again_and_reaches_what_is_behind_it() -> None:
    hand = _in_l3(pages=3)
    lease = hand.look(1, 2, 3).lease
    hand.load(lease, 3)
    _read(hand, hand.one(ReadRecords), 1)
    hand.feed(StoreDeleted(hand.one(DeleteRecords).ticket))
    hand.release(lease)
    hand.store(1, 2)
    assert [
        each.message.pages for each in hand.out if isinstance(each, Reply) and isinstance(each.message, Accepted)
    ] == [1]
    hand.copied()
    assert hand.look(1, 2, 3, lease=False).resumable_tokens == 12


def test_an_unanswered_record_counts_as_missing() -> None:
    hand = _in_l3(pages=2)
    hand.load(hand.look(1, 2).lease, 2)
    nothing = np.zeros(0, np.bool_)
    hand.feed(StoreRead(hand.one(ReadRecords).ticket, nothing, nothing))
    assert _error(hand).code == "transfer_failed"
    assert hand.look(1, 2, lease=False).resumable_tokens == 0


def test_no_room_for_promotion_is_an_error_and_a_miss() -> None:
    hand = _in_l3(pages=2, l2_pages=4)
    pinned = hand.look(90, 91, 92, 93)
    assert pinned.l2_tokens == 16
    hand.load(hand.look(1, 2).lease, 2)
    assert hand.kinds() == ["FailFence", "Error"]
    assert _error(hand).code == "no_space"


def test_prefetch_brings_what_fits() -> None:
    hand = _in_l3(pages=4, l2_pages=4)
    hand.look(90, 91)  # a lease keeps two of four blocks
    hand.feed(PrefetchAsked(SessionId(1), hand.ask(), tokens(1, 2, 3, 4), Scope()))
    read = hand.one(ReadRecords)
    assert read.urgency == "prefetch"
    assert len(read.records) == 2
    _read(hand, read)
    assert hand.message() == Done(ticket=TicketId(read.ticket - 1), pages=2)
    match = hand.look(1, 2, 3, 4, lease=False)
    assert (match.l2_tokens, match.l3_tokens) == (8, 8)


def test_prefetch_of_the_unknown_is_done_at_once() -> None:
    hand = Hand()
    hand.open()
    hand.feed(PrefetchAsked(SessionId(1), hand.ask(), tokens(7), Scope()))
    assert hand.kinds() == ["Accepted", "Done"]


def test_a_load_waits_for_a_prefetch_under_way() -> None:
    hand = _in_l3(pages=2)
    hand.feed(PrefetchAsked(SessionId(1), hand.ask(), tokens(1, 2), Scope()))
    read = hand.one(ReadRecords)
    assert hand.look(1, 2, lease=False).resumable_tokens == 8
    hand.load(hand.look(1, 2).lease, 2)
    assert hand.kinds() == ["Accepted"]
    _read(hand, read)
    assert hand.kinds() == ["Done", "CopyPages"]


def test_extend_goes_on_behind_the_lease() -> None:
    hand = Hand(l3_pages=50)
    hand.open()
    hand.stored(1, 2, 3)
    match = hand.look(1, 2, 3, limit=4)
    assert match.resumable_tokens == 4
    hand.feed(ExtendAsked(SessionId(1), hand.ask(), LeaseId(match.lease), tokens(2, 3, 4), 1 << 30))
    longer = hand.message()
    assert isinstance(longer, Match)
    assert (longer.lease, longer.resumable_tokens, longer.known_tokens) == (match.lease, 12, 12)
    assert hand.state.snapshot()["rows"]["pinned"] == 3
    hand.load(match.lease, 3)
    hand.copied()
    hand.release(match.lease)
    touched = hand.one(TouchRecords)
    assert len(touched.keys) == 3
    assert hand.state.snapshot()["rows"]["pinned"] == 0


def test_an_empty_match_takes_no_lease() -> None:
    hand = Hand()
    hand.open()
    assert hand.look(1, 2).lease == 0
    hand.stored(1)
    assert hand.look(1, limit=3).lease == 0
    assert hand.look(1, limit=-5).resumable_tokens == 0


def test_leases_expire_unless_renewed_or_loading() -> None:
    hand = Hand()
    hand.open()
    hand.stored(1)
    renewed, loading, forgotten = (hand.look(1).lease for _ in range(3))
    hand.load(loading, 1)
    copy = hand.one(CopyPages)
    hand.now_s = 9.0
    hand.feed(RenewAsked(SessionId(1), hand.ask(), (LeaseId(renewed),)))
    assert hand.message() == Done(count=1)
    hand.now_s = 11.0
    hand.feed(Tick())
    assert hand.state.snapshot()["leases"] == 2
    hand.load(forgotten, 1)
    assert _error(hand).code == "unknown_lease"
    hand.feed(CopyEnded(copy.ticket, True))
    hand.now_s = 22.0
    hand.feed(Tick())
    assert hand.state.snapshot()["leases"] == 0


def test_a_lease_is_its_sessions_own() -> None:
    hand = Hand()
    hand.open()
    hand.open(2, instance=b"j" * 16)
    hand.stored(1)
    lease = hand.look(1).lease
    hand.load(lease, 1, session=2)
    assert _error(hand).code == "unknown_lease"
    hand.release(lease, session=2)
    assert hand.message() == Done(count=0)
    hand.release(lease, lease)
    assert hand.message() == Done(count=1)
    hand.release(lease)
    assert hand.message() == Done(count=0)


def test_a_released_lease_lets_its_load_end() -> None:
    hand = Hand(pages=2)
    hand.open()
    hand.stored(1, 2)
    lease = hand.look(1, 2).lease
    hand.load(lease, 2)
    copy = hand.one(CopyPages)
    hand.release(lease)
    hand.store(8, 9)  # must not get the blocks that are being read
    assert hand.kinds() == ["DoneFence", "Accepted", "Done"]
    hand.feed(CopyEnded(copy.ticket, True))
    hand.store(8, 9)
    assert "CopyPages" in hand.kinds()


def test_loads_beyond_the_lease_are_out_of_range() -> None:
    hand = Hand()
    hand.open()
    hand.stored(1, 2)
    lease = hand.look(1, 2).lease
    for count, first in ((3, 0), (2, 1), (1, -1), (0, 3)):
        hand.load(lease, count, first=first)
        assert _error(hand).code == "out_of_range", (count, first)
    hand.feed(LoadAsked(SessionId(1), hand.ask(), LeaseId(lease), 0, starts(2, 47), 0, 1))
    assert _error(hand).code == "out_of_range"


def test_leases_are_bounded() -> None:
    hand = Hand()
    hand.open()
    hand.stored(1)
    for _ in range(LIMITS.leases_per_session):
        assert hand.look(1).lease
    hand.feed(LookupAsked(SessionId(1), hand.ask(), tokens(1), 4, True, Scope()))
    assert isinstance(hand.message(), Busy)


def test_a_duplicate_answer_is_counted_and_ignored() -> None:
    hand = _in_l3(pages=1)
    hand.load(hand.look(1).lease, 1)
    read = hand.one(ReadRecords)
    _read(hand, read)
    copy = hand.one(CopyPages)
    hand.copied()
    for late in (
        CopyEnded(copy.ticket, False),
        StoreRead(read.ticket, np.zeros(1, np.bool_), np.ones(1, np.bool_)),
        StoreDeleted(copy.ticket),
        CopyEnded(TicketId(1 << 40), True),
    ):
        assert hand.feed(late) == []
    assert hand.counters["late_answers"] == 4
    assert hand.look(1, lease=False).l2_tokens == 4


def _recovered(order: tuple[int, ...], groups: tuple[str, ...] = ("kv",)) -> StoreRecovered:
    """Pages 1, 2, 3 as a store found them, in this order of use."""
    truth, model = Truth(), MODELS[0] if groups == ("kv",) else MODELS[1]
    namespace = truth.namespace(model, "t", Scope())
    keys = truth.learn(model, namespace, tokens(1, 2, 3))
    rows = [
        RecoveredRow(
            PageKey(keys[page]),
            PageKey(keys[page - 1]) if page else None,
            namespace,
            "t",
            group,
            CacheState.l3_allocated(BLOCK),
        )
        for page in order
        for group in groups
    ]
    return StoreRecovered(tuple(rows))


def test_a_restart_finds_pages_by_their_keys() -> None:
    hand = Hand(l3_pages=50)
    hand.feed(_recovered((2, 1, 0)))
    assert hand.state.snapshot()["tenants"]["t"]["l3_bytes"] == 3 * CacheState.l3_allocated(BLOCK)
    hand.open()
    match = hand.look(1, 2, 3, 4)
    assert (match.l3_tokens, match.known_tokens) == (12, 12)
    assert hand.state.snapshot()["tree_tokens"] == 12
    hand.load(match.lease, 3)
    _read(hand, hand.one(ReadRecords))
    hand.copied()


def test_a_page_found_in_l3_while_a_store_fills_it_stays_pending() -> None:
    hand = Hand(l3_pages=50)
    hand.feed(StoreModeChanged("off", "gone"))
    hand.open()
    hand.store(1, 2)
    copy = hand.one(CopyPages)
    hand.feed(StoreModeChanged("rw", ""))
    hand.feed(_recovered((2, 1, 0)))
    match = hand.look(1, 2, 3)
    assert (match.resumable_tokens, match.pending_tokens, match.lease) == (0, 12, 0)
    hand.feed(CopyEnded(copy.ticket, False, "why"))
    match = hand.look(1, 2, 3)
    assert match.l3_tokens == 12
    hand.load(match.lease, 3)
    _read(hand, hand.one(ReadRecords))
    hand.copied()


def test_pages_without_their_parent_wait_for_it() -> None:
    hand = Hand(l3_pages=50)
    hand.feed(_recovered((2, 0)))
    hand.open()
    assert hand.look(1, 2, 3, lease=False).resumable_tokens == 4
    hand.stored(1, 2)
    assert hand.look(1, 2, 3, lease=False).resumable_tokens == 12


def test_pages_without_their_parent_age_out() -> None:
    hand = Hand(l3_pages=3)
    hand.feed(_recovered((2,)))
    hand.open()
    hand.stored(7, 8, 9)
    assert hand.state.snapshot()["rows"]["rows"] == 4
    assert hand.counters["evicted_l3"] == 1


def test_a_page_that_lost_a_group_is_deleted_when_its_shape_is_known() -> None:
    hand = Hand(pages=64, l3_pages=50)
    hand.state.world.pool.format(384)
    whole, part = _recovered((0, 1), ("b", "a")), _recovered((2,), ("b",))
    hand.feed(StoreRecovered(whole.rows + part.rows))
    hand.open(model=MODELS[1])
    hand.feed(LookupAsked(SessionId(1), hand.ask(), tokens(1, 2, 3), 99, False, Scope()))
    assert len(hand.one(DeleteRecords).keys) == 2
    assert hand.one(Reply).message.resumable_tokens == 8  # type: ignore[union-attr]


def test_more_than_the_capacity_was_found() -> None:
    hand = Hand(l3_pages=2)
    hand.feed(_recovered((2, 1, 0)))
    assert len(hand.one(DeleteRecords).keys) == 1
    hand.open()
    assert hand.look(1, 2, 3, lease=False).l3_tokens == 8


def test_what_read_only_could_not_delete_is_deleted_later() -> None:
    hand = _in_l3(pages=1)
    hand.load(hand.look(1).lease, 1)
    read = hand.one(ReadRecords)
    hand.feed(StoreModeChanged("ro", "full"))
    _read(hand, read, 0, corrupt=False)
    assert not any(isinstance(each, DeleteRecords) for each in hand.out)
    hand.feed(StoreModeChanged("rw", ""))
    deleted = hand.one(DeleteRecords)
    assert deleted.keys == ((read.records[0].key, "kv"),)
    hand.feed(StoreDeleted(deleted.ticket))
    assert hand.state.idle()


def test_less_capacity_deletes_at_once() -> None:
    hand = Hand(l3_pages=10)
    hand.open()
    hand.stored(1, 2, 3)
    commands = hand.state.reconfigure(l3_capacity_bytes=CacheState.l3_allocated(BLOCK), write_policy="none")
    hand.state.check()
    assert sum(len(each.keys) for each in commands if isinstance(each, DeleteRecords)) == 2


def test_tokens_add_up_over_lookups() -> None:
    hand = _in_l3(pages=3)
    before = hand.counters
    hand.look(1, 2, 3, 4)
    hand.look(90, 91)
    hand.look(55)
    hand.look(1, lease=False)
    after = {name: count - before[name] for name, count in hand.counters.items()}
    assert after["tokens_looked_up"] == 28
    assert after["tokens_l3"] == 12
    assert after["tokens_missed"] == 28 - 12 - after["tokens_l2"]
    assert after["probes"] == 1

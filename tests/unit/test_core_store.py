"""Store and what follows from it: visibility, dedup, room, write-through, write-back."""

from dataclasses import replace

import numpy as np
import pytest
from core_world import BLOCK, Hand, starts, tokens

from hicache.base.ids import RequestId, SessionId
from hicache.core.commands import CopyPages, DeleteRecords, DoneFence, Reply, WriteRecords
from hicache.core.events import Drain, LookupAsked, StoreAsked, StoreDeleted, StoreModeChanged, StoreWritten
from hicache.core.state import CacheState
from hicache.protocol.messages import Accepted, Busy, Done, Error, Scope
from tests.sim.contents import LIMITS, MODELS


def _accepted(hand: Hand) -> int:
    found = [each.message for each in hand.out if isinstance(each, Reply) and isinstance(each.message, Accepted)]
    assert len(found) == 1
    return found[0].pages


def test_pages_are_pending_while_copied_and_visible_with_done() -> None:
    hand = Hand()
    hand.open()
    assert "Accepted" in [*hand.store(1, 2, 3), *hand.kinds()]
    copy = hand.one(CopyPages)
    assert not copy.to_l1
    assert copy.copies[0].l1.tolist() == [0, 1, 2]
    assert copy.copies[0].l2_offsets.tolist() == [0, BLOCK, 2 * BLOCK]
    match = hand.look(1, 2, 3, lease=False)
    assert (match.resumable_tokens, match.pending_tokens) == (0, 12)
    hand.out = [copy]
    hand.copied()
    assert hand.message() == Done(ticket=copy.ticket, pages=3)
    match = hand.look(1, 2, 3, 4, lease=False)
    assert (match.known_tokens, match.resumable_tokens, match.l2_tokens) == (12, 12, 12)


def test_known_to_the_token_resumable_to_the_page() -> None:
    hand = Hand()
    hand.open()
    hand.stored(1, 2)
    text = tokens(1, 2)[:24]  # a page and two tokens
    hand.feed(LookupAsked(SessionId(1), hand.ask(), text, 1 << 30, False, Scope()))
    match = hand.message()
    assert (match.known_tokens, match.resumable_tokens) == (6, 4)  # type: ignore[attr-defined]


def test_a_failed_copy_leaves_nothing() -> None:
    hand = Hand()
    hand.open()
    hand.store(1, 2)
    hand.copied(ok=False)
    message = hand.message()
    assert isinstance(message, Error)
    assert message.code == "transfer_failed"
    assert hand.look(1, 2, lease=False).known_tokens == 0
    assert hand.state.snapshot()["rows"]["rows"] == 0
    assert hand.state.snapshot()["pool"]["used_bytes"] == 0


def test_ready_and_filling_pages_are_skipped() -> None:
    hand = Hand()
    hand.open()
    hand.stored(1, 2)
    hand.store(1, 2, 3)
    first = hand.one(CopyPages)
    assert _accepted(hand) == 1
    assert first.copies[0].l1.tolist() == [2]
    hand.store(1, 2, 3, 4)  # page 3 is being filled
    assert _accepted(hand) == 1
    assert hand.one(CopyPages).copies[0].l1.tolist() == [3]


def test_nothing_missing_is_done_at_once() -> None:
    hand = Hand()
    hand.open()
    hand.stored(1, 2)
    hand.store(1, 2)
    assert hand.kinds() == ["DoneFence", "Accepted", "Done"]
    assert hand.one(DoneFence).generation == hand.request
    assert hand.state.idle()


def test_chunks_of_one_prefill_follow_each_other() -> None:
    hand = Hand()
    hand.open()
    hand.store(1, 2)
    first = hand.one(CopyPages)
    hand.store(1, 2, 3, 4, first=2)  # before the first chunk is there
    assert _accepted(hand) == 2
    hand.copied()
    assert hand.look(1, 2, 3, 4, lease=False).resumable_tokens == 0
    hand.out = [first]
    hand.copied()
    assert hand.look(1, 2, 3, 4, lease=False).resumable_tokens == 16


def test_a_chunk_without_what_precedes_it_is_not_kept() -> None:
    hand = Hand()
    hand.open()
    hand.store(1, 2, 3, first=1)
    assert hand.kinds() == ["DoneFence", "Accepted", "Done"]
    assert _accepted(hand) == 0


def test_a_full_pool_shortens_the_store_from_the_front() -> None:
    hand = Hand(pages=4)
    hand.open()
    hand.stored(1, 2)
    lease = hand.look(1, 2).lease
    assert lease
    hand.store(5, 6, 7, 8)
    assert _accepted(hand) == 2
    assert hand.one(CopyPages).copies[0].l1.tolist() == [0, 1]
    hand.copied()
    assert hand.look(5, 6, 7, 8, lease=False).resumable_tokens == 8


def test_demand_evicts_the_least_recent_leaf_first() -> None:
    hand = Hand(pages=4)
    hand.open()
    hand.stored(1, 2, 3, 4)
    hand.stored(9)
    assert hand.look(1, 2, 3, 4, lease=False).resumable_tokens == 12
    hand.stored(9, 8)
    assert hand.look(1, 2, 3, 4, lease=False).resumable_tokens == 8
    assert hand.look(9, 8, lease=False).resumable_tokens == 8


def test_probes_touch_nothing_and_leases_do() -> None:
    for leased in (False, True):
        hand = Hand(pages=4)
        hand.open()
        hand.stored(1, 2)
        hand.stored(5, 6)
        lease = hand.look(1, 2, lease=leased).lease
        if leased:
            hand.release(lease)
        hand.stored(7, 8)
        kept = hand.look(1, 2, lease=False).resumable_tokens
        assert kept == (8 if leased else 0)


def test_write_through_in_batches_and_pins_until_written() -> None:
    hand = Hand(pages=8, l3_pages=100)
    hand.open()
    hand.store(1, 2, 3, 4, 5)
    hand.copied()
    writes = [each for each in hand.out if isinstance(each, WriteRecords)]
    assert [len(each.records) for each in writes] == [3, 2]  # io_batch_pages = 3
    assert writes[0].records[0].parent is None
    assert writes[0].records[1].parent == writes[0].records[0].key
    assert writes[1].records[0].parent == writes[0].records[2].key
    assert hand.state.snapshot()["rows"]["pinned"] == 5
    hand.written()
    snapshot = hand.state.snapshot()
    assert snapshot["rows"]["pinned"] == 0
    assert snapshot["l3"]["used_bytes"] == 5 * CacheState.l3_allocated(BLOCK)


def test_a_page_that_l3_has_is_dropped_freely_and_still_found() -> None:
    hand = Hand(pages=2, l3_pages=100)
    hand.open()
    hand.stored(1, 2)
    hand.stored(5, 6)
    match = hand.look(1, 2, lease=False)
    assert (match.l2_tokens, match.l3_tokens) == (0, 8)


def test_l3_makes_room_before_it_writes() -> None:
    hand = Hand(pages=8, l3_pages=3)
    hand.open()
    hand.stored(1, 2, 3)
    hand.store(5, 6)
    hand.copied()
    kinds = hand.kinds()
    assert kinds.index("DeleteRecords") < kinds.index("WriteRecords")
    deleted = hand.one(DeleteRecords)
    assert len(deleted.keys) == 2
    assert hand.state.snapshot()["l3"]["used_bytes"] == 3 * CacheState.l3_allocated(BLOCK)
    write = hand.one(WriteRecords)
    hand.feed(StoreWritten(write.ticket, np.ones(2, np.bool_)))
    hand.feed(StoreDeleted(deleted.ticket))
    assert hand.state.snapshot()["rows"]["l3"]["ready"] == 3


def test_a_write_larger_than_l3_is_not_ordered() -> None:
    hand = Hand(pages=8, l3_pages=2)
    hand.open()
    hand.store(1, 2, 3)
    hand.copied()
    assert hand.kinds() == ["Done"]
    assert hand.counters["unwritten_pages"] == 3


def test_a_failed_write_keeps_the_page_in_l2() -> None:
    hand = Hand(pages=8, l3_pages=8)
    hand.open()
    hand.store(1, 2)
    hand.copied()
    hand.written(ok=False)
    match = hand.look(1, 2, lease=False)
    assert match.l2_tokens == 8
    assert hand.state.snapshot()["l3"]["used_bytes"] == 0
    assert hand.counters["failed_writes"] == 2


def test_policy_none_never_writes() -> None:
    hand = Hand(pages=4, l3_pages=8, policy="none")
    hand.open()
    hand.store(1, 2, 3, 4)
    hand.copied()
    assert hand.kinds() == ["Done"]
    hand.store(5, 6)
    assert "WriteRecords" not in hand.kinds()


def _write_back() -> Hand:
    hand = Hand(pages=32, l3_pages=100, policy="write_back", limits=replace(LIMITS, io_batch_pages=8))
    hand.open()
    return hand


def test_write_back_writes_when_the_reserve_is_touched() -> None:
    hand = _write_back()
    for at in range(0, 30, 3):
        hand.store(at + 100, at + 101, at + 102)
        hand.copied()
        assert "WriteRecords" not in hand.kinds()
    hand.store(1, 2)
    write = hand.one(WriteRecords)
    assert hand.state.snapshot()["rows"]["l2"]["leaving"] == len(write.records) == 2
    hand.feed(StoreWritten(write.ticket, np.ones(2, np.bool_)))
    assert hand.counters["evicted_l2"] == 2
    match = hand.look(100, 101, 102, lease=False)
    assert (match.l2_tokens, match.l3_tokens) == (4, 8)  # the leaf went first, then its parent


def test_a_page_that_is_leaving_is_rescued_by_a_lease() -> None:
    hand = _write_back()
    for at in range(0, 30, 3):
        hand.stored(at + 100, at + 101, at + 102)
    hand.store(1, 2)
    write = hand.one(WriteRecords)
    match = hand.look(100, 101, 102)
    assert match.l2_tokens == 12
    hand.feed(StoreWritten(write.ticket, np.ones(2, np.bool_)))
    hand.release(match.lease)
    assert hand.look(100, 101, 102, lease=False).l2_tokens == 12


def test_drain_writes_back_what_only_l2_has() -> None:
    hand = _write_back()
    hand.store(1, 2)
    hand.copied()
    hand.feed(Drain())
    assert len(hand.one(WriteRecords).records) == 2
    hand.store(7)
    message = hand.message()
    assert isinstance(message, Error)
    assert message.code == "draining"


def test_a_read_only_store_gets_no_writes_and_serves_on() -> None:
    hand = Hand(pages=2, l3_pages=8)
    hand.open()
    hand.stored(1, 2)
    hand.feed(StoreModeChanged("ro", "full"))
    hand.store(5, 6)
    hand.copied()
    assert hand.kinds() == ["Done"]
    assert hand.look(1, 2, lease=False).l3_tokens == 8


def test_a_store_that_went_off_is_forgotten() -> None:
    hand = Hand(pages=2, l3_pages=8)
    hand.open()
    hand.stored(1, 2)
    hand.stored(5, 6)
    lease = hand.look(1, 2)
    assert lease.l3_tokens == 8
    hand.feed(StoreModeChanged("off", "gone"))
    assert hand.look(1, 2, lease=False).resumable_tokens == 0
    hand.load(lease.lease, 2)
    message = hand.message()
    assert isinstance(message, Error)
    assert message.code == "transfer_failed"
    assert hand.state.snapshot()["l3"]["used_bytes"] == 0


def test_two_groups_have_blocks_of_their_own() -> None:
    hand = Hand(pages=64, l3_pages=100)
    model = MODELS[1]
    hand.state.world.pool.format(384)
    hand.open(model=model)
    blocks = (np.array([4, 9, 5, 8], np.int32), np.array([1, 0], np.int32))
    hand.feed(StoreAsked(SessionId(1), hand.ask(), tokens(1, 2), 0, blocks, 0, 1, Scope()))
    copies = hand.one(CopyPages).copies
    assert copies[0].l1.tolist() == [4, 9, 5, 8]
    assert copies[0].l2.tolist() == [0, 0, 1, 1]
    assert np.diff(copies[0].l2_offsets).tolist() == [64, 64, 64]
    assert copies[1].l1.tolist() == [1, 0]
    hand.copied()
    write = hand.one(WriteRecords)
    assert [record.group for record in write.records] == ["a", "b", "a", "b"]
    half = np.array([True, True, True, False])
    hand.feed(StoreWritten(write.ticket, half))
    assert len(hand.one(DeleteRecords).keys) == 2  # of the page that lacks a group, both
    assert hand.state.snapshot()["rows"]["l3"] == {"filling": 0, "ready": 1, "leaving": 1}


@pytest.mark.parametrize(
    ("count", "first", "blocks"),
    [
        (2, 0, starts(1)),
        (2, 0, starts(3)),
        (2, 3, starts(0)),
        (2, -1, starts(3)),
        (2, 0, starts(2, 47)),
        (2, 0, starts(2, -1)),
        (2, 0, ()),
        (2, 0, starts(2) + starts(2)),
    ],
)
def test_counts_and_starts_out_of_range(count: int, first: int, blocks: tuple[np.ndarray, ...]) -> None:  # type: ignore[type-arg]
    hand = Hand()
    hand.open()
    text = tokens(*range(count))
    hand.feed(StoreAsked(SessionId(1), RequestId(9), text, first, blocks, 0, 1, Scope()))
    message = hand.message()
    assert isinstance(message, Error)
    assert message.code == "out_of_range"


def test_torn_pages_and_oversized_requests() -> None:
    hand = Hand()
    hand.open()
    hand.feed(StoreAsked(SessionId(1), hand.ask(), tokens(1)[:-4], 0, starts(1), 0, 1, Scope()))
    assert hand.message().code == "out_of_range"  # type: ignore[attr-defined]
    hand.feed(StoreAsked(SessionId(1), hand.ask(), b"\0" * 4 * 600, 0, starts(0), 0, 1, Scope()))
    assert hand.message().code == "too_large"  # type: ignore[attr-defined]


def test_too_many_transfers_are_busy() -> None:
    hand = Hand(pages=32)
    hand.open()
    for page in range(LIMITS.requests_in_flight):
        hand.store(page)
    hand.store(99)
    assert isinstance(hand.message(), Busy)


def test_the_tree_is_bounded() -> None:
    hand = Hand(limits=replace(LIMITS, tree_tokens=8))
    hand.open()
    hand.stored(1, 2)
    hand.store(5)
    assert _accepted(hand) == 0
    assert hand.counters["refused_pages"] == 1

"""Sessions: welcome and refusal, epochs, death in the middle of everything."""

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from core_world import BLOCK, Hand, tokens

from hicache.base.ids import RequestId, SessionId
from hicache.core.commands import CancelCopy, CopyPages, DropSession, ReadRecords, Reply
from hicache.core.events import (
    CopyEnded,
    Drain,
    LookupAsked,
    ReleaseAsked,
    RenewAsked,
    SessionClosed,
    SessionOpened,
    StoreRead,
    Tick,
)
from hicache.core.state import CacheState, CoreConfig
from hicache.protocol.messages import Done, Error, Refuse, Scope, Welcome
from hicache.spec.model import ShardSpec
from tests.sim.contents import LIMITS, MODELS, SECRET, make_model


def _close(hand: Hand, session: int = 1, request: int = 0) -> None:
    hand.feed(SessionClosed(SessionId(session), "gone", RequestId(request)))


def _refusal(hand: Hand) -> Refuse:
    message = hand.message()
    assert isinstance(message, Refuse)
    return message


def test_welcome_tells_the_limits() -> None:
    hand = Hand()
    hand.open()
    message = hand.message()
    assert isinstance(message, Welcome)
    assert message.limits.tokens_per_request == LIMITS.tokens_per_request


def test_a_larger_epoch_supersedes_and_an_older_one_is_refused() -> None:
    hand = Hand()
    hand.open(1, epoch=5)
    for epoch in (5, 4):
        hand.open(2, epoch=epoch)
        assert _refusal(hand).code == "denied"
        assert hand.one(DropSession).session == 2
    hand.open(3, epoch=6)
    assert hand.one(DropSession).session == 1
    assert hand.look(1, session=3).lease == 0
    assert hand.feed(SessionClosed(SessionId(1), "late clean-up")) == []
    assert len(hand.state.snapshot()["sessions"]) == 1


@pytest.mark.parametrize("epoch", [1, 5, 6])
def test_another_tenant_with_the_same_instance_id_supersedes_nobody(epoch: int) -> None:
    """The refusal is the same below, at and above the open epoch: nothing of the other's session is told."""
    hand = Hand()
    hand.open(1, epoch=5)
    instance = hand.state.world.sessions[SessionId(1)].instance
    spec = MODELS[0]
    hand.feed(
        SessionOpened(SessionId(2), RequestId(900), instance, epoch, "other", spec.spec, spec.layout, ShardSpec())
    )
    refusal = _refusal(hand)
    assert refusal.code == "denied"
    assert "epoch" not in refusal.reason
    assert hand.one(DropSession).session == 2
    assert hand.look(1, session=1).lease == 0
    hand.open(3, epoch=6)
    assert hand.one(DropSession).session == 1


def test_an_open_session_id_is_not_taken_twice_and_not_dropped() -> None:
    hand = Hand()
    hand.open(1)
    hand.open(1, instance=b"k" * 16)
    assert hand.kinds() == ["Refuse"]
    assert hand.look(1).lease == 0


def test_sessions_are_bounded() -> None:
    hand = Hand()
    for session in range(1, LIMITS.sessions + 1):
        hand.open(session, instance=bytes([session]) * 16)
    hand.open(99, instance=b"z" * 16)
    assert _refusal(hand).code == "busy"


def test_bad_specs_are_refused_with_their_reason() -> None:
    hand = Hand()
    model = MODELS[0]
    for spec, layout, code in (
        (msgspec.structs.replace(model.spec, prefix_granularity=0), model.layout, "bad_spec"),
        (model.spec, msgspec.structs.replace(model.layout, pool_bytes=10), "bad_spec"),
        (msgspec.structs.replace(model.spec, prefix_granularity=2), model.layout, "unsupported"),
    ):
        hand.feed(SessionOpened(SessionId(7), hand.ask(), b"i" * 16, 1, "t", spec, layout, ShardSpec()))
        assert _refusal(hand).code == code


def test_a_model_larger_than_a_parent_is_refused_with_the_key_to_set() -> None:
    hand = Hand()
    hand.open(model=make_model("large", 64, (("kv", 64, 8),)))
    refusal = _refusal(hand)
    assert refusal.code == "no_space"
    assert "l2" in refusal.remedy


def test_an_unused_pool_is_cut_for_a_larger_model() -> None:
    small, large = MODELS[0], make_model("large", 64, (("kv", 64, 8),))
    state = CacheState(CoreConfig(arena_bytes=1 << 20), LIMITS, SECRET)
    hand = Hand()
    hand.state = state
    hand.open(1, model=small)
    before = state.snapshot()["pool"]["parent_bytes"]
    hand.open(2, instance=b"j" * 16, model=large)
    assert isinstance(hand.message(), Welcome)
    assert state.snapshot()["pool"]["parent_bytes"] >= before
    hand.stored(1, 2)
    assert hand.look(1, 2, lease=False).resumable_tokens == 8
    hand.open(3, instance=b"k" * 16, model=make_model("huge", 512, (("kv", 512, 64),)))
    assert _refusal(hand).code == "no_space"


def test_death_during_a_store_waits_for_the_lane() -> None:
    hand = Hand()
    hand.open()
    hand.store(1, 2)
    copy = hand.one(CopyPages)
    _close(hand)
    assert hand.kinds() == ["CancelCopy"]
    assert hand.one(CancelCopy).ticket == copy.ticket
    assert hand.state.snapshot()["pool"]["used_bytes"] == 2 * BLOCK
    hand.feed(CopyEnded(copy.ticket, False, "cancelled"))
    assert hand.kinds() == ["DropSession"]
    assert hand.state.snapshot()["pool"]["used_bytes"] == 0
    assert hand.state.idle()


def test_death_during_a_load_frees_pins_after_the_lane() -> None:
    hand = Hand()
    hand.open()
    hand.stored(1, 2)
    hand.load(hand.look(1, 2).lease, 2)
    copy = hand.one(CopyPages)
    _close(hand)
    assert hand.state.snapshot()["rows"]["pinned"] == 2
    assert hand.state.snapshot()["leases"] == 0
    hand.feed(CopyEnded(copy.ticket, True))
    assert hand.kinds() == ["DropSession"]
    assert hand.state.snapshot()["rows"]["pinned"] == 0


def test_death_while_reading_drops_at_once_and_keeps_what_comes() -> None:
    hand = Hand(pages=2, l3_pages=9)
    hand.open()
    hand.stored(1, 2)
    hand.stored(8, 9)
    hand.load(hand.look(1, 2).lease, 2)
    read = hand.one(ReadRecords)
    _close(hand)
    assert "DropSession" in hand.kinds()
    hand.feed(StoreRead(read.ticket, np.ones(2, np.bool_), np.zeros(2, np.bool_)))
    assert hand.out == []
    hand.open(2, epoch=2)
    assert hand.look(1, 2, session=2).l2_tokens == 8


def test_goodbye_is_answered_and_idempotent() -> None:
    hand = Hand()
    hand.open()
    _close(hand, request=77)
    assert hand.kinds() == ["Done", "DropSession"]
    assert hand.one(Reply).request == 77
    _close(hand, request=78)
    assert hand.out == []


def test_a_new_incarnation_comes_while_the_old_ones_copy_runs() -> None:
    hand = Hand()
    hand.open(1, epoch=1)
    hand.store(1)
    copy = hand.one(CopyPages)
    hand.open(2, epoch=2)
    assert hand.kinds() == ["CancelCopy", "Welcome"]
    hand.stored(5, session=2)
    hand.feed(CopyEnded(copy.ticket, True))
    assert hand.one(DropSession).session == 1
    assert hand.look(1, session=2, lease=False).resumable_tokens == 4


def test_silence_is_suspect_and_a_word_ends_it() -> None:
    hand = Hand()
    hand.open()
    hand.now_s = 6.0
    hand.feed(Tick())
    assert hand.state.snapshot()["sessions"][0]["state"] == "SUSPECT"
    hand.feed(RenewAsked(SessionId(1), hand.ask(), ()))
    assert hand.message() == Done(count=0)
    assert hand.state.snapshot()["sessions"][0]["state"] == "ACTIVE"


def test_strangers_are_told_to_say_hello() -> None:
    hand = Hand()
    hand.feed(LookupAsked(SessionId(5), hand.ask(), tokens(1), 4, True, Scope()))
    message = hand.message()
    assert isinstance(message, Error)
    assert (message.code, message.remedy) == ("unknown_session", "say Hello again")


def test_draining_ends_what_runs_and_takes_nothing_new() -> None:
    hand = Hand()
    hand.open()
    hand.stored(1)
    lease = hand.look(1).lease
    hand.load(lease, 1)
    copy = hand.one(CopyPages)
    hand.feed(Drain())
    assert not hand.state.idle()
    hand.feed(LookupAsked(SessionId(1), hand.ask(), tokens(1), 4, True, Scope()))
    assert hand.message().code == "draining"  # type: ignore[attr-defined]
    hand.open(2, instance=b"j" * 16)
    assert _refusal(hand).code == "draining"
    hand.feed(ReleaseAsked(SessionId(1), hand.ask(), ()))
    assert hand.message() == Done()
    hand.feed(CopyEnded(copy.ticket, True))
    assert hand.state.idle()


def test_namespaces_keep_scopes_apart() -> None:
    hand = Hand()
    hand.open()
    hand.stored(1, salt="x")
    assert hand.look(1, lease=False).known_tokens == 0
    hand.stored(1)
    assert hand.state.snapshot()["namespaces"]["count"] == 2


@pytest.mark.parametrize("mode", ["l3_mode", "write_policy"])
def test_config_values_are_checked(mode: str) -> None:
    with pytest.raises(ValueError, match=mode):
        CacheState(replace(CoreConfig(arena_bytes=1024), **{mode: "perhaps"}), LIMITS, SECRET)
    with pytest.raises(ValueError, match="write_policy"):
        Hand().state.reconfigure(write_policy="perhaps")


def test_snapshot_is_json() -> None:
    hand = Hand(l3_pages=9)
    hand.open()
    hand.stored(1, 2)
    hand.look(1, 2)
    snapshot = json.loads(json.dumps(hand.state.snapshot()))
    assert snapshot["pool"]["used_bytes"] == 2 * BLOCK
    assert snapshot["pool"]["used_bytes"] + snapshot["pool"]["free_bytes"] == 16 * BLOCK
    assert snapshot["counters"]["stored_pages"] == 2

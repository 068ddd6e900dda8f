"""Processes of one engine: what one session leases, the others of its group load, renew and release."""

import pytest
from core_world import Hand, starts, tokens

from hicache.base.ids import LeaseId, SessionId
from hicache.core.commands import CopyPages, DropSession
from hicache.core.events import CopyEnded, ExtendAsked, RenewAsked, SessionClosed, StoreAsked
from hicache.protocol.messages import Accepted, Done, Error, Match, Scope
from hicache.spec.model import ShardSpec

GROUP, OTHER = b"g" * 16, b"h" * 16
SCHEDULER, WORKER, STRANGER = 1, 2, 3


def engine(**stranger: object) -> Hand:
    """A scheduler without memory and a worker with it, pages 1 to 3 stored; and a third session."""
    hand = Hand()
    hand.open(SCHEDULER, instance=b"s" * 16, group=GROUP, memory=False)
    hand.open(WORKER, instance=b"w" * 16, group=GROUP)
    hand.open(STRANGER, instance=b"x" * 16, **({"group": OTHER} | stranger))
    hand.stored(1, 2, 3, session=WORKER)
    return hand


def error(hand: Hand) -> Error:
    message = hand.message()
    assert isinstance(message, Error), message
    return message


def test_a_worker_loads_on_the_schedulers_lease() -> None:
    hand = engine()
    match = hand.look(1, 2, 3, session=SCHEDULER)
    hand.load(match.lease, 3, session=WORKER)
    assert hand.one(CopyPages).session == WORKER
    hand.copied()
    assert isinstance(hand.message(), Done)
    hand.release(match.lease, session=WORKER)
    assert hand.message() == Done(count=1)
    assert not hand.state.world.sessions[SessionId(SCHEDULER)].leases


def test_extend_and_renew_reach_over_the_group() -> None:
    hand = engine()
    match = hand.look(1, session=SCHEDULER)
    hand.feed(RenewAsked(SessionId(WORKER), hand.ask(), (LeaseId(match.lease),)))
    assert hand.message() == Done(count=1)
    hand.feed(ExtendAsked(SessionId(WORKER), hand.ask(), LeaseId(match.lease), tokens(2, 3), 1 << 30))
    more = hand.message()
    assert isinstance(more, Match)
    assert more.resumable_tokens == 12


@pytest.mark.parametrize("stranger", [{}, {"group": b""}, {"group": GROUP, "tenant": "other"}])
def test_to_a_stranger_the_lease_does_not_exist(stranger: dict[str, object]) -> None:
    hand = engine(**stranger)
    lease = hand.look(1, 2, session=SCHEDULER).lease
    hand.load(lease, 2, session=STRANGER)
    told = error(hand)
    hand.load(lease + 100, 2, session=STRANGER)
    unknown = error(hand)
    assert told.code == unknown.code == "unknown_lease"
    assert told.message.replace(str(lease), "?") == unknown.message.replace(str(lease + 100), "?")
    hand.release(lease, session=STRANGER)
    assert hand.message() == Done(count=0)
    hand.feed(RenewAsked(SessionId(STRANGER), hand.ask(), (LeaseId(lease),)))
    assert hand.message() == Done(count=0)


def test_sessions_without_a_group_share_nothing() -> None:
    hand = Hand()
    hand.open(1, instance=b"a" * 16)
    hand.open(2, instance=b"b" * 16)
    hand.stored(1)
    hand.load(hand.look(1, session=1).lease, 1, session=2)
    assert error(hand).code == "unknown_lease"


def test_a_lease_of_another_shard_is_not_loaded() -> None:
    hand = engine(group=GROUP, shard=ShardSpec(1, 2))
    lease = hand.look(1, session=SCHEDULER).lease
    hand.load(lease, 1, session=STRANGER)
    assert "another model, layout or shard" in error(hand).message
    hand.feed(ExtendAsked(SessionId(STRANGER), hand.ask(), LeaseId(lease), tokens(2, 3), 1 << 30))
    assert "another model, layout or shard" in error(hand).message


def test_without_memory_nothing_is_loaded_or_stored() -> None:
    hand = engine()
    hand.load(hand.look(1, session=SCHEDULER).lease, 1, session=SCHEDULER)
    assert "attached no memory" in error(hand).message
    hand.feed(
        StoreAsked(SessionId(SCHEDULER), hand.ask(), tokens(7), 0, starts(1), 0, 1, Scope()),
    )
    assert "attached no memory" in error(hand).message


def test_the_owners_end_does_not_end_a_load_of_another_process() -> None:
    hand = engine()
    lease = hand.look(1, 2, session=SCHEDULER).lease
    hand.load(lease, 2, session=WORKER)
    ticket = hand.one(CopyPages).ticket
    hand.feed(SessionClosed(SessionId(SCHEDULER), "died"))
    assert hand.one(DropSession).session == SCHEDULER
    hand.feed(CopyEnded(ticket, True))
    assert isinstance(hand.message(), Done)
    hand.load(lease, 2, session=WORKER)
    assert error(hand).code == "unknown_lease"


def test_the_loaders_end_leaves_the_lease_with_its_owner() -> None:
    hand = engine()
    lease = hand.look(1, 2, session=SCHEDULER).lease
    hand.load(lease, 2, session=WORKER)
    ticket = hand.one(CopyPages).ticket
    hand.feed(SessionClosed(SessionId(WORKER), "died"))
    hand.feed(CopyEnded(ticket, False, "cancelled"))
    hand.open(WORKER, instance=b"w" * 16, epoch=2, group=GROUP)
    hand.load(lease, 2, session=WORKER)
    assert any(isinstance(getattr(each, "message", None), Accepted) for each in hand.out)

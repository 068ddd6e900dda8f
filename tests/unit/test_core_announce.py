"""What routers are told: by hand, one case each. The law over all histories is checked in tests/sim."""

import numpy as np
import pytest
from core_world import PAGE, Hand, tokens

from hicache.base.ids import PageKey, SessionId
from hicache.core.commands import Announce, CopyPages, PagesRemoved, PagesStored, ReadRecords, WriteRecords
from hicache.core.events import (
    CopyEnded,
    PrefetchAsked,
    RecoveredRow,
    SessionOpened,
    StoreModeChanged,
    StoreRead,
    StoreRecovered,
)
from hicache.core.state import CacheState
from hicache.core.world import Announced
from hicache.protocol.messages import Scope
from hicache.spec.model import ShardSpec
from tests.sim.contents import MODELS

ALL = Announced(frozenset({"t"}))


def hand_of(pages: int = 16, l3_pages: int = 50, policy: str = "write_through", told: Announced | None = ALL) -> Hand:
    hand = Hand(pages, l3_pages, policy, announced=told)
    hand.open()
    return hand


def changes(hand: Hand) -> list[PagesStored | PagesRemoved]:
    """Those of the last event."""
    return [change for each in hand.out if isinstance(each, Announce) for change in each.changes]


def keys(hand: Hand, *pages: int) -> tuple[PageKey, ...]:
    namespace = hand.state.world.namespaces[0]
    return tuple(namespace.shape.chain.keys(namespace.id, tokens(*pages)))


def surveyed(hand: Hand, part_pages: int = 1) -> list[PagesStored]:
    return [stored for part in hand.state.survey(part_pages) for stored in part]


def test_a_page_is_announced_when_it_is_whole_and_again_when_it_is_on_disk() -> None:
    hand = hand_of()
    hand.store(1, 2, 3)
    assert changes(hand) == []
    hand.copied()
    mine = keys(hand, 1, 2, 3)
    assert changes(hand) == [PagesStored("l2", None, mine, tokens(1, 2, 3), PAGE)]
    hand.written()
    assert changes(hand) == [PagesStored("l3", None, mine, tokens(1, 2, 3), PAGE)]


def test_what_follows_names_its_parent_and_only_its_own_tokens() -> None:
    hand = hand_of()
    hand.stored(1, 2)
    hand.store(1, 2, 3, 4)
    hand.copied()
    parent, *mine = keys(hand, 1, 2, 3, 4)[1:]
    assert changes(hand) == [PagesStored("l2", parent, tuple(mine), tokens(3, 4), PAGE)]


def test_branches_that_part_in_the_middle_of_an_edge() -> None:
    hand = hand_of()
    hand.stored(1, 2, 3, 4)
    hand.store(1, 2, 7)
    hand.copied()
    (change,) = changes(hand)
    assert change == PagesStored("l2", keys(hand, 1, 2)[-1], keys(hand, 1, 2, 7)[-1:], tokens(7), PAGE)


def test_a_failed_copy_is_never_heard_of() -> None:
    hand = hand_of()
    hand.store(1, 2)
    hand.copied(ok=False)
    assert changes(hand) == []
    assert surveyed(hand) == []


def test_eviction_takes_a_page_from_its_tier_alone() -> None:
    hand = hand_of(pages=2)
    hand.stored(1, 2)
    hand.store(5)  # takes the place of the leaf
    assert changes(hand) == [PagesRemoved("l2", keys(hand, 1, 2)[1:])]
    hand.copied()
    assert [change.tier for change in surveyed(hand) if keys(hand, 1, 2)[1] in change.keys] == ["l3"]


def test_what_is_read_back_is_announced_without_a_word_on_disk() -> None:
    hand = hand_of(pages=2)
    hand.stored(1)
    hand.stored(5, 6)
    assert hand.look(1).l3_tokens == PAGE
    hand.feed(PrefetchAsked(SessionId(1), hand.ask(), tokens(1), Scope()))
    gone = changes(hand)
    assert [type(change) for change in gone] == [PagesRemoved]
    hand.feed(StoreRead(hand.one(ReadRecords).ticket, np.ones(1, np.bool_), np.zeros(1, np.bool_)))
    assert changes(hand) == [PagesStored("l2", None, keys(hand, 1), tokens(1), PAGE)]


def test_a_demotion_is_silent_until_the_page_has_left() -> None:
    hand = hand_of(pages=16, policy="write_back")
    hand.stored(*range(1, 16))
    hand.store(20)
    demoted = next((each for each in hand.out if isinstance(each, WriteRecords)), None)
    assert demoted is not None
    assert changes(hand) == []
    hand.written()
    (stored, removed) = sorted(changes(hand), key=lambda change: isinstance(change, PagesRemoved))
    assert isinstance(stored, PagesStored)
    assert stored.tier == "l3"
    assert removed == PagesRemoved("l2", stored.keys)


def test_a_disk_that_goes_off_takes_all_its_pages_along() -> None:
    hand = hand_of()
    hand.stored(1, 2)
    hand.feed(StoreModeChanged("off", "gone"))
    (change,) = changes(hand)
    assert (change.tier, set(change.keys)) == ("l3", set(keys(hand, 1, 2)))


def test_a_child_that_is_whole_before_its_parent_is_withheld() -> None:
    hand = hand_of(l3_pages=0)
    hand.store(1, 2)
    first = hand.one(CopyPages).ticket
    hand.store(1, 2, 3)
    hand.copied()
    assert changes(hand) == []
    assert surveyed(hand) == []
    hand.feed(CopyEnded(first, True))
    above, *below = changes(hand)
    assert above == PagesStored("l2", None, keys(hand, 1, 2), tokens(1, 2), PAGE)
    assert below == [PagesStored("l2", keys(hand, 1, 2)[-1], keys(hand, 1, 2, 3)[-1:], tokens(3), PAGE)]


def test_a_child_whose_parent_never_came_is_told_of_when_it_does() -> None:
    hand = hand_of(l3_pages=0)
    hand.store(1, 2)
    first = hand.one(CopyPages).ticket
    hand.store(1, 2, 3)
    hand.copied()
    hand.feed(CopyEnded(first, False, "why"))
    assert changes(hand) == []
    hand.store(1, 2)
    hand.copied()
    assert [change.keys for change in changes(hand)] == [keys(hand, 1, 2), keys(hand, 1, 2, 3)[-1:]]


def _recovered(hand: Hand, *pages: int) -> None:
    """As a store streams them at start: keys, no tokens."""
    model = MODELS[0]
    world = hand.state.world
    other = CacheState(world.config, world.limits, world.secret)
    other.handle(
        SessionOpened(SessionId(1), hand.ask(), b"i" * 16, 1, "t", model.spec, model.layout, ShardSpec()), 0.0
    )
    namespace = other.world.sessions[SessionId(1)].namespace_of(Scope())
    found = model.shape.chain.keys(namespace, tokens(*pages))
    parents = [None, *found[:-1]]
    rows = [RecoveredRow(key, parent, namespace, "t", "kv", 4096) for key, parent in zip(found, parents, strict=True)]
    hand.feed(StoreRecovered(tuple(rows)))


def test_pages_found_at_start_are_told_of_once_their_tokens_are_known() -> None:
    hand = Hand(16, 50, announced=ALL)
    _recovered(hand, 1, 2, 3)
    assert changes(hand) == []
    hand.open()
    hand.look(1, 2)
    assert changes(hand) == [PagesStored("l3", None, keys(hand, 1, 2), tokens(1, 2), PAGE)]
    hand.look(1, 2, 3)
    parent, mine = keys(hand, 1, 2, 3)[1:]
    assert changes(hand) == [PagesStored("l3", parent, (mine,), tokens(3), PAGE)]


@pytest.mark.parametrize("told", [None, Announced(frozenset()), Announced(frozenset({"t"}), "another model")])
def test_nobody_is_told_of_what_is_not_configured(told: Announced | None) -> None:
    hand = hand_of(told=told)
    hand.store(1, 2)
    hand.copied()
    assert changes(hand) == []
    hand.written()
    assert (changes(hand), surveyed(hand)) == ([], [])


def test_the_model_that_is_named_is_announced() -> None:
    hand = hand_of(told=Announced(frozenset({"t"}), MODELS[0].spec.name))
    hand.store(1)
    hand.copied()
    assert len(changes(hand)) == 1


def test_salted_pages_stay_in_the_house() -> None:
    hand = hand_of()
    hand.store(1, 2, salt="x")
    hand.copied()
    assert changes(hand) == []
    hand.store(1, 2)
    hand.copied()
    assert len(changes(hand)) == 1
    assert len(surveyed(hand)) == 1


@pytest.mark.parametrize("rank", ["tp", "pp", "cp"])
def test_one_rank_speaks_for_all(rank: str) -> None:
    model = MODELS[0]
    hand = Hand(announced=ALL)
    for session, at in ((1, 1), (2, 0)):
        shard = ShardSpec(**{f"{rank}_size": 2, f"{rank}_rank": at})
        hand.feed(
            SessionOpened(
                SessionId(session), hand.ask(), bytes([session]) * 16, 1, "t", model.spec, model.layout, shard
            )
        )
        hand.store(1, 2, session=session)
        hand.copied()
        assert len(changes(hand)) == (at == 0)


def test_a_survey_gives_parents_first_and_each_tier_by_itself() -> None:
    hand = hand_of(pages=4)
    hand.stored(1, 2, 3)
    hand.stored(1, 2, 7)
    hand.store(9)  # evicts the leaf 3
    hand.copied()
    known: set[PageKey] = set()
    tiers: dict[str, set[PageKey]] = {"l2": set(), "l3": set()}
    for change in surveyed(hand):
        assert change.parent is None or change.parent in known
        assert list(change.keys) == _chained(hand, change)
        known.update(change.keys)
        tiers[change.tier].update(change.keys)
    lost = keys(hand, 1, 2, 3)[-1]
    assert tiers["l3"] == {*keys(hand, 1, 2, 3), *keys(hand, 1, 2, 7)}
    assert tiers["l2"] == (tiers["l3"] - {lost}) | {*keys(hand, 9)}
    assert hand.state.announced_pages() == len(known)


def _chained(hand: Hand, change: PagesStored) -> list[PageKey]:
    namespace = hand.state.world.namespaces[0]
    above = namespace.id if change.parent is None else change.parent
    return namespace.shape.chain.keys(above, change.tokens)


def test_a_survey_comes_in_parts_while_the_cache_goes_on() -> None:
    hand = hand_of(l3_pages=0)
    for page in (1, 2, 3):
        hand.stored(page)
    parts = hand.state.survey(1)
    first = next(parts)
    hand.stored(4)
    rest = [stored for part in parts for stored in part]
    told = {key for change in [*first, *rest] for key in change.keys}
    assert told >= {*keys(hand, 1), *keys(hand, 2), *keys(hand, 3)}
    assert len(first) == 1


def test_a_padded_page_is_not_announced() -> None:
    """Routers route by tokens, and no sequence has these."""
    hand = Hand(announced=Announced(frozenset({"t"})))
    hand.open()
    hand.stored(1)
    hand.store_text(tokens(1) + np.array([5, 5, -1, -1], "<i4").tobytes(), 1)
    hand.copied()
    assert not [each for each in hand.out if isinstance(each, Announce)]
    assert hand.look(1, 5).resumable_tokens == 4

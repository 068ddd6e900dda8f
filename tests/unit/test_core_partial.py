"""Resuming inside a page: its first tokens are the prompt's, the rest is computed anew."""

import numpy as np
import pytest
from core_world import PAGE, Hand, tokens

from hicache.base.ids import LeaseId, SessionId
from hicache.core.commands import CopyPages
from hicache.core.events import ExtendAsked, PrefetchAsked
from hicache.protocol.messages import Accepted, Done, Match, Scope


def text(*ids: int) -> bytes:
    return np.array(ids, "<i4").tobytes()


def hand_with(*pages: int, l3_pages: int = 0, pool: int = 16) -> Hand:
    hand = Hand(pool, l3_pages)
    hand.open()
    hand.stored(*pages)
    return hand


@pytest.mark.parametrize("shared", [1, 2, 3])
def test_a_prompt_that_parts_inside_a_page_gets_its_first_tokens(shared: int) -> None:
    hand = hand_with(1, 2)
    match = hand.look_for(tokens(1) + text(*[2] * shared, 9, 9, 9), partial=True)
    assert (match.resumable_tokens, match.partial_tokens, match.partial_l3) == (PAGE, shared, False)
    hand.load(match.lease, 2)
    assert len(hand.one(CopyPages).copies[0].l1) == 2
    hand.copied()
    assert isinstance(hand.message(), Done)


def test_the_limit_may_cut_the_last_page() -> None:
    hand = hand_with(1, 2)
    match = hand.look_for(tokens(1, 2), limit=2 * PAGE - 1, partial=True)
    assert (match.resumable_tokens, match.partial_tokens) == (PAGE, PAGE - 1)
    assert hand.look_for(tokens(1, 2), limit=2 * PAGE, partial=True).partial_tokens == 0


def test_only_who_asks_for_it_is_told() -> None:
    hand = hand_with(1, 2)
    match = hand.look_for(tokens(1, 2), limit=2 * PAGE - 1)
    assert (match.resumable_tokens, match.partial_tokens) == (PAGE, 0)
    assert hand.counters["tokens_missed"] == PAGE


def test_tokens_of_partial_pages_are_served_by_their_tier() -> None:
    hand = hand_with(1, 2)
    hand.look_for(tokens(1, 2), limit=2 * PAGE - 1, partial=True)
    assert (hand.counters["tokens_l2"], hand.counters["tokens_missed"]) == (2 * PAGE - 1, 1)


def test_a_lease_may_hold_nothing_but_a_part_of_a_page() -> None:
    hand = hand_with(1)
    match = hand.look_for(text(1, 1, 7), partial=True)
    assert (match.resumable_tokens, match.partial_tokens) == (0, 2)
    assert match.lease
    hand.feed(ExtendAsked(SessionId(1), hand.ask(), LeaseId(match.lease), tokens(1), 1 << 30))
    more = hand.message()
    assert isinstance(more, Match)
    assert (more.resumable_tokens, more.partial_tokens) == (PAGE, 0)


def test_what_padding_made_a_page_is_found_by_its_tokens() -> None:
    """A client stores the end of a sequence as a page whose other tokens no sequence has."""
    hand = hand_with(1)
    padded = tokens(1) + text(5, 5, -1, -1)
    hand.store_text(padded, 1)
    hand.copied()
    match = hand.look_for(tokens(1) + text(5, 5, 6, 6), partial=True)
    assert (match.resumable_tokens, match.partial_tokens) == (PAGE, 2)


def test_a_page_on_its_way_is_not_promised() -> None:
    hand = hand_with(1)
    hand.store(1, 2)
    match = hand.look_for(tokens(1) + text(2, 2, 3, 3), partial=True)
    assert (match.resumable_tokens, match.partial_tokens) == (PAGE, 0)


def test_a_partial_page_on_disk_is_prefetched() -> None:
    hand = hand_with(1, 2, l3_pages=8, pool=2)
    hand.stored(3, 4)  # pushes the others out of L2
    asked = tokens(1) + text(2, 2, 9, 9)
    match = hand.look_for(asked, partial=True)
    assert (match.resumable_tokens, match.partial_tokens, match.partial_l3) == (PAGE, 2, True)
    hand.release(match.lease)
    hand.feed(PrefetchAsked(SessionId(1), hand.ask(), asked, Scope()))
    assert any(getattr(each, "message", None) == Accepted(hand_ticket(hand), 2) for each in hand.out)


def hand_ticket(hand: Hand) -> int:
    return next(each.message.ticket for each in hand.out if isinstance(getattr(each, "message", None), Accepted))

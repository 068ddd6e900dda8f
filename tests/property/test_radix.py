"""The radix tree against a dict of prefixes.

The model keeps every known prefix as a tuple and knows nothing of edges, splits or merges. Sequences are short
and made of two or three different tokens, so that most operations split, cut or merge in the middle of a page.
"""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.index.node import Pin, RowOwners
from hicache.index.radix import RadixTree

Tokens = tuple[int, ...]


def raw(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def int32s(rows: Sequence[int]) -> np.ndarray:
    return np.array(rows, np.int32)


class Model:
    """Known prefixes, rows of pages and pinned prefixes, by brute force."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.known: set[Tokens] = {()}
        self.rows: dict[Tokens, int] = {}
        self.pinned: list[Tokens] = []

    def pages_of(self, tokens: Tokens) -> list[Tokens]:
        return [tokens[:end] for end in range(self.page, len(tokens) + 1, self.page)]

    def insert(self, tokens: Tokens, rows: list[int]) -> None:
        self.known.update(tokens[:end] for end in range(len(tokens) + 1))
        self.rows.update(zip(self.pages_of(tokens), rows, strict=True))

    def match(self, tokens: Tokens) -> tuple[int, list[int]]:
        length = max(end for end in range(len(tokens) + 1) if tokens[:end] in self.known)
        return length, [self.rows[page] for page in self.pages_of(tokens[:length])]

    def prune(self, rows: set[int]) -> list[int]:
        """Longest first: a page leaves unless it is on a pinned path or another page goes on from it."""
        gone = []
        for page, row in sorted(self.rows.items(), key=lambda item: -len(item[0])):
            below = any(other[: len(page)] == page and other != page for other in self.rows)
            held = any(pin[: len(page)] == page for pin in self.pinned)
            if row in rows and not below and not held:
                gone.append(row)
                self._drop(page)
        return gone

    def _drop(self, page: Tokens) -> None:
        del self.rows[page]
        self.known = {prefix for prefix in self.known if prefix[: len(page)] != page}
        prefix = page[:-1]
        while prefix and len(prefix) % self.page:  # tokens that only led to the page
            if any(len(other) == len(prefix) + 1 and other[:-1] == prefix for other in self.known):
                break
            self.known.discard(prefix)
            prefix = prefix[:-1]


class Pair:
    """One tree and its model, changed together and compared after each step."""

    def __init__(self, page: int, edge_tokens: int, owners: RowOwners, free: list[int]) -> None:
        self.tree = RadixTree(page, owners, edge_tokens=edge_tokens)
        self.model = Model(page)
        self.pins: list[tuple[Pin, Tokens]] = []
        self.free = free  # rows not in use, shared by trees that share their owners

    def insert(self, tokens: Tokens) -> None:
        pages = self.model.pages_of(tokens)
        new = [page for page in pages if page not in self.model.rows]
        fresh = {page: self.free.pop() for page in new}
        rows = [self.model.rows.get(page, fresh.get(page, -1)) for page in pages]
        assert self.tree.insert(raw(tokens), int32s(rows)) == len(new)
        self.model.insert(tokens, rows)

    def match(self, tokens: Tokens) -> None:
        found = self.tree.match(raw(tokens))
        known, rows = self.model.match(tokens)
        assert found.known_tokens == known
        assert found.rows.dtype == np.int32
        assert found.rows.tolist() == rows

    def pin(self, tokens: Tokens, pages: int) -> None:
        found = self.tree.match(raw(tokens))
        pages = min(pages, found.known_tokens // self.model.page)
        path = tokens[: pages * self.model.page]
        self.pins.append((self.tree.pin(found, pages), path))
        self.model.pinned.append(path)

    def unpin(self, index: int) -> None:
        if self.pins:
            pin, path = self.pins.pop(index % len(self.pins))
            self.tree.unpin(pin)
            self.model.pinned.remove(path)

    def prune(self, rows: Sequence[int]) -> None:
        gone = self.tree.prune(int32s(rows)).tolist()
        assert sorted(gone) == sorted(self.model.prune(set(rows)))
        self.free.extend(gone)

    def laws(self) -> None:
        self.tree.check()
        assert self.tree.tokens_held == len(self.model.known) - 1
        assert self.tree.pages_held == len(self.model.rows)
        for _, path in self.pins:
            assert self.tree.match(raw(path)).known_tokens == len(path)


def random_tokens(rng: random.Random, pair: Pair, alphabet: int) -> Tokens:
    """Often a known prefix that goes on, sometimes a sequence out of nowhere."""
    start: Tokens = ()
    if pair.model.rows and rng.random() < 0.8:
        start = rng.choice(list(pair.model.rows))
        start = start[: rng.randint(0, len(start))] if rng.random() < 0.5 else start
    return start + tuple(rng.randrange(alphabet) for _ in range(rng.randint(0, 12)))


def random_step(rng: random.Random, pair: Pair, alphabet: int) -> None:
    what = rng.random()
    rows = list(pair.model.rows.values())
    if what < 0.30 and len(rows) < 120:
        pair.insert(random_tokens(rng, pair, alphabet)[:60])
    elif what < 0.60:
        pair.match(random_tokens(rng, pair, alphabet))
    elif what < 0.68 and len(pair.pins) < 6:
        pair.pin(random_tokens(rng, pair, alphabet), rng.randint(0, 8))
    elif what < 0.76:
        pair.unpin(rng.randrange(6))
    elif rows:
        pair.prune(rng.sample(rows, rng.randint(1, min(len(rows), rng.choice((1, 4, 30))))))


@pytest.mark.parametrize(("page", "alphabet", "edge_tokens"), [(4, 2, 16384), (3, 3, 7), (1, 2, 5), (16, 2, 16384)])
def test_ten_thousand_steps_against_the_dict_of_prefixes(page: int, alphabet: int, edge_tokens: int) -> None:
    """4 × 3,000 steps; two trees of one table take turns, so that a row or node id passes from one to the other."""
    rng = random.Random(page * 1000 + alphabet)
    owners, free = RowOwners(capacity=1), list(range(2000))
    pairs = [Pair(page, edge_tokens, owners, free) for _ in range(2)]
    for step in range(3000):
        pair = pairs[0] if rng.random() < 0.7 else pairs[1]
        random_step(rng, pair, alphabet)
        if step % 3 == 0:
            pair.laws()
    for pair in pairs:
        pair.laws()
        while pair.pins:
            pair.unpin(0)
        pair.prune(list(pair.model.rows.values()))
        pair.laws()
        assert pair.tree.pages_held == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.lists(st.integers(0, 1), max_size=14).map(tuple)),
        st.tuples(st.just("match"), st.lists(st.integers(0, 1), max_size=14).map(tuple)),
        st.tuples(st.just("pin"), st.lists(st.integers(0, 1), max_size=14).map(tuple)),
        st.tuples(st.just("unpin"), st.integers(0, 5)),
        st.tuples(st.just("prune"), st.lists(st.integers(0, 200), min_size=1, max_size=6)),
    ),
    max_size=25,
)


@given(steps=STEPS, page=st.integers(1, 4), edge_tokens=st.sampled_from([1, 3, 16384]))
@settings(max_examples=200, deadline=None)
def test_any_short_history(steps: list[tuple[str, object]], page: int, edge_tokens: int) -> None:
    """Histories that hypothesis can shrink to the smallest failing one."""
    pair = Pair(page, edge_tokens, RowOwners(), list(range(400)))
    for what, value in steps:
        if what == "insert":
            pair.insert(value)  # type: ignore[arg-type]
        elif what == "match":
            pair.match(value)  # type: ignore[arg-type]
        elif what == "pin":
            pair.pin(value, 3)  # type: ignore[arg-type]
        elif what == "unpin":
            pair.unpin(value)  # type: ignore[arg-type]
        else:
            live = list(pair.model.rows.values())
            if live:
                pair.prune([live[i % len(live)] for i in value])  # type: ignore[attr-defined]
        pair.laws()

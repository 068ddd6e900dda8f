"""Column ranges of the transformers connector's L1 pool."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hicache.protocol.messages import Scope
from hicache_client.connectors.transformers.pool import (
    ColumnPool,
    Range,
    Resident,
    Tokens,
    common_prefix,
)

ANY = Scope()


@dataclass
class Transfer:
    finished: bool = False
    waits: int = 0
    ends_when_waited: bool = False

    def wait(self, timeout_s: float) -> bool:
        self.waits += 1
        self.finished |= self.ends_when_waited
        return self.finished


def tokens(*ids: int) -> Tokens:
    return np.array(ids, dtype=np.int32)


def taken(pool: ColumnPool, size: int) -> Range:
    held = pool.allocate(size)
    assert held is not None
    return held


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [((), (), 0), ((1,), (), 0), ((1, 2), (1, 2, 3), 2), ((1, 2, 3), (1, 9, 3), 1), ((4,), (5,), 0)],
)
def test_common_prefix(a, b, length) -> None:
    assert common_prefix(tokens(*a), tokens(*b)) == length
    assert common_prefix(tokens(*b), tokens(*a)) == length


def test_ranges_grow_only_into_free_columns() -> None:
    pool = ColumnPool(100)
    first, second = taken(pool, 30), taken(pool, 30)
    assert not pool.extend(first, 31)
    assert pool.extend(second, 70)
    assert (second.start, second.size, pool.held()) == (30, 70, 100)
    pool.free(second)
    assert pool.extend(first, 100)
    assert pool.allocate(1) is None


def test_freeing_twice_is_a_broken_law() -> None:
    pool = ColumnPool(100)
    held = taken(pool, 30)
    pool.free(held)
    with pytest.raises(AssertionError, match="twice"):
        pool.free(held)


def test_oldest_idle_sequence_goes_first() -> None:
    pool = ColumnPool(90)
    for first_token in (1, 2, 3):
        held = taken(pool, 30)
        pool.park(held, (Resident(tokens(first_token, 7), held.start, ANY),))
    oldest = pool.best(tokens(1, 7), ANY)
    assert oldest is not None
    pool.touch(oldest[0])
    assert taken(pool, 30).start == 30
    assert pool.best(tokens(2, 7), ANY) is None
    assert pool.best(tokens(1, 7, 8), ANY)[2] == 2
    assert pool.best(tokens(3, 8), ANY)[2] == 1


def test_longest_prefix_of_the_same_scope_wins() -> None:
    pool = ColumnPool(90)
    for ids, scope in (((1, 2), ANY), ((1, 2, 3), ANY), ((1, 2, 3, 4), Scope(salt="other"))):
        held = taken(pool, 30)
        pool.park(held, (Resident(tokens(*ids), held.start, scope),))
    found = pool.best(tokens(1, 2, 3, 4), ANY)
    assert found is not None
    assert (found[1].column, found[2]) == (30, 3)


def test_range_under_a_transfer_is_kept_until_it_ends() -> None:
    pool = ColumnPool(50)
    held, transfer = taken(pool, 50), Transfer()
    pool.retire(held, [transfer])
    assert pool.allocate(10) is None
    transfer.finished = True
    assert taken(pool, 10).start == 0


@pytest.mark.parametrize("ends", [True, False])
def test_eviction_waits_for_a_store_within_bounds(ends) -> None:
    pool = ColumnPool(50)
    held, store = taken(pool, 50), Transfer(ends_when_waited=ends)
    pool.park(held, (Resident(tokens(1), 0, ANY, 1, [store]),))
    assert (pool.allocate(50) is not None) == ends
    assert store.waits == 1


def test_dropped_idle_sequences_are_unknown() -> None:
    pool = ColumnPool(50)
    held = taken(pool, 20)
    pool.park(held, (Resident(tokens(1), 0, ANY),))
    pool.drop_idle()
    assert pool.best(tokens(1), ANY) is None
    assert taken(pool, 50).size == 50


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aaapfrex"), st.integers(1, 40)), max_size=60))
def test_ranges_never_overlap(steps) -> None:
    """Against a plain list of what is held: no column has two owners, and none is lost."""
    pool = ColumnPool(100)
    held: list[Range] = []
    transfers: list[Transfer] = []
    for step, size in steps:
        if step == "a":
            got = pool.allocate(size)
            if got is not None:
                held.append(got)
        elif step == "x":
            for transfer in transfers:
                transfer.finished = True
            transfers = []
        elif held:
            one = held.pop(size % len(held))
            if step == "p":
                pool.park(one, (Resident(tokens(size), one.start, ANY),))
            elif step == "f":
                pool.free(one)
            elif step == "r":
                transfers.append(Transfer())
                pool.retire(one, [transfers[-1]])
            else:
                pool.extend(one, one.size + size)
                held.append(one)
        columns = [c for r in held for c in range(r.start, r.end)]
        assert len(columns) == len(set(columns))
        assert all(0 <= c < 100 for c in columns)
    for transfer in transfers:
        transfer.finished = True
    for one in held:
        pool.free(one)
    assert pool.allocate(100) is not None

"""Column ranges of the transformers connector's L1 pool."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hicache.protocol.messages import Scope
from hicache_client.connectors.transformers.pool import (
    SETTLE_BUDGET_S,
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

    def wait(self, timeout_s: float) -> bool:
        raise AssertionError("a pool looks at all of its transfers, it waits for no single one")


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


@dataclass
class Clock:
    """Time that passes only where somebody sleeps; `ends` says when a transfer is over."""

    seconds: float = 0.0
    ends: dict[float, Transfer] = field(default_factory=dict)

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        for at, transfer in self.ends.items():
            transfer.finished |= self.seconds >= at

    def pool(self, columns: int, settle_timeout_s: float = 10.0) -> ColumnPool:
        return ColumnPool(columns, settle_timeout_s, now=self.now, sleep=self.sleep)


def park(pool: ColumnPool, size: int, token: int, *transfers: Transfer) -> None:
    held = taken(pool, size)
    pool.park(held, (Resident(tokens(token), held.start, ANY, 1, list(transfers)),))


def test_nothing_is_waited_for_while_a_settled_sequence_can_go() -> None:
    clock = Clock()
    pool = clock.pool(90)
    stores = [Transfer(), Transfer(finished=True), Transfer()]
    for token, store in enumerate(stores):  # the oldest is still read
        park(pool, 30, token, store)
    assert taken(pool, 30).start == 30
    assert clock.seconds == 0
    assert pool.best(tokens(0), ANY) is not None
    assert pool.best(tokens(2), ANY) is not None


@pytest.mark.parametrize(("timeout_s", "most_s"), [(10.0, SETTLE_BUDGET_S), (0.05, 0.05)])
def test_transfers_that_do_not_end_cost_one_budget_together(timeout_s: float, most_s: float) -> None:
    clock = Clock()
    pool = clock.pool(80, timeout_s)
    for token in range(8):
        park(pool, 10, token, Transfer(), Transfer())
    assert pool.allocate(80) is None
    assert most_s <= clock.seconds < most_s + 0.01
    assert all(pool.best(tokens(token), ANY) for token in range(8))  # still good for reuse


def test_whichever_transfer_ends_first_makes_room() -> None:
    late, soon, retired = Transfer(), Transfer(), Transfer()
    clock = Clock(ends={0.05: soon, 0.1: retired})
    pool = clock.pool(90)
    park(pool, 30, 1, late)
    park(pool, 30, 2, soon)
    pool.retire(taken(pool, 30), [retired])
    assert taken(pool, 30).start == 30
    assert clock.seconds == pytest.approx(0.05, abs=0.005)
    assert taken(pool, 30).start == 60
    assert clock.seconds == pytest.approx(0.1, abs=0.005)
    assert pool.best(tokens(1), ANY) is not None


def test_no_wait_and_no_eviction_that_cannot_make_room() -> None:
    clock = Clock()
    pool = clock.pool(90)
    park(pool, 30, 1)
    taken(pool, 30)
    park(pool, 30, 2, Transfer())
    assert pool.allocate(60) is None
    assert pool.allocate(91) is None
    assert clock.seconds == 0
    assert pool.best(tokens(1), ANY) is not None


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

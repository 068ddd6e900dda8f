"""Free space against a bitmap; claims against every order of entering and leaving."""

import itertools
import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.store.extents import Claims, FreeSpace


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=120))
def test_free_space_agrees_with_a_bitmap(steps: list[tuple[int, int]]) -> None:
    size = 128
    space, free = FreeSpace(), np.ones(size, bool)
    space.add(0, size)
    taken: list[tuple[int, int]] = []
    for what, n in steps:
        if what == 0 or not taken:
            offset = space.take(n)
            runs = [len(r) for r in "".join("x" if f else " " for f in free).split()]
            assert (offset is None) == (max(runs, default=0) < n)
            if offset is not None:
                assert free[offset : offset + n].all()
                free[offset : offset + n] = False
                taken.append((offset, n))
        elif what == 1:
            offset, length = taken.pop(n % len(taken))
            free[offset : offset + length] = True
            space.add(offset, length)
        else:
            popped = space.pop_largest(n)
            if popped is not None:
                offset, length = popped
                assert length <= n
                assert free[offset : offset + length].all()
                free[offset : offset + length] = False
                taken.append((offset, length))
        expected = np.zeros(size, bool)
        extents = space.extents()
        for offset, length in extents:
            expected[offset : offset + length] = True
        assert np.array_equal(expected, free)
        assert space.total_bytes == free.sum()
        # coalesced: no two extents touch
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(extents))


def test_best_fit_lowest_first() -> None:
    space = FreeSpace()
    for offset, size in ((0, 8), (20, 4), (40, 4), (60, 16)):
        space.add(offset, size)
    assert [space.take(n) for n in (4, 4, 4, 17)] == [20, 40, 0, None]


def test_retired_extents_wait_for_readers_that_came_before() -> None:
    claims = Claims()
    early = claims.enter()
    assert early is not None
    claims.retire([(0, 4096)])
    late = claims.enter()
    assert late is not None
    assert claims.reclaim() == []
    claims.retire([(4096, 8192)])
    claims.leave(early)
    assert claims.reclaim() == [(0, 4096)]
    assert claims.limbo_bytes == 8192
    claims.leave(late)
    assert claims.reclaim() == [(4096, 8192)]
    assert claims.limbo_bytes == 0


def test_reclaim_waits_for_a_reader_to_leave() -> None:
    claims = Claims()
    epoch = claims.enter()
    assert epoch is not None
    claims.retire([(0, 4096)])
    threading.Timer(0.05, claims.leave, [epoch]).start()
    assert claims.reclaim(wait_s=30.0) == [(0, 4096)]


def test_close_shuts_readers_out_and_tells_of_those_inside() -> None:
    claims = Claims()
    epoch = claims.enter()
    assert epoch is not None
    assert not claims.close(wait_s=0.01)
    assert claims.enter() is None
    claims.leave(epoch)
    assert claims.close(wait_s=0.01)

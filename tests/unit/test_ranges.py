"""Runs hold exactly the pairs they were made of, in order; waves hold every layer once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.plan.overlap import layer_waves
from hicache.plan.ranges import Runs, coalesce


def expand(runs: Runs, steps: tuple[int, int]) -> list[tuple[int, int]]:
    return [
        (l2 + i * steps[0], l1 + i * steps[1])
        for l2, l1, count in zip(runs.l2.tolist(), runs.l1.tolist(), runs.count.tolist(), strict=True)
        for i in range(count)
    ]


def coalesce_lists(l2: list[int], l1: list[int], steps: tuple[int, int], max_count: int) -> Runs:
    return coalesce(np.array(l2, np.int64), np.array(l1, np.int64), steps, max_count)


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=40),
    st.sampled_from([(1, 1), (2, 1), (3, 2)]),
    st.integers(1, 6),
)
def test_runs_expand_to_their_input(pairs: list[tuple[int, int]], steps: tuple[int, int], max_count: int) -> None:
    runs = coalesce_lists([a for a, _ in pairs], [b for _, b in pairs], steps, max_count)
    assert expand(runs, steps) == pairs
    assert runs.count.max(initial=0) <= max_count
    assert runs.count.min(initial=1) >= 1


def test_one_unbroken_stretch_is_one_run() -> None:
    runs = coalesce_lists([96, 192, 288, 384], [16, 32, 48, 64], (96, 16), 100)
    assert (runs.l2.tolist(), runs.l1.tolist(), runs.count.tolist()) == ([96], [16], [4])


@pytest.mark.parametrize(
    ("l2", "l1", "counts"),
    [
        ([0, 96, 200], [0, 1, 2], [2, 1]),  # a gap in L2
        ([0, 96, 192], [0, 1, 3], [2, 1]),  # a gap in L1
        ([192, 96, 0], [2, 1, 0], [1, 1, 1]),  # backwards is no run
        ([0, 0], [0, 0], [1, 1]),  # a pair twice is no run
        ([], [], []),
    ],
)
def test_gaps_break_runs(l2: list[int], l1: list[int], counts: list[int]) -> None:
    assert coalesce_lists(l2, l1, (96, 1), 100).count.tolist() == counts


def test_long_runs_are_cut() -> None:
    runs = coalesce_lists(list(range(10)), list(range(10)), (1, 1), 4)
    assert runs.count.tolist() == [4, 4, 2]


@given(st.integers(0, 200), st.integers(1, 1 << 20))
def test_waves_cover_every_layer_once_in_order(layers: int, block_layer_bytes: int) -> None:
    waves = layer_waves(layers, block_layer_bytes)
    assert [i for low, high in waves for i in range(low, high)] == list(range(layers))


def test_the_first_layer_of_big_blocks_comes_alone() -> None:
    assert layer_waves(30, 24 << 10) == [(0, 1), (1, 3), (3, 7), (7, 15), (15, 23), (23, 30)]


def test_small_blocks_move_in_few_calls() -> None:
    assert layer_waves(30, 1536) == [(0, 4), (4, 12), (12, 28), (28, 30)]

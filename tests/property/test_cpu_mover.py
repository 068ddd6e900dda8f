"""The CPU mover against a byte-wise reference, over random layouts in both directions."""

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.copy.base import GroupGeometry, Transfer
from hicache.copy.cpu import CpuMover
from hicache.copy.geometry import canonical, neighbour_step, start_places
from hicache.plan.ranges import coalesce

Bytes = npt.NDArray[np.uint8]


@dataclass
class Log:
    """The only thread's share; it remembers what it was told."""

    told: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    steps: Iterator[int] = field(default_factory=itertools.count)

    def running(self) -> None:
        self.told.append("running")

    def layers_done(self, count: int) -> None:
        self.counts.append(count)

    def claim(self) -> int:
        return next(self.steps)

    def revoked(self) -> bool:
        return False


def l1_runs(g: GroupGeometry, layer: int, start: int) -> list[int]:
    """Addresses of the runs of one block×layer, by the formula of spec/layout.py and nothing else."""
    block, inside = divmod(start, g.starts_per_block)
    base = g.layer_offsets[layer] + block * g.block_stride + inside * g.start_stride
    loops = [range(count) for count, _ in g.axes]
    return [base + sum(i * s for i, (_, s) in zip(at, g.axes, strict=True)) for at in product(*loops)]


def naive(pool: Bytes, arena: Bytes, g: GroupGeometry, transfer: Transfer, to_l1: bool) -> None:
    """Byte by byte in spirit: run by run in the plainest way."""
    for offset, start in zip(transfer.l2_offsets.tolist(), transfer.l1_starts.tolist(), strict=True):
        for layer in range(len(g.layers)):
            at = offset + layer * g.block_layer_bytes
            for address in l1_runs(g, layer, start):
                if to_l1:
                    pool[address : address + g.run_bytes] = arena[at : at + g.run_bytes]
                else:
                    arena[at : at + g.run_bytes] = pool[address : address + g.run_bytes]
                at += g.run_bytes


@dataclass
class Case:
    geometry: tuple[GroupGeometry, ...]
    transfers: tuple[Transfer, ...]
    pool_bytes: int
    arena_bytes: int
    seed: int


@st.composite
def geometries(draw: st.DrawFn, layers: tuple[int, ...], pool_offset: int) -> tuple[GroupGeometry, int]:
    """A group's geometry over regions that start at `pool_offset`, and where they end."""
    tokens = draw(st.sampled_from([1, 2, 3, 16, 64, 256]))
    heads = draw(st.integers(1, 3))
    row = draw(st.sampled_from([1, 2, 4, 6, 8, 24, 64]))  # bytes of one head of one token
    pages = draw(st.integers(1, 6))
    size = 2 * heads * tokens * row
    gap = draw(st.sampled_from([0, 1, 4, 8, 56]))
    axes: tuple[tuple[int, int], ...]
    layout: tuple[int, int, tuple[tuple[int, int], ...], int]
    style = draw(st.sampled_from(["block", "head_rows", "token_rows", "kv_blocks", "padded", "cut", "cut"]))
    cut, inner = 1, 0
    if style == "block":  # a block×layer is one run
        region, layout = pages * (size + gap), (pages, size + gap, (), size)
    elif style == "head_rows":  # [K/V][head][token][dim], a start is a token
        plane = pages * tokens * row + gap
        axes = ((2, heads * plane), (heads, plane), (tokens, row))
        region, layout = 2 * heads * plane, ((pages - 1) * tokens + 1, row, axes, row)
    elif style == "token_rows":  # [K/V][token][head][dim], L2 keeps head before token
        line = heads * row + gap
        axes = ((2, pages * tokens * line), (heads, row), (tokens, line))
        region, layout = 2 * pages * tokens * line, ((pages - 1) * tokens + 1, line, axes, row)
    elif style == "kv_blocks":  # [K/V][block][…]
        half = size // 2 + gap
        region, layout = 2 * pages * half, (pages, half, ((2, pages * half),), size // 2)
    elif style == "cut":  # [block][head][start][token][K and V]: several starts in each block
        cut, inner = draw(st.integers(2, 5)), 2 * tokens * row + draw(st.sampled_from([0, 8, 3]))
        head = cut * inner + gap
        region, layout = pages * heads * head, (pages * cut, heads * head, ((heads, head),), 2 * tokens * row)
    else:  # every axis with its own padding, one of them of one step
        line, head = row + gap, tokens * (row + gap) + gap
        block = 2 * heads * head
        axes = ((2, heads * head), (1, 7), (heads, head), (tokens, line))
        region, layout = pages * block, (pages, block, axes, row)
    even = draw(st.booleans())
    spacing = [0 if even else draw(st.sampled_from([0, 8, 9])) for _ in layers]
    offsets, at = [], pool_offset
    for extra in spacing:
        offsets.append(at + extra)
        at += region + extra
    if draw(st.booleans()):
        offsets.reverse()
    blocks, stride, merged, run = layout
    return GroupGeometry(layers, size, tuple(offsets), blocks, stride, merged, run, tokens, cut, inner), at


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 9))
    owner = [draw(st.integers(0, 1)) for _ in range(count)]
    groups = [tuple(i for i in range(count) if owner[i] == k) for k in (0, 1)]
    geometry: list[GroupGeometry] = []
    end = draw(st.sampled_from([0, 8, 3]))
    for layers in filter(None, groups):
        g, end = draw(geometries(layers, end))
        geometry.append(g)
    transfers, arena = [], 0
    for index, g in enumerate(geometry):
        block_bytes = g.block_layer_bytes * len(g.layers)
        step = 1 if g.starts_per_block > 1 else neighbour_step(g) // g.block_stride
        page_starts = list(range(0, g.blocks, step))
        starts = draw(st.lists(st.sampled_from(page_starts), unique=True, max_size=len(page_starts)))
        if draw(st.booleans()):
            starts.sort()
        if starts and step > 1 and len(starts) == 1:  # a page may begin at any start
            starts = [draw(st.integers(0, g.blocks - 1))]
        slots = draw(st.permutations(range(len(starts) + 1)))[: len(starts)]
        if draw(st.booleans()):
            slots = sorted(slots)
        arena = (arena + 4095) // 4096 * 4096
        offsets = np.array([arena + s * block_bytes for s in slots], dtype=np.int64)
        arena += (len(starts) + 1) * block_bytes
        transfers.append(Transfer(index, offsets, np.array(starts, dtype=np.int32)))
    return Case(tuple(geometry), tuple(transfers), end, arena, draw(st.integers(0, 2**32 - 1)))


@settings(max_examples=300, deadline=None)
@given(cases(), st.booleans())
def test_equals_naive_reference(case: Case, to_l1: bool) -> None:
    rng = np.random.default_rng(case.seed)
    pool = rng.integers(0, 256, case.pool_bytes, dtype=np.uint8)
    arena = rng.integers(0, 256, case.arena_bytes, dtype=np.uint8)
    want_pool, want_arena = pool.copy(), arena.copy()
    for transfer in case.transfers:
        naive(want_pool, want_arena, case.geometry[transfer.group], transfer, to_l1)
    log = Log()
    CpuMover(arena).copy(pool, case.geometry, case.transfers, to_l1, log)
    assert np.array_equal(pool, want_pool)
    assert np.array_equal(arena, want_arena)
    total = sum(len(g.layers) for g in case.geometry)
    assert log.told == ["running"]
    assert log.counts == sorted(set(log.counts))
    assert log.counts[-1] == total


@settings(max_examples=60, deadline=None)
@given(cases())
def test_layers_are_told_only_after_their_bytes(case: Case) -> None:
    rng = np.random.default_rng(case.seed)
    pool = np.zeros(case.pool_bytes, dtype=np.uint8)
    arena = rng.integers(1, 256, case.arena_bytes, dtype=np.uint8)
    want = pool.copy()
    for transfer in case.transfers:
        naive(want, arena.copy(), case.geometry[transfer.group], transfer, to_l1=True)
    order = sorted((layer, k, i) for k, g in enumerate(case.geometry) for i, layer in enumerate(g.layers))

    class Checking(Log):
        def layers_done(self, count: int) -> None:
            super().layers_done(count)
            for _, k, i in order[:count]:
                g = case.geometry[k]
                for start in case.transfers[k].l1_starts.tolist():
                    for address in l1_runs(g, i, start):
                        assert np.array_equal(
                            pool[address : address + g.run_bytes], want[address : address + g.run_bytes]
                        )

    CpuMover(arena).copy(pool, case.geometry, case.transfers, True, Checking())


class Team:
    """Several threads' shares in one copy. `check` is given the layers of which no thread has anything left."""

    def __init__(self, size: int, check: Callable[[int], None]) -> None:
        self.lock = threading.Lock()
        self.claimed = 0
        self.layers = [0] * size
        self.check = check

    def claim(self) -> int:
        with self.lock:
            self.claimed += 1
            return self.claimed - 1

    def tell(self, member: int, count: int) -> None:
        with self.lock:
            self.layers[member] = count
            self.check(min(self.layers))


@dataclass
class Member:
    team: Team
    index: int

    def running(self) -> None: ...

    def claim(self) -> int:
        return self.team.claim()

    def revoked(self) -> bool:
        return False

    def layers_done(self, count: int) -> None:
        self.team.tell(self.index, count)


@settings(max_examples=100, deadline=None)
@given(cases(), st.booleans(), st.sampled_from([1, 100, 1000, 1 << 20]))
def test_threads_share_one_copy(case: Case, to_l1: bool, step_bytes: int) -> None:
    rng = np.random.default_rng(case.seed)
    pool = rng.integers(0, 256, case.pool_bytes, dtype=np.uint8)
    arena = rng.integers(0, 256, case.arena_bytes, dtype=np.uint8)
    want_pool, want_arena = pool.copy(), arena.copy()
    for transfer in case.transfers:
        naive(want_pool, want_arena, case.geometry[transfer.group], transfer, to_l1)
    order = sorted((layer, k, i) for k, g in enumerate(case.geometry) for i, layer in enumerate(g.layers))
    wrong: list[int] = []

    def check(count: int) -> None:
        for _, k, i in order[:count]:
            g, transfer = case.geometry[k], case.transfers[k]
            for offset, start in zip(transfer.l2_offsets.tolist(), transfer.l1_starts.tolist(), strict=True):
                at = offset + i * g.block_layer_bytes
                spans = l1_runs(g, i, start) if to_l1 else [at]
                have, want = (pool, want_pool) if to_l1 else (arena, want_arena)
                size = g.run_bytes if to_l1 else g.block_layer_bytes
                wrong.extend(a for a in spans if not np.array_equal(have[a : a + size], want[a : a + size]))

    team = Team(3, check)

    def work(index: int) -> None:
        CpuMover(arena, step_bytes).copy(pool, case.geometry, case.transfers, to_l1, Member(team, index))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert team.layers == [sum(len(g.layers) for g in case.geometry)] * 3
    assert np.array_equal(pool, want_pool)
    assert np.array_equal(arena, want_arena)


@settings(max_examples=60, deadline=None)
@given(cases(), st.booleans(), st.sampled_from(["start", "negative", "offset", "below", "length", "group", "pool"]))
def test_nothing_moves_when_a_number_is_out_of_range(case: Case, to_l1: bool, fault: str) -> None:
    rng = np.random.default_rng(case.seed)
    pool = rng.integers(0, 256, case.pool_bytes, dtype=np.uint8)
    arena = rng.integers(0, 256, case.arena_bytes, dtype=np.uint8)
    before = pool.copy(), arena.copy()
    g = case.geometry[-1]
    offsets = np.append(case.transfers[-1].l2_offsets, case.transfers[-1].l2_offsets.max(initial=0))
    starts = np.append(case.transfers[-1].l1_starts, np.int32(0))
    group = len(case.geometry) - 1
    geometry = case.geometry
    if fault == "start":
        starts[-1] = g.blocks
    elif fault == "negative":
        starts[-1] = -1
    elif fault == "offset":
        offsets[-1] = case.arena_bytes - g.block_layer_bytes * len(g.layers) + 1
    elif fault == "below":
        offsets[-1] = -8
    elif fault == "length":
        starts = starts[:-1]
    elif fault == "group":
        group += 1
    else:
        pool = pool[: max(0, max(g.layer_offsets) - 1)]
        before = pool.copy(), before[1]
    log = Log()
    transfers = (*case.transfers[:-1], Transfer(group, offsets, starts))
    with pytest.raises(HiCacheError) as caught:
        CpuMover(arena).copy(pool, geometry, transfers, to_l1, log)
    assert caught.value.code == ErrorCode.OUT_OF_RANGE
    assert log.told == []
    assert log.counts == []
    assert np.array_equal(pool, before[0])
    assert np.array_equal(arena, before[1])


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40)), max_size=4),
    st.integers(1, 16),
)
def test_canonical_axes_walk_the_same_bytes_in_the_same_order(axes: list[tuple[int, int]], run: int) -> None:
    def walk(parts: tuple[tuple[int, int], ...], length: int) -> list[int]:
        loops = [range(count) for count, _ in parts]
        return [
            sum(i * s for i, (_, s) in zip(at, parts, strict=True)) + byte
            for at in product(*loops)
            for byte in range(length)
        ]

    kept, longer = canonical(tuple(axes), run)
    assert walk(kept, longer) == walk(tuple(axes), run)
    assert len(kept) <= len(axes)


@pytest.mark.parametrize(("gap", "counts"), [(64, [4, 4]), (0, [8])])
def test_neighbouring_starts_of_a_block_move_as_one(gap: int, counts: list[int]) -> None:
    g = GroupGeometry((0,), 256, (0,), 8, 4 * 256 + gap, (), 256, 1, starts_per_block=4, start_stride=256)
    places = start_places(g, np.arange(8, dtype=np.int32))
    assert places.tolist() == [i // 4 * (1024 + gap) + i % 4 * 256 for i in range(8)]
    runs = coalesce(np.arange(8, dtype=np.int64) * 256, places, (256, neighbour_step(g)), 100)
    assert runs.count.tolist() == counts


def test_misaligned_offset_is_refused() -> None:
    g = GroupGeometry((0,), 64, (0,), 4, 64, (), 64, 1)
    arena, pool = np.zeros(256, np.uint8), np.zeros(256, np.uint8)
    transfer = Transfer(0, np.array([4], np.int64), np.array([0], np.int32))
    with pytest.raises(HiCacheError, match="multiples of 8"):
        CpuMover(arena).copy(pool, (g,), (transfer,), True, Log())


def test_cancel_stops_between_waves_and_tells_no_more() -> None:
    size, layers = 16 << 10, (0, 1, 2)  # blocks of this size move layer by layer at first
    g = GroupGeometry(layers, size, tuple(i * 2 * size for i in layers), 2, size, (), size, 1)
    arena, pool = np.ones(6 * size, np.uint8), np.zeros(6 * size, np.uint8)
    mover = CpuMover(arena)

    class Cancelling(Log):
        def layers_done(self, count: int) -> None:
            super().layers_done(count)
            mover.cancel()

    log = Cancelling()
    transfer = Transfer(0, np.array([0], np.int64), np.array([0], np.int32))
    with pytest.raises(HiCacheError) as caught:
        mover.copy(pool, (g,), (transfer,), True, log)
    assert caught.value.code == ErrorCode.TRANSFER_FAILED
    assert log.counts == [1]
    assert pool[:size].all()
    assert not pool[size:].any()

"""The CPU mover: blocks between an engine's shared-memory pool (L1) and the arena (L2) with numpy copies.

Both ends of a wave of layers are strided views of shape (units, layers, axes…, items), where a unit is one item, so
that any aligned byte distance is an index: that of a start in L1, that of a page in L2. One run of neighbouring
blocks is then one assignment between two slices; numpy walks the axes in C without the GIL.
docs/internals/copy.md holds the measurements behind each choice.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import gcd

import numpy as np
import numpy.typing as npt

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.copy.base import Bytes, GroupGeometry, Share, Transfer
from hicache.copy.geometry import Axes, canonical, neighbour_step, start_places
from hicache.plan.overlap import layer_waves
from hicache.plan.ranges import Runs, coalesce

# One step moves about this much at most, so that a cancelled or revoked copy ends within about a millisecond.
STEP_BYTES = 4 << 20

_ITEMS: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class _Plan:
    """One group's part of a copy, checked."""

    geometry: GroupGeometry
    axes: Axes
    run_bytes: int
    item_bytes: int
    block_bytes: int
    step: int  # bytes between neighbours in L1
    l2_offsets: npt.NDArray[np.int64]
    l1_places: npt.NDArray[np.int64]  # bytes from a layer's first start, ascending
    pieces: dict[int, list[Runs]] = field(
        default_factory=dict
    )  # by pages per piece: waves of one width have the same


def _plan(geometry: GroupGeometry, transfer: Transfer, arena_bytes: int, pool_bytes: int) -> _Plan:
    """Check every start and offset at once, before any byte moves, and put the pairs in the order of L1.

    Raises `HiCacheError(OUT_OF_RANGE)`.
    """
    axes, run_bytes = canonical(geometry.axes, geometry.run_bytes)
    block_bytes = geometry.block_layer_bytes * len(geometry.layers)
    item = gcd(8, run_bytes, geometry.block_layer_bytes, geometry.block_stride, *geometry.layer_offsets)
    item = gcd(item, geometry.start_stride, *(stride for _, stride in axes))
    offsets, starts = transfer.l2_offsets, transfer.l1_starts

    def bad(text: str) -> HiCacheError:
        return HiCacheError(ErrorCode.OUT_OF_RANGE, f"group {transfer.group}: {text}")

    reach = run_bytes + sum((count - 1) * stride for count, stride in axes)
    end = max(geometry.layer_offsets) + geometry.last_start() + reach
    if min(geometry.layer_offsets) < 0 or end > pool_bytes:
        raise bad(f"the layout ends at byte {end} of a pool of {pool_bytes}")
    if offsets.shape != starts.shape or offsets.ndim != 1:
        raise bad(f"{offsets.shape} L2 offsets for {starts.shape} L1 starts")
    if len(starts) and not 0 <= int(starts.min()) <= int(starts.max()) < geometry.blocks:
        raise bad(f"L1 starts {starts.min()} … {starts.max()} leave [0, {geometry.blocks})")
    if len(offsets):
        low, high = int(offsets.min()), int(offsets.max())
        if not 0 <= low <= high <= arena_bytes - block_bytes:
            raise bad(f"L2 offsets {low} … {high} leave [0, {arena_bytes - block_bytes}]")
        if np.any(offsets % item):
            raise bad(f"L2 offsets must be multiples of {item}")
    places = start_places(geometry, starts)
    if np.any(places[1:] < places[:-1]):
        # L1 in address order: small pieces then follow each other in memory, which is worth up to 1.5×.
        order = np.argsort(places, kind="stable")
        offsets, places = offsets[order], places[order]
    return _Plan(geometry, axes, run_bytes, item, block_bytes, neighbour_step(geometry), offsets, places)


def _even_spans(offsets: tuple[int, ...], low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Cut layers [low, high) where their spacing in L1 changes: (low, high, stride in bytes) each."""
    while low < high:
        end, stride = low + 1, 0
        if end < high and offsets[end] > offsets[low]:
            stride = offsets[end] - offsets[low]
            while end < high and offsets[end] - offsets[end - 1] == stride:
                end += 1
        yield low, end, stride
        low = end


def _pieces(runs: Runs, pages: int) -> Iterator[Runs]:
    """Cut `runs`, none longer than `pages`, where `pages` pages are full: no piece is longer than twice that."""
    piece = (np.cumsum(runs.count) - 1) // pages
    cuts = [0, *(np.flatnonzero(piece[1:] != piece[:-1]) + 1).tolist(), len(piece)]
    for low, high in pairwise(cuts):
        yield Runs(runs.l2[low:high], runs.l1[low:high], runs.count[low:high])


class CpuMover:
    """Moves blocks on the calling thread: a `Mover`.

    Threads may share a mover, but `cancel` is for good and hits all its copies, so the lane makes one per part of
    a job; it holds two references. All that share a copy have the same `step_bytes`.
    """

    def __init__(self, arena: Bytes, step_bytes: int = STEP_BYTES) -> None:
        self._arena = arena
        self._step_bytes = min(step_bytes, STEP_BYTES)
        self._cancelled = False

    def cancel(self) -> None:
        """Make running and later copies raise `HiCacheError(TRANSFER_FAILED)` within about a millisecond."""
        self._cancelled = True  # one reference store; the copying thread looks between calls

    def copy(
        self,
        pool: Bytes,
        geometry: tuple[GroupGeometry, ...],
        transfers: tuple[Transfer, ...],
        to_l1: bool,
        share: Share,
    ) -> None:
        """See `Mover.copy`."""
        for transfer in transfers:
            if not 0 <= transfer.group < len(geometry):
                raise HiCacheError(ErrorCode.OUT_OF_RANGE, f"group {transfer.group} of {len(geometry)}")
        plans = [_plan(geometry[t.group], t, len(self._arena), len(pool)) for t in transfers]
        order = sorted(layer for group in geometry for layer in group.layers)
        ranks = [[bisect_left(order, layer) for layer in plan.geometry.layers] for plan in plans]  # ascending
        smallest = min((plan.geometry.block_layer_bytes for plan in plans), default=0)
        share.running()
        step, mine = 0, share.claim()
        for low, high in layer_waves(len(order), smallest):
            for plan, rank in zip(plans, ranks, strict=True):
                layers = bisect_left(rank, low), bisect_left(rank, high)
                if layers[0] < layers[1] and len(plan.l1_places):
                    for move in self._wave(pool, plan, layers, to_l1):
                        if step == mine:
                            if share.revoked():
                                raise HiCacheError(ErrorCode.TRANSFER_FAILED, "revoked")
                            move()
                            mine = share.claim()
                        step += 1
            share.layers_done(high)

    def _wave(self, pool: Bytes, plan: _Plan, layers: tuple[int, int], to_l1: bool) -> Iterator[Callable[[], None]]:
        """The steps of some layers of one group."""
        bytes_per_block = (layers[1] - layers[0]) * plan.geometry.block_layer_bytes
        pages = max(1, self._step_bytes // bytes_per_block)
        pieces = plan.pieces.get(pages)
        if pieces is None:
            runs = coalesce(plan.l2_offsets, plan.l1_places, (plan.block_bytes, plan.step), pages)
            pieces = plan.pieces[pages] = list(_pieces(runs, pages))
        for low, high, stride in _even_spans(plan.geometry.layer_offsets, *layers):
            l1, l2 = self._views(pool, plan, (low, high), stride)
            for piece in pieces:
                yield partial(self._copy_runs, l1, l2, piece, plan, to_l1)

    def _views(
        self, pool: Bytes, plan: _Plan, layers: tuple[int, int], layer_stride: int
    ) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.unsignedinteger]]:
        """L1 and L2 of some layers. `np.ndarray` itself refuses a view that would leave its buffer."""
        g, item = plan.geometry, plan.item_bytes
        inner = (layers[1] - layers[0], *(count for count, _ in plan.axes), plan.run_bytes // item)
        packed = [item]  # L2 keeps the axes row-major
        for count in reversed(inner[2:]):
            packed.append(packed[-1] * count)
        l1 = np.ndarray(
            (g.last_start() // item + 1, *inner),
            _ITEMS[item],
            pool,
            g.layer_offsets[layers[0]],
            (item, layer_stride, *(stride for _, stride in plan.axes), item),
        )
        l2 = np.ndarray(
            ((len(self._arena) - plan.block_bytes) // item + 1, *inner),
            _ITEMS[item],
            self._arena,
            layers[0] * g.block_layer_bytes,
            (item, g.block_layer_bytes, *reversed(packed)),
        )
        return l1, l2

    def _copy_runs(
        self,
        l1: npt.NDArray[np.unsignedinteger],
        l2: npt.NDArray[np.unsignedinteger],
        runs: Runs,
        plan: _Plan,
        to_l1: bool,
    ) -> None:
        """One assignment per run. The body is kept bare: for small blocks it is most of the cost."""
        target, source = (l1, l2) if to_l1 else (l2, l1)
        l1_step, l2_step = plan.step // plan.item_bytes, plan.block_bytes // plan.item_bytes
        target_step, source_step = (l1_step, l2_step) if to_l1 else (l2_step, l1_step)
        l1_first, l2_first = (runs.l1 // plan.item_bytes).tolist(), (runs.l2 // plan.item_bytes).tolist()
        first = zip(l1_first, l2_first, strict=True) if to_l1 else zip(l2_first, l1_first, strict=True)
        for (to, from_), count in zip(first, runs.count.tolist(), strict=True):
            if self._cancelled:
                raise HiCacheError(ErrorCode.TRANSFER_FAILED, "cancelled")
            if count == 1:
                target[to] = source[from_]
            else:
                target[to : to + (count - 1) * target_step + 1 : target_step] = source[
                    from_ : from_ + (count - 1) * source_step + 1 : source_step
                ]

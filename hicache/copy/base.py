"""What a mover is, and how threads share one copy."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """How to address one cache group in both tiers.

    L2: block at byte offset o holds its layers in group order, each `block_layer_bytes` long and contiguous
    (`page_first_direct`). L1: runs of `run_bytes` at `layer_offsets[i] + (start // starts_per_block)·block_stride +
    (start % starts_per_block)·start_stride + Σ axis` (spec/layout.py).
    """

    layers: tuple[int, ...]  # model layer index of each layer of the group
    block_layer_bytes: int
    layer_offsets: tuple[int, ...]
    blocks: int
    block_stride: int
    axes: tuple[tuple[int, int], ...]  # (count, stride in bytes), outer to inner
    run_bytes: int
    block_tokens: int
    starts_per_block: int = 1
    start_stride: int = 0  # bytes

    def last_start(self) -> int:
        """Byte distance from a layer's first start to its last: no start lies further."""
        block, rest = divmod(self.blocks - 1, self.starts_per_block)
        return block * self.block_stride + rest * self.start_stride


@dataclass(frozen=True, slots=True)
class Transfer:
    """Block pairs of one group: L2 byte offsets (int64) and L1 starts (int32), equally long."""

    group: int
    l2_offsets: npt.NDArray[np.int64]
    l1_starts: npt.NDArray[np.int32]


class Share(Protocol):
    """One thread's share in a copy that several may make together: which steps are its own, and whom it tells.

    All walk through the same steps in the same order, from layer to layer; each moves those that it claimed.
    """

    def running(self) -> None:
        """Called first, and before the first byte moves."""
        ...

    def claim(self) -> int:
        """The number of the next step that nobody has; larger each time. Past the last step nothing is left."""
        ...

    def revoked(self) -> bool:
        """Whether the client wants no more of it. Asked before each step; the copy then stops."""
        ...

    def layers_done(self, count: int) -> None:
        """This thread has nothing left to move in the first `count` layers, in model order and of every group."""
        ...


class Mover(Protocol):
    """Moves pages for one device. Thread-safe; `copy` returns when this thread touches neither end any more."""

    def copy(
        self,
        pool: Bytes,
        geometry: tuple[GroupGeometry, ...],
        transfers: tuple[Transfer, ...],
        to_l1: bool,
        share: Share,
    ) -> None:
        """Copy `share` of the pairs, layer by layer in model order, until no step is left; stop when revoked.

        Raises `HiCacheError(TRANSFER_FAILED)` or `HiCacheError(OUT_OF_RANGE)`, the latter before any byte moves.
        Cancellation: `cancel` of the concrete mover.
        """
        ...

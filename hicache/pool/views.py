"""One block size's sight of the pool: block b lies in parent b // packing, at place b % packing."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hicache.base.errors import LawBroken
from hicache.pool.refs import BlockRefs

if TYPE_CHECKING:
    from hicache.pool.blocks import Pool

Int32s = npt.NDArray[np.int32]


class PoolView:
    """Blocks of `block_bytes`, `packing` to a parent. Counts of owners stand in `count`, one per block id.

    `open_blocks` are the free blocks in parents that this view already holds.
    """

    def __init__(self, pool: "Pool", index: int, block_bytes: int) -> None:
        self.pool = pool
        self.index = index
        self.block_bytes = block_bytes
        self.packing = pool.parent_bytes // block_bytes
        self.count: Int32s = np.zeros(pool.parents * self.packing, np.int32)
        self.open_in_parent: Int32s = np.zeros(pool.parents, np.int32)  # free blocks; 0 where not ours
        self.open_blocks = 0
        self.used_blocks = 0
        self.held_parents = 0

    def offset_bytes(self, ids: Int32s) -> npt.NDArray[np.int64]:
        """Byte offset in the arena of each block."""
        wide = ids.astype(np.int64)
        parent = wide // self.packing
        # (b // k)·parent + (b % k)·block without a second division
        offset: npt.NDArray[np.int64] = wide * self.block_bytes
        offset += parent * (self.pool.parent_bytes - self.packing * self.block_bytes)
        return offset

    def available(self) -> int:
        """Blocks that could be allocated now if no other view took a parent meanwhile."""
        return self.open_blocks + self.pool.free_parents * self.packing

    def allocate(self, count: int) -> BlockRefs | None:
        """`count` blocks with one owner, ascending within open and then within fresh parents; None if too few."""
        if count > self.available():
            return None
        runs = []
        if self.open_blocks:
            runs.append(self._from_open(count))
            count -= runs[-1].size
        if count > 0:
            runs.append(self._from_fresh(count))
        ids = runs[0] if len(runs) == 1 else np.concatenate(runs) if runs else np.zeros(0, np.int32)
        self.count[ids] = 1
        self.used_blocks += ids.size
        return BlockRefs(self, ids)

    def _from_open(self, count: int) -> Int32s:
        parents = np.flatnonzero(self.open_in_parent)
        enough = int(np.searchsorted(np.cumsum(self.open_in_parent[parents]), count)) + 1
        parents = parents[:enough]
        row, place = np.nonzero(self.count.reshape(-1, self.packing)[parents] == 0)
        row, place = row[:count], place[:count]
        self.open_in_parent[parents] -= np.bincount(row, minlength=parents.size).astype(np.int32)
        self.open_blocks -= row.size
        return (parents[row] * self.packing + place).astype(np.int32)

    def _from_fresh(self, count: int) -> Int32s:
        parents = self.pool.lend_parents(self.index, -(-count // self.packing))
        ids = (parents[:, None] * self.packing + np.arange(self.packing)).reshape(-1)
        rest = ids.size - count
        self.open_in_parent[parents[-1]] = rest
        self.open_blocks += rest
        self.held_parents += parents.size
        return ids[:count].astype(np.int32)

    def share(self, ids: Int32s) -> BlockRefs:
        """One more owner for blocks that have one."""
        if not (self.count[ids] > 0).all():
            raise LawBroken(f"law 2: a free block was shared: {ids[self.count[ids] <= 0][:8].tolist()}")
        self.count[ids] += 1
        return BlockRefs(self, ids)

    def adopt(self, ids: Int32s) -> BlockRefs:
        """An owner for shares that somebody took by `BlockRefs.surrender`."""
        return BlockRefs(self, ids)

    def drop(self, ids: Int32s) -> None:
        """Take one share from each block; blocks without owner become free, empty parents go back to the pool."""
        if not ids.size:
            return
        left = self.count[ids] - 1
        if (left < 0).any():
            raise LawBroken(f"law 2: a free block was released: {ids[left < 0][:8].tolist()}")
        self.count[ids] = left
        freed = ids[left == 0]
        if not freed.size:
            return
        self.used_blocks -= freed.size
        parents, counts = np.unique(freed // self.packing, return_counts=True)
        self.open_in_parent[parents] += counts.astype(np.int32)
        self.open_blocks += freed.size
        empty = parents[self.open_in_parent[parents] == self.packing].astype(np.int64)
        if empty.size:
            self.open_in_parent[empty] = 0
            self.open_blocks -= empty.size * self.packing
            self.held_parents -= empty.size
            self.pool.return_parents(empty)

    def dead_bytes(self) -> int:
        """Bytes of held parents that no block can use."""
        return self.held_parents * (self.pool.parent_bytes - self.packing * self.block_bytes)

    def check(self) -> None:
        """Law 1 of this view: used + open = packing · held parents, and every count is where it must be."""
        ours = self.pool.owner == self.index
        used = (self.count.reshape(-1, self.packing) > 0).sum(axis=1)
        held = int(ours.sum())
        if (self.count < 0).any():
            raise LawBroken(f"law 2: negative count in view {self.index}")
        if used[~ours].any():
            raise LawBroken(f"law 2: view {self.index} uses a parent that it does not hold")
        if not (np.where(ours, self.packing - used, 0) == self.open_in_parent).all():
            raise LawBroken(f"law 1: open blocks of view {self.index} are miscounted")
        sums = (held, int(used.sum()), int(self.open_in_parent.sum()))
        if sums != (self.held_parents, self.used_blocks, self.open_blocks):
            raise LawBroken(f"law 1: view {self.index} counts {sums} as {self.held_parents, self.used_blocks}")
        if self.used_blocks + self.open_blocks != self.packing * held:
            raise LawBroken(f"law 1: free + owned ≠ capacity in view {self.index}")

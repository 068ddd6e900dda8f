"""A flat pool: one arena cut into equal *parents*, each free or lent whole to one view.

    arena     | parent 0        | parent 1        | parent 2        | … | tail (unused)
    owner     | view A          | free            | view B          |
    blocks    | a0 a1 a2 (rest) |                 | b0        (rest)|        rest = dead bytes of that view

A view (views.py) cuts its parents into blocks of its own size, so cache groups and models of different block
sizes share one memory without a split that is fixed in advance. A parent goes back as soon as its last block does.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hicache.base.errors import ErrorCode, HiCacheError, LawBroken
from hicache.pool.views import PoolView

ALIGN_BYTES = 4096
PARENT_BYTES = 2 << 20  # what `auto` aims at
LEAST_PARENTS = 64  # a small arena gets smaller parents rather than few of them
MOST_VIEWS = 64  # block sizes at once
MOST_BLOCKS = 1 << 28  # per view: each costs four bytes of counts
FREE = -1


def parent_bytes_for(block_bytes: int, arena_bytes: int) -> int:
    """Size of a parent that holds k ≥ 1 blocks, near 2 MiB, aligned to a disk page."""
    target = min(PARENT_BYTES, arena_bytes // LEAST_PARENTS)
    packing = max(1, target // block_bytes)
    return -(-packing * block_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Pool:
    """Owns every parent of an arena of `arena_bytes`. `parent_bytes` is 0 until `format`."""

    def __init__(self, arena_bytes: int) -> None:
        self.arena_bytes = arena_bytes
        self.parent_bytes = 0
        self.parents = 0
        self.free_parents = 0
        self.owner: npt.NDArray[np.int32] = np.zeros(0, np.int32)  # per parent: index of a view, or FREE
        self.views: list[PoolView] = []
        self._by_size: dict[int, PoolView] = {}

    def format(self, parent_bytes: int) -> None:
        """Cut the arena anew. Only while no block is in use; views asked for before are void afterwards."""
        if self.used_blocks():
            raise HiCacheError(ErrorCode.NO_SPACE, "the pool cannot be cut anew while blocks are in use")
        if not 0 < parent_bytes <= self.arena_bytes:
            raise HiCacheError(
                ErrorCode.NO_SPACE,
                f"parent_bytes must be 1 to the arena's {self.arena_bytes}, got {parent_bytes}",
                "raise l2.size or lower l2.parent",
            )
        self.parent_bytes = parent_bytes
        self.parents = self.arena_bytes // parent_bytes
        self.free_parents = self.parents
        self.owner = np.full(self.parents, FREE, np.int32)
        self.views = []
        self._by_size = {}

    def view(self, block_bytes: int) -> PoolView:
        """The view whose blocks have `block_bytes`; made when first asked for.

        Raises `HiCacheError(NO_SPACE)` when a block is larger than a parent."""
        view = self._by_size.get(block_bytes)
        if view is not None:
            return view
        if not 0 < block_bytes <= self.parent_bytes:
            raise HiCacheError(
                ErrorCode.NO_SPACE,
                f"a block of {block_bytes} bytes does not fit a parent of {self.parent_bytes}",
                f"set l2.parent to {block_bytes} bytes or more, or to auto, and restart",
            )
        if self.parents * (self.parent_bytes // block_bytes) > MOST_BLOCKS:
            raise HiCacheError(
                ErrorCode.NO_SPACE,
                f"blocks of {block_bytes} bytes cut {self.arena_bytes} into more than {MOST_BLOCKS}",
                "use larger pages: raise the model's prefix_granularity",
            )
        view = PoolView(self, self._place(), block_bytes)
        self.views[view.index : view.index + 1] = [view]
        self._by_size[block_bytes] = view
        return view

    def _place(self) -> int:
        """Index for a new view: the next, or at the bound that of one without blocks, which is then void."""
        if len(self.views) < MOST_VIEWS:
            return len(self.views)
        for view in self.views:
            if not view.held_parents:
                del self._by_size[view.block_bytes]
                return view.index
        raise HiCacheError(
            ErrorCode.NO_SPACE, f"blocks of {MOST_VIEWS} sizes are in use, the limit", "use fewer models per daemon"
        )

    def fits(self, needs: Iterable[tuple[PoolView, int]]) -> bool:
        """Could all of these (view, blocks) be allocated right now, together?"""
        total: dict[int, int] = {}
        for view, count in needs:
            total[view.index] = total.get(view.index, 0) + count
        parents = 0
        for index, count in total.items():
            view = self.views[index]
            parents += -(-max(0, count - view.open_blocks) // view.packing)
        return parents <= self.free_parents

    def used_blocks(self) -> int:
        return sum(view.used_blocks for view in self.views)

    def used_bytes(self) -> int:
        """Bytes in blocks that have an owner."""
        return sum(view.used_blocks * view.block_bytes for view in self.views)

    # ---- for views only -----------------------------------------------------------------------------

    def lend_parents(self, view: int, count: int) -> npt.NDArray[np.int64]:
        """Give the `count` lowest free parents to `view`; ascending, so that its blocks run on."""
        found = np.flatnonzero(self.owner == FREE)[:count]
        self.owner[found] = view
        self.free_parents -= count
        return found

    def return_parents(self, parents: npt.NDArray[np.int64]) -> None:
        self.owner[parents] = FREE
        self.free_parents += parents.size

    def check(self) -> None:
        """Laws 1 and 2 as far as the pool sees them."""
        free = int((self.owner == FREE).sum())
        if free != self.free_parents:
            raise LawBroken(f"law 1: {free} parents are free, {self.free_parents} counted")
        for view in self.views:
            view.check()

"""Owners of blocks. One object per *run* of blocks, released exactly once; the counts live in the view's column."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hicache.base.errors import LawBroken

if TYPE_CHECKING:
    from hicache.pool.views import PoolView

Int32s = npt.NDArray[np.int32]


class BlockRefs:
    """One share in each block of `ids` (no block twice). While it lives, none of them is given to anybody else.

    allocate ─► owned ─ release ─► (counts fall; at 0 a block is free)
                  ├── share ─► a second owner of the same blocks
                  └── surrender ─► ids; whoever took them answers for the counts (`PoolView.adopt` undoes it)
    """

    __slots__ = ("_ids", "view")

    def __init__(self, view: "PoolView", ids: Int32s) -> None:
        self.view = view
        self._ids: Int32s | None = ids

    @property
    def ids(self) -> Int32s:
        if self._ids is None:
            raise LawBroken("law 2: blocks asked of an owner that has released them")
        return self._ids

    @property
    def live(self) -> bool:
        return self._ids is not None

    def share(self) -> "BlockRefs":
        return self.view.share(self.ids)

    def surrender(self) -> Int32s:
        """End this owner without lowering the counts."""
        ids = self.ids
        self._ids = None
        return ids

    def release(self) -> None:
        self.view.drop(self.surrender())

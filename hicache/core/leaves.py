"""Which of some rows may go so that no child stays behind its parent."""

import numpy as np
import numpy.typing as npt

from hicache.core.residency import Int32s, Mask, Residency
from hicache.policy.evict.base import Evictor


class Leaves:
    """Grants rows in batches; a row is granted once all its counted children are.

    `kids` is the column of children that matter. Children granted in an earlier or in the same batch count as
    gone. Use as a context manager: the scratch column must be left zero.
    """

    def __init__(self, residency: Residency, kids: Int32s) -> None:
        self._residency = residency
        self._kids = kids
        self._gone = residency.scratch
        self._used: list[Int32s] = []

    def __enter__(self) -> "Leaves":
        return self

    def __exit__(self, *_: object) -> None:
        for parents in self._used:
            self._gone[parents] = 0

    def grant(self, rows: Int32s) -> Mask:
        """Mask of `rows` (no row twice) that may go: the largest such part. O(rows)."""
        granted: Mask = self._residency.pins[rows] == 0
        parent = self._residency.parent[rows]
        above = parent[granted]
        above = above[above >= 0]
        self._used.append(above)
        np.add.at(self._gone, above, np.int32(1))
        stuck = np.flatnonzero(granted & (self._kids[rows] > self._gone[rows]))
        if stuck.size:
            self._take_back(rows, parent, granted, stuck)
        return granted

    def _take_back(self, rows: Int32s, parent: Int32s, granted: Mask, stuck: npt.NDArray[np.int64]) -> None:
        """A row with a child that stays must stay, and so must all rows above it."""
        place = dict(zip(rows.tolist(), range(rows.size), strict=True))
        parents = parent.tolist()
        work = stuck.tolist()
        while work:
            at = work.pop()
            if not granted[at]:
                continue
            granted[at] = False
            above = parents[at]
            if above >= 0:
                self._gone[above] -= 1
                if above in place:
                    work.append(place[above])


def pick_victims(residency: Residency, kids: Int32s, evictor: Evictor, count: int) -> Int32s:
    """Up to `count` rows that may leave a tier, by the policy's order, children before their parents.

    They are members of the policy no more."""
    with Leaves(residency, kids) as leaves:
        rows = evictor.victims(count, leaves.grant)
    with Leaves(residency, kids) as leaves:  # a cut at `count` may have parted a row from its children
        may = leaves.grant(rows)
    if not may.all():
        evictor.insert(rows[~may])
    return rows[may]

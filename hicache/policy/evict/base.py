"""What an eviction policy is. One instance orders the rows of one tier.

Batch-oriented: rows come as int32 arrays without duplicates, those of one path *leaf first*, so that a policy that
keeps the order of a batch evicts children before their parents by itself.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


class Evictor(Protocol):
    """Orders the member rows of a tier by how soon they may go."""

    def insert(self, rows: Rows) -> None:
        """These are members from now on and were just used."""
        ...

    def touch(self, rows: Rows) -> None:
        """Those of `rows` that are members were just used; the others are passed over."""
        ...

    def remove(self, rows: Rows) -> None:
        """These are members no more; not being one is no error."""
        ...

    def victims(self, count: int, allowed: Callable[[Rows], Mask]) -> Rows:
        """Up to `count` members to evict, best first; they are members no more when this returns.

        `allowed(rows)` says which may go now; it is asked about each row at most once per call and in the
        policy's order. Rows that it refuses (pinned, or a parent of rows that stay) count as just used: asking
        about the same ones again and again would make eviction cost more than its victims."""
        ...

    def members(self, rows: Rows) -> Mask:
        """Which of `rows` are members."""
        ...

    def __len__(self) -> int:
        """Number of members."""
        ...

    def check(self) -> None:
        """Raise `LawBroken` unless the own books add up."""
        ...

"""Neighbouring blocks become runs, so that one call moves many of them. Columnar: no object per block."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Runs:
    """Run r is `count[r]` block pairs: L2 offsets `l2[r] + i·l2_step`, L1 places `l1[r] + i·l1_step`.

    Three int64 columns of equal length; the pairs of all runs, in order, are the input. The steps are those
    given to `coalesce`.
    """

    l2: Int64s
    l1: Int64s
    count: Int64s


def coalesce(l2_offsets: Int64s, l1_places: Int64s, steps: tuple[int, int], max_count: int) -> Runs:
    """Join consecutive pairs that advance by exactly `steps` = (bytes in L2, bytes in L1).

    No run is longer than `max_count` ≥ 1, so that whoever walks the runs comes up for air in bounded time.
    The order of the pairs is kept: it is the caller's, and often an engine's order of use. O(n), vectorised.
    """
    n = len(l2_offsets)
    starts_run = np.ones(n, dtype=np.bool_)
    apart = (l2_offsets[1:] - l2_offsets[:-1] != steps[0]) | (l1_places[1:] - l1_places[:-1] != steps[1])
    starts_run[1:] = apart
    # Breaking at multiples of max_count of the *input* position is one line and bounds every run; a run that
    # begins between two multiples is then cut once more than needed, which costs one call.
    starts_run[::max_count] = True
    first = np.flatnonzero(starts_run)
    count = np.empty_like(first)
    np.subtract(first[1:], first[:-1], out=count[:-1])
    count[-1:] = n - first[-1:]
    return Runs(l2_offsets[first], l1_places[first], count)

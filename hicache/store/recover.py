"""What the rows of an index say at open: what is used, what is broken, and in which order things were used."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.store.extents import Extent
from hicache.store.record import PAGE_BYTES, allocated_bytes, row_fault, scan_row

Int64s = npt.NDArray[np.int64]

_SANE_ORDINAL = 1 << 62


@dataclass(frozen=True, slots=True)
class Recovered:
    """`extents` by offset, disjoint, inside the file; `broken`: (row key, reason) to be quarantined."""

    extents: list[Extent]
    broken: list[tuple[bytes, str]]
    next_ordinal: int


def scan(rows: Iterable[tuple[bytes, bytes]], file_bytes: int) -> Recovered:
    """Read all (key, value) pairs of the index once.

    A row is broken if its own check fails, if its frame is not inside the file, or if it overlaps the frame of
    a later write: two rows must never own the same bytes, or writing one record would destroy another.
    """
    keys: list[bytes] = []
    broken: list[tuple[bytes, str]] = []
    offsets, sizes, ordinals = array("q"), array("q"), array("q")
    latest = 0
    for key, row in rows:
        fault = row_fault(key, row)
        if fault:
            broken.append((key, fault))
            continue
        last_use, offset, length, ordinal = scan_row(row)
        size = allocated_bytes(length)
        if offset % PAGE_BYTES or offset + size > file_bytes:
            broken.append((key, "frame outside of the file"))
            continue
        keys.append(key)
        offsets.append(offset)
        sizes.append(size)
        ordinals.append(ordinal)
        # The row check does not cover last_use (it changes in place): a wild value must not end the count.
        latest = max(latest, ordinal, last_use if last_use < _SANE_ORDINAL else 0)
    off, size_of = np.asarray(offsets, dtype=np.int64), np.asarray(sizes, dtype=np.int64)
    order = np.argsort(off, kind="stable")
    if np.any(off[order][1:] < (off + size_of)[order][:-1]):
        order, lost = _without_overlaps(order, off, size_of, np.asarray(ordinals, dtype=np.int64))
        broken.extend((keys[i], "overlaps a later frame") for i in lost)
    extents = list(zip(off[order].tolist(), size_of[order].tolist(), strict=True))
    return Recovered(extents, broken, latest + 1)


def _without_overlaps(order: Int64s, off: Int64s, size: Int64s, ordinal: Int64s) -> tuple[Int64s, list[int]]:
    """Of overlapping frames keep the later write. `order` is by offset; so is the result."""
    kept: list[int] = []
    lost: list[int] = []
    for i in order.tolist():
        while kept and off[kept[-1]] + size[kept[-1]] > off[i] and ordinal[kept[-1]] < ordinal[i]:
            lost.append(kept.pop())
        if kept and off[kept[-1]] + size[kept[-1]] > off[i]:
            lost.append(i)
        else:
            kept.append(i)
    return np.asarray(kept, dtype=np.int64), lost


def by_last_use(rows: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Row keys, oldest use first. Rows that were used together (equal ordinals) stay in key order."""
    keys: list[bytes] = []
    uses = array("Q")
    for key, row in rows:
        keys.append(key)
        uses.append(int.from_bytes(row[:8], "little"))
    return [keys[i] for i in np.argsort(np.asarray(uses, dtype=np.uint64), kind="stable").tolist()]

"""The segment file: where frames lie, and how bytes get in and out of it.

The file's space is in one of four states, and nothing about it is stored: rows name what is used, and every
byte that no row names is free when the store opens. A crash therefore leaves no garbage to collect.

    used (a row names it) ─delete─► limbo (readers may hold it) ─reclaim─► backed free ─allocate─► used
                                                                    │ punch            ▲ reserve
                                                                    └────► hole ───────┘

backed + used + limbo ≤ capacity, always. Holes cost no disk: when free space is split too finely for a new
frame, backed extents are punched and the same amount is reserved elsewhere, if need be behind the end of
the file. Mixed frame sizes therefore never strand capacity; the file merely becomes sparse.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hicache.store import medium
from hicache.store.base import Bytes
from hicache.store.extents import Claims, Extent, FreeSpace
from hicache.store.record import HEADER_BYTES, PAGE_BYTES

LIMBO_WAIT_S = 10.0  # a reader holds a claim for one record; longer means that the medium hangs


class SegmentFile:
    """Frames of one store. `allocate`, `write`, `sync`, `free` are the writer's; `read` is anybody's."""

    def __init__(self, path: Path, capacity_bytes: int, min_free_bytes: int, grow_bytes: int) -> None:
        """Open or create. `used_at_open` must be called before anything else. `min_free_bytes` may be changed
        at any time, by any thread: the next growth looks at it."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._dir = path.parent
        self._capacity = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self.min_free_bytes = min_free_bytes
        self._grow = max(PAGE_BYTES, grow_bytes // PAGE_BYTES * PAGE_BYTES)
        self._end = os.fstat(self._fd).st_size // PAGE_BYTES * PAGE_BYTES
        self._backed = FreeSpace()
        self._holes = FreeSpace()
        self._can_punch = True
        self.claims = Claims()
        self.used_bytes = 0
        self._page = bytearray(PAGE_BYTES)

    @property
    def fd(self) -> int:
        """Still this object's: to look at, not to close."""
        return self._fd

    @property
    def end_bytes(self) -> int:
        return self._end

    @property
    def backed_bytes(self) -> int:
        """Disk that the store holds: used, in limbo, and free but reserved."""
        return self.used_bytes + self.claims.limbo_bytes + self._backed.total_bytes

    @property
    def free_extents(self) -> int:
        return len(self._backed) + len(self._holes)

    def used_at_open(self, extents: list[Extent]) -> None:
        """Take the extents that rows name (by offset, disjoint); all else in the file is free.

        Which of the free space is backed is not known. Counting all of it as backed is the safe side: the
        limit holds, and a hole that was thought backed shows as ENOSPC at its write, like any full disk.
        """
        at = 0
        for offset, size in extents:
            if offset > at:
                self._backed.add(at, offset - at)
            at = offset + size
            self.used_bytes += size
        if self._end > at:
            self._backed.add(at, self._end - at)
        self._give_back(self.backed_bytes - self._capacity)

    def allocate(self, size: int) -> int | None:
        """Offset of `size` free bytes, or None when capacity is reached. Raises OSError (ENOSPC …)."""
        if self.used_bytes + size > self._capacity:
            return None
        offset = self._find(size)
        if offset is None and self.claims.limbo_bytes:
            self._reclaim(LIMBO_WAIT_S)
            offset = self._find(size)
        if offset is not None:
            self.used_bytes += size
        return offset

    def write(self, offset: int, header: bytes, payload: Bytes) -> None:
        """Write one frame; not durable before `sync`. Raises OSError."""
        self._page[:HEADER_BYTES] = header
        self._all(os.pwritev, [memoryview(self._page), payload.data], offset)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def read(self, offset: int, header: bytearray, into: Bytes) -> bool:
        """Read one frame's header page and payload; False if the file ends before. Raises OSError."""
        return self._all(os.preadv, [memoryview(header), into.data], offset)

    def free(self, extents: list[Extent], known: bool) -> None:
        """Give extents back. `known`: a committed row named them, so readers may still hold them."""
        self.used_bytes -= sum(size for _, size in extents)
        if known:
            self.claims.retire(extents)
            self._reclaim(0.0)
        else:
            for offset, size in extents:
                self._backed.add(offset, size)
        self._give_back(self.backed_bytes - self._capacity)

    def close(self) -> None:
        os.close(self._fd)

    # ---- space ------------------------------------------------------------------------------------------

    def _find(self, size: int) -> int | None:
        self._reclaim(0.0)
        offset = self._backed.take(size)
        return offset if offset is not None else self._reserve(size)

    def _reclaim(self, wait_s: float) -> None:
        for offset, size in self.claims.reclaim(wait_s):
            self._backed.add(offset, size)

    def _reserve(self, size: int) -> int | None:
        """Back new space: a hole that fits, else the file's end, there in larger steps."""
        room = self._capacity - self.backed_bytes
        if room < size:
            self._give_back(size - room)
            room = self._capacity - self.backed_bytes
        if room < size:
            return None
        offset = self._holes.take(size)
        if offset is not None:
            try:
                self._back(offset, size)
            except OSError:
                self._holes.add(offset, size)
                raise
            return offset
        step = min(room, max(size, self._grow))
        try:
            self._back(self._end, step)
        except OSError:
            if step == size:
                raise
            step = size
            self._back(self._end, step)
        self._backed.add(self._end, step)
        self._end += step
        return self._backed.take(size)

    def _back(self, offset: int, size: int) -> None:
        if medium.free_bytes(self._dir) - size < self.min_free_bytes:
            raise OSError(errno.ENOSPC, f"fewer than min_free {self.min_free_bytes} bytes would be left")
        medium.reserve(self._fd, offset, size)

    def _give_back(self, excess: int) -> None:
        """Punch at least `excess` bytes of backed free space, as far as there is any."""
        while excess > 0 and self._can_punch:
            extent = self._backed.pop_largest(-(-excess // PAGE_BYTES) * PAGE_BYTES)
            if extent is None:
                return
            try:
                self._can_punch = medium.punch(self._fd, *extent)
            except OSError:
                # Callers have committed already; what stays backed is punched another time.
                self._backed.add(*extent)
                return
            (self._holes if self._can_punch else self._backed).add(*extent)
            excess -= extent[1]

    # ---- bytes ------------------------------------------------------------------------------------------

    def _all(self, call: Callable[[int, list[memoryview], int], int], parts: list[memoryview], offset: int) -> bool:
        """Move all of `parts`, also when the kernel moves less at a time. False at the end of the file."""
        while parts:
            moved = call(self._fd, parts, offset)
            if moved == 0:
                return False
            offset += moved
            while parts and moved >= parts[0].nbytes:
                moved -= parts.pop(0).nbytes
            if parts and moved:
                parts[0] = parts[0][moved:]
        return True


def header_page() -> bytearray:
    """A buffer for `SegmentFile.read`."""
    return bytearray(PAGE_BYTES)


def as_bytes(array: Bytes) -> Bytes:
    """The same memory as flat uint8."""
    return array.reshape(-1).view(np.uint8)

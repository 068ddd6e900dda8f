"""Free space of the segment file, and the claims of readers that keep freed space from reuse.

An extent is (offset, size) in bytes, both multiples of the page. Nothing here does I/O.
"""

import threading
from bisect import bisect_left, insort

Extent = tuple[int, int]


class FreeSpace:
    """Disjoint free extents, coalesced on `add`, taken best fit and lowest offset first.

    One sorted list of (size, offset) serves the search: 100k entries are moved by memmove in tens of µs, and
    a cache whose blocks have few sizes has few entries.
    """

    def __init__(self) -> None:
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._by_size: list[Extent] = []
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._by_size)

    def add(self, offset: int, size: int) -> None:
        """Give back an extent. It must not overlap any free one."""
        self.total_bytes += size
        left = self._start_of_end.get(offset)
        if left is not None:
            offset, size = left, size + self._remove(left)
        if offset + size in self._size_at:
            size += self._remove(offset + size)
        self._insert(offset, size)

    def take(self, size: int) -> int | None:
        """Offset of `size` bytes out of the smallest extent that holds them, or None."""
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            return None
        found, offset = self._by_size[at]
        self._remove(offset)
        if found > size:
            self._insert(offset + size, found - size)
        self.total_bytes -= size
        return offset

    def pop_largest(self, limit: int) -> Extent | None:
        """Remove up to `limit` bytes of the largest extent: what is given back to the filesystem."""
        if not self._by_size:
            return None
        size, offset = self._by_size[-1]
        self._remove(offset)
        taken = min(size, limit)
        if size > taken:
            self._insert(offset, size - taken)
        self.total_bytes -= taken
        return offset + size - taken, taken

    def extents(self) -> list[Extent]:
        """All extents by offset."""
        return sorted(self._size_at.items())

    def _insert(self, offset: int, size: int) -> None:
        self._size_at[offset] = size
        self._start_of_end[offset + size] = offset
        insort(self._by_size, (size, offset))

    def _remove(self, offset: int) -> int:
        size = self._size_at.pop(offset)
        del self._start_of_end[offset + size]
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        return size


class Claims:
    """Readers in flight, by epoch; freed extents wait until no reader is left that may know them.

        reader: enter() ─► look the row up, read the frame ─► leave()
        writer: commit the row's end ─► retire(extents) ─► … ─► reclaim() ─► the extents are free

    `retire` opens a new epoch. A reader that entered in it looks its row up after the commit and so cannot
    see the retired row; extents retired at epoch e are safe once every reader in flight entered at e or later.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._epoch = 0
        self._active: dict[int, int] = {}
        self._limbo: list[tuple[int, list[Extent]]] = []
        self._closed = False
        self.limbo_bytes = 0

    def enter(self) -> int | None:
        """Epoch to hand to `leave`; None once closed."""
        with self._changed:
            if self._closed:
                return None
            self._active[self._epoch] = self._active.get(self._epoch, 0) + 1
            return self._epoch

    def leave(self, epoch: int) -> None:
        with self._changed:
            left = self._active[epoch] - 1
            if left:
                self._active[epoch] = left
            else:
                del self._active[epoch]
                self._changed.notify_all()

    def retire(self, extents: list[Extent]) -> None:
        """These are not referenced by any committed row any more."""
        if not extents:
            return
        with self._changed:
            self._epoch += 1
            self._limbo.append((self._epoch, extents))
            self.limbo_bytes += sum(size for _, size in extents)

    def reclaim(self, wait_s: float = 0.0) -> list[Extent]:
        """Retired extents that no reader can know any more; with `wait_s`, wait that long for the first."""
        with self._changed:
            if wait_s > 0 and self._limbo:
                self._changed.wait_for(lambda: self._safe(self._limbo[0][0]), timeout=wait_s)
            done = [e for epoch, group in self._limbo if self._safe(epoch) for e in group]
            self._limbo = [entry for entry in self._limbo if not self._safe(entry[0])]
            self.limbo_bytes -= sum(size for _, size in done)
            return done

    def close(self, wait_s: float) -> bool:
        """Let no reader in any more and wait for those inside; False if some stayed longer than `wait_s`."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: not self._active, timeout=wait_s)

    def _safe(self, epoch: int) -> bool:
        return min(self._active, default=epoch) >= epoch

"""The L2 arena: one memfd, mapped once, filled before the first request so that nothing is touched cold later.

Fresh memory costs microseconds per page, many times what copying into it costs, and a machine without enough of
it answers a late touch with the OOM killer or SIGBUS. So all of it is taken at start: `fallocate` per chunk, which
fails with an error instead of a signal, then one store per page so that the page tables are filled as well.
"""

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.copy.base import Bytes
from hicache_client.memory import MemoryBound, memory_bound, read_int

Hugepages = Literal["off", "2MiB", "1GiB"]
Progress = Callable[[int, int], None]  # (bytes ready, bytes in all), from any thread

CHUNK_BYTES = 64 << 20
PAGE_BYTES: dict[Hugepages, int] = {"off": 4096, "2MiB": 2 << 20, "1GiB": 1 << 30}
_FLAGS: dict[Hugepages, int] = {
    "off": 0,
    "2MiB": os.MFD_HUGETLB | os.MFD_HUGE_2MB,
    "1GiB": os.MFD_HUGETLB | os.MFD_HUGE_1GB,
}


class Arena:
    """Shared memory of fixed size. `bytes` is a uint8 view of shape (size,), `fd` is sealed against resizing.

    Made by `Arena.create`; close it last, after all who copy.
    """

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        self.fd = fd
        self._map = mapping
        self._bytes: Bytes | None = np.frombuffer(mapping, dtype=np.uint8)

    @property
    def bytes(self) -> Bytes:
        assert self._bytes is not None, "the arena is closed"
        return self._bytes

    @classmethod
    def create(cls, size: int, hugepages: Hugepages, threads: int, progress: Progress) -> "Arena":
        """Take `size` bytes (a multiple of the page size) and touch all of them with `threads` threads.

        Raises `HiCacheError(CONFIG)` for a size that cannot be, `HiCacheError(NO_SPACE)` when the memory or the
        huge pages are not there; its remedy names the limit. Nothing stays allocated then.
        """
        page = PAGE_BYTES[hugepages]
        if size <= 0 or size % page:
            raise HiCacheError(
                ErrorCode.CONFIG,
                f"l2.size must be a positive multiple of {page}, got {size}",
                f"set l2.size to {max(1, -(-size // page)) * page}",
            )
        bound = memory_bound()
        if hugepages == "off" and size > bound.bytes:
            raise _lacking(size, hugepages, f"{bound.what} leaves {bound.bytes} bytes", bound)
        fd = os.memfd_create("hicache-l2", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _FLAGS[hugepages])
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            os.close(fd)
            raise _lacking(size, hugepages, error.strerror or str(error), bound) from error
        arena = cls(fd, mapping)
        try:
            _touch(arena, size, page, max(1, threads), progress)
        except OSError as error:
            arena.close()
            raise _lacking(size, hugepages, error.strerror or str(error), bound) from error
        return arena

    def close(self) -> None:
        """Unmap and close. Views that are still alive keep the mapping, not the descriptor. Idempotent."""
        self._bytes = None
        with contextlib.suppress(BufferError):  # then it goes with the last view
            self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _touch(arena: Arena, size: int, page: int, threads: int, progress: Progress) -> None:
    """Allocate and touch all pages in parallel. Raises the first OSError of any thread."""
    chunk = max(CHUNK_BYTES, page)
    offsets = iter(range(0, size, chunk))
    lock = threading.Lock()
    failed: list[OSError] = []
    ready = 0

    def work() -> None:
        nonlocal ready
        while True:
            with lock:
                offset = None if failed else next(offsets, None)
            if offset is None:
                return
            end = min(offset + chunk, size)
            try:
                os.posix_fallocate(arena.fd, offset, end - offset)
            except OSError as error:
                failed.append(OSError(error.errno, error.strerror))  # without the frames that hold views
                return
            arena.bytes[offset:end:page] = 0
            with lock:
                ready += end - offset
                progress(ready, size)

    workers = [threading.Thread(target=work, name=f"hicache-touch-{i}") for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed:
        raise failed[0]


def _lacking(size: int, hugepages: Hugepages, why: str, bound: MemoryBound) -> HiCacheError:
    text = f"the L2 arena of {size} bytes cannot be had: {why}"
    if hugepages == "off":
        return HiCacheError(
            ErrorCode.NO_SPACE, text, f"lower l2.size, or raise {bound.what} (now {bound.bytes} bytes)"
        )
    page = PAGE_BYTES[hugepages]
    pool = f"/sys/kernel/mm/hugepages/hugepages-{page >> 10}kB/nr_hugepages"
    return HiCacheError(
        ErrorCode.NO_SPACE,
        f"{text}; it needs {size // page} huge pages of {hugepages}, {_free_hugepages(page)} are free",
        f"write the number of pages to {pool} (or the kernel's hugepages= option), check the container's hugetlb "
        "limit, or set l2.hugepages to off",
    )


def _free_hugepages(page: int) -> int:
    return read_int(Path(f"/sys/kernel/mm/hugepages/hugepages-{page >> 10}kB/free_hugepages")) or 0

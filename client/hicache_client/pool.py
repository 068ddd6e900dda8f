"""Memory that an engine shares with the daemon: anonymous files with a size that nobody can change."""

import errno
import fcntl
import mmap
import os
import weakref

from hicache_client.memory import memory_bound

MADV_POPULATE_WRITE = 23  # Linux 5.14; not named by Python 3.11's mmap
PAGE_BYTES = 4096
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed_memfd(name: str, size_bytes: int) -> int:
    """A memfd of exactly `size_bytes`, sealed: a file that shrank under a mapping would fault the daemon."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


class SharedPool:
    """An engine's L1 pool: `buffer` to work in, `fd` to hand out. Freed when the last mapping goes."""

    def __init__(self, size_bytes: int, *, pretouch: bool = False) -> None:
        """Raises `ValueError` for a size below 1, `OSError` (ENOMEM) when the machine or the cgroup has less.

        `pretouch` takes the pages now (3 µs each) instead of at their first use.
        """
        if size_bytes < 1:
            raise ValueError(f"size_bytes must be positive, got {size_bytes}")
        bound = memory_bound()
        if size_bytes > bound.bytes:  # touching it would have the kernel kill the engine
            text = f"an L1 pool of {size_bytes:,} bytes is more than the {bound.bytes:,} bytes left of {bound.what}"
            raise OSError(errno.ENOMEM, text)
        self.size_bytes = size_bytes
        self.fd = sealed_memfd("hicache-l1", size_bytes)
        try:
            self._map = mmap.mmap(self.fd, size_bytes, mmap.MAP_SHARED)
        except BaseException:
            os.close(self.fd)
            raise
        self._close_fd = weakref.finalize(self, os.close, self.fd)  # also if nobody calls `close`
        self._close_fd.atexit = False
        if pretouch:
            self._pretouch()
        self.buffer = memoryview(self._map)

    def close(self) -> None:
        """Give the descriptor and our mapping back. Arrays made from `buffer` keep the memory alive until
        they go themselves. Idempotent."""
        self._close_fd()
        self.fd = -1
        try:
            self.buffer.release()
            self._map.close()
        except BufferError:  # somebody still holds a view; the mapping goes with the last of them
            return

    def _pretouch(self) -> None:
        try:
            self._map.madvise(MADV_POPULATE_WRITE)
        except OSError:  # older kernel
            for offset in range(0, self.size_bytes, PAGE_BYTES):
                self._map[offset] = 0

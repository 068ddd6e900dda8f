"""Memory that an engine shares with the daemon: anonymous files with a size that nobody can change.

pool ─sever─► the same bytes at the same addresses, in another file
              whoever holds the former one goes on with what nobody sees any more
"""

import errno
import fcntl
import os
import weakref
from collections.abc import Iterator

from hicache_client.mapping import Mapping
from hicache_client.memory import memory_bound

PAGE_BYTES = 4096
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PIECE_BYTES = 64 << 20


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


class Backing:
    """One file behind a pool, as those see it that wait for writes of others to it.

    `leaving`: its bytes are being taken elsewhere, or were: what is written to it now may not arrive. It stays set.
    `severed`: the pool shows another file: what is written to this one never arrives.
    """

    __slots__ = ("leaving", "severed")

    def __init__(self) -> None:
        self.leaving = False
        self.severed = False


class SharedPool:
    """An engine's L1 pool: `buffer` to work in, `fd` to hand out. Freed when the last view of it goes.

    `address` is where `buffer` begins, a multiple of the page size. It, `buffer` and the number of `fd` stay the same
    for the life of the pool; `backing` is another object after each `sever`. Read it before `fd`.
    """

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
            self._mapping = Mapping(self.fd, size_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self._close_fd = weakref.finalize(self, os.close, self.fd)  # also if nobody calls `close`
        self._close_fd.atexit = False
        self.address = self._mapping.address
        self.buffer = self._mapping.buffer
        self.backing = Backing()
        if pretouch:
            self._pretouch()

    def close(self) -> None:
        """Give the descriptor and our view of the memory back; `buffer` is empty from then on. Arrays and tensors
        made from it keep the memory alive until they go themselves. Idempotent."""
        self._close_fd()
        self.fd = -1
        self.buffer = self._mapping.buffer = memoryview(b"")

    def sever(self) -> None:
        """Move the bytes to fresh memory under the same addresses, so that nobody else can write to them any more.

        For an engine that must go on while the daemon may still be writing: it was stopped in the middle of a load,
        say. Views stay as they are; what the daemon has yet to write goes to the former memory, which is freed when
        the daemon lets go of it. Every load and store that was not seen to have ended has `failed` from here on, and
        is `settled`. The client notices and registers the new memory with its next call (`reattach` does it sooner).

        Nobody in this process may write to the pool meanwhile: that write could be lost. Takes the time of copying
        what was ever touched, and that much memory more. Not for several threads at once, nor beside `close`.

        Raises `OSError`, and nothing has changed: ENOMEM when the machine or the cgroup has less memory left than
        is to be copied. Raises `ValueError` for a closed pool."""
        if self.fd < 0:
            raise ValueError("the pool is closed")
        needed, bound = os.fstat(self.fd).st_blocks * 512, memory_bound()
        if needed > bound.bytes:
            text = f"moving the {needed:,} bytes in use of an L1 pool takes more than the {bound.bytes:,} bytes left"
            raise OSError(errno.ENOMEM, f"{text} of {bound.what}")
        former, fresh = self.backing, sealed_memfd("hicache-l1", self.size_bytes)
        try:
            former.leaving = True  # before the first byte: a load that ends from here on may miss the copy
            try:
                self._copy_to(fresh)
                self._mapping.show(fresh)
            except OSError:  # nothing else: after an interrupt nobody knows which file is shown
                former.leaving = False
                raise
            former.severed = True
            os.dup2(fresh, self.fd, inheritable=False)  # at once: the number never is another file's
            self.backing = Backing()
        finally:
            os.close(fresh)

    def _copy_to(self, fresh: int) -> None:
        """By `pwrite`, which reports a lack of memory where a write to a mapping would fault."""
        for at, end in _touched(self.fd, self.size_bytes):
            done = at
            while done < end:
                done += os.pwrite(fresh, self.buffer[done : min(end, done + PIECE_BYTES)], done)

    def _pretouch(self) -> None:
        try:
            self._mapping.populate()
        except OSError:  # older kernel
            for offset in range(0, self.size_bytes, PAGE_BYTES):
                self.buffer[offset] = 0


def _touched(fd: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges [low, high) of a file that take memory; the rest was never written and reads as zeroes."""
    low = 0
    while low < size_bytes:
        try:
            low = os.lseek(fd, low, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # none from here to the end
                return
            raise
        high = os.lseek(fd, low, os.SEEK_HOLE)
        yield low, high
        low = high

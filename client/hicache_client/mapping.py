"""Shared memory at addresses that stay: what mmap.mmap is, but another file can be shown at the same place.

Python's mmap object keeps a descriptor of its own, unmaps its addresses when it goes, and cannot map over them.
"""

import ctypes
import mmap
import os
import weakref

MAP_FIXED = 0x10
MADV_POPULATE_WRITE = 23  # Linux 5.14


class Mapping:
    """`size` bytes of a file, shared and writable, at a page-aligned `address`.

    Unmapped when `buffer` and the last view made from it have gone, torch's and numpy's included.
    """

    def __init__(self, fd: int, size: int) -> None:
        """Raises OSError. `fd` stays the caller's and may be closed."""
        libc = _libc()
        self.size = size
        self.address = _map(libc, None, size, fd)
        memory = (ctypes.c_ubyte * size).from_address(self.address)
        end = weakref.finalize(memory, libc.munmap, self.address, size)
        end.atexit = False  # a view may be used to the very end
        self.buffer = memoryview(memory).cast("B")

    def show(self, fd: int) -> None:
        """From now on the same addresses are `fd`'s first `size` bytes, for every view at once. Raises OSError."""
        _map(_libc(), self.address, self.size, fd)

    def populate(self) -> None:
        """Take all pages now. Raises OSError (EINVAL on a kernel that is too old)."""
        if _libc().madvise(self.address, self.size, MADV_POPULATE_WRITE):
            raise _error()


def _map(libc: ctypes.CDLL, address: int | None, size: int, fd: int) -> int:
    flags = mmap.MAP_SHARED | (MAP_FIXED if address is not None else 0)
    got = libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if got is None or got == ctypes.c_void_p(-1).value:
        raise _error()
    assert isinstance(got, int)
    return got


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc

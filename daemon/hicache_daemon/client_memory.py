"""Memory that a client lends: mapped only after it is sure that touching it cannot kill the daemon."""

import ctypes
import fcntl
import mmap
import os
import stat
import weakref

import numpy as np

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.copy.base import Bytes


class ClientMemory:
    """A client's memfd, mapped shared and writable. `bytes` is a uint8 view of shape (size,).

    A file that its owner may shrink turns the next touch beyond its end into SIGBUS, here. So only a memfd
    sealed against shrinking is mapped, and at most as many bytes as it has.
    """

    def __init__(self, fd: int, size: int, what: str) -> None:
        """Raises `HiCacheError(BAD_SPEC)` for memory that is not safe, `NO_SPACE` when it cannot be mapped.

        `fd` stays the caller's; `what` names the memory in errors."""
        _check(fd, size, what)
        try:
            self._map = _Mapping(fd, size)
        except PermissionError as error:
            raise HiCacheError(
                ErrorCode.BAD_SPEC, f"{what} is not writable: {error.strerror}", "open it for writing, unsealed"
            ) from error
        except OSError as error:
            raise HiCacheError(
                ErrorCode.NO_SPACE,
                f"{what} of {size} bytes cannot be mapped: {error.strerror}",
                "raise the daemon's address space limit (ulimit -v), or reserve more huge pages",
            ) from error
        self._bytes: Bytes | None = self._map.view()

    @property
    def bytes(self) -> Bytes:
        if self._bytes is None:
            raise HiCacheError(ErrorCode.UNKNOWN_SESSION, "the session's memory is gone")
        return self._bytes

    def close(self) -> None:
        """Unmap. Raises BufferError if a view is still alive somewhere: a bug, and better loud than a fault."""
        self._bytes = None
        self._map.close()


class _Mapping:
    """What mmap.mmap is, without the duplicate of the descriptor that it keeps: two per session would be spent on
    nothing. Every view keeps the object behind it alive, and so is known here."""

    def __init__(self, fd: int, size: int) -> None:
        """Raises OSError."""
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._address, self._size = address, size
        self._buffer: ctypes.Array[ctypes.c_ubyte] | None = (ctypes.c_ubyte * size).from_address(address)

    def view(self) -> Bytes:
        """All of it: uint8 of shape (size,)."""
        assert self._buffer is not None
        return np.ctypeslib.as_array(self._buffer)

    def close(self) -> None:
        """Unmap; raises BufferError while a view is alive. Idempotent."""
        if self._buffer is not None:
            alive = weakref.ref(self._buffer)
            self._buffer = None
            if (buffer := alive()) is not None:
                self._buffer = buffer
                raise BufferError("a view of the client's memory is still alive")
        address, self._address = self._address, 0
        if address and _libc.munmap(address, self._size):
            raise OSError(ctypes.get_errno(), "munmap")


_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _check(fd: int, size: int, what: str) -> None:
    remedy = "create it with memfd_create(MFD_ALLOW_SEALING), ftruncate it, add F_SEAL_SHRINK"
    try:
        info = os.fstat(fd)
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise HiCacheError(ErrorCode.BAD_SPEC, f"{what} is not a memfd: {error.strerror}", remedy) from error
    if not stat.S_ISREG(info.st_mode):
        raise HiCacheError(ErrorCode.BAD_SPEC, f"{what} is not a memfd", remedy)
    if size <= 0 or info.st_size < size:
        raise HiCacheError(ErrorCode.BAD_SPEC, f"{what}: {size} bytes declared, the memfd has {info.st_size}", remedy)
    if not seals & fcntl.F_SEAL_SHRINK:
        raise HiCacheError(ErrorCode.BAD_SPEC, f"{what} is not sealed against shrinking", remedy)

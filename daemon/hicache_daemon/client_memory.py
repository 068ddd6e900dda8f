"""Memory that a client lends: mapped only after it is sure that touching it cannot kill the daemon."""

import fcntl
import mmap
import os
import stat

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
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
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
        self._bytes: Bytes | None = np.frombuffer(self._map, dtype=np.uint8, count=size)

    @property
    def bytes(self) -> Bytes:
        if self._bytes is None:
            raise HiCacheError(ErrorCode.UNKNOWN_SESSION, "the session's memory is gone")
        return self._bytes

    def close(self) -> None:
        """Unmap. Raises BufferError if a view is still alive somewhere: a bug, and better loud than a fault."""
        self._bytes = None
        self._map.close()


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

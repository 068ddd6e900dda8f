"""What the filesystem under the store is, and the two calls that Python's os module lacks."""

import contextlib
import ctypes
import errno
import os
from pathlib import Path

from hicache.base.errors import ErrorCode, HiCacheError

_KEEP_SIZE, _PUNCH_HOLE = 1, 2

# LMDB's lock file and mmap coherence, flock and rename need a local filesystem that honours fdatasync.
_UNSAFE = {
    "nfs": "locks and mmap are not coherent over NFS",
    "nfs4": "locks and mmap are not coherent over NFS",
    "cifs": "locks and mmap are not coherent over SMB",
    "smb3": "locks and mmap are not coherent over SMB",
    "9p": "mmap is not coherent over 9p",
    "ceph": "one daemon's disk tier must be local",
    "glusterfs": "one daemon's disk tier must be local",
    "lustre": "one daemon's disk tier must be local",
    "overlay": "a container's overlay is copied up, slow, and gone with the container",
    "aufs": "a container's overlay is copied up, slow, and gone with the container",
}


def _unescape(field: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, char)
    return field


def filesystem_of(path: Path, mountinfo: str | None = None) -> str:
    """Type of the filesystem that holds `path`, as mountinfo names it ("ext4", "overlay" …); "" if unknown.

    statfs(2) would give a magic number and is not in Python's os module; mountinfo gives the name itself. Of
    several mounts over one point the last one counts.
    """
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return ""
    target = Path(os.path.realpath(path))
    best, found = -1, ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        point = Path(_unescape(left.split()[4]))
        depth = len(point.parts)
        if depth >= best and (target == point or point in target.parents):
            best, found = depth, right.split()[0]
    return found


def why_unsafe(kind: str) -> str:
    """Why a filesystem of this type is known to break the store; "" if it is not."""
    return _UNSAFE.get(kind) or ("its semantics depend on the FUSE server" if kind.startswith("fuse") else "")


def check_filesystem(path: Path, allow_unsafe: bool) -> str:
    """The filesystem's type. Raises `HiCacheError(STORE)` for one that is known to break the store."""
    kind = filesystem_of(path)
    reason = why_unsafe(kind)
    if reason and not allow_unsafe:
        raise HiCacheError(
            ErrorCode.STORE,
            f"{path} is on {kind}: {reason}",
            "set l3.path to a directory on a local disk (ext4, xfs)",
        )
    return kind


def free_bytes(path: Path) -> int:
    """Bytes that an unprivileged process could still write on this filesystem."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


class _Libc:
    """`fallocate(2)`: os.posix_fallocate can neither punch nor keep the size, and emulates by writing."""

    def __init__(self) -> None:
        self._call = ctypes.CDLL(None, use_errno=True).fallocate
        self._call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

    def fallocate(self, fd: int, mode: int, offset: int, size: int) -> bool:
        """False if the filesystem cannot; raises OSError for every other failure."""
        while self._call(fd, mode, offset, size) != 0:
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            if code in (errno.EOPNOTSUPP, errno.ENOSYS):
                return False
            raise OSError(code, os.strerror(code))
        return True


def reserve(fd: int, offset: int, size: int) -> None:
    """Back `size` bytes from `offset` with blocks and extend the file over them.

    Where the filesystem cannot preallocate the file only grows, sparse: a full disk then shows at the write.
    Raises OSError (ENOSPC …).
    """
    if not _Libc().fallocate(fd, 0, offset, size) and os.fstat(fd).st_size < offset + size:
        os.ftruncate(fd, offset + size)


def punch(fd: int, offset: int, size: int) -> bool:
    """Give blocks back to the filesystem; False where it cannot. Raises OSError."""
    return _Libc().fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, size)


class Reserve:
    """Keeps `size` bytes backed past the end of a growing file, without changing its length."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._size, self._reserved_to = fd, size, 0

    def top_up(self) -> None:
        """Cheap unless the file has grown into half of the reserve. A full disk is no error: it stays smaller."""
        with contextlib.suppress(OSError):
            end = os.fstat(self._fd).st_size
            if end + self._size // 2 > self._reserved_to:
                _Libc().fallocate(self._fd, _KEEP_SIZE, end, self._size)
                self._reserved_to = end + self._size

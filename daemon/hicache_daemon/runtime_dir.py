"""The directory that holds the daemon's sockets: private, locked by one daemon at a time."""

import fcntl
import os
import stat
from pathlib import Path

from hicache.base.errors import ErrorCode, HiCacheError
from hicache_daemon.folders import why_unusable

CONTROL_NAME = "control.sock"
LIFELINE_NAME = "lifeline.sock"
EVENTS_NAME = "events.sock"
REPLAY_NAME = "replay.sock"
NUMBERS_NAME = "events.next"
LOCK_NAME = "hicached.lock"
MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux, less its terminator
HIDDEN_SUFFIX = ".new"  # of a socket that is not open yet
_LONGEST_NAME = CONTROL_NAME + HIDDEN_SUFFIX


class RuntimeDir:
    """An owned runtime directory. `close()` removes the sockets and gives the lock back.

    The lock is an flock on a file that stays: deleting it would let a third daemon lock a new inode while the
    second still waits on the old one. The kernel drops it with the process, so kill -9 leaves no stale lock.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @property
    def control(self) -> Path:
        return self.path / CONTROL_NAME

    @property
    def lifeline(self) -> Path:
        return self.path / LIFELINE_NAME

    @property
    def events(self) -> Path:
        return self.path / EVENTS_NAME

    @property
    def replay(self) -> Path:
        return self.path / REPLAY_NAME

    @property
    def numbers(self) -> Path:
        """Stays when the daemon ends: what follows in KV events goes on from there."""
        return self.path / NUMBERS_NAME

    @classmethod
    def claim(cls, path: Path) -> "RuntimeDir":
        """Create, check and lock the directory and clear stale sockets.

        Raises `HiCacheError(CONFIG)` if it is not ours alone, if its path is too long for a socket, or if
        another daemon holds it.
        """
        _check_length(path / _LONGEST_NAME)
        try:
            path.mkdir(mode=0o750, parents=True, exist_ok=True)
            if _check_ownership(path) & 0o027:
                path.chmod(0o750)  # group may not write, others nothing: sockets in it are then as private
            lock_fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        except OSError as error:
            raise HiCacheError(
                ErrorCode.CONFIG,
                f"server.runtime_dir {path} is not usable: {error.strerror}",
                "set server.runtime_dir to a directory that this user may create and write",
            ) from error
        _lock(lock_fd, path)
        claimed = cls(path, lock_fd)
        claimed._remove_sockets()  # only after the lock is ours: a live daemon's sockets are never touched
        return claimed

    def close(self) -> None:
        """Remove the sockets, then unlock. Idempotent."""
        if self._lock_fd >= 0:
            self._remove_sockets()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _remove_sockets(self) -> None:
        for name in (CONTROL_NAME, LIFELINE_NAME, EVENTS_NAME, REPLAY_NAME):
            (self.path / name).unlink(missing_ok=True)


def check_usable(path: Path) -> None:
    """Raise `HiCacheError(CONFIG)` for what `claim` would refuse at any time; changes and locks nothing."""
    _check_length(path / _LONGEST_NAME)
    if os.path.lexists(path):
        _check_ownership(path)
    reason = why_unusable(path)
    if reason:
        raise HiCacheError(
            ErrorCode.CONFIG,
            f"server.runtime_dir {path} is not usable: {reason}",
            "set server.runtime_dir to a directory that this user may create and write",
        )


def _check_length(path: Path) -> None:
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise HiCacheError(
            ErrorCode.CONFIG,
            f"server.runtime_dir: {path} is longer than the {MAX_SOCKET_PATH_BYTES} bytes of a unix socket path",
            "choose a shorter directory",
        )


def _check_ownership(path: Path) -> int:
    """The mode of a directory that is ours."""
    info = os.stat(path, follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode):
        raise HiCacheError(
            ErrorCode.CONFIG,
            f"server.runtime_dir {path} is not a directory (or is a link)",
            "remove it, or set server.runtime_dir to another directory",
        )
    if info.st_uid != os.getuid():
        raise HiCacheError(
            ErrorCode.CONFIG,
            f"server.runtime_dir {path} belongs to uid {info.st_uid}, this daemon runs as {os.getuid()}",
            "remove it, or set server.runtime_dir to another directory",
        )
    return info.st_mode


def _lock(lock_fd: int, path: Path) -> None:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.pread(lock_fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock_fd)
        raise HiCacheError(
            ErrorCode.CONFIG,
            f"another hicached (pid {pid}) already serves {path}",
            "stop it first, or give this one another server.runtime_dir",
        ) from error
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)

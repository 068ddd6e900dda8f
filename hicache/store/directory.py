"""The store's directory: whose it is, which format, and who has it open.

    manifest.json   format, version, uuid, when created, a check of the secret; written once, first of all
    lock            held with flock by the one process that has the store open; its text names the pid
    index/          LMDB environment of the rows
    frames.seg      the frames

Nothing in a directory that is not ours, or of another version, is changed: the checks come before the first
write. The manifest is written before anything else, so a crash while a store is being made leaves either an
empty directory (and perhaps a lock) or a store without records.
"""

import contextlib
import fcntl
import json
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.store import medium
from hicache.store.health import Health
from hicache.store.record import FORMAT_VERSION, Seal

FORMAT = "hicache-l3"
MANIFEST = "manifest.json"
_MANIFEST_NEW = "manifest.json.new"
LOCK = "lock"
INDEX = "index"
FRAMES = "frames.seg"


def _error(text: str, remedy: str) -> HiCacheError:
    return HiCacheError(ErrorCode.STORE, text, remedy)


@dataclass(frozen=True, slots=True)
class StoreDirectory:
    """A directory that this process holds. `release` gives it up."""

    path: Path
    seal: Seal
    filesystem: str
    lock_fd: int

    @property
    def index(self) -> Path:
        return self.path / INDEX

    @property
    def frames(self) -> Path:
        return self.path / FRAMES

    def release(self) -> None:
        os.close(self.lock_fd)


def claim(path: Path, secret: bytes | None, allow_unsafe_fs: bool) -> StoreDirectory:
    """Make or open the store's directory and lock it.

    Raises `HiCacheError(STORE)`: unsafe filesystem, a foreign directory, another version or secret, or
    another process that has it open.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        kind = medium.check_filesystem(path, allow_unsafe_fs)
        _refuse_foreign(path)
        lock_fd = _lock(path)
    except OSError as error:
        raise _error(f"cannot open {path}: {error.strerror}", "check l3.path and its permissions") from error
    try:
        seal = _read_manifest(path, secret) or _make_manifest(path, secret)
    except OSError as error:
        os.close(lock_fd)
        raise _error(f"cannot write {path / MANIFEST}: {error.strerror}", "free space or check rights") from error
    except HiCacheError:
        os.close(lock_fd)
        raise
    return StoreDirectory(path, seal, kind, lock_fd)


def _refuse_foreign(path: Path) -> None:
    names = set(os.listdir(path))
    if MANIFEST in names:
        _read_version(path)
    elif names - {LOCK, _MANIFEST_NEW}:
        raise _error(
            f"{path} is not empty and holds no {MANIFEST}: not a store of hicache",
            "set l3.path to an empty directory; nothing was changed here",
        )


def _lock(path: Path) -> int:
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise _error(
            f"{path} is in use by process {holder}", "stop that daemon, or give this one its own l3.path"
        ) from None
    # ENOSPC must not keep a full store from being opened for reading; the pid is only information.
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _read_version(path: Path) -> dict[str, object]:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        form, version = manifest["format"], manifest["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise _error(
            f"{path / MANIFEST} cannot be read as a manifest", "move the directory away; nothing was changed"
        ) from error
    if form != FORMAT or version != FORMAT_VERSION:
        raise _error(
            f"{path} holds format {form!r} version {version!r}; this hicache reads {FORMAT!r} {FORMAT_VERSION}",
            "run the release that wrote it, or move the directory away: it is a cache and fills again",
        )
    return dict(manifest)


def _read_manifest(path: Path, secret: bytes | None) -> Seal | None:
    if not (path / MANIFEST).exists():
        return None
    manifest = _read_version(path)
    try:
        seal = Seal.derive(uuid.UUID(str(manifest["uuid"])).bytes, secret)
        check = manifest["secret_check"]
    except (ValueError, KeyError) as error:
        raise _error(f"{path / MANIFEST} lacks a valid uuid or secret_check", "move the directory away") from error
    if check != seal.secret_check():
        raise _error(
            f"{path} was written under another secret: none of its records could be verified",
            "restore the file named by identity.secret_file, or move the directory away",
        )
    return seal


def _make_manifest(path: Path, secret: bytes | None) -> Seal:
    seal = Seal.derive(uuid.uuid4().bytes, secret)
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "uuid": seal.uuid.hex(),
        "created_unix_s": int(time.time()),
        "secret_check": seal.secret_check(),
    }
    new = path / _MANIFEST_NEW
    with new.open("wb") as file:
        file.write(json.dumps(manifest, indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
    new.rename(path / MANIFEST)
    sync_directory(path)
    return seal


def sync_directory(path: Path) -> None:
    """Make names created in `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def look_for_files(directory: StoreDirectory, frames_fd: int, index_fd: int, health: Health) -> None:
    """Turn the store off if its files were deleted or replaced under it.

    What is written to such a file no later start can find, and the disk it takes nobody can see."""
    if health.off:
        return
    for path, fd in ((directory.frames, frames_fd), (directory.index / "data.mdb", index_fd)):
        ours = os.fstat(fd)
        try:
            there = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            there = None
        except OSError:  # a failing medium says nothing of whether it is there; reads and writes will tell
            continue
        if not ours.st_nlink or there is None or (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            health.turn_off(f"folder is gone: {path} was deleted or replaced; restart the daemon")
            return

"""The secret that keys page identities: configured, kept beside L3, or drawn anew for each boot."""

import os
import stat
from pathlib import Path

from hicache.base.errors import ErrorCode, HiCacheError

SECRET_BYTES = 32
SECRET_NAME = "secret"
RECORDS_NAME = "records"  # folder of the store itself, below l3.path


def load_secret(secret_file: Path | None, l3_path: Path | None) -> bytes:
    """32 bytes: those of `secret_file`; else of `{l3_path}/secret`, made at the first start; else random.

    Records in L3 are found only under the secret that wrote them, so it must live as long as they do; without
    L3 nothing outlives the boot and a fresh one is the safest. Raises `HiCacheError(CONFIG)`.
    """
    found = find_secret(secret_file, l3_path)
    if found is not None:
        return found
    if l3_path is None:
        return os.urandom(SECRET_BYTES)
    _create(l3_path / SECRET_NAME)
    return _read(l3_path / SECRET_NAME, "l3.path")


def find_secret(secret_file: Path | None, l3_path: Path | None) -> bytes | None:
    """The secret that is there; None if one is still to be made. Changes nothing. Raises `HiCacheError(CONFIG)`."""
    if secret_file is not None:
        return _read(secret_file, "identity.secret_file")
    if l3_path is None:
        return None
    path = l3_path / SECRET_NAME
    if path.exists():
        return _read(path, "l3.path")
    if (l3_path / RECORDS_NAME).exists():
        raise HiCacheError(
            ErrorCode.CONFIG,
            f"l3.path: {l3_path} holds records, but the secret that keys them is gone from {path}",
            "restore it, set identity.secret_file, or move the directory away: it is a cache and fills again",
        )
    return None


def _parse(content: bytes) -> bytes | None:
    """Exactly 32 bytes are the secret itself; else it must be 64 hex digits, with or without a newline."""
    if len(content) == SECRET_BYTES:
        return content
    digits = content.rstrip(b"\r\n")
    if len(digits) != 2 * SECRET_BYTES:
        return None
    try:
        secret = bytes.fromhex(digits.decode("ascii"))
    except ValueError:
        return None
    return secret if len(secret) == SECRET_BYTES else None  # fromhex skips spaces


def _read(path: Path, key: str) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(4 * SECRET_BYTES)
    except OSError as error:
        raise HiCacheError(
            ErrorCode.CONFIG,
            f"{key}: cannot read {path}: {error.strerror}",
            "make it a file that the daemon's user may read, mode 0600",
        ) from error
    secret = _parse(content)
    if secret is None:
        raise HiCacheError(
            ErrorCode.CONFIG,
            f"{key}: {path} must hold exactly {SECRET_BYTES} random bytes, or {2 * SECRET_BYTES} hex digits",
            f"make one with: (umask 077; head -c {SECRET_BYTES} /dev/urandom > {path})",
        )
    if stat.S_IMODE(mode) & 0o077:
        raise HiCacheError(
            ErrorCode.CONFIG,
            f"{key}: {path} may be read by others (mode {stat.S_IMODE(mode):04o})",
            f"chmod 600 {path}",
        )
    return secret


def _create(path: Path) -> None:
    """Write a new secret whole or not at all: a half-written one would lock the records out for good."""
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        temporary = path.with_name(f".{SECRET_NAME}.{os.getpid()}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, os.urandom(SECRET_BYTES).hex().encode() + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise HiCacheError(
            ErrorCode.CONFIG,
            f"l3.path: cannot create {path}: {error.strerror}",
            "set l3.path to a folder on a local disk that the daemon's user may write",
        ) from error

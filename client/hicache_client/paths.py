"""Where the daemon's sockets lie."""

import os
from collections.abc import Mapping
from pathlib import Path

from hicache.base.errors import ErrorCode, HiCacheError

CONTROL_NAME = "control.sock"
LIFELINE_NAME = "lifeline.sock"


def runtime_dir(configured: Path | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """`configured`, else `$HICACHE_RUNTIME_DIR`, else `$XDG_RUNTIME_DIR/hicache`, else `/tmp/hicache-$UID`.

    Raises `HiCacheError(DENIED)` if the last, which any user could have made first, is not ours. A directory
    that was named on purpose may belong to the daemon's own user; its mode says who may connect.
    """
    env = os.environ if environ is None else environ
    if configured is not None:
        return configured
    if env.get("HICACHE_RUNTIME_DIR"):
        return Path(env["HICACHE_RUNTIME_DIR"])
    if env.get("XDG_RUNTIME_DIR"):
        return Path(env["XDG_RUNTIME_DIR"]) / "hicache"
    fallback = Path(f"/tmp/hicache-{os.getuid()}")
    _check_ours(fallback)
    return fallback


def _check_ours(path: Path) -> None:
    try:
        owner = os.stat(path, follow_symlinks=False).st_uid
    except FileNotFoundError:
        return  # no daemon yet
    if owner != os.getuid():
        raise HiCacheError(
            ErrorCode.DENIED,
            f"runtime directory {path} belongs to uid {owner}, expected {os.getuid()}",
            "remove it, or set HICACHE_RUNTIME_DIR for daemon and engine alike",
        )

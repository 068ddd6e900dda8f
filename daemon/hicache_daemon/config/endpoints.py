"""Where KV events may be published: what is wrong with an endpoint, told before a start would find out."""

import ipaddress
import os
import stat
from pathlib import Path

from hicache_daemon.folders import why_unusable
from hicache_daemon.runtime_dir import HIDDEN_SUFFIX, MAX_SOCKET_PATH_BYTES

MAX_PATH_BYTES = MAX_SOCKET_PATH_BYTES - len(HIDDEN_SUFFIX)


def fault_of(endpoint: str) -> tuple[str, str] | None:
    """What makes an endpoint unusable, and what to do; None if nothing is seen."""
    if endpoint.startswith("tcp://"):
        host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            return f"{endpoint} is not tcp://host:port", "as in tcp://127.0.0.1:5557"
        return None
    if not endpoint.startswith("ipc://"):
        return f"{endpoint} begins with neither ipc:// nor tcp://", "as in tcp://127.0.0.1:5557"
    path = Path(endpoint.removeprefix("ipc://"))
    if not path.is_absolute():  # ipc://@name as well: such sockets know no permissions
        return f"{endpoint} has no absolute path", "as in ipc:///run/hicache/events.sock"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        return f"{path} is too long for a unix socket", f"use at most {MAX_PATH_BYTES} bytes"
    if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
        return f"{path} is there and is not a socket", "choose another name"
    reason = why_unusable(path.parent) if path.parent.is_dir() else f"{path.parent} is not a folder"
    return (reason, "choose a folder that the daemon's user may write") if reason else None


def is_local(endpoint: str) -> bool:
    """Can only this machine connect? Names other than localhost count as addresses of others."""
    if not endpoint.startswith("tcp://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

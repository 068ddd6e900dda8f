"""Ask a daemon about itself without a session: for status pages and scripts."""

import time
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.limits import Limits
from hicache.protocol.messages import Busy, Describe, Description, Error, Refuse
from hicache.protocol.wire import decode_daemon, encode
from hicache_client.buffers import error_of
from hicache_client.link import open_dealer
from hicache_client.paths import CONTROL_NAME, runtime_dir

What = Literal["status", "config", "l2", "l3", "sessions"]


def describe(what: What = "status", directory: Path | None = None, timeout_s: float = 2.0) -> dict[str, Any]:
    """The daemon's state as plain data. `directory`: see `paths.runtime_dir`.

    Raises `HiCacheError`: TIMEOUT when no daemon answers, else the daemon's own.
    """
    path = runtime_dir(directory) / CONTROL_NAME
    with zmq.Context() as context, open_dealer(context, path) as sock:
        deadline = time.monotonic() + timeout_s
        frames = encode(Describe(what), 1, 0, 0)
        if not sock.poll(_left_ms(deadline), zmq.POLLOUT):
            raise _no_answer(path, timeout_s)
        sock.send_multipart(frames, zmq.NOBLOCK)
        if not sock.poll(_left_ms(deadline), zmq.POLLIN):
            raise _no_answer(path, timeout_s)
        reply = decode_daemon(sock.recv_multipart(zmq.NOBLOCK), Limits()).message
    if isinstance(reply, Error | Busy | Refuse):
        raise error_of(reply)
    if not isinstance(reply, Description):
        raise HiCacheError(ErrorCode.MALFORMED, f"{type(reply).__name__} came as answer to Describe")
    try:
        return msgspec.msgpack.decode(reply.data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise HiCacheError(ErrorCode.MALFORMED, f"the description is not a map: {error}") from error


def _left_ms(deadline: float) -> int:
    return max(0, round((deadline - time.monotonic()) * 1000))


def _no_answer(path: Path, timeout_s: float) -> HiCacheError:
    return HiCacheError(
        ErrorCode.TIMEOUT,
        f"no daemon answered at {path} within {timeout_s:g} s",
        "start it with `hicache serve`, or set HICACHE_RUNTIME_DIR to where it runs",
    )

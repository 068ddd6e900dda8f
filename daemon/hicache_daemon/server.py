"""The control socket, and how a private ZeroMQ socket is bound.

A ROUTER on `ipc://`, driven by the loop's `add_reader` on the socket's own descriptor. That descriptor is
edge-triggered: it becomes readable when something *changes*, and any call on the socket may consume the edge.
So each wake-up reads until the socket says EAGAIN, and each send looks at EVENTS afterwards.

    fd readable ─► drain: at most BATCH messages ─► more? call_soon(drain) : wait for the next edge
    send ─► EVENTS has POLLIN? call_soon(drain)

Sends never block and never queue here: libzmq's pipe of SEND_DEPTH messages per peer is the bounded outgoing
queue. A peer that lets it fill up is told nothing more; `send` says so and its session is closed.
Connections come in one by one, and only while descriptors are left: see descriptors.py.
Frames beyond MAXMSGSIZE (twice the largest legal one, so that a moderately oversized message still gets a
typed answer) cut the connection inside libzmq.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import zmq

from hicache.base.errors import HiCacheError
from hicache.base.limits import Limits
from hicache_daemon.descriptors import Door
from hicache_daemon.runtime_dir import HIDDEN_SUFFIX

BATCH = 64  # messages per turn of the loop: threads' events get their turn in between
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 15_000
MIN_DEPTH = 4 * BATCH  # replies: a turn of the loop may write BATCH of them before libzmq's thread sends one
BACKLOG = 100  # connections that wait at the door

OnMessage = Callable[[bytes, list[bytes]], None]


class Sent(Enum):
    """What became of a reply."""

    OK = "ok"
    FULL = "the client does not read its replies"
    GONE = "the control connection is gone"


class Server:
    """Frames in, frames out; knows nothing of messages. All calls on the loop thread."""

    def __init__(self, path: Path, limits: Limits, on_message: OnMessage, log: Any) -> None:
        """`on_message(identity, frames)` is called per message; it must not raise."""
        self._log = log
        self._door: Door | None = None
        self._path = path
        self._limits = limits
        self._on_message = on_message
        self._max_frames = 2 + limits.buffers + 1  # one too many tells the decoder enough
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1
        self._draining = False

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind and start to read. Raises `OSError` or `zmq.ZMQError` if the path cannot be bound."""
        sock, depth = self._socket, max(4 * self._limits.requests_in_flight, MIN_DEPTH)
        options = {
            zmq.LINGER: 0,
            zmq.ROUTER_MANDATORY: 1,  # else a full or missing pipe swallows replies without a word
            zmq.SNDHWM: depth,
            zmq.RCVHWM: depth,
            zmq.MAXMSGSIZE: 2 * max(self._limits.buffer_bytes, self._limits.body_bytes),
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
        }
        for option, value in options.items():
            sock.setsockopt(option, value)
        self._door = bind_private(sock, self._path, self._log)
        if self._door is not None:
            self._door.open(loop)
        self._loop = loop
        self._fd = int(sock.getsockopt(zmq.FD))
        loop.add_reader(self._fd, self._drain)
        self._wake()  # an edge may have come between bind and add_reader

    def send(self, identity: bytes, frames: Sequence[Any]) -> Sent:
        """Hand a reply to the peer's pipe, or say why not; nothing is kept here. After `close` everybody is gone."""
        if self._loop is None:
            return Sent.GONE
        try:
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK)
            outcome = Sent.OK
        except zmq.Again:
            outcome = Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            outcome = Sent.GONE
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._wake()
        return outcome

    def close(self) -> None:
        """Stop reading and unbind. Replies not yet with the kernel are dropped. Idempotent."""
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None
            self._path.unlink(missing_ok=True)
        if self._door is not None:
            self._door.close()
            self._door = None
        self._socket.close(0)
        self._context.term()

    def _wake(self) -> None:
        if not self._draining and self._loop is not None:
            self._draining = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._draining = True  # sends from within on_message need not wake us
        for _ in range(BATCH):
            if self._loop is None:  # closed by a message
                return
            message = self._receive()
            if message is None:
                self._draining = False
                return
            self._on_message(*message)
        self._draining = False
        self._wake()

    def _receive(self) -> tuple[bytes, list[bytes]] | None:
        """The next message, cut after `_max_frames` frames; None if there is none.

        The parts of a message arrive together, so only the first receive can find nothing."""
        sock = self._socket
        try:
            identity = sock.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        frames: list[bytes] = []
        while sock.getsockopt(zmq.RCVMORE):
            frame = sock.recv()
            if len(frames) < self._max_frames:
                frames.append(frame)
        return identity, frames


def bind_private(sock: "zmq.Socket[bytes]", path: Path, log: Any) -> Door | None:
    """Bind to `ipc://path`, a file that is ours alone. The caller opens the door, and removes the file in the end:
    libzmq leaves that of a listener which it was given. Raises `OSError` or `zmq.ZMQError`."""
    hidden = path.with_name(path.name + HIDDEN_SUFFIX)
    listener = _listen(hidden)
    sock.setsockopt(zmq.USE_FD, listener)  # from the bind on libzmq's to close
    sock.bind(f"ipc://{hidden}")
    door = None
    try:
        door = Door(listener, log)
    except HiCacheError as error:  # another libzmq: better a daemon that a flood can end than none
        log.warning("control.no_door", reason=error.message, remedy=error.remedy)
    hidden.rename(path)  # only now may anybody connect
    return door


def _listen(path: Path) -> int:
    """A listening socket's descriptor; the file is ours alone, also if the directory is shared with a group."""
    path.unlink(missing_ok=True)
    mask = os.umask(0o177)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sock:
            sock.bind(str(path))
            sock.listen(BACKLOG)
            return sock.detach()
    finally:
        os.umask(mask)

"""One session with one daemon: the sockets, the open requests, the fences and the leases. Never blocks.

    request   OPEN ─reply─► CLOSED                     (Load, Store, Prefetch: Accepted, then Done)
              OPEN ─abandon─► ABANDONED ─reply─► CLOSED   (a late Match gives its lease back at once)
    link      UP ─lifeline EOF, other boot id, unknown session, nonsense─► `dead` names the reason

The client (aio.py, sync.py) does the waiting between calls of `drain` and `try_send`. With several threads it
serialises them; only `gone` and `leases` may be used from any thread.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import zmq

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.limits import Limits
from hicache.protocol.messages import (
    Accepted,
    Busy,
    ClientLimits,
    ClientMessage,
    DaemonMessage,
    Error,
    Match,
    Refuse,
    Release,
    Welcome,
)
from hicache.protocol.wire import Buffer, decode_daemon, encode
from hicache_client.fences import Fence, FenceArea
from hicache_client.leases import LeaseBook
from hicache_client.lifeline import Lifeline
from hicache_client.options import ClientStats

HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 15_000
CONNECT_TIMEOUT_MS = 5_000
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1_000

_log = logging.getLogger("hicache.client")


@dataclass(slots=True, eq=False)
class Pending:
    """One open request. `reply` is the first answer, `last` the one that closed it. `unwatched`: nobody waits for
    the first answer, so the link counts it if it is a refusal."""

    request_id: int
    message: ClientMessage
    fence: Fence | None = None
    reply: DaemonMessage | None = None
    last: DaemonMessage | None = None
    abandoned: bool = False
    unwatched: bool = False


def open_dealer(context: "zmq.Context[zmq.Socket[bytes]]", path: Path) -> "zmq.Socket[bytes]":
    """A DEALER that never waits, neither when it sends nor when it is closed.

    IMMEDIATE: without a connection a send says EAGAIN instead of queueing for a daemon that may never come.
    """
    sock = context.socket(zmq.DEALER)
    for option, value in {
        zmq.LINGER: 0,
        zmq.IMMEDIATE: 1,
        zmq.CONNECT_TIMEOUT: CONNECT_TIMEOUT_MS,
        zmq.RECONNECT_IVL: RECONNECT_MS,
        zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MS,
        zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
        zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
        zmq.MAXMSGSIZE: 2 * Limits().buffer_bytes,
    }.items():
        sock.setsockopt(option, value)
    sock.connect(f"ipc://{path}")
    return sock


class Link:
    """See the module. `dead` is empty while the session is up, else the reason of its end."""

    def __init__(
        self, sock: "zmq.Socket[bytes]", lifeline: Lifeline, fences: FenceArea, boot_id: int, epoch: int
    ) -> None:
        self.socket = sock
        self.lifeline = lifeline
        self.fences = fences
        self.boot_id = boot_id
        self.epoch = epoch
        self.dead = ""
        self.blocked = False  # the last send found no room
        self.silent = 0  # requests in a row that met their deadline without any reply
        self.proven = False  # a request other than Hello was answered
        self.limits: ClientLimits | None = None
        self.received = 0  # replies
        self.leases = LeaseBook()
        self.stats = ClientStats()
        self.on_progress: Callable[[], None] | None = None  # replies came, or the link died
        self._ids = count(1)
        self._open: dict[int, Pending] = {}
        self._to_return: list[int] = []  # the daemon's lease numbers
        self._decode_limits = Limits()

    # ---- requests ---------------------------------------------------------------------------------------

    def has_credit(self) -> bool:
        """Whether the daemon lets us open one more request."""
        return len(self._open) < (self.limits.requests_in_flight if self.limits else 1)

    def check_size(self, message: ClientMessage, buffers: Sequence[Buffer]) -> None:
        """Raise `HiCacheError(TOO_LARGE)` for what this daemon said it does not take: an oversized frame
        would otherwise cut the connection."""
        if self.limits is None:
            return
        tokens = getattr(message, "tokens_count", 0)
        if tokens > self.limits.tokens_per_request:
            raise HiCacheError(
                ErrorCode.TOO_LARGE, f"{tokens} tokens in one request, at most {self.limits.tokens_per_request}"
            )
        largest = max((memoryview(buffer).nbytes for buffer in buffers), default=0)
        if largest > self.limits.buffer_bytes:
            raise HiCacheError(
                ErrorCode.TOO_LARGE, f"a buffer of {largest} bytes, at most {self.limits.buffer_bytes}"
            )

    def try_send(
        self, message: ClientMessage, buffers: Sequence[Buffer], fence: Fence | None = None
    ) -> Pending | None:
        """Send now, or None if there is no credit or no room."""
        if self.dead or not self.has_credit():
            return None
        pending = Pending(next(self._ids), message, fence)
        frames = encode(message, pending.request_id, 0, self.epoch, buffers)
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.blocked = True
            return None
        except zmq.ZMQError as error:
            self.dead = f"the control socket failed: {error}"
            return None
        self.blocked = False
        self._open[pending.request_id] = pending
        return pending

    def abandon(self, pending: Pending) -> None:
        """Nobody waits for this reply. The credit stays spent until it comes: the daemon still counts it."""
        pending.abandoned = True

    def give_back(self, leases: Sequence[int]) -> None:
        """Return leases (the daemon's numbers) as soon as there is room; nobody waits for the answer."""
        self._to_return.extend(leases)
        self._return_leases()

    def _return_leases(self) -> None:
        if self._to_return:
            pending = self.try_send(Release(tuple(self._to_return)), ())
            if pending is not None:
                pending.abandoned = True
                self._to_return.clear()

    # ---- what comes back --------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take every reply that is here, then look whether the daemon lives."""
        if self.dead:
            return
        came = 0
        try:
            while not self.dead and self._has_reply():
                came += 1
                self._receive(self.socket.recv_multipart(zmq.NOBLOCK))
        except zmq.ZMQError as error:  # never seen; an engine must not see it either
            self.dead = f"the control socket failed: {error}"
        if not self.dead and not self.lifeline.alive():
            self.dead = "the daemon is gone"
        if not self.dead and self.fences.severed():
            self.dead = "the pool was severed"
        if came:
            self._return_leases()
        if (came or self.dead) and self.on_progress is not None:
            self.on_progress()

    def _has_reply(self) -> bool:
        events = self.socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & zmq.POLLIN)

    def gone(self) -> bool:
        """Whether the session has ended, as far as one can tell without reading replies."""
        return bool(self.dead) or self.fences.severed() or not self.lifeline.alive()

    def close(self) -> None:
        """End the session: hang up, drop what is unsent, free the fences. Idempotent."""
        self.dead = self.dead or "closed"
        self.lifeline.close()
        self.socket.close(0)
        self.fences.close()
        self.leases.clear()
        self._open.clear()

    def _receive(self, frames: list[bytes]) -> None:
        try:
            envelope = decode_daemon(frames, self._decode_limits)
        except HiCacheError as error:
            other = error.code == ErrorCode.VERSION
            self.dead = str(error) if other else f"the daemon sent what is no message: {error}"
            return
        if envelope.boot_id != self.boot_id:
            self.dead = "the daemon was restarted"
            return
        self.silent = 0
        self.received += 1
        pending = self._open.get(envelope.request_id)
        if pending is None:
            self.stats.late_replies += 1
            return
        self._answer(pending, envelope.message)

    def _answer(self, pending: Pending, reply: DaemonMessage) -> None:
        first = pending.reply is None
        if first:
            pending.reply = reply
            if pending.abandoned and not isinstance(pending.message, Release):
                self.stats.late_replies += 1
        if not isinstance(reply, Accepted):
            del self._open[pending.request_id]
            pending.last = reply
        if first and pending.fence is not None and isinstance(reply, Error | Busy):  # it will not begin
            pending.fence.reject()
        if first and pending.unwatched:
            self._count_refusal(reply)
        match reply:
            case Error(code=ErrorCode.UNKNOWN_SESSION.value):
                self.dead = "the daemon does not know this session"
            case Error() | Busy():
                pass
            case Match(lease=lease) if lease and pending.abandoned:
                self._to_return.append(lease)
            case Welcome() | Refuse():
                pass
            case _:
                self.proven = True

    def _count_refusal(self, reply: DaemonMessage) -> None:
        if isinstance(reply, Busy):
            self.stats.busy += 1
        elif isinstance(reply, Error):
            self.stats.errors += 1
            _log.debug("a request failed: %s: %s", reply.code, reply.message)

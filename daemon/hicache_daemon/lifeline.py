"""The lifeline: a unix SOCK_SEQPACKET connection that brings a client's memory and dies with the client.

    accept ─► CONNECTED ─Attach + 2 fds─► ATTACHED ─Hello (over ZeroMQ)─► BOUND ─► CLOSED
                  │ ATTACH_TIMEOUT_S          │ HELLO_TIMEOUT_S            │ EOF ─► on_death(session)
                  └─────────► CLOSED ◄────────┴── EOF, or a refusal        └ release(session)

The kernel closes the connection with the process, also on kill -9: its EOF is the death of the engine, at once
and without a heartbeat. What is not bound to a session is bounded in number and in time, so an engine that
crashes at any step of its registration leaves nothing behind.
"""

import array
import asyncio
import contextlib
import fcntl
import hmac
import os
import socket
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.limits import Limits
from hicache.protocol.fence import SLOT_BYTES
from hicache.protocol.messages import Attach, Attached, Refuse
from hicache.protocol.wire import decode_packet, encode_packet

PACKET_BYTES = 4096
MAX_FDS = 16  # received, so that surplus ones can be closed; legal are two
MAX_UNBOUND = 64
ATTACH_TIMEOUT_S = 5.0
HELLO_TIMEOUT_S = 30.0
INSTANCE_BYTES = 16
TOKEN_BYTES = 16
ACCEPTS_PER_TURN = 32

OnDeath = Callable[[int], None]


@dataclass(slots=True)
class Attachment:
    """One connection and, once attached, the client's shared memory. Owns its file descriptors."""

    sock: socket.socket
    pid: int
    deadline: asyncio.TimerHandle | None = None
    attach: Attach | None = None
    fds: list[int] = field(default_factory=list)  # L1 pool, fence area; empty once they are mapped
    session: int = 0  # 0: not bound
    token: bytes = field(default=b"", repr=False)  # what Hello must repeat; known to the peer alone

    def close_fds(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


class Lifeline:
    """Acceptor and registry of attachments. All calls on the loop thread."""

    def __init__(self, path: Path, boot_id: int, limits: Limits, on_death: OnDeath, log: Any) -> None:
        self._path = path
        self._boot_id = boot_id
        self._limits = limits
        self._on_death = on_death
        self._log = log
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._open: dict[int, Attachment] = {}  # by connection fd
        self._waiting: dict[tuple[bytes, int], Attachment] = {}  # attached, not bound
        self._bound: dict[int, Attachment] = {}  # by session

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind and start to accept."""
        mask = os.umask(0o177)
        try:
            self._listener.bind(str(self._path))
        finally:
            os.umask(mask)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._loop = loop
        loop.add_reader(self._listener.fileno(), self._accept)

    def counts(self) -> dict[str, int]:
        return {"bound": len(self._bound), "unbound": len(self._open) - len(self._bound)}

    # ---- used by Hello ------------------------------------------------------------------------------

    def waiting(self, instance: bytes, epoch: int, token: bytes) -> Attachment:
        """The attachment of this incarnation, for whoever has the token that it was answered with.

        Raises `HiCacheError(UNKNOWN_SESSION)`, which for another token says what it says for no attachment."""
        attachment = self._waiting.get((instance, epoch))
        if attachment is None or not hmac.compare_digest(attachment.token, token):
            raise HiCacheError(
                ErrorCode.UNKNOWN_SESSION,
                f"no lifeline is attached for this instance, epoch {epoch} and token",
                "connect the lifeline socket and send Attach with the same instance and epoch before Hello, "
                "and repeat the token of its answer",
            )
        return attachment

    def bind(self, attachment: Attachment, session: int) -> None:
        """The memory is mapped: the connection now stands for `session`."""
        assert attachment.attach is not None
        del self._waiting[attachment.attach.instance, attachment.attach.epoch]
        self._cancel_deadline(attachment)
        attachment.close_fds()  # the mappings keep the memory
        attachment.session = session
        self._bound[session] = attachment

    def release(self, session: int) -> None:
        """The session is over; closing the connection tells the client. Idempotent."""
        attachment = self._bound.get(session)
        if attachment is not None:
            self._close(attachment)

    def close(self) -> None:
        """Stop accepting and close every connection. Idempotent."""
        if self._loop is not None:
            self._loop.remove_reader(self._listener.fileno())
            for attachment in list(self._open.values()):
                self._close(attachment)
            self._loop = None
        self._listener.close()

    # ---- connections --------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors: the client waits in the backlog and times out
                self._log.warning("lifeline.accept_failed", error=error.strerror)
                return
            sock.setblocking(False)
            pid, uid = _peer(sock)
            if uid not in (os.geteuid(), 0):  # root could read our memory anyway
                self._log.warning("lifeline.foreign_uid", pid=pid, uid=uid)
                text = f"uid {uid} may not attach to a daemon of uid {os.geteuid()}"
                self._refuse_raw(sock, ErrorCode.DENIED, text)
            elif len(self._open) - len(self._bound) >= MAX_UNBOUND:
                self._refuse_raw(sock, ErrorCode.BUSY, f"{MAX_UNBOUND} connections already wait for their Hello")
            else:
                self._adopt(Attachment(sock, pid))

    def _adopt(self, attachment: Attachment) -> None:
        assert self._loop is not None
        fd = attachment.sock.fileno()
        self._open[fd] = attachment
        attachment.deadline = self._loop.call_later(ATTACH_TIMEOUT_S, self._expire, attachment)
        self._loop.add_reader(fd, self._readable, attachment)

    def _readable(self, attachment: Attachment) -> None:
        try:
            data, fds, truncated = _receive(attachment.sock)
        except BlockingIOError:
            return
        except OSError:  # reset: the peer died with unread data
            data, fds, truncated = b"", [], False
        if not data:
            _close_all(fds)
            self._ended(attachment)
            return
        try:
            if attachment.attach is not None:
                raise HiCacheError(ErrorCode.MALFORMED, "Attach comes once per connection")
            if truncated:
                raise HiCacheError(ErrorCode.TOO_LARGE, f"Attach is one packet of at most {PACKET_BYTES} bytes")
            self._attach(attachment, data, fds)
        except HiCacheError as error:
            _close_all(fds)
            self._log.info("lifeline.refused", pid=attachment.pid, code=error.code, reason=error.message)
            self._send(attachment.sock, Refuse(error.code, error.message, error.remedy))
            self._ended(attachment)

    def _attach(self, attachment: Attachment, data: bytes, fds: list[int]) -> None:
        assert self._loop is not None
        envelope = decode_packet(data, self._limits)
        message = envelope.message
        if not isinstance(message, Attach) or envelope.epoch != message.epoch:
            raise HiCacheError(ErrorCode.MALFORMED, "the first packet must be an Attach, its epoch in the header")
        check_attach(message, fds, self._limits)
        if (message.instance, message.epoch) in self._waiting:
            raise HiCacheError(
                ErrorCode.DENIED,
                "this instance and epoch are attached already",
                "draw a random instance id per client and count its epoch up with each connection",
            )
        attachment.attach, attachment.fds, attachment.token = message, fds, os.urandom(TOKEN_BYTES)
        self._waiting[message.instance, message.epoch] = attachment
        self._cancel_deadline(attachment)
        attachment.deadline = self._loop.call_later(HELLO_TIMEOUT_S, self._expire, attachment)
        self._send(attachment.sock, Attached(self._boot_id, attachment.token), message.epoch)

    def _expire(self, attachment: Attachment) -> None:
        self._log.info("lifeline.expired", pid=attachment.pid, attached=attachment.attach is not None)
        self._close(attachment)

    def _ended(self, attachment: Attachment) -> None:
        session = attachment.session
        self._close(attachment)
        if session:
            self._on_death(session)

    def _close(self, attachment: Attachment) -> None:
        fd = attachment.sock.fileno()
        if self._loop is None or fd < 0:
            return
        self._loop.remove_reader(fd)
        self._cancel_deadline(attachment)
        del self._open[fd]
        self._bound.pop(attachment.session, None)
        if attachment.attach is not None and not attachment.session:
            del self._waiting[attachment.attach.instance, attachment.attach.epoch]
        attachment.close_fds()
        attachment.sock.close()

    @staticmethod
    def _cancel_deadline(attachment: Attachment) -> None:
        if attachment.deadline is not None:
            attachment.deadline.cancel()
            attachment.deadline = None

    def _refuse_raw(self, sock: socket.socket, code: ErrorCode, reason: str) -> None:
        """Refuse before the peer said anything. A close over an unread packet would reset the connection, and
        the reason with it: so nothing more is let in, and what came is taken out."""
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RD)
            while (packet := _receive(sock))[0]:
                _close_all(packet[1])
        self._send(sock, Refuse(code, reason))
        sock.close()

    def _send(self, sock: socket.socket, message: Attached | Refuse, epoch: int = 0) -> None:
        try:
            sock.send(encode_packet(message, self._boot_id, epoch))
        except OSError as error:  # the peer is gone already; its EOF follows
            self._log.debug("lifeline.send_failed", error=error.strerror)


def check_attach(message: Attach, fds: list[int], limits: Limits) -> None:
    """Raise `HiCacheError` unless the declared memory is there, is ours to write, and cannot shrink under us."""

    def bad(text: str, remedy: str = "") -> HiCacheError:
        return HiCacheError(ErrorCode.BAD_SPEC, f"Attach: {text}", remedy)

    if len(message.instance) != INSTANCE_BYTES:
        raise bad(f"instance must have {INSTANCE_BYTES} bytes, got {len(message.instance)}")
    if not 0 <= message.epoch < 1 << 32:
        raise bad(f"epoch must fit 32 bits, got {message.epoch}")
    if not message.pool_bytes and not message.fence_slots:  # it asks for others
        if fds:
            raise bad(f"no file descriptors come with 0 pool_bytes and 0 fence_slots, got {len(fds)}")
        return
    if not 0 < message.pool_bytes <= limits.pool_bytes:
        raise bad(f"pool_bytes must be 1 to {limits.pool_bytes}, got {message.pool_bytes}")
    if not 0 < message.fence_slots <= limits.fence_slots:
        raise bad(f"fence_slots must be 1 to {limits.fence_slots}, got {message.fence_slots}")
    if len(fds) != 2:
        raise bad(f"two file descriptors must come with it, got {len(fds)}")
    sizes = {"the L1 pool": message.pool_bytes, "the fence area": message.fence_slots * SLOT_BYTES}
    for (what, need), fd in zip(sizes.items(), fds, strict=True):
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size < need:
            raise bad(f"{what} must be a memfd of at least {need} bytes, got {info.st_size}")
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise bad(f"{what} is not a memfd", "create it with memfd_create(MFD_ALLOW_SEALING)") from error
        if not seals & fcntl.F_SEAL_SHRINK:
            raise bad(f"{what} may shrink, which would make the daemon fault", "add F_SEAL_SHRINK")


def _peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the peer, as the kernel saw them at connect()."""
    pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _receive(sock: socket.socket) -> tuple[bytes, list[int], bool]:
    """One packet: (data, fds, truncated). The caller owns the fds."""
    fds = array.array("i")
    data, ancillary, flags, _ = sock.recvmsg(
        PACKET_BYTES, socket.CMSG_SPACE(MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds), bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())

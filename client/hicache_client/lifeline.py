"""The unix socket whose two ends tell each other that they live; it also carries the shared memory.

    connect ─► send Attach + 2 fds ─► Attached | Refuse ─► kept open, silent; EOF = the other side is gone

The daemon closes its end only after the last copy of the session has ended. So its EOF means that it will not
touch our memory again; our own hanging up means nothing of the kind, which is why the daemon's process is
watched apart.
"""

import os
import select
import socket
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.limits import Limits
from hicache.protocol.messages import Attach, LifelineMessage
from hicache.protocol.wire import decode_packet, encode_packet

PACKET_BYTES = 65536
REMEDY = "start it with `hicache serve`, or set HICACHE_RUNTIME_DIR to where it runs"


class Peer:
    """The process at the other end of a unix socket."""

    def __init__(self, sock: socket.socket) -> None:
        pid, _uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self._poll = select.poll()
        self._known = True
        try:
            fd = os.pidfd_open(pid)
        except OSError:  # it has exited already, or lives in a pid namespace that we cannot see
            self._known = False
            return
        weakref.finalize(self, os.close, fd)
        self._poll.register(fd, select.POLLIN)

    def exited(self) -> bool:
        """Whether it is known to have ended."""
        return self._known and bool(self._poll.poll(0))


class Lifeline:
    """A connected lifeline; never blocks."""

    def __init__(self, path: Path) -> None:
        """Raises `HiCacheError(TIMEOUT)` when no daemon listens at `path`."""
        self._limits = Limits()
        self._hung_up = False  # by us
        self._ended = False  # by the daemon
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._socket.setblocking(False)
            self._socket.connect(str(path))
            self._peer = Peer(self._socket)
        except OSError as error:  # absent, refused, not allowed, or its backlog is full
            self._socket.close()
            reason = error.strerror or str(error)
            raise HiCacheError(ErrorCode.TIMEOUT, f"no daemon at {path}: {reason}", REMEDY) from error

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    def attach(self, message: Attach, fds: Sequence[int]) -> None:
        """Hand over the memory: the descriptors of pool and fences, or none.

        Raises `HiCacheError(TIMEOUT)` if the daemon is gone."""
        packet = encode_packet(message, 0, message.epoch)
        try:
            socket.send_fds(self._socket, [packet], fds)
        except OSError as error:
            raise HiCacheError(ErrorCode.TIMEOUT, f"the daemon hung up: {error.strerror}", REMEDY) from error

    def answer(self) -> LifelineMessage | None:
        """The daemon's answer to Attach, or None while there is none.

        Raises `HiCacheError`: TIMEOUT at EOF, else as `decode_packet`."""
        try:
            packet = self._socket.recv(PACKET_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            packet = b""
        if not packet:
            raise HiCacheError(ErrorCode.TIMEOUT, "the daemon hung up before it answered Attach", REMEDY)
        return decode_packet(packet, self._limits).message

    def alive(self) -> bool:
        """Whether both ends are open. Any thread may ask."""
        if not self._hung_up and not self._ended:
            try:
                self._ended = not self._socket.recv(PACKET_BYTES)  # nothing is ever sent here: data is ignored
            except BlockingIOError:
                return True
            except OSError:
                self._ended = not self._hung_up  # reset; or another thread closed it just now
        return not self._hung_up and not self._ended

    def over(self) -> bool:
        """Whether the daemon has done with our memory: it closed its end, or its process has ended."""
        return not self.alive() and (self._ended or self._peer.exited())

    def close(self) -> None:
        """Hang up, which ends the session. Idempotent."""
        self.alive()  # the last look at what the daemon did by itself
        self._hung_up = True
        self._socket.close()

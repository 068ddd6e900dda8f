"""The unix socket whose two ends tell each other that they live; it also carries the shared memory.

connect ─► send Attach + 2 fds ─► Attached | Refuse ─► kept open, silent; EOF = the other side is gone
"""

import socket
from pathlib import Path

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.limits import Limits
from hicache.protocol.messages import Attach, LifelineMessage
from hicache.protocol.wire import decode_packet, encode_packet

PACKET_BYTES = 65536
REMEDY = "start it with `hicache serve`, or set HICACHE_RUNTIME_DIR to where it runs"


class Lifeline:
    """A connected lifeline; never blocks."""

    def __init__(self, path: Path) -> None:
        """Raises `HiCacheError(TIMEOUT)` when no daemon listens at `path`."""
        self._limits = Limits()
        self._open = True
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        try:
            self._socket.connect(str(path))
        except OSError as error:  # absent, refused, not allowed, or its backlog is full
            self._socket.close()
            raise HiCacheError(ErrorCode.TIMEOUT, f"no daemon at {path}: {error.strerror}", REMEDY) from error

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    def attach(self, message: Attach, pool_fd: int, fence_fd: int) -> None:
        """Hand over the memory. Raises `HiCacheError(TIMEOUT)` if the daemon is gone."""
        packet = encode_packet(message, 0, message.epoch)
        try:
            socket.send_fds(self._socket, [packet], [pool_fd, fence_fd])
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
        """Whether the daemon still holds its end. Any thread may ask."""
        if not self._open:
            return False
        try:
            self._open = bool(self._socket.recv(PACKET_BYTES))  # nothing is ever sent here: data is ignored
        except BlockingIOError:
            return True
        except OSError:  # reset, or closed by another thread
            self._open = False
        return self._open

    def close(self) -> None:
        """Hang up, which ends the session. Idempotent."""
        self._open = False
        self._socket.close()

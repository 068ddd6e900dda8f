"""A daemon for tests: real sockets, scripted answers, no cache behind them.

    with FakeDaemon(directory, answer) as daemon:
        client = Client(ClientOptions(runtime_dir=directory), …)

`answer(request)` runs on the daemon's thread and gives the replies to send, in order; None takes the default
(see `default_answer`), an empty list is silence. `push` sends a reply later, from any thread.
"""

import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec
import zmq

from hicache.base.errors import HiCacheError
from hicache.base.limits import Limits
from hicache.protocol.fence import (
    SLOT_BYTES,
    SLOT_WORDS,
    STATE_DONE,
    STATE_FAILED,
    STATE_RUNNING,
    WORD_GENERATION,
    WORD_LAYERS_DONE,
    WORD_REVOKED,
    WORD_STATE,
)
from hicache.protocol.messages import (
    Accepted,
    Attach,
    Attached,
    ClientLimits,
    ClientMessage,
    DaemonMessage,
    Describe,
    Description,
    Done,
    Error,
    Extend,
    Goodbye,
    Hello,
    Load,
    Lookup,
    Match,
    Prefetch,
    Refuse,
    Release,
    Renew,
    Store,
    Welcome,
)
from hicache.protocol.version import MAJOR, VERSION, text
from hicache.protocol.wire import Buffer, decode_client, decode_packet, encode, encode_packet, request_id_of
from hicache_client.paths import CONTROL_NAME, LIFELINE_NAME

LIMITS = ClientLimits(
    requests_in_flight=64,
    tokens_per_request=1 << 20,
    body_bytes=1 << 20,
    buffer_bytes=1 << 22,
    leases_per_session=4096,
    lease_ttl_s=60.0,
    session_silence_s=30.0,
)


@dataclass(slots=True)
class FakeSession:
    """What one Attach brought. `pool` is the client's L1 memory, `fences` its fence words; a client without memory
    gets some that it does not see."""

    attach: Attach
    pool: mmap.mmap
    fences: memoryview
    connection: socket.socket
    token: bytes = b""  # what its Hello must repeat

    def fence(self, message: Load | Store) -> "FakeFence":
        return FakeFence(self.fences, message.fence, message.generation)


@dataclass(frozen=True, slots=True)
class FakeFence:
    """The daemon's side of one fence slot."""

    words: memoryview
    slot: int
    generation: int

    def progress(self, layers: int) -> None:
        """`layers` are in place."""
        self._check()
        self.words[self.slot * SLOT_WORDS + WORD_LAYERS_DONE] = layers
        self.words[self.slot * SLOT_WORDS + WORD_STATE] = STATE_RUNNING

    def finish(self, ok: bool = True) -> None:
        self._check()
        self.words[self.slot * SLOT_WORDS + WORD_STATE] = STATE_DONE if ok else STATE_FAILED

    @property
    def revoked(self) -> bool:
        return self.words[self.slot * SLOT_WORDS + WORD_REVOKED] == self.generation

    def _check(self) -> None:
        assert self.words[self.slot * SLOT_WORDS + WORD_GENERATION] == self.generation, "the slot was reused"


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """One request as it came. `session` is None before any Attach."""

    identity: bytes
    request_id: int
    epoch: int
    message: ClientMessage
    buffers: tuple[Buffer, ...]
    session: FakeSession | None

    @property
    def fence(self) -> FakeFence:
        """The fence of a Load or Store."""
        assert self.session is not None
        assert isinstance(self.message, Load | Store)
        return self.session.fence(self.message)


Answer = Callable[[FakeRequest], Iterable[DaemonMessage] | None]


def default_answer(request: FakeRequest) -> Iterable[DaemonMessage]:
    """An empty cache that takes every store and fulfils every load without moving a byte."""
    match request.message:
        case Hello():
            return [Welcome(VERSION, 1, LIMITS)]
        case Lookup() | Extend():
            return [Match(0, 0, 0, 0, 0)]
        case Load() | Store():
            request.fence.finish()
            pages = max(request.message.blocks_count, default=0)
            return [Accepted(1, pages), Done(1, pages)]
        case Prefetch():
            return [Accepted(1, 0), Done(1, 0)]
        case Renew() | Release():
            return [Done(count=len(request.message.leases))]
        case Describe():
            return [Description(msgspec.Raw(msgspec.msgpack.encode({"schema_version": 1})))]
        case Goodbye():
            return [Done()]


@dataclass(slots=True)
class _Push:
    identity: bytes
    request_id: int
    epoch: int
    messages: list[DaemonMessage] = field(default_factory=list)
    boot_id: int = 0


class FakeDaemon:
    """See the module. `stop` cuts every connection at once, as kill -9 would; `start` after it is a new boot."""

    def __init__(self, directory: Path, answer: Answer | None = None, *, attach: bool = True) -> None:
        """`attach` False: the lifeline accepts and then says nothing."""
        self.directory = directory
        self.answer = answer
        self.attach = attach
        self.refuse_attach: Refuse | None = None
        self.speaks = VERSION  # another major: Attach is refused, and every header says so
        self.boot_id = 0
        self.requests: list[FakeRequest] = []
        self.sessions: dict[tuple[bytes, int], FakeSession] = {}  # by instance and epoch
        self.failures: list[BaseException] = []  # of `answer` or of a malformed request
        self._by_identity: dict[bytes, FakeSession] = {}
        self._pushes: SimpleQueue[_Push] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "FakeDaemon":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        os.close(self._wake)
        if self.failures and exc[0] is None:
            raise self.failures[0]

    def start(self) -> None:
        """Bind and serve under a new boot id."""
        self.boot_id += 1 << 32 | 1
        self._stopping = False
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="fake-daemon", daemon=True)
        self._thread.start()
        assert ready.wait(10), "the fake daemon did not start"

    def stop(self) -> None:
        if self._thread is not None:
            self._stopping = True
            os.eventfd_write(self._wake, 1)
            self._thread.join(10)
            self._thread = None

    def push(self, request: FakeRequest, *messages: DaemonMessage, boot_id: int | None = None) -> None:
        """Reply to a request now. Any thread."""
        boot = self.boot_id if boot_id is None else boot_id
        self._pushes.put(_Push(request.identity, request.request_id, request.epoch, list(messages), boot))
        os.eventfd_write(self._wake, 1)

    def seen(self, kind: type[ClientMessage]) -> list[FakeRequest]:
        """The requests of one kind so far, oldest first."""
        return [request for request in list(self.requests) if isinstance(request.message, kind)]

    # ---- the daemon's thread ----------------------------------------------------------------------------

    def _run(self, ready: threading.Event) -> None:
        self.directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        for name in (CONTROL_NAME, LIFELINE_NAME):
            (self.directory / name).unlink(missing_ok=True)
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(f"ipc://{self.directory / CONTROL_NAME}")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(self.directory / LIFELINE_NAME))
        listener.listen(16)
        connections: dict[int, socket.socket] = {}
        try:
            ready.set()
            while not self._stopping:
                self._turn(router, listener, connections)
        finally:
            for each in (listener, *connections.values()):
                each.close()
            router.close(0)
            context.term()
            self._by_identity.clear()
            for name in (CONTROL_NAME, LIFELINE_NAME):
                (self.directory / name).unlink(missing_ok=True)

    def _turn(
        self, router: "zmq.Socket[bytes]", listener: socket.socket, connections: dict[int, socket.socket]
    ) -> None:
        poller = zmq.Poller()
        for each in (router, listener, self._wake, *connections.values()):
            poller.register(each, zmq.POLLIN)
        events = dict(poller.poll(1000))
        if self._wake in events:
            os.eventfd_read(self._wake)
        if listener.fileno() in events:
            connection, _ = listener.accept()
            connections[connection.fileno()] = connection
        for fd in [fd for fd in connections if fd in events]:
            if not self._lifeline(connections[fd]):
                connections.pop(fd).close()
        if router in events:
            identity, *frames = router.recv_multipart()
            self._request(router, identity, frames)
        while True:
            try:
                push = self._pushes.get_nowait()
            except Empty:
                return
            self._send(router, push)

    def _lifeline(self, connection: socket.socket) -> bool:
        """Serve one packet; whether the connection goes on."""
        try:
            packet, fds, _, _ = socket.recv_fds(connection, 65536, 2)
            if packet and self.attach:
                answer = encode_packet(self._attached(packet, fds, connection), self.boot_id, 0)
                connection.send(self._in_version(answer))
            for fd in fds:  # mapped by now, or not wanted
                os.close(fd)
        except (BrokenPipeError, ConnectionResetError):  # the client hung up
            return False
        return bool(packet)

    def _attached(self, packet: bytes, fds: list[int], connection: socket.socket) -> Attached | Refuse:
        message = decode_packet(packet, Limits()).message
        assert isinstance(message, Attach)
        if self.speaks >> 8 != MAJOR:
            return Refuse("version", f"protocol {text(VERSION)} came, this side speaks {text(self.speaks)}")
        if self.refuse_attach is None:
            sizes = (message.pool_bytes, message.fence_slots * SLOT_BYTES) if fds else (4096, 4096)
            pool, words = (mmap.mmap(fd, size) for fd, size in zip(fds or (-1, -1), sizes, strict=True))
            fences = memoryview(words).cast("Q")
            token = os.urandom(16)
            self.sessions[message.instance, message.epoch] = FakeSession(message, pool, fences, connection, token)
            return Attached(self.boot_id, token)
        return self.refuse_attach

    def _request(self, router: "zmq.Socket[bytes]", identity: bytes, frames: list[bytes]) -> None:
        try:
            envelope = decode_client(frames, Limits())
        except HiCacheError as error:
            self.failures.append(error)
            told = Error(error.code, error.message, error.remedy)
            self._send(router, _Push(identity, request_id_of(frames), 0, [told], self.boot_id))
            return
        message = envelope.message
        if isinstance(message, Hello):
            session = self.sessions.get((message.instance, message.epoch))
            if session is not None and session.token == message.token:
                self._by_identity[identity] = session
        request = FakeRequest(
            identity,
            envelope.request_id,
            envelope.epoch,
            message,
            envelope.buffers,
            self._by_identity.get(identity),
        )
        self.requests.append(request)
        try:
            replies = self.answer(request) if self.answer is not None else None
            replies = default_answer(request) if replies is None else replies
        except Exception as error:  # noqa: BLE001  # shown by `failures` when the daemon is left
            self.failures.append(error)
            return
        self._send(router, _Push(identity, envelope.request_id, envelope.epoch, list(replies), self.boot_id))

    def _in_version(self, header: Buffer) -> bytes:
        """A header, or what begins with one, as a daemon writes it that speaks `speaks`."""
        return bytes(header[:2]) + self.speaks.to_bytes(2, "big") + bytes(header[4:])

    def _send(self, router: "zmq.Socket[bytes]", push: _Push) -> None:
        for message in push.messages:
            frames = encode(message, push.request_id, push.boot_id, push.epoch)
            router.send_multipart([push.identity, self._in_version(frames[0]), *frames[1:]])


def int32_bytes(values: Iterable[int]) -> bytes:
    """Token ids or block starts as the wire wants them."""
    numbers = list(values)
    return struct.pack(f"<{len(numbers)}i", *numbers)

"""The desk between the control socket and the cache state: messages become events, replies become frames.

    frames ─decode─► Envelope ─┬ Describe ─► answered at once, no session needed
                               ├ Hello ────► admission, lanes.attach ─► SessionOpened
                               └ others ───► session? epoch? credits? ─► …Asked

A request that raises costs itself an Error INTERNAL and nothing else; a broken law stops the daemon.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from hicache.base.clock import Clock
from hicache.base.errors import ErrorCode, HiCacheError, LawBroken
from hicache.base.ids import LeaseId, RequestId, SessionId
from hicache.base.limits import Limits
from hicache.core.commands import Reply
from hicache.core.events import (
    Event,
    ExtendAsked,
    LoadAsked,
    LookupAsked,
    PrefetchAsked,
    ReleaseAsked,
    RenewAsked,
    SessionClosed,
    SessionOpened,
    StoreAsked,
)
from hicache.protocol.messages import (
    Accepted,
    Busy,
    ClientMessage,
    DaemonMessage,
    Describe,
    Description,
    Error,
    Extend,
    Goodbye,
    Hello,
    Load,
    Lookup,
    Prefetch,
    Refuse,
    Release,
    Renew,
    Store,
    Welcome,
)
from hicache.protocol.wire import Envelope, decode_client, encode, request_id_of
from hicache_daemon.admission import Tenants, check_hello
from hicache_daemon.lanes import CpuLane
from hicache_daemon.lifeline import Lifeline
from hicache_daemon.phase import Phase
from hicache_daemon.server import Sent
from hicache_daemon.sessions import Session, Sessions

BUSY_RETRY_S = 0.01
START_RETRY_S = 0.5

Buffers = Sequence[bytes | memoryview]


class Describer(Protocol):
    def __call__(self, what: str) -> dict[str, Any]:
        """The named part of the daemon's state as JSON-able values, `schema_version` first."""
        ...


@dataclass(slots=True)
class Front:
    """One per daemon; all calls on the loop thread. `feed` hands an event to the cache state at once, `post`
    after the present one; `crash` ends the daemon."""

    boot_id: int
    limits: Limits
    tenants: Tenants
    sessions: Sessions
    lifeline: Lifeline
    lanes: CpuLane
    send: Callable[[bytes, Sequence[Any]], Sent]
    feed: Callable[[Event], None]
    post: Callable[[Event], None]
    crash: Callable[[LawBroken], None]
    phase: Callable[[], Phase]
    describe: Describer
    clock: Clock
    log: Any
    counters: dict[str, int] = field(
        default_factory=lambda: {"messages": 0, "malformed": 0, "refused": 0, "busy": 0, "internal_errors": 0}
    )

    def on_message(self, identity: bytes, frames: Sequence[bytes]) -> None:
        """Handle one message from the socket. Never raises."""
        self.counters["messages"] += 1
        request = 0
        try:
            request = request_id_of(frames)
            envelope = decode_client(frames, self.limits)
        except HiCacheError as error:
            self.counters["malformed"] += 1
            self._say(identity, request, Error(error.code, error.message, error.remedy))
            return
        try:
            self._dispatch(identity, envelope)
        except LawBroken as error:
            self.crash(error)
        except Exception:  # a bug met by one request: it is told, the story is logged, the others go on
            self.counters["internal_errors"] += 1
            self.log.exception("request.failed", request=request, frames=[len(frame) for frame in frames])
            session = self.sessions.of_identity(identity)
            if session is not None:
                session.open.discard(request)
            self._say(identity, request, _INTERNAL, envelope.epoch)

    def reply(self, command: Reply) -> None:
        """Send a reply of the cache state; it closes the request unless it is Accepted."""
        session = self.sessions.get(command.session)
        if session is None:
            return
        if not isinstance(command.message, Accepted):
            session.open.discard(command.request)
        if session.silent:
            return
        message = command.message
        if isinstance(message, Welcome):  # the version is agreed at this desk; the state knows of none
            message = msgspec.structs.replace(message, version=session.version)
        frames = encode(message, command.request, self.boot_id, session.epoch)
        sent = self.send(session.identity, frames)
        if sent is not Sent.OK:
            session.silent = True
            self.log.warning("session.unreachable", session=session.id, engine=session.engine, reason=sent.value)
            self.post(SessionClosed(SessionId(session.id), sent.value))
        elif isinstance(message, Refuse):
            self.counters["refused"] += 1
            self.drop(session.id, message.reason)

    def drop(self, session_id: int, reason: str) -> None:
        """Forget a session at the edge: unmap its memory, close its lifeline. Idempotent."""
        session = self.sessions.remove(session_id)
        if session is None:
            return
        self.lanes.detach(SessionId(session_id))
        self.lifeline.release(session_id)
        lived_s = round(self.clock.monotonic_s() - session.opened_s, 1)
        self.log.info("session.dropped", session=session_id, engine=session.engine, reason=reason, lived_s=lived_s)

    # ---- one message --------------------------------------------------------------------------------

    def _dispatch(self, identity: bytes, envelope: Envelope[ClientMessage]) -> None:
        message, request = envelope.message, RequestId(envelope.request_id)
        if isinstance(message, Describe):
            data = msgspec.msgpack.encode(self.describe(message.what))
            self._say(identity, request, Description(msgspec.Raw(data)), envelope.epoch)
            return
        if isinstance(message, Hello):
            self._hello(identity, request, envelope.epoch, message)
            return
        session = self.sessions.of_identity(identity)
        if session is None or session.epoch != envelope.epoch:
            self._say(identity, request, _UNKNOWN_SESSION, envelope.epoch)
            return
        session.heard_s = self.clock.monotonic_s()
        session.requests += 1
        if request in session.open:
            text = f"request id {request} is open already"
            self._say(identity, request, Error(ErrorCode.MALFORMED, text, "use every id once"), session.epoch)
        elif len(session.open) >= self.limits.requests_in_flight and not isinstance(message, Goodbye):
            self.counters["busy"] += 1
            self._say(identity, request, Busy(BUSY_RETRY_S, _OVER_CREDITS), session.epoch)
        else:
            session.open.add(request)
            self.feed(_event(SessionId(session.id), request, message, envelope.buffers))

    def _hello(self, identity: bytes, request: RequestId, epoch: int, hello: Hello) -> None:
        try:
            session = self._admit(identity, epoch, hello)
        except HiCacheError as error:
            self.counters["refused"] += 1
            self.log.info("session.refused", engine=hello.engine[:80], code=error.code, reason=error.message)
            self._say(identity, request, Refuse(error.code, error.message, error.remedy), epoch)
            return
        session.open.add(request)
        opened = SessionOpened(
            SessionId(session.id),
            request,
            hello.instance,
            hello.epoch,
            hello.tenant,
            hello.model,
            hello.layout,
            hello.shard,
            hello.group,
            session.memory,
        )
        try:
            self.feed(opened)
        except BaseException:
            self.drop(session.id, "opening it failed")
            raise
        self.log.info(
            "session.opened",
            session=session.id,
            engine=hello.engine,
            model=hello.model.name,
            tenant=hello.tenant,
            pid=session.pid,
            epoch=epoch,
        )

    def _admit(self, identity: bytes, epoch: int, hello: Hello) -> Session:
        """Check everything, map the client's memory, bind its lifeline. Raises `HiCacheError`."""
        phase = self.phase()
        if phase is Phase.DRAINING:
            raise HiCacheError(ErrorCode.DRAINING, "the daemon is stopping", "run uncached and try again later")
        if phase is not Phase.READY:
            raise HiCacheError(ErrorCode.BUSY, f"the daemon is {phase}", f"try again in {START_RETRY_S} s")
        if epoch != hello.epoch:
            raise HiCacheError(ErrorCode.MALFORMED, f"epoch is {epoch} in the header, {hello.epoch} in Hello")
        attachment = self.lifeline.waiting(hello.instance, hello.epoch, hello.token)
        assert attachment.attach is not None
        version = check_hello(hello, attachment.attach, self.tenants, self.limits)
        earlier = self.sessions.of_identity(identity)
        if earlier is not None:
            self.feed(SessionClosed(SessionId(earlier.id), "superseded by a new Hello on its connection"))
        elif len(self.sessions) >= self.limits.sessions:
            raise HiCacheError(ErrorCode.BUSY, f"{self.limits.sessions} sessions are open, the limit", "try later")
        session_id, attach = self.sessions.new_id(), attachment.attach
        if attach.pool_bytes:
            pool_fd, fence_fd = attachment.fds
            self.lanes.attach(
                SessionId(session_id),
                pool_fd,
                attach.pool_bytes,
                fence_fd,
                attach.fence_slots,
                model=hello.model,
                layout=hello.layout,
            )
        pid, now_s = attachment.pid, self.clock.monotonic_s()
        self.lifeline.bind(attachment, session_id)
        session = Session(
            id=session_id,
            identity=identity,
            instance=hello.instance,
            epoch=hello.epoch,
            tenant=hello.tenant,
            engine=hello.engine,
            model=hello.model.name,
            version=version,
            pid=pid,
            opened_s=now_s,
            heard_s=now_s,
            group=hello.group,
            memory=attach.pool_bytes > 0,
        )
        self.sessions.add(session)
        return session

    def _say(self, identity: bytes, request: int, message: DaemonMessage, epoch: int = 0) -> None:
        """Answer outside of the cache state. Without a session nobody is dropped if it is not read."""
        if self.send(identity, encode(message, request, self.boot_id, epoch)) is Sent.FULL:
            session = self.sessions.of_identity(identity)
            if session is not None and not session.silent:
                session.silent = True
                self.post(SessionClosed(SessionId(session.id), Sent.FULL.value))


_OVER_CREDITS = "as many requests are open as Welcome allows"
_INTERNAL = Error(ErrorCode.INTERNAL, "the daemon failed on this request", "see the daemon's log; treat it as a miss")
_UNKNOWN_SESSION = Error(
    ErrorCode.UNKNOWN_SESSION, "no session is open on this connection for this epoch", "attach and say Hello again"
)


def _event(session: SessionId, request: RequestId, message: ClientMessage, buffers: Buffers) -> Event:
    """The event that a message of an open session stands for."""
    match message:
        case Lookup():
            tokens = bytes(buffers[0])
            limit, lease = message.limit_tokens, message.lease
            return LookupAsked(session, request, tokens, limit, lease, message.scope, message.partial)
        case Extend():
            return ExtendAsked(session, request, LeaseId(message.lease), bytes(buffers[0]), message.limit_tokens)
        case Prefetch():
            return PrefetchAsked(session, request, bytes(buffers[0]), message.scope)
        case Load():
            named, blocks = LeaseId(message.lease), _int32s(buffers)
            return LoadAsked(session, request, named, message.first_page, blocks, message.fence, message.generation)
        case Store():
            return StoreAsked(
                session,
                request,
                bytes(buffers[0]),
                message.first_page,
                _int32s(buffers[1:]),
                message.fence,
                message.generation,
                message.scope,
            )
        case Renew():
            return RenewAsked(session, request, tuple(LeaseId(lease) for lease in message.leases))
        case Release():
            return ReleaseAsked(session, request, tuple(LeaseId(lease) for lease in message.leases))
        case Goodbye():
            return SessionClosed(session, "goodbye", request)
        case _:
            raise AssertionError(f"{type(message).__name__} has its own way in")


def _int32s(buffers: Buffers) -> tuple[np.ndarray[Any, np.dtype[np.int32]], ...]:
    return tuple(np.frombuffer(buffer, dtype="<i4") for buffer in buffers)

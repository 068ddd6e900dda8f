"""The desk: what reaches the cache state, what is answered here, and what a bug in one request costs."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.base.errors import ErrorCode, HiCacheError, LawBroken
from hicache.base.ids import RequestId, SessionId
from hicache.base.limits import Limits
from hicache.core.commands import Reply
from hicache.core.events import Event, SessionClosed, SessionOpened, StoreAsked
from hicache.protocol.messages import (
    Accepted,
    Attach,
    Busy,
    ClientLimits,
    ClientMessage,
    DaemonMessage,
    Describe,
    Description,
    Done,
    Error,
    Goodbye,
    Hello,
    Lookup,
    Match,
    Refuse,
    Renew,
    Store,
    Welcome,
)
from hicache.protocol.version import VERSION, text
from hicache.protocol.wire import decode_daemon, encode
from hicache_daemon.admission import Tenants
from hicache_daemon.front import Front
from hicache_daemon.lifeline import Attachment
from hicache_daemon.log import LevelGate, make_log
from hicache_daemon.phase import Phase
from hicache_daemon.server import Sent
from hicache_daemon.sessions import Sessions
from tests.daemon_harness import int32, layout, model

LIMITS = Limits(requests_in_flight=3, sessions=2)
BOOT = 77
WELCOME = Welcome(1, 1, ClientLimits(3, 1, 1, 1, 1, 1.0, 1.0))


class Desk:
    """A Front between a scripted socket and a scripted state."""

    def __init__(self) -> None:
        self.phase = Phase.READY
        self.sent: list[tuple[bytes, int, DaemonMessage]] = []
        self.outcome = Sent.OK
        self.events: list[Event] = []
        self.posted: list[Event] = []
        self.crashes: list[LawBroken] = []
        self.detached: list[int] = []
        self.released: list[int] = []
        self.on_event: Callable[[Event], None] = lambda event: None
        self.sessions = Sessions()
        self._ids = iter(range(1, 1000))
        lifeline = SimpleNamespace(waiting=self._waiting, bind=lambda *_: None, release=self.released.append)
        lanes = SimpleNamespace(attach=lambda *_, **__: None, detach=self.detached.append)
        self.front = Front(
            boot_id=BOOT,
            limits=LIMITS,
            tenants=Tenants({}),
            sessions=self.sessions,
            lifeline=lifeline,  # type: ignore[arg-type]
            lanes=lanes,  # type: ignore[arg-type]
            send=self._send,
            feed=self._feed,
            post=self.posted.append,
            crash=self.crashes.append,
            phase=lambda: self.phase,
            describe=lambda what: {"schema_version": 1, "what": what},
            clock=SimpleNamespace(monotonic_s=lambda: 0.0),
            log=make_log(LevelGate("critical"), "json"),
        )

    def _waiting(self, instance: bytes, epoch: int, token: bytes) -> Attachment:
        attach = Attach(instance, epoch, layout().pool_bytes, 4)
        return Attachment(None, 1, attach=attach, fds=[-1, -1])  # type: ignore[arg-type]

    def _send(self, identity: bytes, frames: Sequence[Any]) -> Sent:
        if self.outcome is Sent.OK:
            envelope = decode_daemon([bytes(frame) for frame in frames], LIMITS)
            assert envelope.boot_id == BOOT
            self.sent.append((identity, envelope.request_id, envelope.message))
        return self.outcome

    def _feed(self, event: Event) -> None:
        self.events.append(event)
        self.on_event(event)

    def say(self, message: ClientMessage, buffers: Sequence[bytes] = (), *, who: bytes = b"a", epoch: int = 1) -> int:
        request = next(self._ids)
        self.say_as(request, message, buffers, who, epoch)
        return request

    def say_as(self, request: int, message: ClientMessage, buffers: Sequence[bytes], who: bytes, epoch: int) -> None:
        frames = [bytes(frame) for frame in encode(message, request, 0, epoch, buffers)]
        self.front.on_message(who, frames)

    def answer(self, request: int, message: Any, session: int = 1) -> None:
        self.front.reply(Reply(SessionId(session), RequestId(request), message))

    def last(self) -> DaemonMessage:
        return self.sent[-1][2]

    def open(self, who: bytes = b"a") -> "Desk":
        request = self.say(HELLO, who=who)
        event = self.events[-1]
        assert isinstance(event, SessionOpened)
        self.answer(request, WELCOME, event.session)
        return self


HELLO = Hello((VERSION,), b"i" * 16, 1, model(), layout())
LOOKUP = Lookup(1, 1)
TOKENS = (int32([7]),)


def test_hello_opens_a_session_and_welcome_names_the_agreed_version() -> None:
    desk = Desk().open()
    welcome = desk.last()
    assert isinstance(welcome, Welcome)
    assert welcome.version == VERSION
    assert len(desk.sessions) == 1


@pytest.mark.parametrize(
    ("phase", "code"),
    [
        (Phase.STARTING, ErrorCode.BUSY),
        (Phase.RECOVERING, ErrorCode.BUSY),
        (Phase.DRAINING, ErrorCode.DRAINING),
    ],
)
def test_outside_of_ready_hello_is_refused_and_describe_still_answered(phase: Phase, code: ErrorCode) -> None:
    desk = Desk()
    desk.phase = phase
    desk.say(HELLO)
    refuse = desk.last()
    assert isinstance(refuse, Refuse)
    assert refuse.code == code
    desk.say(Describe())
    assert isinstance(desk.last(), Description)
    assert not desk.events


def test_a_client_of_another_major_is_told_both_versions() -> None:
    desk = Desk()
    header, body = (bytes(frame) for frame in encode(HELLO, 1, 0, 1))
    desk.front.on_message(b"a", [header[:2] + bytes((1, 0)) + header[4:], body])
    error = desk.last()
    assert isinstance(error, Error)
    assert error.code == ErrorCode.VERSION
    assert error.message == f"protocol 1.0 came, this side speaks {text(VERSION)}"
    assert "same hicache release" in error.remedy
    assert (len(desk.sessions), desk.events) == (0, [])


def test_a_session_that_the_state_refuses_leaves_nothing_at_the_desk() -> None:
    desk = Desk()
    request = desk.say(HELLO)
    desk.answer(request, Refuse("no_space", "too large", "set l2.parent"))
    assert isinstance(desk.last(), Refuse)
    assert (len(desk.sessions), desk.detached, desk.released) == (0, [1], [1])
    desk.say(LOOKUP, TOKENS)
    assert isinstance(desk.last(), Error)


def test_messages_become_events_with_their_buffers() -> None:
    desk = Desk().open()
    desk.say(Store(2, 0, (3,), 5, 6), (int32([1, 2]), int32([9, 8, 7])))
    event = desk.events[-1]
    assert isinstance(event, StoreAsked)
    assert (event.tokens, event.blocks[0].tolist(), event.fence, event.generation) == (int32([1, 2]), [9, 8, 7], 5, 6)
    request = desk.say(Goodbye())
    assert desk.events[-1] == SessionClosed(SessionId(1), "goodbye", RequestId(request))


def test_credits_are_spent_by_requests_and_returned_by_their_last_answer() -> None:
    desk = Desk().open()
    first = desk.say(Store(1, 0, (1,), 0, 1), (int32([1]), int32([1])))
    for _ in range(2):
        desk.say(LOOKUP, TOKENS)
    desk.say(LOOKUP, TOKENS)
    assert isinstance(desk.last(), Busy)
    desk.answer(first, Accepted(1, 1))
    desk.say(LOOKUP, TOKENS)
    assert isinstance(desk.last(), Busy)  # Accepted is not the last word
    desk.answer(first, Done(1, 1))
    fed = len(desk.events)
    desk.say(LOOKUP, TOKENS)
    assert len(desk.events) == fed + 1
    desk.say(Goodbye())
    assert isinstance(desk.events[-1], SessionClosed)  # leaving needs no credit


def test_a_request_id_that_is_open_cannot_be_used_twice() -> None:
    desk = Desk().open()
    request = desk.say(LOOKUP, TOKENS)
    fed = len(desk.events)
    desk.say_as(request, LOOKUP, TOKENS, b"a", 1)
    error = desk.last()
    assert isinstance(error, Error)
    assert error.code == ErrorCode.MALFORMED
    assert len(desk.events) == fed


def test_another_identity_or_epoch_has_no_session() -> None:
    desk = Desk().open()
    fed = len(desk.events)
    for who, epoch in ((b"b", 1), (b"a", 2)):
        desk.say(Renew(), who=who, epoch=epoch)
        error = desk.last()
        assert isinstance(error, Error)
        assert error.code == ErrorCode.UNKNOWN_SESSION
    assert len(desk.events) == fed


def test_a_bug_costs_its_own_request_and_its_credit_comes_back() -> None:
    desk = Desk().open()

    def fail(event: Event) -> None:
        raise KeyError("a bug")

    desk.on_event = fail
    for _ in range(2 * LIMITS.requests_in_flight):
        desk.say(LOOKUP, TOKENS)
        error = desk.last()
        assert isinstance(error, Error)
        assert error.code == ErrorCode.INTERNAL
    desk.on_event = lambda event: None
    request = desk.say(LOOKUP, TOKENS)
    desk.answer(request, Match(0, 0, 0, 0, 0))
    assert isinstance(desk.last(), Match)
    assert not desk.crashes


def test_a_bug_while_opening_unmaps_what_was_mapped() -> None:
    desk = Desk()

    def fail(event: Event) -> None:
        raise KeyError("a bug")

    desk.on_event = fail
    desk.say(HELLO)
    assert isinstance(desk.last(), Error)
    assert (len(desk.sessions), desk.detached, desk.released) == (0, [1], [1])


def test_a_broken_law_is_no_ones_answer_but_the_end() -> None:
    desk = Desk().open()

    def fail(event: Event) -> None:
        raise LawBroken("free + owned != capacity")

    desk.on_event = fail
    answers = len(desk.sent)
    desk.say(LOOKUP, TOKENS)
    assert len(desk.crashes) == 1
    assert len(desk.sent) == answers


@pytest.mark.parametrize("outcome", [Sent.FULL, Sent.GONE])
def test_a_client_that_cannot_be_answered_is_closed_once(outcome: Sent) -> None:
    desk = Desk().open()
    requests = [desk.say(LOOKUP, TOKENS) for _ in range(2)]
    desk.outcome = outcome
    for request in requests:
        desk.answer(request, Match(0, 0, 0, 0, 0))
    assert desk.posted == [SessionClosed(SessionId(1), outcome.value)]


def test_a_full_pipe_of_one_without_a_session_drops_only_the_answer() -> None:
    desk = Desk()
    desk.outcome = Sent.FULL
    desk.say(Describe())
    assert not desk.posted


def test_the_limit_of_sessions_does_not_hinder_a_client_that_comes_again() -> None:
    desk = Desk().open(b"a").open(b"b")
    desk.say(HELLO, who=b"c")
    refuse = desk.last()
    assert isinstance(refuse, Refuse)
    assert refuse.code == ErrorCode.BUSY
    desk.open(b"a")
    assert any(isinstance(event, SessionClosed) and event.session == 1 for event in desk.events)


def test_memory_that_cannot_be_mapped_refuses_the_session() -> None:
    desk = Desk()

    def refuse(*_: object, **__: object) -> None:
        raise HiCacheError(ErrorCode.NO_SPACE, "cannot be mapped", "raise the limit")

    desk.front.lanes.attach = refuse  # type: ignore[method-assign]
    desk.say(HELLO)
    answer = desk.last()
    assert isinstance(answer, Refuse)
    assert (answer.code, answer.remedy) == (ErrorCode.NO_SPACE, "raise the limit")
    assert len(desk.sessions) == 0


def test_noise_is_answered_to_the_request_that_its_header_names() -> None:
    desk = Desk()
    frames = [bytes(frame) for frame in encode(LOOKUP, 123, 0, 1, TOKENS)]
    desk.front.on_message(b"a", [frames[0], b"\xff" * 5, *frames[2:]])
    desk.front.on_message(b"a", [b"noise"])
    assert [(request, type(message)) for _, request, message in desk.sent] == [(123, Error), (0, Error)]

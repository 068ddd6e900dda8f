"""More than 10,000 hostile messages against a running daemon: each is answered with a typed message, the daemon's
memory does not grow, its laws hold, and it still serves."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache.base.errors import ErrorCode
from hicache.protocol.messages import (
    Describe,
    Description,
    Error,
    Extend,
    Goodbye,
    Hello,
    Load,
    Lookup,
    Prefetch,
    Release,
    Renew,
    Scope,
    Store,
)
from hicache.protocol.version import VERSION
from hicache.protocol.wire import HEADER, decode_daemon, encode
from tests.daemon_harness import LIMITS, PAGE_TOKENS, SAFETY_S, DaemonProcess, RawClient, layout, model, tokens

EXAMPLES = 220
PER_EXAMPLE = 50
WARM_UP = 20  # examples after which memory must stay as it is
GROWTH_BYTES = 24 << 20

REPLY_TYPES = (
    "Welcome",
    "Refuse",
    "Match",
    "Accepted",
    "Done",
    "Busy",
    "Error",
    "Description",
)

EPOCH = 0xEEEE_EEEE  # stands for the epoch of whoever sends it

natural = st.one_of(st.integers(0, 70), st.integers(0, 5), st.integers(0, 2**63 - 1))
ints = st.one_of(natural, natural, natural, st.integers(-(2**63), -1))  # no field may be negative
ids = st.integers(0, 2**64 - 1)
small = st.integers(0, 40)
frame = st.binary(max_size=200)
scopes = st.builds(Scope, salt=st.text(max_size=8), lora=st.text(max_size=8))
counts = st.lists(small, max_size=3).map(tuple)

messages = st.one_of(
    st.builds(Lookup, small, ints, st.booleans(), scopes),
    st.builds(Extend, ints, small, ints),
    st.builds(Prefetch, small, scopes),
    st.builds(Load, ints, ints, counts, ints, ints),
    st.builds(Store, small, ints, counts, ints, ints, scopes),
    st.builds(Renew, st.lists(ints, max_size=4).map(tuple)),
    st.builds(Release, st.lists(ints, max_size=4).map(tuple)),
    st.builds(Describe, st.sampled_from(["status", "l2", "everything"])),
    st.builds(
        Hello,
        st.lists(ints, max_size=3).map(tuple),
        st.binary(max_size=20),
        ints,
        st.just(model()),
        st.just(layout()),
    ),
)


@st.composite
def sensible(draw: st.DrawFn) -> list[bytes]:
    """A well-formed message with arbitrary values, its buffers as long as it says."""
    message = Goodbye() if draw(st.integers(0, 99)) == 99 else draw(messages)
    sizes: list[int] = []
    if isinstance(message, Lookup | Extend | Prefetch | Store):
        sizes.append(message.tokens_count)
    if isinstance(message, Load | Store):
        sizes += message.blocks_count
    buffers = [draw(st.binary(min_size=4 * size, max_size=4 * size)) for size in sizes]
    return [bytes(part) for part in encode(message, draw(ids), 0, EPOCH, buffers)]


@st.composite
def damaged(draw: st.DrawFn) -> list[bytes]:
    """A well-formed message with one thing wrong: a byte, a length, a frame more or less, another version."""
    frames = draw(sensible())
    damage = draw(st.sampled_from(["flip", "cut", "drop", "add", "version", "length", "body", "many"]))
    at = draw(st.integers(0, len(frames) - 1))
    if damage == "flip" and frames[at]:
        where = draw(st.integers(0, len(frames[at]) - 1))
        frames[at] = frames[at][:where] + bytes([draw(st.integers(0, 255))]) + frames[at][where + 1 :]
    elif damage == "cut":
        frames[at] = frames[at][: draw(st.integers(0, len(frames[at])))]
    elif damage == "drop" and len(frames) > 1:
        del frames[at]
    elif damage == "add":
        frames.insert(draw(st.integers(0, len(frames))), draw(frame))
    elif damage == "version":
        frames[0] = frames[0][:2] + bytes([draw(st.integers(0, 255)), draw(st.integers(0, 255))]) + frames[0][4:]
    elif damage == "length":
        fields = list(HEADER.unpack(frames[0]))
        fields[draw(st.sampled_from([6, 9]))] = draw(st.integers(0, 65535))
        frames[0] = HEADER.pack(*fields)
    elif damage == "body":
        body = draw(
            st.recursive(
                st.none() | ints | st.text(max_size=5),
                lambda s: st.lists(s) | st.dictionaries(st.text(max_size=3), s),
                max_leaves=8,
            )
        )
        frames[1:2] = [msgspec.msgpack.encode(body)]
    elif damage == "many":
        frames += [b""] * draw(st.integers(1, 40))
    return frames


hostile = st.one_of(st.lists(frame, min_size=1, max_size=5), damaged(), sensible(), sensible())


_EPOCH_BYTES = EPOCH.to_bytes(4, "little")


class Target:
    """The daemon and two clients of it: one with a session, one without."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.clients = [RawClient(daemon).open(), RawClient(daemon)]
        self.clients[0].store(tokens(4 * PAGE_TOKENS), range(4))
        self.sent = 0
        self.replies: dict[str, int] = {}
        self.rss_bytes: list[int] = []

    def exchange(self, client: RawClient, batch: list[list[bytes]]) -> None:
        """Send all, then a Describe; every message must be answered before that one is."""
        for head, *rest in batch:
            client.sock.send_multipart([head.replace(_EPOCH_BYTES, client.epoch.to_bytes(4, "little")), *rest])
        self.sent += len(batch)
        sentinel, got = 2**64 - 1 - self.sent, 0
        client.sock.send_multipart(encode(Describe(), sentinel, 0, client.epoch))
        while True:
            assert client.sock.poll(int(SAFETY_S * 1000)), self.daemon.log()
            envelope = decode_daemon(client.sock.recv_multipart(), LIMITS)
            if envelope.request_id == sentinel and isinstance(envelope.message, Description):
                break
            name = type(envelope.message).__name__
            assert name in REPLY_TYPES
            if isinstance(envelope.message, Error):
                assert envelope.message.code in set(ErrorCode)
                assert envelope.message.code != ErrorCode.INTERNAL, envelope.message
                name += f":{envelope.message.code}"
            self.replies[name] = self.replies.get(name, 0) + 1
            got += 1
        assert got >= len(batch)

    def revive(self) -> None:
        """A Goodbye among the hostile messages ends the session; open another."""
        client = self.clients[0]
        reply = client.ask(Renew())
        if isinstance(reply, Error):
            client.open()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with DaemonProcess(tmp_path_factory.mktemp("fuzz"), ["server.log_level=warning"], l3=True) as daemon:
        target = Target(daemon)
        yield target
        for client in target.clients:
            client.__exit__(None, None, None)
        assert target.sent >= 10_000
        # Every kind of trouble was really met, so the fuzzing reaches what it is meant to reach.
        for code in ("malformed", "version", "unknown_session", "unknown_lease", "too_large", "out_of_range"):
            assert target.replies.get(f"Error:{code}", 0) > 0, target.replies
        assert target.replies.get("Match", 0) > 0, target.replies
        assert max(target.rss_bytes) - target.rss_bytes[0] < GROWTH_BYTES, target.rss_bytes
        with RawClient(daemon).open() as client:
            data = tokens(8 * PAGE_TOKENS, seed=77)
            client.store(data, range(8))
            assert client.lookup(data).resumable_tokens == 128
        status = daemon.describe()
        assert status["front"]["internal_errors"] == status["loop"]["internal_errors"] == 0
        assert daemon.stop() == 0
        assert not daemon.events("request.failed"), daemon.log()


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.lists(hostile, min_size=PER_EXAMPLE, max_size=PER_EXAMPLE), st.booleans())
def test_hostile_messages_are_answered_and_harm_nothing(
    target: Target, batch: list[list[bytes]], session: bool
) -> None:
    target.exchange(target.clients[0 if session else 1], batch)
    if session:
        target.revive()
    if target.sent >= WARM_UP * PER_EXAMPLE:
        target.rss_bytes.append(target.daemon.rss_bytes())


def test_frames_beyond_any_limit_are_refused_or_cut_and_others_are_served(target: Target) -> None:
    client = target.clients[1]
    body: list[Any] = [*encode(Describe(), 5, 0, 0)]
    too_long: list[Any] = [HEADER.pack(b"HC", VERSION >> 8, 0, 0, 0, 0, 5, 0, LIMITS.body_bytes + 1, 0)]
    target.exchange(client, [[*too_long, bytes(LIMITS.body_bytes + 1)], [*body, bytes(LIMITS.buffer_bytes + 4)]])
    before = target.daemon.rss_bytes()
    with RawClient(target.daemon) as giant:
        giant.sock.send_multipart([b"y" * (3 * LIMITS.buffer_bytes)])  # libzmq itself hangs up on this one
        assert not giant.sock.poll(500)
    assert target.daemon.rss_bytes() - before < LIMITS.buffer_bytes
    target.revive()

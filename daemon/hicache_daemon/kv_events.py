"""Tells routers what the cache holds: KV events on a PUB socket, what was missed on a ROUTER.

    Announce ─► events of this turn ─► batch, numbered ─┬► PUB: never waits; a slow subscriber loses batches and sees
                                                        │  a number missing
                                                        └► buffer of the latest batches
    replay request "from number n" ─► n is in the buffer? ─yes─► those batches, end
                                                          └─no──► snapshot: AllBlocksCleared, all known pages, end

Both answers leave the asker at the number of a batch that was published: what follows on the PUB socket fits. A
snapshot's batches are numbered from n on, without a hole if the rest can be filled with empty ones, since some
routers count. When nothing happens, the last number is repeated with an empty batch: who came late or lost the last
batch finds out. No call waits, and everything that grows has a bound.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from hicache.base.clock import Clock
from hicache.base.errors import ErrorCode, HiCacheError
from hicache.core.commands import Announce, PagesStored
from hicache.protocol import kv_events as wire
from hicache_daemon.descriptors import Door
from hicache_daemon.runtime_dir import HIDDEN_SUFFIX
from hicache_daemon.server import bind_private

BATCH_PAGES = 1024  # a batch that has as many is not waited with; also the parts of a snapshot
REMOVED_PAGES = 16384  # in one event
SPACING_S = 0.05  # between batches, so that numbers don't run away
BEAT_S = 1.0  # without a batch, before the last number is repeated
SEND_DEPTH = 256  # batches that wait for one subscriber
REPLAY_DEPTH = 256  # messages that wait for one asker
REPLAYS = 8  # served at once
WAITING = 64  # more that wait for their turn
PADDING = 200_000  # empty batches that fill up a snapshot, at most
STALL_S = 10.0  # an asker that takes nothing for this long is given up
TURN_S = 0.002  # of the loop, for replays
RETRY_S = 0.01
CLOSE_MS = 200  # for the last batch to reach the kernel
REQUEST_BYTES = 1024
RESERVED = 1000  # numbers that a killed daemon may leave out
COUNTERS = ("batches", "stored", "removed", "dropped", "replays", "snapshots", "failed_replays", "malformed")


class Cache(Protocol):
    """The cache state, as far as this asks it."""

    def survey(self, part_pages: int) -> Iterator[tuple[PagesStored, ...]]: ...
    def announced_pages(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Options:
    """Endpoints are `ipc://` with an absolute path, or `tcp://`."""

    endpoint: str
    replay_endpoint: str
    topic: str
    buffer_bytes: int


class Numbers:
    """Numbers of batches, which go on where an earlier daemon stopped: routers take a smaller one for an old one, and
    an equal one for one they have. A file says up to which they may have been used."""

    def __init__(self, path: Path, log: Any) -> None:
        self._path = path
        self._log = log
        self._reserved = self.next = self._read()

    def take(self) -> int:
        if self.next >= self._reserved:
            self._write(self.next + RESERVED)
        self.next += 1
        return self.next - 1

    def close(self) -> None:
        """In an orderly end nothing is left out."""
        self._write(self.next)

    def _read(self) -> int:
        try:
            text = self._path.read_text()
            number = int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else -1
        except FileNotFoundError:
            return 0
        except (OSError, UnicodeDecodeError):
            number = -1
        if number < 0:
            self._log.warning(
                "kv_events.numbers_lost", path=str(self._path), reason="it can't be read: they begin anew"
            )
        return max(0, number)

    def _write(self, number: int) -> None:
        self._reserved = number
        fresh = self._path.with_name(self._path.name + HIDDEN_SUFFIX)
        try:
            fresh.write_text(str(number))
            fresh.replace(self._path)
        except OSError as error:
            self._log.warning("kv_events.numbers_not_kept", path=str(self._path), reason=error.strerror)


class Buffer:
    """The latest batches, at most so many bytes of them. The very last is kept in any case."""

    OVERHEAD = 200  # bytes of a batch besides its content, in this process

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._batches: deque[tuple[int, bytes]] = deque()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, number: int, payload: bytes) -> None:
        self._batches.append((number, payload))
        self.held_bytes += len(payload) + self.OVERHEAD
        while self.held_bytes > self._limit_bytes and len(self._batches) > 1:
            self.held_bytes -= len(self._batches.popleft()[1]) + self.OVERHEAD

    def since(self, start: int) -> list[tuple[int, bytes]] | None:
        """All batches from number `start` on; None if some of them are here no more, or are still to come."""
        if not self._batches:
            return None
        oldest, newest = self._batches[0][0], self._batches[-1][0]
        if not oldest <= start <= newest + 1:
            return None
        return list(islice(self._batches, start - oldest, None))


@dataclass(slots=True)
class _Replay:
    """One asker's answer, as far as it has not been sent."""

    left: Iterator[tuple[int, bytes]]
    moved_s: float
    frames: list[bytes] | None = None  # the message that did not fit
    over: bool = False


class KvEvents:
    """One per daemon; all calls on the loop thread."""

    def __init__(
        self,
        options: Options,
        cache: Cache,
        numbers: Numbers,
        *,
        clock: Clock,
        log: Any,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """`now_s`: seconds since 1970."""
        self._options = options
        self._cache = cache
        self._clock = clock
        self._log = log
        self._now_s = now_s
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._topic = options.topic.encode()
        self._buffer = Buffer(options.buffer_bytes)
        self._numbers = numbers
        self._sent_s = -SPACING_S
        self._pending: list[msgspec.Raw] = []
        self._pending_pages = 0
        self._replays: dict[bytes, _Replay] = {}
        self._waiting: deque[tuple[bytes, int]] = deque()  # askers and the number that each asked for
        self._timers: dict[str, asyncio.Handle] = {}
        self._doors: list[Door] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = zmq.Context(io_threads=1)
        self._pub: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)

    # ---- life ---------------------------------------------------------------------------------------

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind, and void what routers knew of an earlier daemon. Raises `HiCacheError(CONFIG)`."""
        for sock, depth in ((self._pub, SEND_DEPTH), (self._router, REPLAY_DEPTH)):
            sock.setsockopt(zmq.SNDHWM, depth)
            sock.setsockopt(zmq.RCVHWM, WAITING)
            sock.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES)
        self._pub.setsockopt(zmq.LINGER, CLOSE_MS)
        self._pub.setsockopt(zmq.XPUB_NODROP, 1)  # a full subscriber is told of; see _publish
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._bind(self._pub, "endpoint", self._options.endpoint, loop)
        self._bind(self._router, "replay_endpoint", self._options.replay_endpoint, loop)
        self._loop = loop
        loop.add_reader(int(self._router.getsockopt(zmq.FD)), self._wake)
        self._wake()
        self._append([wire.cleared()])
        self._later("beat", BEAT_S, self._beat)
        self._log.info(
            "kv_events.open",
            endpoint=self._options.endpoint,
            replay_endpoint=self._options.replay_endpoint,
            first=self._numbers.next - 1,
        )

    def close(self) -> None:
        """Void what routers know, and unbind. Waits at most CLOSE_MS. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is not None:
            self._flush()
            self._append([wire.cleared()])
            self._numbers.close()
            loop.remove_reader(int(self._router.getsockopt(zmq.FD)))
        for timer in self._timers.values():
            timer.cancel()
        for door in self._doors:
            door.close()
        self._doors = []
        self._replays.clear()
        self._pub.close()
        self._router.close()
        self._context.term()
        if loop is not None:
            for endpoint in (self._options.endpoint, self._options.replay_endpoint):
                if endpoint.startswith("ipc://"):
                    Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def _bind(self, sock: "zmq.Socket[bytes]", key: str, endpoint: str, loop: asyncio.AbstractEventLoop) -> None:
        try:
            if not endpoint.startswith("ipc://"):
                sock.setsockopt(zmq.IPV6, int("[" in endpoint))
                sock.bind(endpoint)
                return
            door = bind_private(sock, Path(endpoint.removeprefix("ipc://")), self._log)
        except (OSError, zmq.ZMQError) as error:
            raise HiCacheError(
                ErrorCode.CONFIG,
                f"kv_events.{key}: {endpoint} cannot be bound: {error.strerror}",
                "choose another, or stop who has it",
            ) from error
        if door is not None:
            self._doors.append(door)
            door.open(loop)

    def _later(self, name: str, delay_s: float, act: Callable[[], None]) -> None:
        """Have `act` called once; a call under the same name that is outstanding stays as it is."""
        if name in self._timers or self._loop is None:
            return

        def due() -> None:
            del self._timers[name]
            act()

        self._timers[name] = self._loop.call_later(delay_s, due) if delay_s > 0 else self._loop.call_soon(due)

    def status(self) -> dict[str, Any]:
        """Figures for status pages. `sequence` is the number of the last batch; `pages` are those routers know of."""
        return {
            "enabled": True,
            "endpoint": self._options.endpoint,
            "replay_endpoint": self._options.replay_endpoint,
            "sequence": self._numbers.next - 1,
            "pages": self._cache.announced_pages(),
            "buffered_batches": len(self._buffer),
            "buffered_bytes": self._buffer.held_bytes,
            "open_replays": len(self._replays) + len(self._waiting),
            "counters": dict(self.counters),
        }

    # ---- live ---------------------------------------------------------------------------------------

    def announce(self, command: Announce) -> None:
        """Take in changes of the cache. They go out together with those of the same turn of the loop."""
        if self._loop is None:
            return
        for change in command.changes:
            medium = wire.MEDIUM[change.tier]
            self._pending_pages += len(change.keys)
            if isinstance(change, PagesStored):
                self.counters["stored"] += len(change.keys)
                self._pending.append(_stored(change))
                continue
            self.counters["removed"] += len(change.keys)
            for at in range(0, len(change.keys), REMOVED_PAGES):
                self._pending.append(wire.removed(medium, change.keys[at : at + REMOVED_PAGES]))
        if self._pending_pages >= BATCH_PAGES:
            self._flush()
        elif self._pending:
            self._later("flush", self._sent_s + SPACING_S - self._clock.monotonic_s(), self._flush)

    def _flush(self) -> None:
        events, self._pending, self._pending_pages = self._pending, [], 0
        if events:
            self._append(events)

    def _append(self, events: list[msgspec.Raw]) -> None:
        """The next batch: numbered, kept, published."""
        number, payload = self._numbers.take(), wire.batch(self._now_s(), events)
        self.counters["batches"] += 1
        self._buffer.add(number, payload)
        self._publish(number, payload)

    def _publish(self, number: int, payload: bytes) -> None:
        frames = [self._topic, wire.sequence_frame(number), payload]
        self._sent_s = self._clock.monotonic_s()
        try:
            self._pub.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:  # nobody got it yet: now to all but those whose pipe is full
            if not self.counters["dropped"]:
                self._log.warning("kv_events.dropped", sequence=number, reason="a subscriber is slow; it can replay")
            self.counters["dropped"] += 1
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            self._pub.send_multipart(frames, zmq.NOBLOCK)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)

    def _beat(self) -> None:
        if self._clock.monotonic_s() - self._sent_s >= BEAT_S:
            self._publish(self._numbers.next - 1, self._empty())
        self._later("beat", BEAT_S, self._beat)

    def _empty(self) -> bytes:
        return wire.batch(self._now_s(), [])

    # ---- replay -------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """The router may have something to read: its descriptor is edge-triggered, and sends take edges away."""
        self._later("read", 0.0, self._read)

    def _read(self) -> None:
        for _ in range(WAITING):
            request = self._receive()
            if request is None:
                break
            identity, start = request
            if start is None or len(self._waiting) >= WAITING:
                self.counters["malformed" if start is None else "failed_replays"] += 1
                continue
            self._waiting.append((identity, start))
        else:
            self._wake()
        if self._waiting:
            self._later("pump", 0.0, self._pump)

    def _receive(self) -> tuple[bytes, int | None] | None:
        """(peer, number it asks for); None if there is nothing to read."""
        try:
            identity = self._router.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        frames: list[bytes] = []
        while self._router.getsockopt(zmq.RCVMORE):
            frame = self._router.recv()
            if len(frames) < 3:
                frames.append(frame)
        return identity, wire.replay_start(frames)

    def _pump(self) -> None:
        """Send replays on for a little while."""
        self._admit()
        until_s = self._clock.monotonic_s() + TURN_S
        moved = False
        for identity, replay in list(self._replays.items()):
            while self._step(identity, replay):
                moved = True
                if self._clock.monotonic_s() > until_s:
                    break
        if int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._wake()
        if self._replays or self._waiting:
            self._later("pump", 0.0 if moved else RETRY_S, self._pump)

    def _admit(self) -> None:
        """Begin answers for which there is room. A peer gets one at a time."""
        for _ in range(len(self._waiting)):
            identity, start = self._waiting.popleft()
            if identity in self._replays or len(self._replays) >= REPLAYS:
                self._waiting.append((identity, start))
                continue
            kept = self._buffer.since(start)
            self.counters["replays" if kept is not None else "snapshots"] += 1
            left = self._snapshot(start) if kept is None else iter(kept)
            self._replays[identity] = _Replay(left, self._clock.monotonic_s())

    def _step(self, identity: bytes, replay: _Replay) -> bool:
        """Send one message. False if that is not possible now, or the replay is over."""
        if replay.frames is None:
            number, payload = next(replay.left, (None, b""))
            replay.over = number is None
            topic, sequence = (b"", wire.END) if number is None else (self._topic, wire.sequence_frame(number))
            replay.frames = [identity, b"", topic, sequence, payload]
        now_s = self._clock.monotonic_s()
        try:
            self._router.send_multipart(replay.frames, zmq.NOBLOCK)
        except zmq.Again:
            if now_s - replay.moved_s > STALL_S:
                self._give_up(identity)
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._give_up(identity)
            return False
        replay.frames, replay.moved_s = None, now_s
        if replay.over:
            del self._replays[identity]
        return not replay.over

    def _give_up(self, identity: bytes) -> None:
        self.counters["failed_replays"] += 1
        del self._replays[identity]

    def _snapshot(self, start: int) -> Iterator[tuple[int, bytes]]:
        """All that is known now, as batches from number `start` to the last one published. What changes while it is
        read is published after that one, and not in here."""
        self._flush()
        needed = 1 + self._cache.announced_pages() // BATCH_PAGES + 1
        while start < self._numbers.next < start + needed:
            self._append([])
        parts = self._cache.survey(BATCH_PAGES)
        first = next(parts, ())  # from here on it counts what is announced
        return self._numbered(start, self._numbers.next - 1, first, parts)

    def _numbered(
        self, start: int, last: int, first: tuple[PagesStored, ...], parts: Iterator[tuple[PagesStored, ...]]
    ) -> Iterator[tuple[int, bytes]]:
        number = start
        yield min(number, last), wire.batch(self._now_s(), [wire.cleared(), *map(_stored, first)])
        for part in parts:
            number += 1
            yield min(number, last), wire.batch(self._now_s(), [_stored(change) for change in part])
        empty = self._empty()
        if last - number > PADDING:
            yield last, empty
        else:
            for filling in range(number + 1, last + 1):
                yield filling, empty


def _stored(change: PagesStored) -> msgspec.Raw:
    return wire.stored(wire.MEDIUM[change.tier], change.parent, change.keys, change.tokens, change.page_tokens)

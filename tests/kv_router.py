"""A router that follows KV events as vLLM's consumers do: what it is told in the end is what the cache holds.

It is as strict as the strictest of them: numbers without holes, also in a replay; no page twice in a tier; no page
before its parent. `counting=False` allows holes in a replay, as others do.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

import msgspec
import zmq

SAFETY_S = 30.0
END = (1 << 64) - 1


@dataclass
class Page:
    parent: int | None
    tokens: tuple[int, ...]


@dataclass
class Event:
    number: int
    names: list[str]


@dataclass
class KvRouter:
    """One SUB and, with `replay`, one DEALER. A context manager."""

    endpoint: str
    replay: str = ""
    counting: bool = True
    topic: bytes = b""
    receive_depth: int = 1000
    pages: dict[str, dict[int, Page]] = field(default_factory=lambda: {"CPU": {}, "DISK": {}})
    known: set[int] = field(default_factory=set)
    number: int | None = None  # of the last batch taken in
    live: int = -1  # of the last one published
    log: list[Event] = field(default_factory=list)
    replays: int = 0

    def __enter__(self) -> "KvRouter":
        self._context = zmq.Context()
        self._sub, self._dealer = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        for sock in (self._sub, self._dealer):
            sock.setsockopt(zmq.LINGER, 0)
        self._sub.setsockopt(zmq.RCVHWM, self.receive_depth)
        self._sub.setsockopt(zmq.SUBSCRIBE, self.topic)
        self._sub.connect(self.endpoint)
        if self.replay:
            self._dealer.connect(self.replay)
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self._sub.close()
        self._dealer.close()
        self._context.term()

    def follow(self, until: "Callable[[KvRouter], object]", seconds: float = SAFETY_S) -> None:
        """Take in what comes until `until(self)` holds."""
        deadline = time.monotonic() + seconds
        while not until(self):
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"not told: number {self.number}, {self.held()} pages, {self.log[-5:]}"
            if self._sub.poll(int(left_s * 1000)):
                self._take(*self._sub.recv_multipart())

    def held(self) -> dict[str, int]:
        return {medium: len(pages) for medium, pages in self.pages.items()}

    def prefix(self, medium: str, tokens: list[int]) -> int:
        """How many of `tokens` a router would count as matched in one tier, walking from the first page."""
        below = {(page.parent, page.tokens): hash for hash, page in self.pages[medium].items()}
        size = len(next(iter(self.pages[medium].values())).tokens) if below else 1
        parent, at = None, 0
        while (parent, tuple(tokens[at : at + size])) in below:
            parent, at = below[parent, tuple(tokens[at : at + size])], at + size
        return at

    def ask(self, start: int) -> None:
        """Request a replay and take it in to its end."""
        self.replays += 1
        self._dealer.send_multipart([b"", start.to_bytes(8, "big")])
        expected, taken = start, 0
        while True:
            assert self._dealer.poll(int(SAFETY_S * 1000)), f"the replay from {start} stops after {taken} batches"
            empty, topic, number_frame, payload = self._dealer.recv_multipart()
            number = int.from_bytes(number_frame, "big")
            assert not empty
            if not payload:
                assert number == END
                return
            assert topic == self.topic or not self.topic
            if self.counting:
                assert number == expected, f"replay from {start}: {number} where {expected} should be"
            expected, taken = number + 1, taken + 1
            self._apply(number, payload)

    def _take(self, topic: bytes, number_frame: bytes, payload: bytes) -> None:
        assert topic.startswith(self.topic)
        number = int.from_bytes(number_frame, "big")
        if number < self.live:
            self.number = None  # the daemon was started again
        self.live = number
        expected = 0 if self.number is None else self.number + 1
        if number > expected and self.replay:
            self.ask(expected)
        if self.number is not None and number <= self.number:
            return
        self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        self.number = number
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        self.log.append(Event(number, [event["type"] for event in events]))
        for event in events:
            getattr(self, f"_on_{event['type']}")(event)

    def _on_AllBlocksCleared(self, _: dict[str, object]) -> None:  # noqa: N802 - the name on the wire
        self.pages = {"CPU": {}, "DISK": {}}
        self.known.clear()

    def _on_BlockStored(self, event: dict[str, object]) -> None:  # noqa: N802
        parent, size, pages = event["parent_block_hash"], event["block_size"], self.pages[str(event["medium"])]
        hashes, tokens = event["block_hashes"], event["token_ids"]
        assert len(tokens) == size * len(hashes)  # type: ignore[arg-type, operator]
        assert parent is None or parent in self.known, "a page before its parent"
        for at, hash in enumerate(hashes):  # type: ignore[arg-type, var-annotated]
            assert hash not in pages, "a page twice in a tier"
            pages[hash] = Page(parent, tuple(tokens[at * size : (at + 1) * size]))  # type: ignore[arg-type, index, operator]
            self.known.add(hash)
            parent = hash

    def _on_BlockRemoved(self, event: dict[str, object]) -> None:  # noqa: N802
        for hash in event["block_hashes"]:  # type: ignore[attr-defined]
            self.pages[str(event["medium"])].pop(hash, None)

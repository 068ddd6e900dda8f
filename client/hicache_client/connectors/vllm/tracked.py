"""What the scheduler side knows of one request and of one load, and how tokens, pages and blocks go together.

Nothing here decides; lookups.py, flights.py and scheduler.py do. The states are drawn in STATES.md.
"""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hicache.protocol.messages import Scope
from hicache_client.leases import LeaseRef

from .metadata import Int32s
from .scope import NotYet, Scoped
from .scout import Ask

TOKEN_BYTES = 4

BlockTable = Sequence[Sequence[int]]  # per cache group the engine's block ids, position 0 first


class EngineRequest(Protocol):
    """What is read of vLLM's v1 Request; scope.py reads some more."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    skip_reading_prefix_cache: bool

    @property
    def num_tokens(self) -> int:
        """Known tokens: neither drafts nor placeholders."""
        ...

    @property
    def all_token_ids(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Paging:
    """How tokens, pages and blocks go together. `starts_per_block`: pages per engine block, per cache group."""

    page_tokens: int
    starts_per_block: tuple[int, ...]

    @property
    def block_pages(self) -> int:
        """Pages of the largest engine block."""
        return max(self.starts_per_block)

    def starts(self, table: BlockTable, first: int, last: int) -> tuple[Int32s, ...]:
        """Where the pages first … last-1 lie, per group. Raises `IndexError` beyond the table."""
        pages = np.arange(first, last, dtype=np.int64)
        columns = []
        for ids, k in zip(table, self.starts_per_block, strict=True):
            needed = np.asarray(ids[: -(-last // k)], dtype=np.int64)
            columns.append((needed[pages // k] * k + pages % k).astype(np.int32))
        return tuple(columns)

    def blocks(self, table: BlockTable, first: int, last: int) -> tuple[tuple[int, ...], ...]:
        """The blocks that the pages first … last-1 touch, per group."""
        return tuple(
            tuple(ids[first // k : -(-last // k)]) for ids, k in zip(table, self.starts_per_block, strict=True)
        )

    def pages_within(self, table: BlockTable) -> int:
        """How many pages the table has room for."""
        return min((len(ids) * k for ids, k in zip(table, self.starts_per_block, strict=True)), default=0)


@dataclass(frozen=True, slots=True)
class Promise:
    """What vLLM was told last: `tokens` from token `start` on can be loaded."""

    start: int
    tokens: int
    sync: bool
    leases: tuple[LeaseRef, ...]
    memory_tokens: int  # of the whole match, what came from L2


@dataclass(slots=True, eq=False)
class Flight:
    """A load that was planned and is not over on every worker. `end` in tokens: behind its last page."""

    load: int
    request: str
    ask: Ask | None
    begun_s: float
    start: int
    end: int
    tokens: int
    memory_tokens: int
    sync: bool
    ended: int = 0  # workers that said so
    failed: bool = False


@dataclass(slots=True, eq=False)
class Tracked:
    """One request from its arrival until nothing of it is left."""

    request: EngineRequest
    scope: Scoped = field(default_factory=NotYet)
    preemptions: int = 0

    # looking up
    ask: Ask | None = None
    asked_at: float | None = None  # the first time that vLLM was told to come again for the answer
    prefetch_at: float | None = None  # ... for the prefetch
    gave_up: bool = False  # this admission goes without
    negative: bool = False  # a load failed: never again
    promise: Promise | None = None
    local_tokens: int = 0  # vLLM's own hit at the last lookup

    # loading
    flight: Flight | None = None
    receiving: bool = False  # vLLM waits for finished_recving
    unproven: set[int] = field(default_factory=set)  # loads into blocks of the table, not known to have gone well
    spoiled: bool = False  # it computed on blocks whose load failed: nothing of it is stored

    # storing
    table: list[list[int]] = field(default_factory=list)
    offered: int = 0  # pages before it were offered to the daemon, or are known to it
    due: int = 0  # no store before so many tokens are computed
    stored: bool = False  # blocks of the table stand in a plan, so a worker may be reading them
    end: int = 0  # of a finished request: tokens whose KV may be stored
    finished_s: float = 0.0
    closed: bool = False  # its last stores were planned

    _tokens: bytearray = field(default_factory=bytearray)

    @property
    def name(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def usable_scope(self) -> Scope | None:
        """The scope, None if it has none (yet)."""
        return self.scope if isinstance(self.scope, Scope) else None

    @property
    def preempted(self) -> bool:
        """vLLM took its blocks away since we looked last."""
        return self.preemptions != self.request.num_preemptions

    def tokens_to(self, end: int) -> bytes:
        """The first `end` tokens as little-endian int32. What was read once is not read again."""
        have = len(self._tokens) // TOKEN_BYTES
        if end > have:
            more = array("i", self.request.all_token_ids[have:end])
            if sys.byteorder == "big":
                more.byteswap()
            self._tokens += more.tobytes()
        return bytes(memoryview(self._tokens)[: end * TOKEN_BYTES])

    def lose_blocks(self) -> None:
        """Its blocks are another's from now on: what follows is a new admission."""
        self.preemptions = self.request.num_preemptions
        self.promise = self.flight = self.asked_at = self.prefetch_at = None
        self.stored = self.spoiled = self.gave_up = self.receiving = False
        self.offered = self.due = self.local_tokens = 0
        self.unproven.clear()
        self.table = []

    def offer_again(self) -> None:
        """From the first page."""
        self.offered = self.due = 0
        self.stored = False

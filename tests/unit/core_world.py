"""A state machine with one small model, and shorthands to drive it by hand."""

from typing import Any, TypeVar

import numpy as np

from hicache.base.ids import LeaseId, RequestId, SessionId
from hicache.base.limits import Limits
from hicache.core.commands import Command, CopyPages, Reply, WriteRecords
from hicache.core.events import (
    CopyEnded,
    Event,
    LoadAsked,
    LookupAsked,
    ReleaseAsked,
    SessionOpened,
    StoreAsked,
    StoreWritten,
)
from hicache.core.state import CacheState, CoreConfig
from hicache.core.world import Announced
from hicache.protocol.messages import Match, Scope
from hicache.spec.model import ShardSpec
from tests.sim.contents import LIMITS, MODELS, SECRET, SimModel

PAGE = 4  # tokens
BLOCK = 128  # bytes of a page of MODELS[0]
_T = TypeVar("_T")


def tokens(*pages: int) -> bytes:
    """Each page repeats one token id."""
    return np.repeat(np.array(pages, np.int32), PAGE).astype("<i4").tobytes()


def starts(count: int, first: int = 0) -> tuple[np.ndarray[tuple[int], np.dtype[np.int32]], ...]:
    return (np.arange(first, first + count, dtype=np.int32),)


class Hand:
    """Feeds events, checks all laws after each, and remembers the commands of the last."""

    def __init__(
        self,
        pages: int = 16,
        l3_pages: int = 0,
        policy: str = "write_through",
        limits: Limits = LIMITS,
        *,
        announced: Announced | None = None,
    ) -> None:
        config = CoreConfig(
            arena_bytes=pages * BLOCK,
            parent_bytes=BLOCK,
            l3_mode="rw" if l3_pages else "off",
            l3_capacity_bytes=l3_pages * CacheState.l3_allocated(BLOCK),
            write_policy=policy,
            announced=announced,
        )
        self.state = CacheState(config, limits, SECRET)
        self.now_s = 0.0
        self.out: list[Command] = []
        self.request = 0

    @property
    def counters(self) -> dict[str, int]:
        found: dict[str, int] = self.state.snapshot()["counters"]
        return found

    def feed(self, event: Event) -> list[Command]:
        self.out = self.state.handle(event, self.now_s)
        self.state.check()
        return self.out

    def ask(self) -> RequestId:
        self.request += 1
        return RequestId(self.request)

    def one(self, kind: type[_T]) -> _T:
        """The only command of this kind in the last answer."""
        found = [each for each in self.out if isinstance(each, kind)]
        assert len(found) == 1, self.out
        return found[0]

    def kinds(self) -> list[str]:
        return [type(each.message if isinstance(each, Reply) else each).__name__ for each in self.out]

    def message(self) -> object:
        return self.one(Reply).message

    def open(
        self,
        session: int = 1,
        *,
        epoch: int = 1,
        instance: bytes = b"i" * 16,
        model: SimModel = MODELS[0],
        **more: Any,
    ) -> list[Command]:
        return self.feed(
            SessionOpened(
                SessionId(session),
                self.ask(),
                instance,
                epoch,
                more.pop("tenant", "t"),
                model.spec,
                model.layout,
                more.pop("shard", ShardSpec()),
                **more,
            )
        )

    def store(self, *pages: int, first: int = 0, session: int = 1, salt: str = "") -> list[Command]:
        text = tokens(*pages)
        blocks = starts(len(pages) - first)
        return self.feed(
            StoreAsked(SessionId(session), self.ask(), text, first, blocks, 0, self.request, Scope(salt=salt))
        )

    def store_text(self, text: bytes, first: int) -> list[Command]:
        count = len(text) // 4 // PAGE - first
        return self.feed(StoreAsked(SessionId(1), self.ask(), text, first, starts(count), 0, self.request, Scope()))

    def copied(self, *, ok: bool = True) -> list[Command]:
        return self.feed(CopyEnded(self.one(CopyPages).ticket, ok, "" if ok else "why"))

    def written(self, *, ok: bool = True) -> None:
        for command in [each for each in self.out if isinstance(each, WriteRecords)]:
            self.feed(StoreWritten(command.ticket, np.full(len(command.records), ok)))

    def stored(self, *pages: int, session: int = 1, salt: str = "") -> None:
        """Store, copy and write through."""
        self.store(*pages, session=session, salt=salt)
        if any(isinstance(each, CopyPages) for each in self.out):
            self.copied()
            self.written()

    def look(self, *pages: int, lease: bool = True, limit: int = 1 << 30, session: int = 1) -> Match:
        return self.look_for(tokens(*pages), lease=lease, limit=limit, session=session)

    def look_for(
        self, text: bytes, *, lease: bool = True, limit: int = 1 << 30, session: int = 1, partial: bool = False
    ) -> Match:
        self.feed(LookupAsked(SessionId(session), self.ask(), text, limit, lease, Scope(), partial))
        message = self.message()
        assert isinstance(message, Match), message
        return message

    def load(self, lease: int, count: int, *, first: int = 0, session: int = 1) -> list[Command]:
        return self.feed(
            LoadAsked(SessionId(session), self.ask(), LeaseId(lease), first, starts(count), 0, self.request)
        )

    def release(self, *leases: int, session: int = 1) -> list[Command]:
        return self.feed(ReleaseAsked(SessionId(session), self.ask(), tuple(LeaseId(each) for each in leases)))

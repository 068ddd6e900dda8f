"""Tickets: work that somebody outside is doing. A ticket owns what it touches until its answer comes.

Store    COPYING (L1→L2) ─ CopyEnded ─► rows READY, Done          │ failed: rows ABSENT, Error
Load     READING (waits for Reads) ─► COPYING (L2→L1) ─ CopyEnded ─► Done │ Error
Prefetch READING ─► Done
Read     L3→L2 of one batch, for whoever waits ─ StoreRead ─► rows READY │ rows leave L3
Write    L2→L3 of one batch ─ StoreWritten ─► rows READY in L3           │ rows stay as they were
Delete   records leave L3 ─ StoreDeleted ─► rows ABSENT in L3
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from hicache.base.ids import LeaseId, RequestId, SessionId, TicketId
from hicache.core.residency import Int32s
from hicache.pool.refs import BlockRefs

READING, COPYING = "READING", "COPYING"


@dataclass(slots=True)
class StoreTicket:
    """`rows` are being filled from L1, `refs[g]` own their blocks; `path` are the rows of the sequence so far."""

    id: TicketId
    session: SessionId
    request: RequestId
    namespace: int
    tokens: bytes
    path: Int32s
    rows: Int32s
    refs: list[BlockRefs]


@dataclass(slots=True)
class LoadTicket:
    """`rows` are pinned; once all are in L2, `refs[g]` share their blocks and the copy begins."""

    id: TicketId
    session: SessionId
    request: RequestId
    lease: LeaseId
    namespace: int
    rows: Int32s
    l1: tuple[Int32s, ...]
    fence: int
    generation: int
    waits_for: set[TicketId] = field(default_factory=set)
    phase: str = READING
    refs: list[BlockRefs] = field(default_factory=list)


@dataclass(slots=True)
class PrefetchTicket:
    """Counts pages that land. Owns nothing: the reads do."""

    id: TicketId
    session: SessionId
    request: RequestId
    waits_for: set[TicketId] = field(default_factory=set)
    landed: int = 0


@dataclass(slots=True)
class ReadTicket:
    """`rows` are FILLING from L3 and pinned, `refs[g]` own their blocks. `waiters` are loads and prefetches."""

    id: TicketId
    namespace: int
    rows: Int32s
    refs: list[BlockRefs]
    waiters: list[TicketId]


@dataclass(slots=True)
class WriteTicket:
    """`rows` are pinned in L2 and FILLING in L3. With `demote` they are LEAVING L2."""

    id: TicketId
    namespace: int
    rows: Int32s
    demote: bool


@dataclass(slots=True)
class DeleteTicket:
    """`rows` are LEAVING L3."""

    id: TicketId
    rows: Int32s


Ticket = StoreTicket | LoadTicket | PrefetchTicket | ReadTicket | WriteTicket | DeleteTicket
_T = TypeVar("_T", StoreTicket, LoadTicket, PrefetchTicket, ReadTicket, WriteTicket, DeleteTicket)


def pages_of(ticket: Ticket) -> int:
    """Pages that a ticket counts against `limits.pages_in_flight`."""
    return 0 if isinstance(ticket, PrefetchTicket | DeleteTicket) else ticket.rows.size


class Tickets:
    """All open tickets. An id is never used twice, so a late or doubled answer finds nothing."""

    def __init__(self) -> None:
        self._open: dict[TicketId, Ticket] = {}
        self._next = 1
        self.pages = 0
        self.reader_of: dict[int, TicketId] = {}  # row FILLING from L3 -> its ReadTicket

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._open.values())

    def new_id(self) -> TicketId:
        self._next += 1
        return TicketId(self._next - 1)

    def add(self, ticket: Ticket) -> None:
        self._open[ticket.id] = ticket
        self.pages += pages_of(ticket)
        if isinstance(ticket, ReadTicket):
            self.reader_of.update(dict.fromkeys(ticket.rows.tolist(), ticket.id))

    def find(self, id: TicketId, kind: type[_T]) -> _T | None:
        """The open ticket `id` if it is of this kind."""
        ticket = self._open.get(id)
        return ticket if isinstance(ticket, kind) else None

    def get(self, id: TicketId) -> Ticket | None:
        return self._open.get(id)

    def close(self, ticket: Ticket) -> None:
        del self._open[ticket.id]
        self.pages -= pages_of(ticket)
        if isinstance(ticket, ReadTicket):
            for row in ticket.rows.tolist():
                del self.reader_of[row]

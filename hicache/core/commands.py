"""What the outside must do. The loop hands these to clients, lanes and store threads; answers come as events."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.base.ids import PageKey, RequestId, SessionId, TicketId
from hicache.protocol.messages import Accepted, Busy, Done, Error, Match, Refuse, Welcome

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Reply:
    """Send `message` as answer to `request`. A session that is gone swallows it."""

    session: SessionId
    request: RequestId
    message: Welcome | Refuse | Match | Accepted | Done | Busy | Error


@dataclass(frozen=True, slots=True)
class GroupCopy:
    """Block pairs of one cache group: `l2[i]` ↔ `l1[i]`. `l2` are block ids of the group's view of the pool;
    the byte offset of block b of a view in the arena is `views[group].offset_bytes(b)` (see pool/views.py)."""

    group: int  # index in the session's model
    l2: Int32s
    l2_offsets: npt.NDArray[np.int64]  # byte offset of each block in the arena
    l1: Int32s


@dataclass(frozen=True, slots=True)
class CopyPages:
    """Move pages between a session's L1 and L2. `to_l1`: layer by layer in model order, fencing each layer.

    Answered by exactly one CopyEnded, also when cancelled or when the session's memory is gone."""

    ticket: TicketId
    session: SessionId
    to_l1: bool
    copies: tuple[GroupCopy, ...]
    fence: int
    generation: int


@dataclass(frozen=True, slots=True)
class CancelCopy:
    """Nobody waits for this copy any more; end it soon. CopyEnded still comes."""

    ticket: TicketId


@dataclass(frozen=True, slots=True)
class FailFence:
    """Write a terminal FAILED state: the transfer never began or its first leg failed."""

    session: SessionId
    fence: int
    generation: int
    code: str


@dataclass(frozen=True, slots=True)
class DoneFence:
    """Write a terminal DONE state for a transfer that had nothing to copy."""

    session: SessionId
    fence: int
    generation: int


class Record(NamedTuple):
    """One block of one page as the store knows it. A tuple, since hundreds are made in one event."""

    key: PageKey
    parent: PageKey | None
    namespace: bytes
    tenant: str
    group: str
    offset: int  # of the payload in the L2 arena, bytes
    length: int  # bytes
    fingerprint: bytes  # of model, layout and shard: checked on read, stored in the record's header


@dataclass(frozen=True, slots=True)
class ReadRecords:
    """Read and verify records into the arena. Answered by StoreRead."""

    ticket: TicketId
    records: tuple[Record, ...]
    urgency: Literal["load", "prefetch"] = "load"


@dataclass(frozen=True, slots=True)
class WriteRecords:
    """Make records durable. Answered by StoreWritten."""

    ticket: TicketId
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class DeleteRecords:
    """Forget records. Answered by StoreDeleted."""

    ticket: TicketId
    keys: tuple[tuple[PageKey, str], ...]  # (page key, group)


@dataclass(frozen=True, slots=True)
class TouchRecords:
    """These were used, oldest first; the store may persist the order lazily. Not answered."""

    keys: tuple[tuple[PageKey, str], ...]


class PagesStored(NamedTuple):
    """Consecutive pages of one sequence that lookups find in a tier from now on."""

    tier: Literal["l2", "l3"]
    parent: PageKey | None  # of the page before the first; None: there is none
    keys: tuple[PageKey, ...]
    tokens: bytes  # little-endian int32, page_tokens for each key
    page_tokens: int


class PagesRemoved(NamedTuple):
    """Pages that lookups don't find in a tier any more."""

    tier: Literal["l2", "l3"]
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell routers, in this order. A page's parent was announced before it. Not answered."""

    changes: tuple[PagesStored | PagesRemoved, ...]


@dataclass(frozen=True, slots=True)
class DropSession:
    """Unmap the session's memory. Emitted once, after the last ticket that touches it has ended."""

    session: SessionId
    reason: str


Command = (
    Reply
    | CopyPages
    | CancelCopy
    | FailFence
    | DoneFence
    | ReadRecords
    | WriteRecords
    | DeleteRecords
    | TouchRecords
    | Announce
    | DropSession
)

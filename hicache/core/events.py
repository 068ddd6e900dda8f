"""What can happen. Each event is immutable; `CacheState.handle(event, now_s)` is the only writer."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.base.ids import LeaseId, PageKey, RequestId, SessionId, TicketId
from hicache.protocol.messages import Scope
from hicache.spec.layout import L1Layout
from hicache.spec.model import ModelSpec, ShardSpec

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A client said Hello and its shared memory is mapped. A larger epoch of an instance supersedes a smaller."""

    session: SessionId
    request: RequestId
    instance: bytes
    epoch: int
    tenant: str
    model: ModelSpec
    layout: L1Layout
    shard: ShardSpec
    group: bytes = b""  # of one engine's processes, which share leases; empty: none
    memory: bool = True  # whether it can load and store


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """Goodbye, lifeline EOF, or silence beyond the limit. Idempotent. `request` is 0 unless Goodbye asked."""

    session: SessionId
    reason: str
    request: RequestId = RequestId(0)


@dataclass(frozen=True, slots=True)
class LookupAsked:
    session: SessionId
    request: RequestId
    tokens: bytes  # little-endian int32
    limit_tokens: int
    lease: bool
    scope: Scope
    partial: bool = False


@dataclass(frozen=True, slots=True)
class ExtendAsked:
    session: SessionId
    request: RequestId
    lease: LeaseId
    tokens: bytes
    limit_tokens: int


@dataclass(frozen=True, slots=True)
class PrefetchAsked:
    session: SessionId
    request: RequestId
    tokens: bytes
    scope: Scope


@dataclass(frozen=True, slots=True)
class LoadAsked:
    session: SessionId
    request: RequestId
    lease: LeaseId
    first_page: int
    blocks: tuple[Int32s, ...]  # per group: L1 starts
    fence: int
    generation: int


@dataclass(frozen=True, slots=True)
class StoreAsked:
    session: SessionId
    request: RequestId
    tokens: bytes
    first_page: int
    blocks: tuple[Int32s, ...]
    fence: int
    generation: int
    scope: Scope


@dataclass(frozen=True, slots=True)
class RenewAsked:
    session: SessionId
    request: RequestId
    leases: tuple[LeaseId, ...]


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    session: SessionId
    request: RequestId
    leases: tuple[LeaseId, ...]


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """A lane finished, failed or cancelled a CopyPages; it touches neither end any more."""

    ticket: TicketId
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StoreRead:
    """The store answered a ReadRecords: `ok[i]` says whether record i is in its block, verified.
    `corrupt[i]` (subset of not ok) says that the record exists and is bad: it has been quarantined."""

    ticket: TicketId
    ok: npt.NDArray[np.bool_]
    corrupt: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StoreWritten:
    """The store answered a WriteRecords: record i is durable iff `ok[i]`. `reason` of the failures, if any."""

    ticket: TicketId
    ok: npt.NDArray[np.bool_]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StoreDeleted:
    """The store answered a DeleteRecords; the keys are gone (or never were there)."""

    ticket: TicketId


@dataclass(frozen=True, slots=True)
class RecoveredRow:
    """One index row that the store found at start, oldest use first."""

    key: PageKey
    parent: PageKey | None  # None: first page of its namespace
    namespace: bytes
    tenant: str
    group: str
    frame_bytes: int  # allocated bytes


@dataclass(frozen=True, slots=True)
class StoreRecovered:
    """A batch of rows read at start, in order of use; before any session is opened."""

    rows: tuple[RecoveredRow, ...]


@dataclass(frozen=True, slots=True)
class StoreModeChanged:
    """The disk tier became `rw`, `ro` (no writes; reads go on) or `off`."""

    mode: str
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Stop taking new work; what is in flight ends."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: leases expire, silent sessions become SUSPECT."""


Event = (
    SessionOpened
    | SessionClosed
    | LookupAsked
    | ExtendAsked
    | PrefetchAsked
    | LoadAsked
    | StoreAsked
    | RenewAsked
    | ReleaseAsked
    | CopyEnded
    | StoreRead
    | StoreWritten
    | StoreDeleted
    | StoreRecovered
    | StoreModeChanged
    | Drain
    | Tick
)

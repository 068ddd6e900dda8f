"""The interface that every store passes one conformance suite for.

All calls block and are made from store threads: `read` from several at once, `write`, `delete` and `touch`
from exactly one. Nothing here raises for a bad record or a full disk: the answer says so per record.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class RecordStatus(StrEnum):
    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"  # bad magic, header, checksum or MAC: quarantined, will read as MISSING
    FAILED = "failed"  # the medium or the store failed; the record may be fine


@dataclass(frozen=True, slots=True)
class RecordId:
    key: bytes  # 32-byte page key
    group: str


@dataclass(frozen=True, slots=True)
class RecordMeta:
    """What a row and a header say about a record besides its payload."""

    id: RecordId
    parent: bytes | None
    namespace: bytes
    tenant: str
    fingerprint: bytes  # 32 bytes over model, layout and shard
    length: int  # payload bytes


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One row of the index as found at start."""

    meta: RecordMeta
    allocated_bytes: int
    last_use: int  # ordinal: larger is later


@dataclass(frozen=True, slots=True)
class StoreStats:
    records: int
    used_bytes: int  # allocated on the medium, payload frames only
    capacity_bytes: int
    mode: str  # rw | ro | off
    reason: str = ""
    counters: dict[str, int] = field(default_factory=dict)  # corrupt, quarantined, write_failures …


class Log(Protocol):
    """Where a store tells of changes of its mode and of bad records; a structlog logger is one."""

    def info(self, event: str, **fields: object) -> object: ...

    def warning(self, event: str, **fields: object) -> object: ...


class Store(Protocol):
    """Five verbs and a life cycle."""

    def rows(self) -> Iterator[StoredRow]:
        """All rows in order of last use, oldest first. Called once, after open."""
        ...

    def write(self, metas: Sequence[RecordMeta], payloads: Sequence[Bytes]) -> list[RecordStatus]:
        """Make records durable: payload first, then the row. OK means that they survive a kill -9."""
        ...

    def read(self, metas: Sequence[RecordMeta], into: Sequence[Bytes]) -> list[RecordStatus]:
        """Read payloads straight into `into` (each `meta.length` long) and verify them. On any status but
        OK the buffer's content is undefined."""
        ...

    def delete(self, ids: Sequence[RecordId]) -> None: ...

    def touch(self, ids: Sequence[RecordId]) -> None:
        """Note use, oldest first. Cheap; order is persisted with a later commit or at close."""
        ...

    def tend(self) -> None:
        """From the writer's thread, about once a second: persist the order of use, retry what failed. A store
        that is `ro` finds out here whether it can write again; nobody sends it writes meanwhile."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        """Flush and close. Idempotent."""
        ...

"""A store that fails on purpose: what lies above is tested against every answer that a medium can give.

Each decision depends on the seed, the operation, the record and how often that was asked for, and on nothing
else: the same plan fails the same calls, however threads interleave.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

import xxhash

from hicache.store.base import Bytes, RecordId, RecordMeta, RecordStatus, Store, StoredRow, StoreStats

Operation = Literal["read", "write", "delete"]


class Fault(StrEnum):
    EIO = "eio"  # read, write: FAILED; delete: not carried out
    ENOSPC = "enospc"  # write: FAILED, and the mode is ro until a write succeeds or `tend`
    CORRUPT = "corrupt"  # read: other bytes in the buffer, CORRUPT; MISSING from then on
    SHORT = "short"  # read: half of the bytes, CORRUPT; MISSING from then on
    MISSING = "missing"  # read: MISSING this time
    SLOW = "slow"  # read, write: answers `slow_s` later, else as ever


_APPLIES: Mapping[Operation, tuple[Fault, ...]] = {
    "read": (Fault.EIO, Fault.CORRUPT, Fault.SHORT, Fault.MISSING, Fault.SLOW),
    "write": (Fault.EIO, Fault.ENOSPC, Fault.SLOW),
    "delete": (Fault.EIO,),
}


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """`rates`: probability of each fault per record and call; those of one operation sum to at most 1."""

    seed: int = 0
    rates: Mapping[Fault, float] = field(default_factory=dict)
    slow_s: float = 0.01

    def draw(self, operation: Operation, id: RecordId, nth: int) -> Fault | None:
        text = f"{self.seed}:{operation}:{nth}:{id.group}:".encode() + id.key
        at = xxhash.xxh3_64_intdigest(text) / 2**64
        for fault in _APPLIES[operation]:
            at -= self.rates.get(fault, 0.0)
            if at < 0:
                return fault
        return None


class FaultyStore:
    """Passes calls on to `inner`, less those that the plan fails. `injected` counts the faults by kind."""

    def __init__(self, inner: Store, plan: FaultPlan, sleep: Callable[[float], None] = time.sleep) -> None:
        self._inner = inner
        self._plan = plan
        self._sleep = sleep
        self._lock = threading.Lock()
        self._asked: Counter[tuple[Operation, RecordId]] = Counter()
        self._gone: set[RecordId] = set()  # read as corrupt; deleted inside with the writer's next call
        self._full = False
        self.injected: Counter[Fault] = Counter()

    def rows(self) -> Iterator[StoredRow]:
        return self._inner.rows()

    def write(self, metas: Sequence[RecordMeta], payloads: Sequence[Bytes]) -> list[RecordStatus]:
        self._delete_gone()
        faults = [self._draw("write", meta.id) for meta in metas]
        good = [i for i, fault in enumerate(faults) if fault not in (Fault.EIO, Fault.ENOSPC)]
        statuses = [RecordStatus.FAILED] * len(metas)
        for i, status in zip(
            good, self._inner.write([metas[i] for i in good], [payloads[i] for i in good]), strict=True
        ):
            statuses[i] = status
        if Fault.ENOSPC in faults:
            self._full = True
        elif RecordStatus.OK in statuses:
            self._full = False
        return statuses

    def read(self, metas: Sequence[RecordMeta], into: Sequence[Bytes]) -> list[RecordStatus]:
        return [self._read_one(meta, buffer) for meta, buffer in zip(metas, into, strict=True)]

    def delete(self, ids: Sequence[RecordId]) -> None:
        self._delete_gone()
        self._inner.delete([id for id in ids if self._draw("delete", id) is None])

    def touch(self, ids: Sequence[RecordId]) -> None:
        self._inner.touch(ids)

    def tend(self) -> None:
        self._delete_gone()
        self._full = False
        self._inner.tend()

    def stats(self) -> StoreStats:
        stats = self._inner.stats()
        return replace(stats, mode="ro", reason="injected ENOSPC") if self._full and stats.mode == "rw" else stats

    def close(self) -> None:
        self._inner.close()

    def _draw(self, operation: Operation, id: RecordId) -> Fault | None:
        with self._lock:
            nth = self._asked[operation, id]
            self._asked[operation, id] += 1
            fault = self._plan.draw(operation, id, nth)
            if fault is not None:
                self.injected[fault] += 1
        if fault is Fault.SLOW:
            self._sleep(self._plan.slow_s)
        return fault

    def _read_one(self, meta: RecordMeta, buffer: Bytes) -> RecordStatus:
        fault = self._draw("read", meta.id)
        with self._lock:
            if meta.id in self._gone or fault is Fault.MISSING:
                return RecordStatus.MISSING
        if fault is Fault.EIO:
            return RecordStatus.FAILED
        (status,) = self._inner.read([meta], [buffer])
        if status is RecordStatus.OK and fault in (Fault.CORRUPT, Fault.SHORT):
            # The buffer really is wrong, so that a caller which uses it in spite of the status is found out.
            buffer[len(buffer) // 2 :] ^= 0xA5
            with self._lock:
                self._gone.add(meta.id)
            return RecordStatus.CORRUPT
        return status

    def _delete_gone(self) -> None:
        with self._lock:
            gone, self._gone = list(self._gone), set()
        if gone:
            self._inner.delete(gone)

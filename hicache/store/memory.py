"""A store without a medium: for tests and simulations of what lies above, with the same answers as a real one."""

import threading
from collections.abc import Iterator, Sequence

import numpy as np

from hicache.store.base import Bytes, RecordId, RecordMeta, RecordStatus, StoredRow, StoreStats
from hicache.store.record import allocated_bytes, meta_fault


class MemoryStore:
    """Keeps copies of payloads in a dict ordered by use."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._lock = threading.Lock()
        self._records: dict[RecordId, tuple[RecordMeta, Bytes]] = {}
        self._used = 0
        self._closed = False

    def rows(self) -> Iterator[StoredRow]:
        with self._lock:
            metas = [meta for meta, _ in self._records.values()]
        for use, meta in enumerate(metas):
            yield StoredRow(meta, allocated_bytes(meta.length), use)

    def write(self, metas: Sequence[RecordMeta], payloads: Sequence[Bytes]) -> list[RecordStatus]:
        with self._lock:
            return [self._put(meta, payload) for meta, payload in zip(metas, payloads, strict=True)]

    def read(self, metas: Sequence[RecordMeta], into: Sequence[Bytes]) -> list[RecordStatus]:
        with self._lock:
            return [self._get(meta, buffer) for meta, buffer in zip(metas, into, strict=True)]

    def delete(self, ids: Sequence[RecordId]) -> None:
        with self._lock:
            for id in ids:
                self._drop(id)

    def touch(self, ids: Sequence[RecordId]) -> None:
        with self._lock:
            for id in ids:
                if id in self._records:
                    self._records[id] = self._records.pop(id)

    def tend(self) -> None:
        """Nothing is owed."""

    def stats(self) -> StoreStats:
        mode, reason = ("off", "closed") if self._closed else ("rw", "")
        return StoreStats(len(self._records), self._used, self._capacity, mode, reason)

    def close(self) -> None:
        self._closed = True

    def _put(self, meta: RecordMeta, payload: Bytes) -> RecordStatus:
        size = allocated_bytes(meta.length)
        if self._closed or meta_fault(meta, payload) or self._used + size > self._capacity:
            return RecordStatus.FAILED
        self._drop(meta.id)
        self._records[meta.id] = (meta, payload.copy())
        self._used += size
        return RecordStatus.OK

    def _get(self, meta: RecordMeta, buffer: Bytes) -> RecordStatus:
        if self._closed:
            return RecordStatus.FAILED
        found = self._records.get(meta.id)
        if found is None:
            return RecordStatus.MISSING
        stored, payload = found
        if (stored.namespace, stored.fingerprint, stored.length) != (meta.namespace, meta.fingerprint, meta.length):
            return RecordStatus.MISSING
        np.copyto(buffer, payload)
        return RecordStatus.OK

    def _drop(self, id: RecordId) -> None:
        found = self._records.pop(id, None)
        if found is not None:
            self._used -= allocated_bytes(found[0].length)

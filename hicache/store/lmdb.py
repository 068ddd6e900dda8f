"""The local disk tier: rows in LMDB, frames in a segment file beside it.

LMDB decides what exists: a record is there from the commit of its row on and gone from the commit of its
row's end on. Payload first, then the row:

    write   frames ─► fdatasync ─► rows put ─► commit (synced) ─► OK
    delete  rows out ─► commit ─► extents wait for readers in flight ─► free
    read    claim ─► row ─► preadv of header and payload into the caller's block ─► verify ─► claim ends

Whatever stops a write before its commit leaves frames that no row names: free space at the next open.
What a failing medium does to the mode is drawn in health.py.

Why the payloads do not live in LMDB's pages: docs/adr/0001-l3-payload-placement.md.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.store import medium
from hicache.store.base import Bytes, Log, RecordId, RecordMeta, RecordStatus, StoredRow, StoreStats
from hicache.store.directory import StoreDirectory, claim, look_for_files, sync_directory
from hicache.store.extents import Extent
from hicache.store.health import Health
from hicache.store.quarantine import SetAside, pack_entry
from hicache.store.recency import Recency
from hicache.store.record import (
    FORMAT_VERSION,
    HEADER_BYTES,
    Place,
    RowFields,
    allocated_bytes,
    header_fault,
    meta_fault,
    pack_header,
    pack_row,
    payload_checksum,
    row_fault,
    row_key,
    scan_row,
    stored_row,
    unpack_row,
    with_last_use,
)
from hicache.store.recover import by_last_use, scan
from hicache.store.segment import SegmentFile, as_bytes, header_page

_ROW_BUDGET_BYTES = 1024  # of index file per row: key, row, half-full B+tree pages, copies on write
_INDEX_HEADROOM_BYTES = 64 << 20
_INDEX_RESERVE_BYTES = 8 << 20  # backed ahead, so that deletes commit on a full disk
_QUARANTINE_ROWS = 1024
_TOUCHES_PER_COMMIT = 2048  # each may rewrite a page of the index
_ROWS_PER_READ = 4096
_CLOSE_WAIT_S = 30.0


def _nowhere(step: str) -> None:
    """No one watches the steps."""


@dataclass(frozen=True, slots=True)
class LmdbOptions:
    """How the store treats its medium; capacity and place are arguments of `open`."""

    min_free_bytes: int = 256 << 20  # left on the filesystem for others
    grow_bytes: int = 64 << 20  # the segment file grows in steps of this
    allow_unsafe_fs: bool = False  # network and overlay filesystems
    sync: bool = True  # False only where losing the store with the power is accepted
    max_readers: int = 2048
    at_step: Callable[[str], None] = _nowhere  # called at each named step of a write or delete, for fault tests


class LmdbStore:
    """A `Store` in one directory, held by one process. See the module's docstring."""

    def __init__(
        self, directory: StoreDirectory, capacity_bytes: int, options: LmdbOptions, log: Log, env: lmdb.Environment
    ) -> None:
        """Use `open`."""
        self._dir = directory
        self._capacity = capacity_bytes
        self._options = options
        self._log = log
        self._health = Health(log)
        self._env = env
        self._rows = env.open_db(b"rows")
        self._quarantine = env.open_db(b"quarantine")
        self._meta = env.open_db(b"meta")
        self._seal = directory.seal
        self._max_records = (env.info()["map_size"] - _INDEX_HEADROOM_BYTES) // _ROW_BUDGET_BYTES
        self._segment = SegmentFile(directory.frames, capacity_bytes, options.min_free_bytes, options.grow_bytes)
        self._index_fd = os.open(directory.index / "data.mdb", os.O_RDWR | os.O_CLOEXEC)
        self._reserve = medium.Reserve(self._index_fd, _INDEX_RESERVE_BYTES)
        self._writer = threading.Lock()  # the writer thread, and rarely a reader that quarantines
        self._touched = Recency()
        self._owed_deletes: dict[bytes, None] = {}  # asked for, not committed: they read as MISSING
        self._failed_frame_bytes = allocated_bytes(1)
        self._records = 0
        self._ordinal = 1

    @staticmethod
    def open(path: Path, capacity_bytes: int, options: LmdbOptions, secret: bytes | None, log: Log) -> "LmdbStore":
        """Open or make the store at `path`. `secret` keys the MAC of every header.

        Raises `HiCacheError(STORE)` with a remedy for an unsafe filesystem, a directory that is not a store,
        another format version or secret, a store in use, or an index that cannot be opened. Nothing has been
        changed then, save a lock file that names nobody.
        """
        if capacity_bytes < allocated_bytes(1):
            raise HiCacheError(ErrorCode.STORE, f"capacity of {capacity_bytes} bytes", "raise l3.size")
        directory = claim(path, secret, options.allow_unsafe_fs)
        with contextlib.ExitStack() as undo:
            undo.callback(directory.release)
            try:
                env = undo.enter_context(_open_index(directory, capacity_bytes, options))
                store = LmdbStore(directory, capacity_bytes, options, log, env)
                undo.callback(store._close_files)
                store._recover()
            except (OSError, lmdb.Error) as error:
                raise HiCacheError(
                    ErrorCode.STORE,
                    f"the store at {path} cannot be opened: {error}",
                    "free space or check rights; if its index is damaged, move the directory away: it is a cache",
                ) from error
            undo.pop_all()
        return store

    # ---- Store ------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[StoredRow]:
        """All rows, oldest use first. No transaction stays open while the caller works."""
        with self._env.begin(db=self._rows) as txn:
            keys = by_last_use(txn.cursor())
        for start in range(0, len(keys), _ROWS_PER_READ):
            batch: list[StoredRow] = []
            with self._env.begin(db=self._rows) as txn:
                for key in keys[start : start + _ROWS_PER_READ]:
                    row = txn.get(key)
                    if row is not None:
                        batch.append(stored_row(key, row))
            yield from batch

    def write(self, metas: Sequence[RecordMeta], payloads: Sequence[Bytes]) -> list[RecordStatus]:
        with self._writer:
            statuses = [RecordStatus.FAILED] * len(metas)
            if self._health.off:
                return statuses
            placed, whole = self._write_frames(metas, payloads)
            if not placed:
                return statuses
            extents = [(place.offset, allocated_bytes(metas[i].length)) for i, place in placed]
            puts: list[tuple[bytes, bytes]] = []
            for i, place in placed:
                key = row_key(metas[i].id)
                puts.append((key, pack_row(key, metas[i], place, place.ordinal)))
            try:
                self._options.at_step("frames_written")
                if self._options.sync:
                    self._segment.sync()
                self._options.at_step("frames_synced")
                self._commit(puts, [])
            except (OSError, lmdb.Error) as error:
                # The rows were not committed, so no reader knows these frames.
                self._segment.free(extents, known=False)
                self._trouble("write_failures", error)
                return statuses
            for i, _ in placed:
                statuses[i] = RecordStatus.OK
            if whole:
                self._health.recovered()
            return statuses

    def read(self, metas: Sequence[RecordMeta], into: Sequence[Bytes]) -> list[RecordStatus]:
        header = header_page()
        return [self._read_one(meta, buffer, header) for meta, buffer in zip(metas, into, strict=True)]

    def delete(self, ids: Sequence[RecordId]) -> None:
        with self._writer:
            if self._health.off:
                return
            keys = [row_key(id) for id in ids]
            try:
                freed = self._commit([], keys)
            except (OSError, lmdb.Error) as error:
                self._owed_deletes.update(dict.fromkeys(keys))
                self._trouble("delete_failures", error)
                return
            if freed and self._health.lacks_space:
                self._health.recovered()

    def touch(self, ids: Sequence[RecordId]) -> None:
        with self._writer:
            for id in ids:
                self._touched.touch(row_key(id), self._next_ordinal())
            if len(self._touched) >= 8 * _TOUCHES_PER_COMMIT and self._health.mode == "rw":
                self._flush_touches()

    def tend(self) -> None:
        with self._writer:
            look_for_files(self._dir, self._segment.fd, self._index_fd, self._health)
            if self._health.mode == "ro" and self._can_write():
                self._health.recovered()
            if self._health.mode == "rw" and (self._touched or self._owed_deletes):
                self._flush_touches()

    def stats(self) -> StoreStats:
        counters = self._health.counts()
        counters["backed_bytes"] = self._segment.backed_bytes
        counters["limbo_bytes"] = self._segment.claims.limbo_bytes
        counters["free_extents"] = self._segment.free_extents
        counters["owed_deletes"] = len(self._owed_deletes)
        return StoreStats(
            self._records, self._segment.used_bytes, self._capacity, self._health.mode, self._health.reason, counters
        )

    def set_min_free(self, size_bytes: int) -> None:
        """What growth must leave free on the filesystem, from now on. Any thread."""
        self._segment.min_free_bytes = size_bytes

    def close(self) -> None:
        """Persist the order of use, wait for readers, close. Idempotent."""
        with self._writer:
            while self._touched and not self._health.off and self._flush_touches():
                pass
            if not self._health.close():
                return
            if not self._segment.claims.close(_CLOSE_WAIT_S):
                # Closing the map under a reader would crash the process; leaking it at exit does not.
                self._log.warning("l3_close_with_readers", path=str(self._dir.path))
                return
            with contextlib.suppress(lmdb.Error):
                self._env.sync(True)
            self._env.close()
            self._close_files()
            self._dir.release()

    def _close_files(self) -> None:
        os.close(self._index_fd)
        self._segment.close()

    # ---- write ------------------------------------------------------------------------------------------

    def _write_frames(
        self, metas: Sequence[RecordMeta], payloads: Sequence[Bytes]
    ) -> tuple[list[tuple[int, Place]], bool]:
        """Write what fits. (position, place) of each frame written, and False if the medium ended the batch."""
        placed: list[tuple[int, Place]] = []
        for i, (meta, payload) in enumerate(zip(metas, payloads, strict=True)):
            fault = meta_fault(meta, payload)
            if fault:
                self._health.count("rejected")
                self._log.warning("l3_record_rejected", reason=fault)
                continue
            size = allocated_bytes(meta.length)
            try:
                full = self._records + len(placed) >= self._max_records
                offset = None if full else self._segment.allocate(size)
                if offset is None:
                    self._health.count("refused_full")
                    continue
                flat = as_bytes(payload)
                place = Place(offset, self._next_ordinal(), payload_checksum(flat))
                try:
                    self._segment.write(offset, pack_header(meta, place.ordinal, place.checksum, self._seal), flat)
                except OSError:
                    self._segment.free([(offset, size)], known=False)
                    raise
            except OSError as error:
                self._failed_frame_bytes = size
                self._trouble("write_failures", error)
                return placed, False
            placed.append((i, place))
        return placed, True

    def _commit(self, puts: list[tuple[bytes, bytes]], drops: list[bytes]) -> int:
        """One index transaction: owed and asked deletes, then puts, then some touches. Bytes freed.

        Raises lmdb.Error or OSError; nothing has changed then.
        """
        gone: list[bytes] = []
        added = 0
        owed = list(self._owed_deletes)
        self._touched.forget((*owed, *drops, *(key for key, _ in puts)))
        touches = self._touched.oldest(_TOUCHES_PER_COMMIT)
        with self._env.begin(write=True, db=self._rows) as txn:
            for key in (*owed, *drops):
                row = txn.pop(key)
                if row is not None:
                    gone.append(row)
            for key, row in puts:
                old = txn.get(key)
                if old is not None:
                    gone.append(old)
                txn.put(key, row)
                added += 1
            for key, last_use in touches:
                old = txn.get(key)
                if old is not None:
                    txn.put(key, with_last_use(old, last_use))
            self._options.at_step("rows_put")
        self._options.at_step("rows_committed")
        for key in owed:
            del self._owed_deletes[key]
        self._touched.forget(key for key, _ in touches)
        self._records += added - len(gone)
        self._reserve.top_up()
        return self._free_rows(gone)

    def _free_rows(self, rows: list[bytes]) -> int:
        extents: list[Extent] = []
        for row in rows:
            _, offset, length, _ = scan_row(row)
            extents.append((offset, allocated_bytes(length)))
        if extents:
            self._segment.free(extents, known=True)
        return sum(size for _, size in extents)

    def _can_write(self) -> bool:
        """Try what a write does: space for a frame as large as the one that failed, a page of it, a commit."""
        try:
            offset = self._segment.allocate(self._failed_frame_bytes)
            if offset is not None:  # else capacity is used up: nothing to learn from the frames
                try:
                    self._segment.write(offset, bytes(HEADER_BYTES), np.zeros(1, np.uint8))
                    self._segment.sync()
                finally:
                    self._segment.free([(offset, self._failed_frame_bytes)], known=False)
            with self._env.begin(write=True, db=self._meta) as txn:
                txn.put(b"probe", self._next_ordinal().to_bytes(8, "little"))
        except (OSError, lmdb.Error) as error:
            self._trouble("probe_failures", error)
            return False
        return True

    def _flush_touches(self) -> bool:
        """Persist some touches by a commit of their own; False if that failed."""
        try:
            self._commit([], [])
        except (OSError, lmdb.Error) as error:
            self._trouble("touch_failures", error)
            return False
        return True

    def _next_ordinal(self) -> int:
        self._ordinal += 1
        return self._ordinal - 1

    # ---- read -------------------------------------------------------------------------------------------

    def _read_one(self, meta: RecordMeta, into: Bytes, header: bytearray) -> RecordStatus:
        key = row_key(meta.id)
        epoch = self._segment.claims.enter()
        if epoch is None:
            return RecordStatus.FAILED
        try:
            # The row is looked up after the claim: see Claims.
            with self._env.begin(db=self._rows) as txn:
                row = txn.get(key)
            if row is None or key in self._owed_deletes:
                return RecordStatus.MISSING
            fault = row_fault(key, row)
            if not fault:
                fields = unpack_row(key, row)
                if not _same(fields.meta, meta):
                    # Someone else's record under this key; it is good, only not what was asked for.
                    self._health.count("mismatched")
                    return RecordStatus.MISSING
                fault = self._read_frame(fields, into, header)
        except OSError as error:
            self._health.count("read_failures")
            self._log.warning("l3_read_failed", reason=str(error))
            return RecordStatus.FAILED
        except lmdb.Error as error:
            self._health.count("read_failures")
            self._health.turn_off(f"index unusable: {error}")
            return RecordStatus.FAILED
        finally:
            self._segment.claims.leave(epoch)
        if not fault:
            return RecordStatus.OK
        # Not under the claim: the writer may be waiting for it to end.
        return self._set_aside(key, row, fault)

    def _read_frame(self, fields: RowFields, into: Bytes, header: bytearray) -> str:
        """Why the frame is not what its row says, or ""."""
        if into.nbytes != fields.meta.length or not into.flags.c_contiguous:
            raise ValueError(
                f"a record of {fields.meta.length} bytes needs as many contiguous ones, got {into.nbytes}"
            )
        flat = as_bytes(into)
        if not self._segment.read(fields.place.offset, header, flat):
            return "file ends inside the frame"
        fault = header_fault(bytes(header[:HEADER_BYTES]), fields.meta, fields.place, self._seal)
        if not fault and payload_checksum(flat) != fields.place.checksum:
            return "bad payload checksum"
        return fault

    def _set_aside(self, key: bytes, row: bytes, reason: str) -> RecordStatus:
        """Quarantine a bad record, unless it was replaced or deleted meanwhile."""
        with self._writer:
            if self._health.off:
                return RecordStatus.FAILED
            try:
                with self._env.begin(write=True, db=self._rows) as txn:
                    now = txn.get(key)
                    if now is None or now[8:] != row[8:]:  # all but last_use
                        return RecordStatus.MISSING
                    txn.delete(key)
                    self._note_quarantined(txn, key, row, reason)
            except lmdb.Error as error:
                self._owed_deletes[key] = None
                self._trouble("write_failures", error)
            else:
                self._touched.forget([key])
                self._records -= 1
                if not row_fault(key, row):
                    self._free_rows([row])
            self._health.count("corrupt")
            self._health.count("quarantined")
            self._log.warning("l3_record_quarantined", key=key[:32].hex(), group=key[32:].decode(), reason=reason)
            return RecordStatus.CORRUPT

    def _note_quarantined(self, txn: lmdb.Transaction, key: bytes, row: bytes, reason: str) -> None:
        """Keep the last rows set aside: what operators and fsck look at. Frames are not kept."""
        entry = pack_entry(SetAside(reason, key, row))
        txn.put(self._next_ordinal().to_bytes(8, "big"), entry, db=self._quarantine)
        if txn.stat(self._quarantine)["entries"] > _QUARANTINE_ROWS:
            with txn.cursor(db=self._quarantine) as cursor:
                if cursor.first():
                    cursor.delete()

    # ---- open and mode ----------------------------------------------------------------------------------

    def _recover(self) -> None:
        self._env.reader_check()
        self._check_uuid()
        with self._env.begin(db=self._rows) as txn:
            found = scan(txn.cursor(), self._segment.end_bytes)
        self._ordinal = found.next_ordinal
        self._records = len(found.extents)
        self._segment.used_at_open(found.extents)
        for start in range(0, len(found.broken), _ROWS_PER_READ):
            with self._env.begin(write=True, db=self._rows) as txn:
                for key, reason in found.broken[start : start + _ROWS_PER_READ]:
                    self._note_quarantined(txn, key, txn.pop(key) or b"", reason)
        if found.broken:
            self._health.count("quarantined", len(found.broken))
            self._log.warning("l3_rows_quarantined", rows=len(found.broken), first_reason=found.broken[0][1])
        self._reserve.top_up()
        sync_directory(self._dir.path)
        self._log.info("l3_open", path=str(self._dir.path), records=self._records, filesystem=self._dir.filesystem)

    def _check_uuid(self) -> None:
        expected = FORMAT_VERSION.to_bytes(2, "little") + self._seal.uuid
        with self._env.begin(db=self._meta) as txn:
            stored = txn.get(b"store")
        if stored is None:
            with self._env.begin(write=True, db=self._meta) as txn:
                txn.put(b"store", expected)
        elif stored != expected:
            raise HiCacheError(
                ErrorCode.STORE,
                f"the index in {self._dir.path} belongs to another store than its manifest",
                "restore the directory as a whole, or move it away: it is a cache",
            )

    def _trouble(self, counter: str, error: Exception) -> None:
        self._health.trouble(counter, error, isinstance(error, lmdb.MapFullError | lmdb.DiskError))
        if isinstance(error, lmdb.PanicError):  # LMDB refuses every later transaction, reads too
            self._health.turn_off(f"index unusable: {error}")


def _same(stored: RecordMeta, asked: RecordMeta) -> bool:
    return (stored.namespace, stored.fingerprint, stored.length) == (asked.namespace, asked.fingerprint, asked.length)


def _open_index(directory: StoreDirectory, capacity_bytes: int, options: LmdbOptions) -> lmdb.Environment:
    """Map size: one row budget for each record of the smallest frame that fits, and headroom for deletes.

    It is address space, not disk. No writemap: a full disk would be SIGBUS.
    """
    rows = capacity_bytes // allocated_bytes(1)
    size = 2 * _INDEX_HEADROOM_BYTES + rows * _ROW_BUDGET_BYTES
    directory.index.mkdir(mode=0o700, exist_ok=True)  # lmdb would give it the files' mode: only root could enter
    return lmdb.open(
        str(directory.index),
        map_size=-(-size // 4096) * 4096,
        max_dbs=4,
        max_readers=options.max_readers,
        metasync=False,
        sync=options.sync,
        mode=0o600,
    )

"""The store threads: one writer, n readers, between the loop and a blocking `Store`.

    loop ─ReadRecords──► urgent │ prefetch queues ─► reader 0…n-1 ─► StoreRead ──────────────┐
         ─WriteRecords─► one FIFO ────────────────► writer ───────► StoreWritten, StoreDeleted ┴► post
         ─Delete, Touch►  (order of verbs on one key is kept)       StoreModeChanged

The writer first streams the rows found at start, with at most RECOVERY_WINDOW batches ahead of the loop. A
command over a queue's bound is answered as failed at once: pages then simply stay in the tier where they are.

A thread whose store raises answers what it held as failed, logs, counts a death and begins anew after a pause:
a poisoned record costs its own request and nothing else. Should a thread really end, `tend` starts another.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.base.clock import Clock
from hicache.base.ids import PageKey
from hicache.core.commands import DeleteRecords, ReadRecords, Record, TouchRecords, WriteRecords
from hicache.core.events import (
    Event,
    RecoveredRow,
    StoreDeleted,
    StoreModeChanged,
    StoreRead,
    StoreRecovered,
    StoreWritten,
)
from hicache.store.base import RecordId, RecordMeta, RecordStatus, Store, StoredRow, StoreStats
from hicache_daemon.priority import ordinary_thread, thread_nice

Bytes = npt.NDArray[np.uint8]
WriterCommand = WriteRecords | DeleteRecords | TouchRecords

READ_PART = 16  # records one reader takes at a time: a large read spreads over all readers
RECOVERY_BATCH = 2048
RECOVERY_WINDOW = 4  # batches posted but not yet handled by the loop
STATS_INTERVAL_S = 1.0
RESTART_PAUSE_S = 0.1  # a store that raises at every call must not make a thread spin
STUCK_S = 30.0  # a store call that takes longer is named in the readiness reasons


@dataclass(frozen=True, slots=True)
class RecoveryEnded:
    """Not an event of the cache state: the loop may open for sessions. `error` is empty if all rows came."""

    rows: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """`batch_records` per store call; `queue_records` bounds reads and writes that wait, each."""

    readers: int
    batch_records: int
    queue_records: int


Note = Event | RecoveryEnded


@dataclass(slots=True)
class _ReadJob:
    command: ReadRecords
    ok: npt.NDArray[np.bool_]
    corrupt: npt.NDArray[np.bool_]
    parts_left: int


@dataclass(slots=True)
class _Worker:
    """One thread and what it is doing. Written by its thread, read by the loop: single references only."""

    name: str
    body: Callable[["_Worker"], None]
    thread: threading.Thread | None = None
    since_s: float | None = None  # start of the store call in progress
    done: bool = False  # ended because it was told to


@dataclass(slots=True)
class _Queues:
    urgent: deque[tuple[_ReadJob, int, int]] = field(default_factory=deque)
    prefetch: deque[tuple[_ReadJob, int, int]] = field(default_factory=deque)
    writer: deque[WriterCommand] = field(default_factory=deque)
    read_records: int = 0  # queued or being read
    write_records: int = 0  # queued or being written
    other: int = 0  # deletes and touches queued or in progress


class StoreThreads:
    """Runs a `Store` off the loop. `submit`, `tend`, `recovered_handled`, `idle`, `status`: loop thread."""

    def __init__(
        self,
        store: Store,
        arena: Bytes,
        post: Callable[[Note], None],
        options: StoreOptions,
        *,
        clock: Clock,
        log: Any,
    ) -> None:
        """`arena`: the L2 arena as uint8; records name byte ranges in it. `post` is thread-safe."""
        self._store = store
        self._arena = arena
        self._post = post
        self._clock = clock
        self._log = log
        self._nice = thread_nice()  # the maker's, before the loop is favoured
        self._batch = options.batch_records
        self._bound = options.queue_records
        self._lock = threading.Lock()
        self._reads = threading.Condition(self._lock)
        self._writes = threading.Condition(self._lock)
        self._queues = _Queues()
        self._recovery_window = threading.Semaphore(RECOVERY_WINDOW)
        self._recovered = False
        self._stopping_readers = False
        self._stopping_writer = False
        self._halt = threading.Event()
        self._stats = store.stats()
        self._mode = self._stats.mode
        self._counters = {"thread_deaths": 0, "read_refused": 0, "write_refused": 0, "touch_dropped": 0}
        self._workers = [_Worker("hicache-l3-writer", self._write_loop)]
        self._workers += [_Worker(f"hicache-l3-reader-{i}", self._read_loop) for i in range(options.readers)]

    # ---- loop side ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all threads; the writer begins with recovery, whose end is posted as `RecoveryEnded`."""
        self.tend()

    def tend(self) -> None:
        """Start every thread that is not running. Called at start and with every tick."""
        for worker in self._workers:
            if not worker.done and (worker.thread is None or not worker.thread.is_alive()):
                if worker.thread is not None:
                    self._log.warning("store.thread_restarted", thread=worker.name)
                worker.thread = threading.Thread(target=self._run, args=(worker,), name=worker.name, daemon=True)
                worker.thread.start()

    def submit(self, command: ReadRecords | WriterCommand) -> None:
        """Queue a command; over a bound it is answered as failed at once (a touch is dropped)."""
        if isinstance(command, ReadRecords):
            self._submit_read(command)
            return
        with self._lock:
            queues = self._queues
            if isinstance(command, WriteRecords):
                if queues.write_records + len(command.records) > self._bound:
                    self._counters["write_refused"] += 1
                    refused = np.zeros(len(command.records), np.bool_)
                    self._post(StoreWritten(command.ticket, refused, "the store's write queue is full"))
                    return
                queues.write_records += len(command.records)
            elif isinstance(command, TouchRecords) and queues.other >= self._bound:
                self._counters["touch_dropped"] += len(command.keys)  # order of use is advisory
                return
            else:
                queues.other += 1
            queues.writer.append(command)
            self._writes.notify()

    def recovered_handled(self) -> None:
        """The loop handled one StoreRecovered; the writer may send one more."""
        self._recovery_window.release()

    def idle(self) -> bool:
        """Nothing queued and nothing in progress."""
        with self._lock:
            return not (self._queues.read_records or self._queues.write_records or self._queues.other)

    def status(self) -> dict[str, Any]:
        """For status pages: the store's figures, queue depths, deaths, and how long a call has been stuck."""
        stats, queues = self._stats, self._queues
        return {
            "mode": stats.mode,
            "reason": stats.reason,
            "records": stats.records,
            "used_bytes": stats.used_bytes,
            "capacity_bytes": stats.capacity_bytes,
            "reading_records": queues.read_records,
            "writing_records": queues.write_records,
            "stuck_s": round(self.stuck_s(), 1),
            "counters": {**stats.counters, **self._counters},
        }

    def stuck_s(self) -> float:
        """Age of the oldest store call in progress."""
        now_s = self._clock.monotonic_s()
        started = [since_s for worker in self._workers if (since_s := worker.since_s) is not None]
        return max((now_s - since_s for since_s in started), default=0.0)

    def stop(self, flush: bool, timeout_s: float) -> bool:
        """End all threads and close the store; blocks. With `flush` queued writes are made durable first.

        False if a thread did not end in time: the store is then left open for the process's end to drop."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        self._halt.set()
        with self._lock:
            self._stopping_readers = True
            self._queues.urgent.clear()
            self._queues.prefetch.clear()
            if not flush:
                self._queues.writer.clear()
            self._reads.notify_all()
        readers, writer = self._workers[1:], self._workers[0]
        if not self._join(readers, deadline_s):  # they must be gone before the store is closed
            return False
        with self._lock:
            self._stopping_writer = True
            self._writes.notify_all()
        self._recovery_window.release()
        if not self._join([writer], deadline_s):
            return False
        self._store.close()
        return True

    def _join(self, workers: Sequence[_Worker], deadline_s: float) -> bool:
        for worker in workers:
            if worker.thread is not None:
                worker.thread.join(max(0.0, deadline_s - self._clock.monotonic_s()))
        late = [worker.name for worker in workers if worker.thread is not None and worker.thread.is_alive()]
        if late:
            self._log.error("store.threads_late", threads=late)
        return not late

    def _submit_read(self, command: ReadRecords) -> None:
        count = len(command.records)
        answer = _ReadJob(command, np.zeros(count, np.bool_), np.zeros(count, np.bool_), 0)
        with self._lock:
            if count == 0 or self._queues.read_records + count > self._bound:
                self._counters["read_refused"] += bool(count)
                self._post(StoreRead(command.ticket, answer.ok, answer.corrupt))
                return
            self._queues.read_records += count
            parts = [(answer, at, min(at + READ_PART, count)) for at in range(0, count, READ_PART)]
            answer.parts_left = len(parts)
            (self._queues.urgent if command.urgency == "load" else self._queues.prefetch).extend(parts)
            self._reads.notify(len(parts))

    # ---- thread side --------------------------------------------------------------------------------

    def _run(self, worker: _Worker) -> None:
        ordinary_thread(self._nice)
        while not worker.done:
            try:
                worker.body(worker)
                worker.done = True
            except Exception:  # noqa: BLE001 - reported and counted; the commands it held have been answered
                worker.since_s = None
                with self._lock:
                    self._counters["thread_deaths"] += 1
                self._log.exception("store.thread_died", thread=worker.name)
                self._halt.wait(RESTART_PAUSE_S)

    def _read_loop(self, worker: _Worker) -> None:
        queues = self._queues
        while True:
            with self._lock:
                while not (queues.urgent or queues.prefetch or self._stopping_readers):
                    self._reads.wait()
                if self._stopping_readers:
                    return
                job, first, last = (queues.urgent or queues.prefetch).popleft()
            worker.since_s = self._clock.monotonic_s()
            try:
                self._read_part(job, first, last)
            finally:  # also when the store raised: those records stay False, the request fails, L2 goes on
                worker.since_s = None
                with self._lock:
                    job.parts_left -= 1
                    queues.read_records -= last - first
                    complete = job.parts_left == 0
                if complete:
                    self._post(StoreRead(job.command.ticket, job.ok, job.corrupt))

    def _read_part(self, job: _ReadJob, first: int, last: int) -> None:
        records = job.command.records[first:last]
        statuses = self._store.read([_meta(r) for r in records], [self._payload(r) for r in records])
        for at, status in enumerate(statuses, first):
            job.ok[at] = status is RecordStatus.OK
            job.corrupt[at] = status is RecordStatus.CORRUPT

    def _write_loop(self, worker: _Worker) -> None:
        queues = self._queues
        if not self._recovered:
            self._recover()
        while True:
            with self._lock:
                if not queues.writer and not self._stopping_writer:
                    self._writes.wait(STATS_INTERVAL_S)
                if not queues.writer and self._stopping_writer:
                    return
                run = self._take_run()
            worker.since_s = self._clock.monotonic_s()
            if run:
                self._do_run(run)
            else:
                self._store.tend()
            self._look_at_mode(self._store.stats())
            worker.since_s = None

    def _take_run(self) -> list[WriterCommand]:
        """The longest run of one verb at the queue's head, writes up to one batch: one commit for many."""
        writer, run, count = self._queues.writer, list[WriterCommand](), 0
        while writer and (not run or type(writer[0]) is type(run[0])) and count < self._batch:
            command = writer.popleft()
            run.append(command)
            count += len(command.records if isinstance(command, WriteRecords) else command.keys)
        return run

    def _do_run(self, run: list[WriterCommand]) -> None:
        """One store call per batch. Whatever happens, each command is answered exactly once."""
        writes = [command for command in run if isinstance(command, WriteRecords)]
        if writes:
            self._write(writes)
            return
        try:
            keys = [key for command in run if not isinstance(command, WriteRecords) for key in command.keys]
            ids = [RecordId(key, group) for key, group in keys]
            for at in range(0, len(ids), self._batch):
                verb = self._store.delete if isinstance(run[0], DeleteRecords) else self._store.touch
                verb(ids[at : at + self._batch])
        finally:
            with self._lock:
                self._queues.other -= len(run)
            for command in run:
                if isinstance(command, DeleteRecords):
                    self._post(StoreDeleted(command.ticket))

    def _write(self, writes: list[WriteRecords]) -> None:
        records = [record for command in writes for record in command.records]
        ok, reason = np.zeros(len(records), np.bool_), "the store's writer thread died"
        try:
            for at in range(0, len(records), self._batch):
                part = records[at : at + self._batch]
                statuses = self._store.write([_meta(r) for r in part], [self._payload(r) for r in part])
                ok[at : at + len(part)] = [status is RecordStatus.OK for status in statuses]
            reason = "" if ok.all() else (self._store.stats().reason or "the store refused records")
        finally:
            with self._lock:
                self._queues.write_records -= len(records)
            at = 0
            for command in writes:
                mine = ok[at : at + len(command.records)]
                at += len(command.records)
                self._post(StoreWritten(command.ticket, mine, "" if mine.all() else reason))

    def _look_at_mode(self, stats: StoreStats) -> None:
        self._stats = stats
        if stats.mode != self._mode:
            self._mode = stats.mode
            self._log.warning("store.mode", mode=stats.mode, reason=stats.reason)
            self._post(StoreModeChanged(stats.mode, stats.reason))

    def _recover(self) -> None:
        """Stream the rows found at start, then RecoveryEnded: once, also if the store fails on the way."""
        self._recovered = True
        count, error, batch = 0, "the store failed while its rows were read", list[RecoveredRow]()
        try:
            for row in self._store.rows():
                batch.append(_recovered(row))
                if len(batch) == RECOVERY_BATCH:
                    count += len(batch)
                    self._post_recovered(batch)
                    batch = []
                if self._stopping_readers:
                    break
            error = ""
        finally:
            if batch:
                count += len(batch)
                self._post_recovered(batch)
            self._post(RecoveryEnded(count, error))

    def _post_recovered(self, batch: list[RecoveredRow]) -> None:
        while not self._recovery_window.acquire(timeout=1.0):
            if self._stopping_readers:  # the loop has gone: nobody will handle them
                return
        self._post(StoreRecovered(tuple(batch)))

    def _payload(self, record: Record) -> Bytes:
        return self._arena[record.offset : record.offset + record.length]


def _meta(record: Record) -> RecordMeta:
    return RecordMeta(
        RecordId(record.key, record.group),
        record.parent,
        record.namespace,
        record.tenant,
        record.fingerprint,
        record.length,
    )


def _recovered(row: StoredRow) -> RecoveredRow:
    meta = row.meta
    parent = None if meta.parent is None else PageKey(meta.parent)
    return RecoveredRow(PageKey(meta.id.key), parent, meta.namespace, meta.tenant, meta.id.group, row.allocated_bytes)

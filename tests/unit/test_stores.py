"""The store threads over a scripted store: answers, order, batches, bounds, and deaths."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any

import numpy as np
import pytest

from hicache.base.ids import PageKey, TicketId
from hicache.base.limits import Limits
from hicache.core.commands import DeleteRecords, ReadRecords, Record, TouchRecords, WriteRecords
from hicache.core.events import StoreDeleted, StoreModeChanged, StoreRead, StoreRecovered, StoreWritten
from hicache.store.base import Bytes, RecordId, RecordMeta, RecordStatus, StoredRow, StoreStats
from hicache_daemon.log import LevelGate, make_log
from hicache_daemon.stores import RECOVERY_BATCH, RECOVERY_WINDOW, Note, RecoveryEnded, StoreOptions, StoreThreads

LENGTH = 8
SAFETY_S = 20.0


class _Clock:
    def monotonic_s(self) -> float:
        return 0.0


@dataclass
class ScriptedStore:
    """Keeps payloads in a dict. `gate` holds calls back; `poison` keys make the store raise."""

    found: int = 0
    kept: dict[RecordId, bytes] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)
    poison: set[bytes] = field(default_factory=set)
    corrupt: set[bytes] = field(default_factory=set)
    mode: str = "rw"
    closed: int = 0
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def _enter(self, verb: str, keys: Sequence[bytes]) -> None:
        assert self.gate.wait(SAFETY_S)
        self.calls.append((verb, len(keys)))
        if self.poison.intersection(keys):
            raise RuntimeError("poisoned record")

    def rows(self) -> Iterator[StoredRow]:
        for at in range(self.found):
            yield StoredRow(RecordMeta(RecordId(_key(at), "g"), None, b"n", "t", b"f", LENGTH), 4096, at)

    def write(self, metas: Sequence[RecordMeta], payloads: Sequence[Bytes]) -> list[RecordStatus]:
        self._enter("write", [meta.id.key for meta in metas])
        if self.mode != "rw":
            return [RecordStatus.FAILED] * len(metas)
        for meta, payload in zip(metas, payloads, strict=True):
            self.kept[meta.id] = payload.tobytes()
        return [RecordStatus.OK] * len(metas)

    def read(self, metas: Sequence[RecordMeta], into: Sequence[Bytes]) -> list[RecordStatus]:
        self._enter("read", [meta.id.key for meta in metas])
        answer = []
        for meta, target in zip(metas, into, strict=True):
            if meta.id.key in self.corrupt:
                answer.append(RecordStatus.CORRUPT)
            elif meta.id in self.kept:
                target[:] = np.frombuffer(self.kept[meta.id], np.uint8)
                answer.append(RecordStatus.OK)
            else:
                answer.append(RecordStatus.MISSING)
        return answer

    def delete(self, ids: Sequence[RecordId]) -> None:
        self._enter("delete", [item.key for item in ids])
        for item in ids:
            self.kept.pop(item, None)

    def touch(self, ids: Sequence[RecordId]) -> None:
        self._enter("touch", [item.key for item in ids])

    def tend(self) -> None: ...

    def stats(self) -> StoreStats:
        return StoreStats(len(self.kept), 0, 0, self.mode, "disk full" if self.mode != "rw" else "")

    def close(self) -> None:
        self.closed += 1


def _key(at: int) -> PageKey:
    return PageKey(at.to_bytes(32, "little"))


def _record(at: int) -> Record:
    return Record(_key(at), None, b"n", "t", "g", at * LENGTH, LENGTH, b"f")


def _records(*ats: int) -> tuple[Record, ...]:
    return tuple(_record(at) for at in ats)


class Harness:
    def __init__(self, store: ScriptedStore, limits: Limits) -> None:
        self.store = store
        self.arena = np.zeros(4096 * LENGTH, np.uint8)
        self.notes: Queue[Note] = Queue()
        options = StoreOptions(2, limits.io_batch_pages, limits.pages_in_flight)
        log = make_log(LevelGate("error"), "json")
        self.threads = StoreThreads(store, self.arena, self.notes.put, options, clock=_Clock(), log=log)

    def next(self, kind: type[Any]) -> Any:
        note = self.notes.get(timeout=SAFETY_S)
        assert isinstance(note, kind), note
        return note

    def fill(self, at: int, value: int) -> None:
        self.arena[at * LENGTH : (at + 1) * LENGTH] = value


Start = Callable[..., Harness]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[Harness] = []

    def build(store: ScriptedStore | None = None, limits: Limits | None = None) -> Harness:
        harness = Harness(store or ScriptedStore(), limits or Limits())
        made.append(harness)
        harness.threads.start()
        if harness.store.found == 0:
            harness.next(RecoveryEnded)
        return harness

    yield build
    for harness in made:
        harness.store.gate.set()
        assert harness.threads.stop(flush=True, timeout_s=SAFETY_S)


def test_what_is_written_is_read_back_into_the_arena(start: Start) -> None:
    harness = start()
    for at in range(40):
        harness.fill(at, at)
    harness.threads.submit(WriteRecords(TicketId(1), _records(*range(40))))
    written = harness.next(StoreWritten)
    assert written.ticket == 1
    assert written.ok.all()
    harness.arena[:] = 255
    harness.threads.submit(ReadRecords(TicketId(2), _records(*range(41))))
    read = harness.next(StoreRead)
    assert read.ok.tolist() == [True] * 40 + [False]
    assert not read.corrupt.any()
    assert harness.arena.reshape(-1, LENGTH)[:40].tolist() == [[at] * LENGTH for at in range(40)]
    assert harness.threads.idle()


def test_a_corrupt_record_is_told_apart_from_a_missing_one(start: Start) -> None:
    harness = start(ScriptedStore(corrupt={_key(1)}))
    harness.threads.submit(ReadRecords(TicketId(1), _records(0, 1)))
    read = harness.next(StoreRead)
    assert (read.ok.tolist(), read.corrupt.tolist()) == ([False, False], [False, True])


def test_verbs_on_one_key_keep_their_order_and_neighbours_share_a_call(start: Start) -> None:
    harness = start()
    harness.store.gate.clear()
    submit = harness.threads.submit
    submit(TouchRecords(((_key(9), "g"),)))  # holds the writer at the gate while the rest queues up
    for ticket in range(3):
        submit(WriteRecords(TicketId(ticket), _records(2 * ticket, 2 * ticket + 1)))
    submit(DeleteRecords(TicketId(10), ((_key(0), "g"),)))
    submit(DeleteRecords(TicketId(11), ((_key(1), "g"),)))
    submit(WriteRecords(TicketId(12), _records(0)))
    harness.store.gate.set()
    assert [harness.next(StoreWritten).ticket for _ in range(3)] == [0, 1, 2]
    assert [harness.next(StoreDeleted).ticket for _ in range(2)] == [10, 11]
    assert harness.next(StoreWritten).ticket == 12
    writes = [call for call in harness.store.calls if call[0] != "touch"]
    assert writes == [("write", 6), ("delete", 2), ("write", 1)]
    assert RecordId(_key(0), "g") in harness.store.kept
    assert RecordId(_key(1), "g") not in harness.store.kept


def test_no_store_call_is_larger_than_a_batch(start: Start) -> None:
    harness = start(limits=Limits(io_batch_pages=16))
    harness.threads.submit(WriteRecords(TicketId(1), _records(*range(50))))
    assert harness.next(StoreWritten).ok.all()
    assert [count for verb, count in harness.store.calls if verb == "write"] == [16, 16, 16, 2]


def test_over_a_bound_a_command_is_answered_as_failed_at_once(start: Start) -> None:
    harness = start(limits=Limits(pages_in_flight=10))
    harness.store.gate.clear()
    harness.threads.submit(WriteRecords(TicketId(1), _records(*range(8))))
    harness.threads.submit(WriteRecords(TicketId(2), _records(*range(8))))
    refused = harness.next(StoreWritten)
    assert refused.ticket == 2
    assert not refused.ok.any()
    assert "queue" in refused.reason
    harness.threads.submit(ReadRecords(TicketId(3), _records(*range(11))))
    assert not harness.next(StoreRead).ok.any()
    harness.store.gate.set()
    assert harness.next(StoreWritten).ok.all()
    assert (
        harness.threads.status()["counters"] | {"write_refused": 1, "read_refused": 1}
        == (harness.threads.status()["counters"])
    )


def test_a_full_disk_fails_the_write_with_a_reason_and_changes_the_mode(start: Start) -> None:
    harness = start()
    harness.store.mode = "ro"
    harness.threads.submit(WriteRecords(TicketId(1), _records(0)))
    notes = [harness.notes.get(timeout=SAFETY_S) for _ in range(2)]  # a poll of the mode may come before the answer
    written = next(note for note in notes if isinstance(note, StoreWritten))
    changed = next(note for note in notes if isinstance(note, StoreModeChanged))
    assert not written.ok.any()
    assert written.reason == "disk full"
    assert (changed.mode, changed.reason) == ("ro", "disk full")


@pytest.mark.parametrize("verb", ["read", "write", "delete"])
def test_a_thread_that_dies_answers_what_it_held_and_is_started_again(start: Start, verb: str) -> None:
    harness = start(ScriptedStore(poison={_key(1)}))
    commands: dict[str, Callable[[int, int], Any]] = {
        "read": lambda ticket, at: ReadRecords(TicketId(ticket), _records(at)),
        "write": lambda ticket, at: WriteRecords(TicketId(ticket), _records(at)),
        "delete": lambda ticket, at: DeleteRecords(TicketId(ticket), ((_key(at), "g"),)),
    }
    kinds = {"read": StoreRead, "write": StoreWritten, "delete": StoreDeleted}
    for round_ in range(5):  # more deaths than there are threads
        harness.threads.submit(commands[verb](2 * round_, 1))
        answer = harness.next(kinds[verb])
        assert answer.ticket == 2 * round_
        assert verb == "delete" or not answer.ok.any()
        harness.threads.submit(commands[verb](2 * round_ + 1, 2))
        assert harness.next(kinds[verb]).ticket == 2 * round_ + 1
    assert harness.threads.status()["counters"]["thread_deaths"] == 5


def test_a_thread_that_really_ended_is_started_by_the_next_tick(start: Start) -> None:
    harness = start()
    for worker in harness.threads._workers[1:]:
        worker.thread = threading.Thread(target=lambda: None)
        worker.thread.start()
        worker.thread.join()
    harness.threads.tend()
    harness.threads.submit(ReadRecords(TicketId(1), _records(0)))
    assert harness.next(StoreRead).ticket == 1


def test_recovery_streams_rows_and_waits_for_the_loop(start: Start) -> None:
    total = RECOVERY_BATCH * (RECOVERY_WINDOW + 2) + 7
    harness = start(ScriptedStore(found=total))
    got = 0
    for _ in range(RECOVERY_WINDOW):
        got += len(harness.next(StoreRecovered).rows)
    with pytest.raises(Empty):  # the window is used up: nothing more comes until the loop has caught up
        harness.notes.get(timeout=0.2)
    while True:
        harness.threads.recovered_handled()
        note = harness.notes.get(timeout=SAFETY_S)
        if isinstance(note, RecoveryEnded):
            assert (note.rows, note.error) == (total, "")
            break
        got += len(note.rows)
    assert got == total


def test_stop_flushes_the_queue_and_closes_the_store_once() -> None:
    harness = Harness(ScriptedStore(), Limits(io_batch_pages=4))
    harness.threads.start()
    harness.next(RecoveryEnded)
    for ticket in range(10):
        harness.threads.submit(WriteRecords(TicketId(ticket), _records(ticket)))
    assert harness.threads.stop(flush=True, timeout_s=SAFETY_S)
    assert len(harness.store.kept) == 10
    assert harness.store.closed == 1


def test_stop_now_does_not_wait_for_a_stuck_store() -> None:
    harness = Harness(ScriptedStore(), Limits())
    harness.threads.start()
    harness.next(RecoveryEnded)
    harness.store.gate.clear()
    harness.threads.submit(ReadRecords(TicketId(1), _records(0)))
    assert not harness.threads.stop(flush=False, timeout_s=0.0)
    assert harness.store.closed == 0  # closing under a reader would crash
    harness.store.gate.set()

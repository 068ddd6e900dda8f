"""Simulated lanes, store and memory: slow, unordered where reality is, and failing on purpose."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from hicache.core.commands import CopyPages, DeleteRecords, ReadRecords, Record, WriteRecords
from hicache.core.events import CopyEnded, Event, RecoveredRow, StoreDeleted, StoreRead, StoreRecovered, StoreWritten
from hicache.core.state import CacheState
from tests.sim.contents import GARBAGE, MODELS, Content, SimFailure, Truth

Place = tuple[int, int, int]  # session, group, L1 start


@dataclass
class Memory:
    """L1 of every session and the L2 arena, block by block."""

    l1: dict[Place, Content] = field(default_factory=dict)
    l2: dict[int, Content] = field(default_factory=dict)  # byte offset in the arena


@dataclass
class CopyJob:
    """A copy under way: pairs move one at a time, in any order, between other things that happen."""

    command: CopyPages
    left: list[tuple[int, Place]]
    cancelled: bool = False
    dying: bool = False

    @property
    def offsets(self) -> set[int]:
        return {int(o) for copy in self.command.copies for o in copy.l2_offsets}


class Lanes:
    """Executes CopyPages. Watches that nobody else touches an L2 block meanwhile in a way that races."""

    def __init__(self, rng: Random, memory: Memory) -> None:
        self.rng = rng
        self.memory = memory
        self.jobs: dict[int, CopyJob] = {}
        self.ended: set[int] = set()
        self.fences: dict[tuple[int, int], list[str]] = {}  # (session, generation) -> terminal states written

    def submit(self, command: CopyPages) -> None:
        pairs = [
            (int(offset), (command.session, copy.group, int(start)))
            for copy in command.copies
            for offset, start in zip(copy.l2_offsets, copy.l1, strict=True)
        ]
        self.rng.shuffle(pairs)
        self.jobs[command.ticket] = CopyJob(command, pairs, dying=self.rng.random() < 0.08)

    def cancel(self, ticket: int) -> None:
        if ticket in self.jobs:
            self.jobs[ticket].cancelled = True
        elif ticket not in self.ended:
            raise SimFailure(f"a copy that never began was cancelled: ticket {ticket}")

    def advance(self) -> Event | None:
        """Move some blocks of some job; the answer if that ended it."""
        job = self.rng.choice(list(self.jobs.values()))
        for _ in range(self.rng.randint(1, 8)):
            if not job.left:
                break
            offset, place = job.left.pop()
            if job.command.to_l1:
                self.memory.l1[place] = self.memory.l2.get(offset, GARBAGE)
            else:
                self.memory.l2[offset] = self.memory.l1.get(place, GARBAGE)
        stop = (job.cancelled or job.dying) and self.rng.random() < 0.3
        if job.left and not stop:
            return None
        ok = not job.left and not job.dying
        command = job.command
        del self.jobs[command.ticket]
        self.ended.add(command.ticket)
        self.end_fence(command.session, command.generation, "done" if ok else "failed")
        return CopyEnded(command.ticket, ok, "" if ok else "simulated")

    def end_fence(self, session: int, generation: int, state: str) -> None:
        self.fences.setdefault((session, generation), []).append(state)

    def written(self) -> set[int]:
        """L2 offsets that running copies write."""
        return set().union(*(job.offsets for job in self.jobs.values() if not job.command.to_l1))

    def read(self) -> set[int]:
        return set().union(*(job.offsets for job in self.jobs.values() if job.command.to_l1))


@dataclass
class Stored:
    contents: list[Content]
    allocated: int
    parent: bytes | None
    namespace: bytes
    tenant: str


class SimStore:
    """L3: reads run at any time, writes and deletions in order. Counts allocated bytes like the real one."""

    def __init__(self, rng: Random, memory: Memory, truth: Truth, capacity: int) -> None:
        self.rng = rng
        self.memory = memory
        self.truth = truth
        self.capacity = capacity
        self.mode = "rw"
        self.held: dict[tuple[bytes, str], Stored] = {}
        self.reads: list[ReadRecords] = []
        self.writer: list[WriteRecords | DeleteRecords] = []

    def offsets(self, command: Any) -> set[int]:
        return {offset for record in command.records for offset in self._parts(record)}

    @staticmethod
    def _parts(record: Record) -> list[int]:
        starts, size = _parts_of(record.group, record.length)
        return [record.offset + place * size for place in range(starts)]

    def read_one(self) -> Event:
        command = self.reads.pop(self.rng.randrange(len(self.reads)))
        ok, corrupt = [], []
        broken = self.rng.random() < 0.08
        for record in command.records:
            parts = self._parts(record)
            held = self.held.get((record.key, record.group))
            bad = held is not None and self.rng.random() < 0.05
            if bad:
                del self.held[(record.key, record.group)]  # quarantined
            good = held is not None and not bad and not broken and self.mode != "off"
            for place, offset in enumerate(parts):
                self.memory.l2[offset] = held.contents[place] if good and held else GARBAGE
            ok.append(good)
            corrupt.append(bad)
        return StoreRead(command.ticket, np.array(ok, np.bool_), np.array(corrupt, np.bool_))

    def write_one(self) -> Event:
        command = self.writer.pop(0)
        if isinstance(command, DeleteRecords):
            for key in command.keys:
                self.held.pop(key, None)
            return StoreDeleted(command.ticket)
        ok = [self._write(record) for record in command.records]
        return StoreWritten(command.ticket, np.array(ok, np.bool_), "" if all(ok) else "simulated")

    def _write(self, record: Record) -> bool:
        contents = [self.memory.l2.get(offset, GARBAGE) for offset in self._parts(record)]
        if contents != self.truth.content_of[(record.key, record.group)]:
            raise SimFailure(f"other bytes than the key's were written to L3: {record.key.hex()[:16]}: {contents}")
        if self.mode != "rw" or self.rng.random() < 0.03:
            return False
        allocated = CacheState.l3_allocated(record.length)
        self.held.pop((record.key, record.group), None)
        self.held[(record.key, record.group)] = Stored(
            contents, allocated, record.parent, record.namespace, record.tenant
        )
        if self.used() > self.capacity:
            raise SimFailure(f"L3 holds {self.used()} bytes of {self.capacity}")
        return True

    def used(self) -> int:
        return sum(each.allocated for each in self.held.values())

    def recovered(self) -> StoreRecovered:
        """All rows, as after a restart, in the order of their writing."""
        rows = [
            RecoveredRow(key, each.parent, each.namespace, each.tenant, group, each.allocated)  # type: ignore[arg-type]
            for (key, group), each in self.held.items()
        ]
        return StoreRecovered(tuple(rows))


def _parts_of(group: str, length: int) -> tuple[int, int]:
    """(starts, bytes of one) of a page's block in the only simulated group that has this name and length."""
    for model in MODELS:
        for shape in model.shape.groups:
            if shape.name == group and shape.block_bytes == length:
                return shape.starts, shape.start_bytes
    raise SimFailure(f"no group {group!r} has blocks of {length} bytes")

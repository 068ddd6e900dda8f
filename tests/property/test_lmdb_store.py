"""The disk store against a dict, through any order of writes, deletes, uses, reopenings and failing media."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache.store.base import Bytes, RecordId, RecordMeta, RecordStatus
from hicache.store.lmdb import LmdbOptions, LmdbStore
from hicache.store.record import allocated_bytes

CAPACITY = 24 * 4096
NUMBERS = st.lists(st.integers(0, 11), min_size=1, max_size=5, unique=True)
LENGTHS = (100, 4096, 9000, 20_000)


class Quiet:
    def info(self, event: str, **fields: object) -> None: ...

    def warning(self, event: str, **fields: object) -> None: ...


def meta(n: int, length: int) -> RecordMeta:
    return RecordMeta(RecordId(n.to_bytes(32, "big"), "full"), None, b"n" * 32, "t", b"f" * 32, length)


class Medium:
    """`os.pwritev` with a switch: the n-th call from now fails."""

    def __init__(self) -> None:
        self.whole, self.fail_in = os.pwritev, 0

    def __call__(self, fd: int, parts: list[memoryview], offset: int) -> int:
        self.fail_in -= 1
        if self.fail_in == 0:
            raise OSError(errno.EIO, "injected")
        return self.whole(fd, parts, offset)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.medium = Medium()
        os.pwritev = self.medium  # type: ignore[assignment]
        self.path = Path(tempfile.mkdtemp(prefix="hicache-test-"))
        self.model: dict[int, Bytes] = {}  # in order of use
        self.writes = 0
        self.store = self.open()

    def open(self) -> LmdbStore:
        options = LmdbOptions(min_free_bytes=0, grow_bytes=4 * 4096, allow_unsafe_fs=True, sync=False)
        return LmdbStore.open(self.path, CAPACITY, options, b"secret", Quiet())

    def teardown(self) -> None:
        os.pwritev = self.medium.whole
        self.store.close()
        shutil.rmtree(self.path)

    @rule(numbers=NUMBERS, length=st.sampled_from(LENGTHS), fail_in=st.sampled_from([0, 0, 0, 1, 2, 4]))
    def write(self, numbers: list[int], length: int, fail_in: int) -> None:
        payloads: list[Bytes] = []
        for n in numbers:
            self.writes += 1
            payloads.append(np.random.default_rng((self.writes, n)).integers(0, 256, length, dtype=np.uint8))
        room = CAPACITY - self.used()
        self.medium.fail_in = fail_in
        statuses = self.store.write([meta(n, length) for n in numbers], payloads)
        self.medium.fail_in = 0
        for n, payload, status in zip(numbers, payloads, statuses, strict=True):
            if status is RecordStatus.OK:
                self.model.pop(n, None)
                self.model[n] = payload
        if fail_in == 0:
            fitting = min(len(numbers), room // allocated_bytes(length))
            assert statuses == [RecordStatus.OK] * fitting + [RecordStatus.FAILED] * (len(numbers) - fitting)

    @rule(numbers=NUMBERS)
    def delete(self, numbers: list[int]) -> None:
        self.store.delete([meta(n, 1).id for n in numbers])
        for n in numbers:
            self.model.pop(n, None)

    @rule(numbers=NUMBERS)
    def touch(self, numbers: list[int]) -> None:
        self.store.touch([meta(n, 1).id for n in numbers])
        for n in numbers:
            if n in self.model:
                self.model[n] = self.model.pop(n)

    @rule()
    def tend(self) -> None:
        self.store.tend()
        assert self.store.stats().mode == "rw"
        self.rows_agree()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.open()
        self.rows_agree()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def rot(self, data: st.DataObject) -> None:
        """A byte of one record's frame changes on the medium."""
        n = data.draw(st.sampled_from(sorted(self.model)))
        raw = (self.path / "frames.seg").read_bytes()
        at = raw.index(self.model[n].tobytes()) + data.draw(st.integers(0, self.model[n].size - 1))
        with (self.path / "frames.seg").open("r+b") as frames:
            frames.seek(at)
            frames.write(bytes([raw[at] ^ 0xFF]))
        buffer = np.zeros(self.model[n].size, np.uint8)
        assert self.store.read([meta(n, buffer.size)], [buffer]) == [RecordStatus.CORRUPT]
        del self.model[n]

    def used(self) -> int:
        return sum(allocated_bytes(payload.size) for payload in self.model.values())

    def rows_agree(self) -> None:
        rows = [int.from_bytes(row.meta.id.key, "big") for row in self.store.rows()]
        assert rows == list(self.model)

    @invariant()
    def every_record_reads_as_written(self) -> None:
        for n in range(12):
            expected = self.model.get(n, np.zeros(100, np.uint8))
            buffer = np.zeros(expected.size, np.uint8)
            (status,) = self.store.read([meta(n, buffer.size)], [buffer])
            assert status is (RecordStatus.OK if n in self.model else RecordStatus.MISSING)
            assert n not in self.model or np.array_equal(buffer, expected)

    @invariant()
    def figures_agree(self) -> None:
        stats = self.store.stats()
        assert (stats.records, stats.used_bytes) == (len(self.model), self.used())
        assert stats.used_bytes <= stats.counters["backed_bytes"] <= CAPACITY


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)

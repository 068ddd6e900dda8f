"""Kill -9 at named and at random points; every acknowledged record is there afterwards, nothing is wrong."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache.store.base import RecordStatus
from hicache.store.record import allocated_bytes
from tests.fault import l3_nursery as nursery

ABSENT = 0


class Nursery:
    """The parent of the writers, and what it heard of them."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, job: dict[str, object], kill_after_lines: int | None = None) -> tuple[list[str], int]:
        """What the writer said until it died, and the signal that it died of."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline().split()[1])
        lines: list[str] = []
        while True:
            if kill_after_lines == len(lines):
                os.kill(pid, signal.SIGKILL)
            line = self._process.stdout.readline().strip()
            if line.startswith("dead"):
                return lines, int(line.split()[1])
            lines.append(line)


@pytest.fixture(scope="module")
def nursery_process() -> Iterator[Nursery]:
    with subprocess.Popen(
        [sys.executable, nursery.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Nursery(process)
        process.kill()


class Model:
    """Versions that each record may be in: one if acknowledged, two while a call that names it is open."""

    def __init__(self) -> None:
        self.may_be: dict[int, set[int]] = {n: {ABSENT} for n in range(nursery.RECORDS)}
        self.version = 0

    def hear(self, lines: list[str]) -> None:
        pending: list[tuple[int, int]] = []
        for line in lines:
            words = line.split()
            if words[0] == "done":
                for n, version in pending:
                    self.may_be[n] = {version}
                pending = []
            else:
                assert words[0] in ("write", "delete"), line
                pending = [(int(n), int(version)) for n, version in (w.split(":") for w in words[1:])]
                for n, version in pending:
                    self.may_be[n].add(version)
                    self.version = max(self.version, version)

    def verify(self, path: Path) -> int:
        """Open the store, read everything, settle what was open. How many records are there."""
        store = nursery.open_store(str(path), nursery.Fuse("", 0))
        used = found = 0
        for n, versions in self.may_be.items():
            wanted = nursery.meta(n)
            buffer = np.zeros(wanted.length, np.uint8)
            (status,) = store.read([wanted], [buffer])
            matching = [v for v in versions if v != ABSENT and np.array_equal(buffer, nursery.content(n, v))]
            if status is RecordStatus.OK:
                assert len(matching) == 1, f"record {n} is not any of {versions}"
                used += allocated_bytes(wanted.length)
                found += 1
            else:
                assert status is RecordStatus.MISSING, f"record {n}: {status}"
                assert ABSENT in versions, f"acknowledged record {n} is lost"
            self.may_be[n] = {matching[0] if status is RecordStatus.OK else ABSENT}
        stats = store.stats()
        assert (stats.records, stats.used_bytes) == (found, used)
        assert len(list(store.rows())) == found
        assert used <= stats.counters["backed_bytes"] <= nursery.CAPACITY
        store.close()
        return found


NAMED = [
    (point, count)
    for point in ("frames_written", "frames_synced", "rows_put", "rows_committed", "torn")
    for count in (1, 2, 3, 5, 8)
]


def test_kill_at_named_points(nursery_process: Nursery, tmp_path: Path) -> None:
    model, found = Model(), 0
    for seed, (point, count) in enumerate(NAMED):
        job = {"path": str(tmp_path / "s"), "seed": seed, "version": model.version, "point": point, "count": count}
        lines, died_of = nursery_process.run(job)
        assert died_of == signal.SIGKILL, (point, count, lines[-1:])
        model.hear(lines)
        found += model.verify(tmp_path / "s")
    assert found > 20 * len(NAMED) // 2  # the store was really in use


def test_kill_at_random_moments(nursery_process: Nursery, tmp_path: Path) -> None:
    model, found, kills, rng = Model(), 0, 50, random.Random(7)
    for seed in range(kills):
        job = {"path": str(tmp_path / "s"), "seed": 100 + seed, "version": model.version, "point": "", "count": 0}
        lines, died_of = nursery_process.run(job, kill_after_lines=rng.randrange(0, 24))
        assert died_of == signal.SIGKILL
        model.hear(lines)
        found += model.verify(tmp_path / "s")
    assert found > 10 * kills


def test_kill_while_the_store_is_made(nursery_process: Nursery, tmp_path: Path) -> None:
    """Whatever a birth that failed left behind is taken over by the next one."""
    for count in range(1, 100):
        path = tmp_path / f"s{count}"
        lines, died_of = nursery_process.run(
            {"path": str(path), "seed": 0, "version": 0, "point": "open", "count": count}
        )
        Model().verify(path)
        if lines == ["opened"]:
            assert died_of == 0
            break
        assert died_of == signal.SIGKILL
    assert 10 < count < 99

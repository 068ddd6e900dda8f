"""Bad bytes, bad media, full disks: never wrong bytes, reads go on, writes come back."""

import errno
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from hicache.store import medium, record
from hicache.store.base import RecordStatus
from hicache.store.lmdb import LmdbOptions, LmdbStore
from hicache.store.quarantine import unpack_entry
from hicache.store.record import PAGE_BYTES, allocated_bytes
from tests.fault import l3_nursery as nursery

OK, MISSING, CORRUPT, FAILED = RecordStatus.OK, RecordStatus.MISSING, RecordStatus.CORRUPT, RecordStatus.FAILED
COUNT = 12


def open_store(path: Path, capacity: int = nursery.CAPACITY, min_free: int = 0) -> LmdbStore:
    options = LmdbOptions(min_free_bytes=min_free, grow_bytes=1 << 20, allow_unsafe_fs=True)
    return LmdbStore.open(path, capacity, options, b"secret", nursery.Quiet())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    made = open_store(tmp_path / "s")
    assert set(write(made, range(COUNT))) == {OK}
    yield made
    made.close()


def write(store: LmdbStore, ns: range) -> list[RecordStatus]:
    return store.write([nursery.meta(n) for n in ns], [nursery.content(n, 1) for n in ns])


def read(store: LmdbStore, n: int) -> RecordStatus:
    buffer = np.zeros(nursery.meta(n).length, np.uint8)
    (status,) = store.read([nursery.meta(n)], [buffer])
    assert status is not OK or np.array_equal(buffer, nursery.content(n, 1))
    return status


def rows_of(path: Path) -> dict[int, tuple[bytes, bytes]]:
    """Key and value of each row."""
    return {int.from_bytes(key[:32], "big"): (key, row) for key, row in table(path, b"rows")}


def table(path: Path, name: bytes) -> list[tuple[bytes, bytes]]:
    """One table of the index, from a copy: LMDB opens a file once per process."""
    copy = path.parent / "index-copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path / "index", copy)
    env = lmdb.open(str(copy), max_dbs=4)
    with env.begin(db=env.open_db(name)) as txn:
        found = [(bytes(key), bytes(value)) for key, value in txn.cursor()]
    env.close()
    return found


def offset_of(path: Path, n: int) -> int:
    key, row = rows_of(path)[n]
    return record.unpack_row(key, row).place.offset


def edit_rows(path: Path, change: Callable[[dict[int, tuple[bytes, bytes]]], dict[bytes, bytes]]) -> None:
    new = change(rows_of(path))
    env = lmdb.open(str(path / "index"), max_dbs=4)
    rows = env.open_db(b"rows")
    with env.begin(write=True, db=rows) as txn:
        for key, row in new.items():
            txn.put(key, row)
    env.close()


def poke(path: Path, offset: int, data: bytes) -> None:
    with (path / "frames.seg").open("r+b") as frames:
        frames.seek(offset)
        frames.write(data)


def peek(path: Path, offset: int, size: int) -> bytes:
    with (path / "frames.seg").open("rb") as frames:
        frames.seek(offset)
        return frames.read(size)


def check_set_aside(store: LmdbStore, bad: int) -> None:
    used = store.stats().used_bytes
    assert [read(store, bad), read(store, bad)] == [CORRUPT, MISSING]
    assert [read(store, n) for n in range(COUNT) if n != bad] == [OK] * (COUNT - 1)
    stats = store.stats()
    assert (stats.counters["corrupt"], stats.counters["quarantined"], stats.records) == (1, 1, COUNT - 1)
    assert stats.used_bytes == used - allocated_bytes(nursery.meta(bad).length)
    assert write(store, range(bad, bad + 1)) == [OK]
    assert read(store, bad) is OK


@pytest.mark.parametrize("where", ["magic", "key", "mac", "payload_first", "payload_last"])
def test_a_flipped_bit_costs_its_record_alone(store: LmdbStore, tmp_path: Path, where: str) -> None:
    bad = 6
    at = {
        "magic": 0,
        "key": 20,
        "mac": record.HEADER_BYTES - 1,
        "payload_first": PAGE_BYTES,
        "payload_last": PAGE_BYTES + nursery.meta(bad).length - 1,
    }[where]
    offset = offset_of(tmp_path / "s", bad) + at
    poke(tmp_path / "s", offset, bytes([peek(tmp_path / "s", offset, 1)[0] ^ 0x10]))
    check_set_aside(store, bad)


def test_any_torn_frame_is_seen(store: LmdbStore, tmp_path: Path) -> None:
    """Zeros from a random byte on, as a write that stopped there leaves them."""
    rng = random.Random(3)
    for n in range(COUNT):
        size = PAGE_BYTES + nursery.meta(n).length
        cut = rng.randrange(size)
        offset = offset_of(tmp_path / "s", n)
        poke(tmp_path / "s", offset + cut, bytes(size - cut))
        assert [read(store, n), read(store, n)] == [CORRUPT, MISSING]


def test_a_frame_in_anothers_place_is_seen(store: LmdbStore, tmp_path: Path) -> None:
    size = allocated_bytes(nursery.meta(2).length)
    frame = peek(tmp_path / "s", offset_of(tmp_path / "s", 6), size)  # 2 and 6 have the same length
    poke(tmp_path / "s", offset_of(tmp_path / "s", 2), frame)
    check_set_aside(store, 2)


def test_an_older_write_of_the_same_key_is_seen(store: LmdbStore, tmp_path: Path) -> None:
    """A lost write: the row is new, the medium still holds the frame that was there before."""
    path, old_at = tmp_path / "s", offset_of(tmp_path / "s", 2)
    old = peek(path, old_at, allocated_bytes(nursery.meta(2).length))
    assert write(store, range(2, 3)) == [OK]
    assert offset_of(path, 2) != old_at
    poke(path, offset_of(path, 2), old)
    check_set_aside(store, 2)


def test_a_file_that_ends_early(store: LmdbStore, tmp_path: Path) -> None:
    os.truncate(tmp_path / "s" / "frames.seg", offset_of(tmp_path / "s", COUNT - 1) + PAGE_BYTES + 10)
    assert [read(store, COUNT - 1), read(store, COUNT - 1)] == [CORRUPT, MISSING]
    assert read(store, 0) is OK


def test_a_frame_file_that_is_gone_costs_the_records_not_the_start(store: LmdbStore, tmp_path: Path) -> None:
    store.close()
    (tmp_path / "s" / "frames.seg").unlink()
    again = open_store(tmp_path / "s")
    assert (again.stats().records, again.stats().counters["quarantined"]) == (0, COUNT)
    assert list(again.rows()) == []
    assert set(write(again, range(COUNT))) == {OK}
    assert [read(again, n) for n in range(COUNT)] == [OK] * COUNT
    again.close()


def test_a_damaged_row_check_set_aside_at_open(store: LmdbStore, tmp_path: Path) -> None:
    store.close()

    def damage(rows: dict[int, tuple[bytes, bytes]]) -> dict[bytes, bytes]:
        key, row = rows[3]
        return {key: row[:25] + bytes([row[25] ^ 1]) + row[26:]}  # in the offset

    edit_rows(tmp_path / "s", damage)
    again = open_store(tmp_path / "s")
    assert again.stats().counters["quarantined"] == 1
    assert [read(again, n) for n in range(COUNT)] == [MISSING if n == 3 else OK for n in range(COUNT)]
    assert len(list(again.rows())) == COUNT - 1
    again.close()


def test_of_two_rows_over_one_frame_the_later_lives(store: LmdbStore, tmp_path: Path) -> None:
    store.close()

    def overlap(rows: dict[int, tuple[bytes, bytes]]) -> dict[bytes, bytes]:
        later = record.unpack_row(*rows[10]).place
        key, row = rows[2]
        fields = record.unpack_row(key, row)
        moved = record.Place(later.offset, fields.place.ordinal, fields.place.checksum)
        return {key: record.pack_row(key, fields.meta, moved, fields.last_use)}

    edit_rows(tmp_path / "s", overlap)
    again = open_store(tmp_path / "s")
    assert [read(again, n) for n in range(COUNT)] == [MISSING if n == 2 else OK for n in range(COUNT)]
    assert again.stats().counters["quarantined"] == 1
    again.close()


def test_the_quarantine_is_bounded(store: LmdbStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hicache.store.lmdb._QUARANTINE_ROWS", 3)
    for n in range(6):
        poke(tmp_path / "s", offset_of(tmp_path / "s", n), b"X")
        assert read(store, n) is CORRUPT
    kept = [unpack_entry(value) for _, value in table(tmp_path / "s", b"quarantine")]
    assert [(entry.reason, entry.row_key) for entry in kept] == [
        ("bad magic", record.row_key(nursery.meta(n).id)) for n in (3, 4, 5)
    ]
    assert record.unpack_row(kept[0].row_key, kept[0].row).meta == nursery.meta(3)
    with pytest.raises(ValueError, match="not a quarantine entry"):
        unpack_entry(b"\x09\x00short")


# ---- failing calls --------------------------------------------------------------------------------------


def fail(code: int) -> Callable[..., int]:
    def call(*_args: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


def test_a_read_error_is_no_verdict_on_the_record(store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail(errno.EIO))
        assert read(store, 0) is FAILED
    assert read(store, 0) is OK
    assert store.stats().counters["read_failures"] == 1


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("by_tend", [False, True])
def test_a_write_error_makes_the_store_read_only_until_one_succeeds(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch, call: str, code: int, by_tend: bool
) -> None:
    used = store.stats().used_bytes
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail(code))
        assert write(store, range(20, 23)) == [FAILED] * 3
        stats = store.stats()
        assert (stats.mode, stats.used_bytes, stats.records) == ("ro", used, COUNT)
        assert os.strerror(code) in stats.reason
        assert [read(store, n) for n in range(COUNT)] == [OK] * COUNT
        assert write(store, range(20, 23)) == [FAILED] * 3
        store.tend()
        assert store.stats().mode == "ro"
    if by_tend:
        store.tend()
        assert store.stats().mode == "rw"
    assert write(store, range(20, 23)) == [OK] * 3
    assert (store.stats().mode, store.stats().reason) == ("rw", "")
    assert [read(store, n) for n in (20, 21, 22)] == [OK] * 3


def test_a_batch_keeps_what_was_written_before_the_medium_failed(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = os.pwritev, []

    def third_fails(fd: int, parts: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "full")
        return whole(fd, parts, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", third_fails)
        assert write(store, range(20, 24)) == [OK, OK, FAILED, FAILED]
    assert store.stats().mode == "ro"
    assert [read(store, n) for n in range(20, 24)] == [OK, OK, MISSING, MISSING]


def test_short_reads_and_writes_are_gone_on_with(store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_page(fd: int, parts: list[memoryview], offset: int) -> int:
        return os.pwrite(fd, parts[0][:1000], offset)

    def some(fd: int, parts: list[memoryview], offset: int) -> int:
        data = os.pread(fd, min(7777, parts[0].nbytes), offset)
        parts[0][: len(data)] = data
        return len(data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", one_page)
        patch.setattr(os, "preadv", some)
        assert set(write(store, range(20, 23))) == {OK}
        assert [read(store, n) for n in (0, 20, 21, 22)] == [OK] * 4
    assert [read(store, n) for n in (0, 20, 21, 22)] == [OK] * 4


class BadIndex:
    """Stands before the index's environment and fails write transactions."""

    def __init__(self, env: lmdb.Environment, error: lmdb.Error) -> None:
        self._env, self._error = env, error

    def begin(self, write: bool = False, **rest: Any) -> Any:
        if write:
            raise self._error
        return self._env.begin(**rest)

    def close(self) -> None:
        self._env.close()

    def sync(self, force: bool) -> None:
        self._env.sync(force)


def test_a_delete_that_cannot_commit_is_owed(store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(store, "_env", BadIndex(store._env, lmdb.MapFullError("map full")))
        store.delete([nursery.meta(0).id, nursery.meta(1).id])
        assert (store.stats().mode, store.stats().records) == ("ro", COUNT)
        assert [read(store, n) for n in range(3)] == [MISSING, MISSING, OK]
        store.tend()
        assert store.stats().mode == "ro"
    store.tend()
    stats = store.stats()
    assert (stats.mode, stats.records, stats.counters["owed_deletes"]) == ("rw", COUNT - 2, 0)
    assert write(store, range(1, 2)) == [OK]
    assert read(store, 1) is OK


def test_a_bad_record_reads_as_missing_though_it_cannot_be_set_aside(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    poke(tmp_path / "s", offset_of(tmp_path / "s", 4), b"X")
    monkeypatch.setattr(store, "_env", BadIndex(store._env, lmdb.DiskError("no space")))
    assert [read(store, 4), read(store, 4)] == [CORRUPT, MISSING]


def test_an_index_in_panic_turns_the_store_off(store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_env", BadIndex(store._env, lmdb.PanicError("panic")))
    assert write(store, range(20, 21)) == [FAILED]
    assert store.stats().mode == "off"
    assert write(store, range(20, 21)) == [FAILED]


# ---- full disks -----------------------------------------------------------------------------------------


def test_the_floor_of_free_space_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [100 << 20]
    monkeypatch.setattr(medium, "free_bytes", lambda _path: free[0])
    store = open_store(tmp_path / "s", capacity=64 << 20, min_free=90 << 20)
    assert set(write(store, range(4))) == {OK}
    free[0] = 90 << 20
    statuses = write(store, range(100, 140))  # the step that was reserved is used up first
    assert FAILED in statuses
    assert (store.stats().mode, "min_free" in store.stats().reason) == ("ro", True)
    assert [read(store, n) for n in range(4)] == [OK] * 4
    store.tend()
    assert store.stats().mode == "ro"  # there is no room for the frame that failed
    free[0] = 100 << 20
    store.tend()
    assert store.stats().mode == "rw"
    assert set(write(store, range(100, 110))) == {OK}
    assert store.stats().mode == "rw"
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 16 MiB that really is full when it is full."""
    point = tmp_path / "disk"
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(point)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


def test_a_disk_that_is_full_in_earnest(small_disk: Path) -> None:
    store = open_store(small_disk / "s", capacity=64 << 20)
    written: list[int] = []
    for n in range(1000):
        if write(store, range(n, n + 1)) != [OK]:
            break
        written.append(n)
    assert len(written) > 50
    assert store.stats().mode == "ro"
    with pytest.raises(OSError, match="No space"):
        fill_up(small_disk / "filler")
    assert {read(store, n) for n in written} == {OK}
    store.delete([nursery.meta(n).id for n in written[:20]])  # commits on a full disk, too
    assert store.stats().mode == "rw"
    assert set(write(store, range(written[0], written[10]))) == {OK}
    assert {read(store, n) for n in written[20:]} == {OK}
    store.close()
    store = open_store(small_disk / "s", capacity=64 << 20)
    assert {read(store, n) for n in (*written[:10], *written[20:])} == {OK}
    store.close()


def test_space_that_cannot_be_given_back_harms_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Punching comes after the commit: its failure must not undo what was committed."""
    store = open_store(tmp_path / "s")
    assert set(write(store, range(40))) == {OK}
    store.close()
    store = open_store(tmp_path / "s", capacity=1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(medium, "punch", fail(errno.EIO))
        store.delete([nursery.meta(n).id for n in range(30)])
    assert store.stats().counters["backed_bytes"] > 1 << 20
    assert (store.stats().mode, store.stats().records) == ("rw", 10)
    store.delete([nursery.meta(30).id])
    assert store.stats().counters["backed_bytes"] <= 1 << 20
    assert [read(store, n) for n in range(31, 40)] == [OK] * 9
    store.close()


def test_without_holes_in_files_the_limit_still_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that can neither preallocate nor punch: split space is refused, nothing is overwritten."""
    monkeypatch.setattr(medium, "punch", lambda *_args: False)
    monkeypatch.setattr(medium._Libc, "fallocate", lambda *_args: False)
    store = open_store(tmp_path / "s", capacity=1 << 20)
    small = [n for n in range(0, 4 * 85, 4)]  # 5000 bytes each
    statuses = store.write([nursery.meta(n) for n in small], [nursery.content(n, 1) for n in small])
    assert statuses == [OK] * 85
    store.delete([nursery.meta(n).id for n in small[::2]])
    assert write(store, range(3, 4)) == [FAILED]  # 100001 bytes, in no gap
    assert store.stats().mode == "rw"
    assert [read(store, n) for n in small] == [MISSING, OK] * 42 + [MISSING]
    assert (tmp_path / "s" / "frames.seg").stat().st_size <= 1 << 20
    store.close()


def test_space_under_a_reader_is_not_reused(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The record is deleted and others are written while a reader stands before its preadv."""
    whole, old_at, later = os.preadv, offset_of(tmp_path / "s", 2), list[int]()

    def meanwhile(fd: int, parts: list[memoryview], offset: int) -> int:
        monkeypatch.setattr(os, "preadv", whole)
        store.delete([nursery.meta(2).id])
        assert write(store, range(20, 35)) == [OK] * 15
        later.extend(offset_of(tmp_path / "s", n) for n in range(20, 35))
        return whole(fd, parts, offset)

    monkeypatch.setattr(os, "preadv", meanwhile)
    assert read(store, 2) is OK  # it was there when it was asked for
    assert len(later) == 15
    assert old_at not in later
    assert read(store, 2) is MISSING
    assert write(store, range(38, 39)) == [OK]  # of the same length: now it is reused
    assert offset_of(tmp_path / "s", 38) == old_at


def test_a_record_replaced_under_a_bad_read_is_not_set_aside(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.preadv

    def meanwhile(fd: int, parts: list[memoryview], offset: int) -> int:
        monkeypatch.setattr(os, "preadv", whole)
        assert write(store, range(2, 3)) == [OK]
        moved = whole(fd, parts, offset)
        parts[0][0] ^= 1
        return moved

    monkeypatch.setattr(os, "preadv", meanwhile)
    assert read(store, 2) is MISSING
    assert read(store, 2) is OK
    assert store.stats().counters.get("quarantined", 0) == 0


def test_close_waits_for_readers(store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, inside, go = os.preadv, threading.Event(), threading.Event()

    def held(fd: int, parts: list[memoryview], offset: int) -> int:
        inside.set()
        go.wait(30)
        return whole(fd, parts, offset)

    monkeypatch.setattr(os, "preadv", held)
    answers: list[RecordStatus] = []
    reader = threading.Thread(target=lambda: answers.append(read(store, 0)))
    reader.start()
    assert inside.wait(30)
    closer = threading.Thread(target=store.close)
    closer.start()
    while read(store, 1) is not FAILED:  # the door is shut
        pass
    assert closer.is_alive()
    go.set()
    reader.join()
    closer.join()
    assert answers == [OK]

"""One suite for every store."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache.store.base import Bytes, RecordId, RecordMeta, RecordStatus, Store
from hicache.store.faulty import FaultPlan, FaultyStore
from hicache.store.lmdb import LmdbOptions, LmdbStore
from hicache.store.memory import MemoryStore
from hicache.store.record import allocated_bytes

OK, MISSING, FAILED = RecordStatus.OK, RecordStatus.MISSING, RecordStatus.FAILED
CAPACITY = 4 << 20


class Quiet:
    def info(self, event: str, **fields: object) -> None: ...

    def warning(self, event: str, **fields: object) -> None: ...


def lmdb_store(path: Path) -> Store:
    options = LmdbOptions(min_free_bytes=0, grow_bytes=1 << 20, allow_unsafe_fs=True)
    return LmdbStore.open(path / "store", CAPACITY, options, b"secret", Quiet())


MAKERS: dict[str, Callable[[Path], Store]] = {
    "lmdb": lmdb_store,
    "faulty": lambda path: FaultyStore(lmdb_store(path), FaultPlan()),
    "memory": lambda path: MemoryStore(CAPACITY),
}


@pytest.fixture(params=sorted(MAKERS))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = MAKERS[request.param](tmp_path)
    yield made
    made.close()


def meta(n: int, length: int = 5000, group: str = "full", namespace: int = 1) -> RecordMeta:
    return RecordMeta(
        RecordId(n.to_bytes(32, "big"), group),
        None if n == 0 else (n - 1).to_bytes(32, "big"),
        bytes([namespace]) * 32,
        "tenant",
        b"f" * 32,
        length,
    )


def payload(n: int, length: int = 5000) -> Bytes:
    return np.random.default_rng(n).integers(0, 256, length, dtype=np.uint8)


def read(store: Store, wanted: RecordMeta) -> tuple[RecordStatus, Bytes]:
    buffer = np.zeros(wanted.length, np.uint8)
    (status,) = store.read([wanted], [buffer])
    return status, buffer


def test_what_was_written_is_read(store: Store) -> None:
    lengths = [1, 100, 4095, 4096, 4097, 65536, 737_280]
    metas = [meta(n, length) for n, length in enumerate(lengths)]
    payloads = [payload(n, length) for n, length in enumerate(lengths)]
    assert store.write(metas, payloads) == [OK] * len(lengths)
    for wanted, expected in zip(metas, payloads, strict=True):
        status, got = read(store, wanted)
        assert status is OK
        assert np.array_equal(got, expected)
    stats = store.stats()
    assert (stats.records, stats.used_bytes) == (len(lengths), sum(map(allocated_bytes, lengths)))
    assert (stats.mode, stats.capacity_bytes) == ("rw", CAPACITY)


def test_reads_of_a_batch_are_independent(store: Store) -> None:
    store.write([meta(0), meta(2)], [payload(0), payload(2)])
    buffers = [np.zeros(5000, np.uint8) for _ in range(3)]
    assert store.read([meta(0), meta(1), meta(2)], buffers) == [OK, MISSING, OK]
    assert np.array_equal(buffers[2], payload(2))


def test_groups_of_one_key_are_apart(store: Store) -> None:
    store.write([meta(0, group="a"), meta(0, group="b")], [payload(1), payload(2)])
    assert np.array_equal(read(store, meta(0, group="a"))[1], payload(1))
    store.delete([RecordId(meta(0).id.key, "a")])
    assert read(store, meta(0, group="a"))[0] is MISSING
    assert np.array_equal(read(store, meta(0, group="b"))[1], payload(2))


def test_another_identity_is_a_miss_and_harms_nothing(store: Store) -> None:
    store.write([meta(0)], [payload(0)])
    stranger = RecordMeta(meta(0).id, None, meta(0).namespace, "tenant", b"g" * 32, 5000)
    for wrong in (meta(0, namespace=2), meta(0, length=4999), stranger):
        assert read(store, wrong)[0] is MISSING
    assert read(store, meta(0))[0] is OK


def test_a_rewrite_replaces(store: Store) -> None:
    store.write([meta(0)], [payload(0)])
    assert store.write([meta(0, 9000)], [payload(7, 9000)]) == [OK]
    assert read(store, meta(0))[0] is MISSING
    assert np.array_equal(read(store, meta(0, 9000))[1], payload(7, 9000))
    assert (store.stats().records, store.stats().used_bytes) == (1, allocated_bytes(9000))


def test_delete_frees_and_forgives(store: Store) -> None:
    store.write([meta(n) for n in range(4)], [payload(n) for n in range(4)])
    store.delete([meta(n).id for n in (1, 2, 99)])
    assert [read(store, meta(n))[0] for n in range(4)] == [OK, MISSING, MISSING, OK]
    assert store.stats().used_bytes == 2 * allocated_bytes(5000)
    store.delete([])


def test_capacity_is_a_hard_limit_and_space_comes_back(store: Store) -> None:
    fits = CAPACITY // allocated_bytes(65536)
    metas = [meta(n, 65536) for n in range(fits + 3)]
    statuses = store.write(metas, [payload(n, 65536) for n in range(fits + 3)])
    assert statuses == [OK] * fits + [FAILED] * 3
    assert store.stats().used_bytes <= CAPACITY
    store.delete([metas[0].id, metas[5].id])
    assert store.write(metas[fits : fits + 3], [payload(n, 65536) for n in range(3)]) == [OK, OK, FAILED]
    assert np.array_equal(read(store, metas[fits])[1], payload(0, 65536))
    assert np.array_equal(read(store, metas[7])[1], payload(7, 65536))


def test_mixed_sizes_never_strand_capacity(store: Store) -> None:
    small, large = 8192, 300_000
    fits = CAPACITY // allocated_bytes(small)
    metas = [meta(n, small) for n in range(fits)]
    assert set(store.write(metas, [payload(1, small)] * fits)) == {OK}
    store.delete([m.id for m in metas[::2]])
    room = (CAPACITY - store.stats().used_bytes) // allocated_bytes(large)
    assert room >= 5
    big = [meta(1000 + n, large) for n in range(room)]
    assert store.write(big, [payload(n, large) for n in range(room)]) == [OK] * room
    assert all(np.array_equal(read(store, m)[1], payload(n, large)) for n, m in enumerate(big))
    assert all(np.array_equal(read(store, m)[1], payload(1, small)) for m in metas[1::2])


def test_rows_come_in_order_of_use(store: Store) -> None:
    metas = [meta(n) for n in range(6)]
    store.write(metas, [payload(n) for n in range(6)])
    store.touch([metas[2].id, metas[0].id])
    store.touch([RecordId(b"?" * 32, "full")])
    store.write([meta(9)], [payload(9)])
    store.tend()  # the order of use is persisted by now
    rows = list(store.rows())
    order = [int.from_bytes(row.meta.id.key, "big") for row in rows]
    assert order == [1, 3, 4, 5, 2, 0, 9]
    assert [row.meta for row in rows] == [meta(n) for n in order]
    assert {row.allocated_bytes for row in rows} == {allocated_bytes(5000)}
    uses = [row.last_use for row in rows]
    assert uses == sorted(set(uses))


@pytest.mark.parametrize(
    "bad",
    [
        RecordMeta(RecordId(b"short", "g"), None, b"n" * 32, "t", b"f" * 32, 10),
        RecordMeta(RecordId(b"k" * 32, "g"), b"p", b"n" * 32, "t", b"f" * 32, 10),
        RecordMeta(RecordId(b"k" * 32, ""), None, b"n" * 32, "t", b"f" * 32, 10),
        RecordMeta(RecordId(b"k" * 32, "g" * 65), None, b"n" * 32, "t", b"f" * 32, 10),
        RecordMeta(RecordId(b"k" * 32, "g"), None, b"n" * 32, "t" * 65, b"f" * 32, 10),
        RecordMeta(RecordId(b"k" * 32, "g"), None, b"n" * 32, "t", b"f" * 32, 11),
    ],
)
def test_a_record_that_does_not_add_up_fails_alone(store: Store, bad: RecordMeta) -> None:
    assert store.write([meta(0, 10), bad, meta(1, 10)], [payload(0, 10)] * 3) == [OK, FAILED, OK]
    assert store.stats().records == 2
    assert store.stats().mode == "rw"


def test_readers_see_the_old_record_or_none_while_the_writer_works(store: Store) -> None:
    """Extents are reused all the time here; a reader never gets bytes of another record with OK."""
    count, length, stop, wrong = 40, 20_000, threading.Event(), []
    metas = [meta(n, length) for n in range(count)]
    contents = [payload(n, length) for n in range(count)]

    def reader(seed: int) -> None:
        rng, buffer = np.random.default_rng(seed), np.zeros(length, np.uint8)
        while not stop.is_set():
            n = int(rng.integers(count))
            (status,) = store.read([metas[n]], [buffer])
            if status not in (OK, MISSING) or (status is OK and not np.array_equal(buffer, contents[n])):
                wrong.append((n, status))

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    rng = np.random.default_rng(1)
    for _ in range(60):
        chosen = rng.choice(count, 8, replace=False).tolist()
        store.delete([metas[n].id for n in chosen[:5]])
        statuses = store.write([metas[n] for n in chosen], [contents[n] for n in chosen])
        assert set(statuses) == {OK}
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.stats().counters.get("corrupt", 0) == 0


def test_after_close_nothing_is_served(store: Store) -> None:
    store.write([meta(0)], [payload(0)])
    store.close()
    store.close()
    assert store.stats().mode == "off"
    assert read(store, meta(0))[0] is FAILED
    assert store.write([meta(1)], [payload(1)]) == [FAILED]
    store.delete([meta(0).id])
    store.touch([meta(0).id])

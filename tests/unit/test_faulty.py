"""The store that fails on purpose fails as planned, and only so."""

import numpy as np
import pytest

from hicache.store.base import RecordId, RecordMeta, RecordStatus
from hicache.store.faulty import Fault, FaultPlan, FaultyStore
from hicache.store.memory import MemoryStore

OK, MISSING, CORRUPT, FAILED = RecordStatus.OK, RecordStatus.MISSING, RecordStatus.CORRUPT, RecordStatus.FAILED


def meta(n: int) -> RecordMeta:
    return RecordMeta(RecordId(n.to_bytes(32, "big"), "full"), None, b"n" * 32, "t", b"f" * 32, 100)


METAS = [meta(n) for n in range(200)]
PAYLOADS = [np.full(100, n % 256, np.uint8) for n in range(200)]


def make(plan: FaultPlan, filled: bool = True) -> tuple[FaultyStore, MemoryStore, list[float]]:
    inner, slept = MemoryStore(1 << 30), list[float]()
    if filled:
        inner.write(METAS, PAYLOADS)
    return FaultyStore(inner, plan, slept.append), inner, slept


def read(store: FaultyStore, n: int) -> tuple[RecordStatus, bool]:
    """Status, and whether the buffer holds the record's bytes."""
    buffer = np.zeros(100, np.uint8)
    (status,) = store.read([METAS[n]], [buffer])
    return status, bool(np.array_equal(buffer, PAYLOADS[n]))


def test_an_empty_plan_changes_nothing() -> None:
    store, inner, slept = make(FaultPlan())
    assert all(read(store, n) == (OK, True) for n in range(200))
    store.delete([m.id for m in METAS])
    assert inner.stats().records == 0
    assert (store.injected, slept) == ({}, [])


@pytest.mark.parametrize(
    ("fault", "first", "second"),
    [
        (Fault.EIO, FAILED, FAILED),
        (Fault.MISSING, MISSING, MISSING),
        (Fault.CORRUPT, CORRUPT, MISSING),
        (Fault.SHORT, CORRUPT, MISSING),
    ],
)
def test_read_faults(fault: Fault, first: RecordStatus, second: RecordStatus) -> None:
    store, inner, _ = make(FaultPlan(rates={fault: 1.0}))
    assert [read(store, 1), read(store, 1)] == [(first, False), (second, False)]
    store.delete([])
    assert inner.stats().records == (199 if first is CORRUPT else 200)


def test_write_faults_leave_nothing() -> None:
    store, inner, _ = make(FaultPlan(seed=3, rates={Fault.EIO: 0.3}), filled=False)
    statuses = store.write(METAS, PAYLOADS)
    assert 20 < statuses.count(FAILED) < 100
    buffer = np.zeros(100, np.uint8)
    for wanted, status in zip(METAS, statuses, strict=True):
        assert inner.read([wanted], [buffer]) == [OK if status is OK else MISSING]
    assert store.injected[Fault.EIO] == statuses.count(FAILED)


def test_a_full_disk_shows_in_the_mode_until_a_write_succeeds() -> None:
    store, _, _ = make(FaultPlan(rates={Fault.ENOSPC: 0.5}), filled=False)
    for wanted, payload in zip(METAS, PAYLOADS, strict=True):
        (status,) = store.write([wanted], [payload])
        assert store.stats().mode == ("rw" if status is OK else "ro")
    store.tend()
    assert store.stats().mode == "rw"


def test_slow_is_slow_and_right() -> None:
    store, _, slept = make(FaultPlan(rates={Fault.SLOW: 1.0}, slow_s=0.25))
    assert read(store, 5) == (OK, True)
    assert slept == [0.25]


def test_a_delete_may_be_lost() -> None:
    store, inner, _ = make(FaultPlan(rates={Fault.EIO: 1.0}))
    store.delete([METAS[0].id])
    assert inner.stats().records == 200


def test_the_plan_depends_on_the_seed_and_not_on_the_order_of_calls() -> None:
    rates = {Fault.EIO: 0.2, Fault.MISSING: 0.2, Fault.CORRUPT: 0.2}
    forward, _, _ = make(FaultPlan(seed=1, rates=rates))
    backward, _, _ = make(FaultPlan(seed=1, rates=rates))
    other, _, _ = make(FaultPlan(seed=2, rates=rates))
    a = [read(forward, n) for n in range(200)]
    b = [read(backward, n) for n in reversed(range(200))][::-1]
    assert a == b
    assert a != [read(other, n) for n in range(200)]
    assert {status for status, _ in a} == {OK, MISSING, CORRUPT, FAILED}

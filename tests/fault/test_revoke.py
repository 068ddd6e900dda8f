"""A daemon that is stopped in the middle of a copy, an engine that does not wait for it, and no wrong byte.

Each claim is tried both ways: without the precaution the same run must show wrong bytes.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache_client import describe
from tests.daemon_harness import SAFETY_S
from tests.fault.big_pool import (
    LAYERS,
    PAGES,
    SOURCE,
    SOURCE_STARTS,
    TARGET,
    TARGET_STARTS,
    Engine,
    contents,
    engine_of,
    sequence,
)

JUNK = np.uint64(0xBAD_BAD_BAD_BAD)
TRIES = 60
WANTED = 15  # copies that were stopped in the middle
BUDGET_S = 20.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine_of(tmp_path_factory.mktemp("daemon")) as made:
        yield made


class Tries:
    """Goes on until enough copies were stopped in the middle: at random points, another sequence each time."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.first = 1000 * seed
        self.end = time.monotonic() + BUDGET_S
        self.hits = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(TRIES):
            yield self.first + number
            if self.hits == WANTED or (self.hits and time.monotonic() > self.end):
                return

    def point(self) -> tuple[int, float]:
        """Layers to wait for, and seconds beyond."""
        return int(self.rng.integers(0, LAYERS)), float(self.rng.choice([0, 0, 1e-3, 3e-3]))


@pytest.mark.parametrize("revoke", [True, False])
def test_a_store_stopped_in_the_middle_publishes_only_what_was_offered(engine: Engine, revoke: bool) -> None:
    tries, wrong = Tries(1 + revoke), 0
    revoked_before = describe("l2", engine.daemon.runtime_dir, SAFETY_S)["copies"]["copies_revoked"]
    for seed in tries:
        engine.memory[:, SOURCE] = contents(seed)
        handle = engine.client.store(sequence(seed), 0, SOURCE_STARTS)
        assert handle is not None
        if not engine.stop_within(handle, *tries.point()):
            engine.go_on()
            continue
        tries.hits += 1
        if revoke:
            handle.revoke()
        engine.memory[:, SOURCE] = JUNK
        engine.go_on()
        assert handle.wait_settled()
        if revoke:
            assert handle.failed
            assert engine.known(seed) == 0
        else:
            assert handle.wait_done()
            wrong += int((engine.fetched(seed) != contents(seed)).any())
    assert tries.hits
    revoked = describe("l2", engine.daemon.runtime_dir, SAFETY_S)["copies"]["copies_revoked"] - revoked_before
    if revoke:
        assert revoked == tries.hits
    else:
        assert wrong, "bytes that came too late were never published, so the other run proves nothing"
        assert not revoked


@pytest.mark.parametrize("revoke", [True, False])
def test_a_store_that_the_daemon_has_not_read_yet_can_be_taken_back(engine: Engine, revoke: bool) -> None:
    seed = 7000 + revoke
    engine.memory[:, SOURCE] = contents(seed)
    assert engine.known(seed) == 0
    engine.stop()
    handle = engine.client.offer(sequence(seed), 0, SOURCE_STARTS)
    assert handle is not None
    if revoke:
        handle.revoke()
    engine.memory[:, SOURCE] = JUNK
    engine.go_on()
    assert handle.wait_settled()
    if revoke:
        assert engine.known(seed) == 0
    else:
        assert handle.wait_done()
        assert (engine.fetched(seed) == JUNK).all()


def test_what_was_revoked_can_be_stored_again(engine: Engine) -> None:
    seed = 7100
    engine.memory[:, SOURCE] = contents(seed)
    first = engine.client.offer(sequence(seed), 0, SOURCE_STARTS)
    assert first is not None
    first.revoke()
    assert first.wait_settled()
    engine.store(seed)
    engine.memory[:, SOURCE] = JUNK
    assert (engine.fetched(seed) == contents(seed)).all()


@pytest.mark.parametrize("sever", [True, False])
def test_a_load_stopped_in_the_middle_cannot_write_to_a_severed_pool(engine: Engine, sever: bool) -> None:
    tries, overwritten = Tries(3 + sever), 0
    held = tries.first + 500
    for seed in tries:
        if engine.known(held) < PAGES:
            engine.store(held)
        lease, copies = engine.lease(held), engine.copies()
        engine.memory[:, TARGET] = 0
        handle = engine.client.load(lease, 0, TARGET_STARTS)
        assert handle is not None
        if not engine.stop_within(handle, *tries.point()):
            engine.go_on()
            engine.client.release([lease])
            continue
        tries.hits += 1
        kept = engine.memory[:, SOURCE].copy()
        if sever:
            handle.revoke()
            engine.pool.sever()
            assert handle.settled
            engine.client.reattach()
        own = contents(seed)
        engine.memory[:, TARGET] = own
        engine.go_on()
        engine.wait_copies(copies + 1)
        overwritten += int((engine.memory[:, TARGET] != own).any())
        assert np.array_equal(engine.memory[:, SOURCE], kept)
        if sever:
            assert not overwritten
            assert handle.failed
            assert not handle.done
            assert (engine.fetched(held) == contents(held)).all()  # the new memory is what loads go to
        else:
            assert handle.wait_done()
            engine.client.release([lease])
    assert tries.hits
    assert sever or overwritten, "no load ever wrote late, so the other run proves nothing"


def test_a_severed_pool_fails_even_a_load_that_ends_well_in_the_former_memory(engine: Engine) -> None:
    """Without a revoke, and looked at only after the daemon wrote DONE."""
    seed = 7200
    engine.store(seed)
    lease, copies = engine.lease(seed), engine.copies()
    engine.memory[:, TARGET] = 0
    engine.stop()
    handle = engine.client.begin_load(lease, 0, TARGET_STARTS)
    assert handle is not None
    engine.pool.sever()
    engine.go_on()
    engine.wait_copies(copies + 1)
    assert not handle.wait_layer(0)
    assert not handle.done
    assert handle.settled
    assert not engine.memory[:, TARGET].any()
    assert (engine.fetched(seed) == contents(seed)).all()


def test_a_revoked_load_ends_soon(engine: Engine, tmp_path: Path) -> None:
    seed = 7300
    engine.store(seed)
    for _ in range(TRIES):
        lease = engine.lease(seed)
        handle = engine.client.load(lease, 0, TARGET_STARTS)
        assert handle is not None
        handle.revoke()
        assert handle.wait_settled()
        engine.client.release([lease])
        if not handle.done:
            break
    assert handle.failed
    assert (engine.fetched(seed) == contents(seed)).all()

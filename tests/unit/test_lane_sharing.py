"""Threads of the lane share a job step by step: who has time moves more, and the fence tells only what is moved."""

import threading
from typing import Any

import pytest
from test_lanes import BLOCK, LAYERS, SAFETY_S, Rig, job, l1_block, l2_block

from hicache.base.ids import TicketId
from hicache.copy.base import Bytes, GroupGeometry, Share, Transfer
from hicache.copy.cpu import CpuMover
from hicache.core.events import CopyEnded
from hicache.protocol import fence as f
from hicache_daemon import lanes


class FirstHeld(CpuMover):
    """The first step of all waits for `go` before it moves; `ended` counts parts that came to their end."""

    held = threading.Semaphore(0)
    free = threading.Semaphore(0)
    go = threading.Event()
    ended = threading.Semaphore(0)

    def copy(
        self,
        pool: Bytes,
        geometry: tuple[GroupGeometry, ...],
        transfers: tuple[Transfer, ...],
        to_l1: bool,
        share: Share,
    ) -> None:
        super().copy(pool, geometry, transfers, to_l1, share)
        FirstHeld.ended.release()

    def _copy_runs(self, *args: Any) -> None:
        if FirstHeld.free.acquire(blocking=False):
            FirstHeld.held.release()
            assert FirstHeld.go.wait(SAFETY_S)
        super()._copy_runs(*args)


@pytest.fixture
def first_held(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Two threads, steps of one page."""
    FirstHeld.held, FirstHeld.free = threading.Semaphore(0), threading.Semaphore(1)
    FirstHeld.go, FirstHeld.ended = threading.Event(), threading.Semaphore(0)
    monkeypatch.setattr(lanes, "CpuMover", FirstHeld)
    monkeypatch.setattr(lanes, "PART_BYTES", 2 * BLOCK)
    monkeypatch.setattr(lanes, "MIN_STEP_BYTES", BLOCK)
    return Rig(2)


def test_a_thread_takes_over_what_another_does_not_come_to(first_held: Rig) -> None:
    client = first_held.attach(1)
    client.arm(0, 1)
    pages = [(i, i) for i in range(8)]
    first_held.lane.submit(job(1, pages))
    assert FirstHeld.held.acquire(timeout=SAFETY_S)
    assert FirstHeld.ended.acquire(timeout=SAFETY_S)  # the other thread
    moved = [l1_block(client, start) == l2_block(first_held, block) for block, start in pages]
    assert moved == [False] + [True] * 7
    assert (client.state(0), client.layers(0)) == (f.STATE_RUNNING, 0)  # a step of the first layers is not moved
    FirstHeld.go.set()
    assert first_held.ended().ok
    assert (client.state(0), client.layers(0)) == (f.STATE_DONE, LAYERS)
    assert l1_block(client, 0) == l2_block(first_held, 0)
    first_held.lane.close()
    client.close()


def test_a_job_ends_without_the_thread_that_never_came(first_held: Rig) -> None:
    """One thread is kept with a store; the other moves a load that was meant for both."""
    client = first_held.attach(1)
    client.arm(0, 1)
    client.arm(1, 2)
    first_held.lane.submit(job(1, [(20, 0)], to_l1=False))
    assert FirstHeld.held.acquire(timeout=SAFETY_S)
    pages = [(i, i + 1) for i in range(8)]
    first_held.lane.submit(job(2, pages, slot=1))
    assert first_held.ended() == CopyEnded(TicketId(2), True)
    assert (client.state(1), client.layers(1)) == (f.STATE_DONE, LAYERS)
    assert all(l1_block(client, start) == l2_block(first_held, block) for block, start in pages)
    assert first_held.lane.stats().queued_loads == 0
    FirstHeld.go.set()
    assert first_held.ended() == CopyEnded(TicketId(1), True)
    first_held.lane.close()
    client.close()

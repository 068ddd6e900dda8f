"""A client takes a transfer back by a word in its fence slot: what the lane makes of it."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from test_lanes import BLOCK, BLOCK_LAYER, LAYERS, POOL, SAFETY_S, Client, Rig, job, l1_block, l2_block

from hicache.base.ids import TicketId
from hicache.copy import cpu
from hicache.copy.base import Bytes, GroupGeometry, Share, Transfer
from hicache.copy.cpu import CpuMover
from hicache.core.events import CopyEnded
from hicache.protocol import fence as f
from hicache_daemon import lanes

PAGES = [(i, i) for i in range(12)]
REVOKED = "transfer_failed: revoked"


def revoke(client: Client, slot: int, generation: int) -> None:
    client.words[slot, f.WORD_REVOKED] = generation


def random_bytes(size: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Watched(CpuMover):
    """Runs `when_copied` after the last byte of each part and before the lane hears of it."""

    when_copied: Callable[[], None]

    def copy(
        self,
        pool: Bytes,
        geometry: tuple[GroupGeometry, ...],
        transfers: tuple[Transfer, ...],
        to_l1: bool,
        share: Share,
    ) -> None:
        super().copy(pool, geometry, transfers, to_l1, share)
        type(self).when_copied()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    monkeypatch.setattr(lanes, "PART_BYTES", 4 * BLOCK)
    monkeypatch.setattr(lanes, "CpuMover", Watched)
    return Watched


@pytest.mark.parametrize("threads", [1, 3])
def test_a_store_revoked_after_its_last_byte_is_not_published(watched: type[Watched], threads: int) -> None:
    rig = Rig(threads)
    client = rig.attach(1)
    client.pool[:] = random_bytes(POOL, 1)
    client.arm(0, 7)
    all_copied = threading.Barrier(threads)

    def when_copied() -> None:
        all_copied.wait(SAFETY_S)
        revoke(client, 0, 7)

    watched.when_copied = staticmethod(when_copied)
    rig.lane.submit(job(7, PAGES, to_l1=False))
    assert rig.ended() == CopyEnded(TicketId(7), False, REVOKED)
    assert client.state(0) == f.STATE_FAILED
    assert all(l2_block(rig, block) == l1_block(client, start) for block, start in PAGES)  # it did come to the end
    stats = rig.lane.stats()
    assert (stats.copies_ok, stats.copies_failed, stats.copies_revoked, stats.bytes_to_l2) == (0, 1, 1, 0)
    rig.lane.close()
    client.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_one_part_that_ends_late_is_enough(watched: type[Watched], threads: int) -> None:
    """Whoever revokes while any part still reads is in time for the whole store."""
    rig = Rig(threads)
    client = rig.attach(1)
    client.arm(0, 7)
    ended = threading.Semaphore(0)
    go = threading.Semaphore(0)

    def when_copied() -> None:
        ended.release()
        assert go.acquire(timeout=SAFETY_S)

    watched.when_copied = staticmethod(when_copied)
    rig.lane.submit(job(7, PAGES, to_l1=False))
    for _ in range(threads):
        assert ended.acquire(timeout=SAFETY_S)
    for _ in range(threads - 1):
        go.release()
    deadline = time.monotonic() + SAFETY_S
    while rig.lane.stats().running > 1:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    revoke(client, 0, 7)
    go.release()
    assert rig.ended() == CopyEnded(TicketId(7), False, REVOKED)
    rig.lane.close()
    client.close()


@pytest.mark.parametrize("generation", [6, 8])
def test_another_transfers_revocation_means_nothing(watched: type[Watched], generation: int) -> None:
    rig = Rig(1)
    client = rig.attach(1)
    client.arm(0, 7)
    revoke(client, 0, generation)
    watched.when_copied = staticmethod(lambda: revoke(client, 0, generation))
    rig.lane.submit(job(7, PAGES, to_l1=False))
    assert rig.ended() == CopyEnded(TicketId(7), True)
    assert client.state(0) == f.STATE_DONE
    assert rig.lane.stats().copies_revoked == 0
    rig.lane.close()
    client.close()


@pytest.mark.parametrize("to_l1", [True, False])
def test_what_is_revoked_before_it_begins_moves_nothing(to_l1: bool) -> None:
    rig = Rig(1)
    client = rig.attach(1)
    client.pool[:] = random_bytes(POOL, 1)
    pool, arena = client.pool.copy(), rig.arena.copy()
    client.arm(0, 7)
    revoke(client, 0, 7)
    rig.lane.submit(job(7, PAGES, to_l1=to_l1))
    assert rig.ended() == CopyEnded(TicketId(7), False, REVOKED)
    assert client.state(0) == f.STATE_FAILED
    assert np.array_equal(client.pool, pool)
    assert np.array_equal(rig.arena, arena)
    assert rig.lane.stats().copies_revoked == 1
    rig.lane.close()
    client.close()


def test_a_load_stops_in_the_middle_of_a_wave() -> None:
    """Four layers move as one wave here, two pages are a step."""
    pages_asked_for = 2
    geometry = GroupGeometry(tuple(range(LAYERS)), BLOCK_LAYER, (0, 1024, 2048, 3072), 13, 4096, (), BLOCK_LAYER, 2)
    arena, pool = random_bytes(13 * BLOCK, 3), np.zeros(13 * 4096, np.uint8)

    class Sole:
        asked = 0
        claimed = -1

        def claim(self) -> int:
            self.claimed += 1
            return self.claimed

        def revoked(self) -> bool:
            self.asked += 1
            return self.asked > 3

        def running(self) -> None: ...
        def layers_done(self, count: int) -> None: ...

    l1 = np.arange(13, dtype=np.int32)
    transfer = Transfer(0, l1[::-1].astype(np.int64) * BLOCK, l1)
    with pytest.raises(cpu.HiCacheError, match="revoked"):
        CpuMover(arena, pages_asked_for * BLOCK).copy(pool, (geometry,), (transfer,), True, Sole())
    moved = pool.reshape(13, 4096).any(axis=1)
    assert moved.tolist() == [True] * (3 * pages_asked_for) + [False] * (13 - 3 * pages_asked_for)


def test_a_load_that_came_to_its_end_is_done(watched: type[Watched]) -> None:
    rig = Rig(1)
    client = rig.attach(1)
    client.arm(0, 7)
    watched.when_copied = staticmethod(lambda: revoke(client, 0, 7))
    rig.lane.submit(job(7, PAGES))
    assert rig.ended() == CopyEnded(TicketId(7), True)
    assert all(l1_block(client, start) == l2_block(rig, block) for block, start in PAGES)
    assert rig.lane.stats().copies_revoked == 0
    rig.lane.close()
    client.close()

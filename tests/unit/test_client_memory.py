"""The client's shared memory: pool.py, fences.py."""

import errno
import gc
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hicache.protocol.fence import (
    MAGIC,
    SLOT_BYTES,
    SLOT_WORDS,
    STATE_DONE,
    STATE_FAILED,
    STATE_RUNNING,
    WORD_GENERATION,
    WORD_LAYERS_DONE,
    WORD_MAGIC,
    WORD_STATE,
)
from hicache_client.fences import FenceArea
from hicache_client.pool import SharedPool

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("pretouch", [False, True])
def test_pool_is_shared_and_cannot_change_size(pretouch: bool) -> None:
    pool = SharedPool(3 * PAGE, pretouch=pretouch)
    pool.buffer[5] = 77
    with mmap.mmap(pool.fd, 3 * PAGE) as other:
        assert other[5] == 77
        other[PAGE] = 9
    assert pool.buffer[PAGE] == 9
    for size in (PAGE, 4 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, size)
    pool.close()


@pytest.mark.parametrize("view_of", [memoryview, lambda buffer: np.frombuffer(buffer, np.uint8)])
def test_views_outlive_the_pool(view_of: Callable[[memoryview], Any]) -> None:
    pool = SharedPool(PAGE)
    view = view_of(pool.buffer)
    view[0] = 3
    pool.close()
    pool.close()
    assert view[0] == 3
    assert pool.fd == -1


@pytest.mark.parametrize("size", [0, -1])
def test_pool_of_no_size(size: int) -> None:
    with pytest.raises(ValueError, match="size_bytes"):
        SharedPool(size)


def never() -> bool:
    return False


class DaemonSide:
    """The words as the daemon maps them."""

    def __init__(self, area: FenceArea) -> None:
        self.words = memoryview(mmap.mmap(area.fd, area.slots * SLOT_BYTES)).cast("Q")

    def write(self, slot: int, word: int, value: int) -> None:
        self.words[slot * SLOT_WORDS + word] = value

    def read(self, slot: int, word: int) -> int:
        return self.words[slot * SLOT_WORDS + word]


def test_slots_rotate_and_generations_never_repeat() -> None:
    area = FenceArea(3, never)
    daemon = DaemonSide(area)
    seen: list[tuple[int, int]] = []
    for _ in range(7):
        fence = area.acquire()
        assert fence is not None
        assert daemon.read(fence.slot, WORD_MAGIC) == MAGIC
        assert daemon.read(fence.slot, WORD_GENERATION) == fence.generation
        assert daemon.read(fence.slot, WORD_STATE) == 0
        assert daemon.read(fence.slot, WORD_LAYERS_DONE) == 0
        seen.append((fence.slot, fence.generation))
        daemon.write(fence.slot, WORD_LAYERS_DONE, 2)
        daemon.write(fence.slot, WORD_STATE, STATE_DONE)
        assert fence.terminal
    assert [slot for slot, _ in seen] == [0, 1, 2, 0, 1, 2, 0]
    assert [generation for _, generation in seen] == [1, 2, 3, 4, 5, 6, 7]


def test_an_open_slot_is_never_given_twice() -> None:
    area = FenceArea(2, never)
    daemon = DaemonSide(area)
    first, second = area.acquire(), area.acquire()
    assert first is not None
    assert second is not None
    assert area.acquire() is None
    daemon.write(second.slot, WORD_STATE, STATE_RUNNING)
    assert area.acquire() is None
    daemon.write(second.slot, WORD_STATE, STATE_FAILED)  # unseen by its owner: found when a slot is needed
    third = area.acquire()
    assert third is not None
    assert third.slot == second.slot
    assert area.acquire() is None


def test_a_fence_keeps_its_end_after_its_slot_is_anothers() -> None:
    area = FenceArea(1, never)
    daemon = DaemonSide(area)
    old = area.acquire()
    assert old is not None
    daemon.write(0, WORD_LAYERS_DONE, 5)
    daemon.write(0, WORD_STATE, STATE_DONE)
    new = area.acquire()
    assert new is not None
    daemon.write(0, WORD_LAYERS_DONE, 1)
    daemon.write(0, WORD_STATE, STATE_RUNNING)
    assert (old.state, old.layers_done) == (STATE_DONE, 5)
    assert (new.state, new.layers_done) == (STATE_RUNNING, 1)
    old.reject()
    assert new.state == STATE_RUNNING
    assert area.busy == 1


def test_progress_and_settling() -> None:
    area = FenceArea(1, never)
    daemon = DaemonSide(area)
    fence = area.acquire()
    assert fence is not None
    assert not fence.settled
    daemon.write(0, WORD_LAYERS_DONE, 3)
    daemon.write(0, WORD_STATE, STATE_RUNNING)
    assert fence.layers_done == 3
    assert not fence.settled
    daemon.write(0, WORD_STATE, STATE_FAILED)
    assert fence.settled
    assert fence.layers_done == 3


def test_a_rejected_slot_is_free_at_once() -> None:
    area = FenceArea(1, never)
    fence = area.acquire()
    assert fence is not None
    fence.reject()
    assert fence.state == STATE_FAILED
    assert area.acquire() is not None


def test_a_closed_area_still_shows_the_end_of_its_copies() -> None:
    over = False
    area = FenceArea(2, lambda: over)
    daemon = DaemonSide(area)
    first, second = area.acquire(), area.acquire()
    assert first is not None
    assert second is not None
    area.close()
    area.close()
    assert not first.settled
    daemon.write(first.slot, WORD_STATE, STATE_FAILED)
    assert first.settled
    assert not second.settled
    over = True
    assert second.settled
    assert not second.terminal


def test_a_pool_beyond_the_memory_is_an_error_and_not_the_end_of_the_engine() -> None:
    gc.collect()  # what other tests left must not go in between
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"more than the .* bytes left of") as caught:
        SharedPool(1 << 46)
    assert caught.value.errno == errno.ENOMEM
    assert len(os.listdir("/proc/self/fd")) == before

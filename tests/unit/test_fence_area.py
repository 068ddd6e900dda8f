"""The daemon's writes to a fence slot: the right words, and none once the slot is another's."""

import platform

import numpy as np
import pytest

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.copy.fence_area import FenceArea, require_store_order
from hicache.protocol import fence as f


def area(slots: int = 2) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.uint64]], FenceArea]:
    memory = np.zeros(slots * f.SLOT_BYTES, np.uint8)
    words = memory.view(np.uint64).reshape(slots, f.SLOT_WORDS)
    words[:, f.WORD_MAGIC] = f.MAGIC
    words[:, f.WORD_GENERATION] = 9
    return words, FenceArea(memory, slots)


def test_each_call_writes_one_word_of_its_slot() -> None:
    words, fences = area()
    slot = fences.slot(1, 9)
    untouched = words[0].copy()
    slot.running()
    assert words[1, f.WORD_STATE] == f.STATE_RUNNING
    slot.layers_done(3)
    assert words[1, f.WORD_LAYERS_DONE] == 3
    slot.done()
    assert words[1, f.WORD_STATE] == f.STATE_DONE
    fences.slot(1, 9).failed("timeout")
    assert words[1, f.WORD_STATE] == f.STATE_FAILED
    assert np.array_equal(words[0], untouched)


@pytest.mark.parametrize("call", ["running", "done"])
def test_slot_of_a_newer_transfer_is_left_alone(call: str) -> None:
    words, fences = area()
    slot = fences.slot(0, 9)
    words[0, f.WORD_GENERATION] = 10
    before = words.copy()
    with pytest.raises(HiCacheError) as caught:
        getattr(slot, call)()
    assert caught.value.code == ErrorCode.TRANSFER_FAILED
    assert np.array_equal(words, before)


@pytest.mark.parametrize("index", [-1, 2])
def test_slot_out_of_range(index: int) -> None:
    with pytest.raises(HiCacheError) as caught:
        area()[1].slot(index, 9)
    assert caught.value.code == ErrorCode.OUT_OF_RANGE


def test_machines_with_a_weaker_store_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(HiCacheError) as caught:
        require_store_order()
    assert caught.value.code == ErrorCode.UNSUPPORTED

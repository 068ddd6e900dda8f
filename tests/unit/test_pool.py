"""hicache/pool: parents, views, owners."""

import numpy as np
import pytest

from hicache.base.errors import HiCacheError, LawBroken
from hicache.pool.blocks import MOST_VIEWS, Pool, parent_bytes_for


def _pool(parents: int = 4, parent_bytes: int = 1024) -> Pool:
    pool = Pool(parents * parent_bytes)
    pool.format(parent_bytes)
    return pool


def test_blocks_ascend_and_run_on_over_parents() -> None:
    view = _pool().view(256)
    refs = view.allocate(6)
    assert refs is not None
    assert refs.ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert view.offset_bytes(refs.ids).tolist() == [0, 256, 512, 768, 1024, 1280]


def test_offsets_skip_dead_bytes() -> None:
    view = _pool().view(300)
    assert view.packing == 3
    assert view.offset_bytes(np.arange(5, dtype=np.int32)).tolist() == [0, 300, 600, 1024, 1324]
    assert view.allocate(1) is not None
    assert view.dead_bytes() == 124


def test_a_view_takes_whole_parents_and_gives_them_back_when_empty() -> None:
    pool = _pool()
    small, large = pool.view(256), pool.view(1024)
    refs = small.allocate(5)
    assert refs is not None
    assert pool.free_parents == 2
    assert large.allocate(3) is None
    assert pool.fits([(large, 2)])
    assert not pool.fits([(large, 2), (small, 4)])
    assert pool.fits([(large, 2), (small, 3)])
    refs.release()
    assert pool.free_parents == 4
    assert pool.used_bytes() == 0
    pool.check()


def test_open_parents_are_filled_first() -> None:
    pool = _pool()
    view = pool.view(256)
    first, second = view.allocate(4), view.allocate(4)
    assert first is not None
    assert second is not None
    ids = first.surrender()
    view.adopt(ids[1:3]).release()
    again = view.allocate(3)
    assert again is not None
    assert again.ids.tolist() == [1, 2, 8]
    pool.check()


def test_the_last_owner_frees() -> None:
    view = _pool().view(512)
    refs = view.allocate(3)
    assert refs is not None
    other = refs.share()
    refs.release()
    assert view.used_blocks == 3
    other.release()
    assert view.used_blocks == 0


def test_an_owner_releases_once() -> None:
    view = _pool().view(512)
    refs = view.allocate(1)
    assert refs is not None
    refs.release()
    assert not refs.live
    with pytest.raises(LawBroken):
        refs.release()


def test_a_free_block_can_be_neither_released_nor_shared() -> None:
    view = _pool().view(512)
    with pytest.raises(LawBroken, match="law 2"):
        view.adopt(np.array([1], np.int32)).release()
    with pytest.raises(LawBroken, match="law 2"):
        view.share(np.array([1], np.int32))


def test_too_much_is_none_and_takes_nothing() -> None:
    pool = _pool()
    assert pool.view(256).allocate(17) is None
    assert pool.free_parents == 4
    nothing = pool.view(256).allocate(0)
    assert nothing is not None
    nothing.release()
    pool.check()


def test_a_block_larger_than_a_parent_is_refused_with_the_remedy() -> None:
    with pytest.raises(HiCacheError, match=r"l2\.parent"):
        _pool().view(2048)


def test_block_sizes_are_bounded_and_idle_ones_make_way() -> None:
    pool = Pool(MOST_VIEWS * 1024 + 1024)
    pool.format(1024)
    kept = [pool.view(1024 - size).allocate(1) for size in range(MOST_VIEWS - 1)]
    idle = pool.view(64)
    assert pool.view(65).index == idle.index
    assert pool.view(65).allocate(1) is not None
    with pytest.raises(HiCacheError, match="64 sizes"):
        pool.view(66)
    assert kept[5] is not None
    kept[5].release()
    assert pool.view(66).index == 5
    pool.check()


def test_blocks_too_small_to_count_are_refused() -> None:
    pool = Pool(1 << 40)
    pool.format(2 << 20)
    with pytest.raises(HiCacheError, match="prefix_granularity"):
        pool.view(2)


def test_only_an_unused_pool_is_cut_anew() -> None:
    pool = _pool()
    refs = pool.view(512).allocate(1)
    with pytest.raises(HiCacheError):
        pool.format(2048)
    assert refs is not None
    refs.release()
    pool.format(2048)
    assert pool.parents == 2
    with pytest.raises(HiCacheError, match=r"l2\.size"):
        pool.format(1 << 20)


@pytest.mark.parametrize(
    ("block", "arena", "parent"),
    [
        (737280, 8 << 30, 1474560),  # SmolLM2, 16 tokens, fp32: two blocks
        (3 << 20, 8 << 30, 3 << 20),  # one block, larger than the aim
        (128, 8 << 30, 2 << 20),
        (1000, 8 << 30, 2097152),
        (128, 1 << 20, 16384),  # a small arena still gets 64 parents
    ],
)
def test_auto_parents(block: int, arena: int, parent: int) -> None:
    assert parent_bytes_for(block, arena) == parent


@pytest.mark.parametrize("spoil", ["count", "open", "owner", "free"])
def test_check_sees_what_does_not_add_up(spoil: str) -> None:
    pool = _pool()
    view = pool.view(256)
    assert view.allocate(5) is not None
    pool.check()
    if spoil == "count":
        view.count[7] = 1
    elif spoil == "open":
        view.open_in_parent[1] -= 1
    elif spoil == "owner":
        pool.owner[0] = -1
    else:
        pool.free_parents += 1
    with pytest.raises(LawBroken):
        pool.check()

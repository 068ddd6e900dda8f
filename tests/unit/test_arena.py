"""The arena: taken whole at start, or refused with the limit that stands in the way."""

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from hicache.base.errors import ErrorCode, HiCacheError
from hicache_client.memory import memory_bound
from hicache_daemon.arena import CHUNK_BYTES, PAGE_BYTES, Arena


def quiet(ready: int, total: int) -> None:
    pass


def test_arena_is_shared_writable_and_fully_allocated() -> None:
    size = 8 << 20
    arena = Arena.create(size, "off", 2, quiet)
    try:
        assert arena.bytes.shape == (size,)
        assert not arena.bytes.any()
        assert os.fstat(arena.fd).st_blocks * 512 >= size  # nothing is left to be touched first
        arena.bytes[4097] = 7
        with mmap.mmap(arena.fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as other:
            assert other[4097] == 7
    finally:
        arena.close()
        arena.close()  # idempotent


def test_arena_cannot_be_resized_under_its_users() -> None:
    arena = Arena.create(1 << 20, "off", 1, quiet)
    try:
        seals = fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_SHRINK
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(arena.fd, 4096)
    finally:
        arena.close()


def test_progress_reaches_the_whole_size_in_rising_steps() -> None:
    size = 2 * CHUNK_BYTES + 4096
    told: list[tuple[int, int]] = []
    arena = Arena.create(size, "off", 2, lambda ready, total: told.append((ready, total)))
    arena.close()
    assert [total for _, total in told] == [size] * 3
    assert [ready for ready, _ in told] == sorted(ready for ready, _ in told)
    assert told[-1][0] == size


def test_views_outlive_close_safely() -> None:
    arena = Arena.create(1 << 20, "off", 1, quiet)
    view = arena.bytes[:8]
    arena.close()
    view[0] = 5
    assert view[0] == 5
    assert arena.fd == -1


@pytest.mark.parametrize("size", [0, -4096, 4097])
def test_size_that_is_no_multiple_of_the_page_is_a_config_error(size: int) -> None:
    with pytest.raises(HiCacheError) as caught:
        Arena.create(size, "off", 1, quiet)
    assert caught.value.code == ErrorCode.CONFIG
    assert "l2.size" in caught.value.remedy


def test_more_than_the_machine_has_names_the_bound() -> None:
    with pytest.raises(HiCacheError) as caught:
        Arena.create(1 << 50, "off", 1, quiet)
    assert caught.value.code == ErrorCode.NO_SPACE
    assert "l2.size" in caught.value.remedy
    assert "MemAvailable" in caught.value.remedy or "cgroup" in caught.value.remedy


def test_missing_huge_pages_name_where_to_reserve_them() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(HiCacheError) as caught:
        Arena.create(1 << 50, "2MiB", 1, quiet)  # more than any machine has reserved
    assert caught.value.code == ErrorCode.NO_SPACE
    assert "nr_hugepages" in caught.value.remedy
    assert str((1 << 50) // PAGE_BYTES["2MiB"]) in caught.value.message
    assert set(os.listdir("/proc/self/fd")) == before


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_memory_bound_is_the_tightest_cgroup_above_the_process(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    assert memory_bound(tmp_path).bytes == 3000 << 10
    write(tmp_path / "proc/self/cgroup", "0::/pod/box\n")
    write(tmp_path / "sys/fs/cgroup/pod/box/memory.max", "max\n")
    write(tmp_path / "sys/fs/cgroup/pod/memory.max", "1000000\n")
    write(tmp_path / "sys/fs/cgroup/pod/memory.current", "400000\n")
    write(tmp_path / "sys/fs/cgroup/pod/memory.stat", "anon 100000\nactive_file 50000\ninactive_file 250000\n")
    bound = memory_bound(tmp_path)
    assert bound.bytes == 900000  # page cache does not count as used
    assert "pod/memory.max" in bound.what


def test_memory_bound_reads_version_one_cgroups(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemAvailable: 3000 kB\n")
    write(tmp_path / "proc/self/cgroup", "5:cpu,memory:/box\n3:pids:/\n")
    write(tmp_path / "sys/fs/cgroup/memory/box/memory.limit_in_bytes", "5000\n")
    assert memory_bound(tmp_path).bytes == 5000


def test_arena_memory_is_aligned_for_wide_items() -> None:
    arena = Arena.create(4096, "off", 1, quiet)
    wide = arena.bytes.view(np.uint64)
    assert wide.flags.aligned
    del wide
    arena.close()

"""What the store refuses to open, and that it leaves the refused bytes alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.store import medium
from hicache.store.base import RecordStatus
from hicache.store.lmdb import LmdbOptions, LmdbStore
from hicache.store.record import allocated_bytes
from tests.fault import l3_nursery as nursery

OPTIONS = LmdbOptions(min_free_bytes=0, grow_bytes=1 << 20, allow_unsafe_fs=True)
OK, MISSING, FAILED = RecordStatus.OK, RecordStatus.MISSING, RecordStatus.FAILED


def open_store(path: Path, capacity: int = nursery.CAPACITY, secret: bytes | None = b"secret") -> LmdbStore:
    return LmdbStore.open(path, capacity, OPTIONS, secret, nursery.Quiet())


def fill(store: LmdbStore, count: int) -> None:
    metas = [nursery.meta(n) for n in range(count)]
    assert set(store.write(metas, [nursery.content(n, 1) for n in range(count)])) == {OK}


def read(store: LmdbStore, n: int) -> RecordStatus:
    buffer = np.zeros(nursery.meta(n).length, np.uint8)
    (status,) = store.read([nursery.meta(n)], [buffer])
    assert status is not OK or np.array_equal(buffer, nursery.content(n, 1))
    return status


def tree(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def refused(path: Path, secret: bytes | None = b"secret") -> HiCacheError:
    with pytest.raises(HiCacheError) as caught:
        open_store(path, secret=secret)
    assert caught.value.code is ErrorCode.STORE
    assert caught.value.remedy
    return caught.value


def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 10)
    store.touch([nursery.meta(3).id])
    store.close()
    store = open_store(tmp_path)
    assert [read(store, n) for n in range(10)] == [OK] * 10
    order = [int.from_bytes(row.meta.id.key, "big") for row in store.rows()]
    assert order == [0, 1, 2, 4, 5, 6, 7, 8, 9, 3]
    store.touch([nursery.meta(0).id])  # a new use is later than all before the restart
    store.close()
    store = open_store(tmp_path)
    assert [int.from_bytes(row.meta.id.key, "big") for row in store.rows()][-1] == 0
    store.close()


def test_a_directory_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("do not lose me")
    before = tree(tmp_path)
    assert "not a store" in refused(tmp_path).message
    assert tree(tmp_path) == before


@pytest.mark.parametrize("change", [{"version": 2}, {"version": "1"}, {"format": "other"}])
def test_another_version_is_left_alone(tmp_path: Path, change: dict[str, object]) -> None:
    open_store(tmp_path).close()
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    before = tree(tmp_path)
    assert str(next(iter(change.values()))) in refused(tmp_path).message
    assert tree(tmp_path) == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "hicache-l3"}'])
def test_a_manifest_that_cannot_be_read_is_left_alone(tmp_path: Path, text: str) -> None:
    open_store(tmp_path).close()
    (tmp_path / "manifest.json").write_text(text)
    before = tree(tmp_path)
    refused(tmp_path)
    assert tree(tmp_path) == before


def test_another_secret_is_refused_before_it_condemns_every_record(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 3)
    store.close()
    for secret in (b"other", None):
        assert "secret" in refused(tmp_path, secret).message
    store = open_store(tmp_path)
    assert [read(store, n) for n in range(3)] == [OK] * 3
    store.close()


def test_an_index_of_another_store_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        open_store(tmp_path / name).close()
    shutil.rmtree(tmp_path / "a" / "index")
    shutil.copytree(tmp_path / "b" / "index", tmp_path / "a" / "index")
    assert "another store" in refused(tmp_path / "a").message


def test_a_damaged_index_is_an_error_with_a_remedy_not_a_crash(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    (tmp_path / "index" / "data.mdb").write_bytes(b"\xa5" * 32768)
    assert "cannot be opened" in refused(tmp_path).message
    assert "cannot be opened" in refused(tmp_path).message  # the lock was given up


def test_a_store_in_use_names_the_process(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); import l3_nursery as n;"
        "s = n.open_store(sys.argv[1], n.Fuse('', 0)); print('open', flush=True); sys.stdin.read(); s.close()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "s"), str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        assert f"process {holder.pid}" in refused(tmp_path / "s", nursery.SECRET).message
        holder.communicate()
    open_store(tmp_path / "s", secret=nursery.SECRET).close()


def test_a_second_open_in_this_process_is_refused_too(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert f"process {os.getpid()}" in refused(tmp_path).message
    store.close()


def test_a_smaller_capacity_gives_disk_back_as_records_go(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 40)
    store.close()
    small = 1 << 20
    store = open_store(tmp_path, capacity=small)
    assert store.stats().used_bytes > small
    assert store.write([nursery.meta(50)], [nursery.content(50, 1)]) == [FAILED]
    assert store.stats().mode == "rw"
    assert [read(store, n) for n in range(40)] == [OK] * 40
    store.delete([nursery.meta(n).id for n in range(30)])
    assert store.stats().used_bytes < small
    assert store.stats().counters["backed_bytes"] <= small
    assert (tmp_path / "frames.seg").stat().st_blocks * 512 <= small
    assert store.write([nursery.meta(50)], [nursery.content(50, 1)]) == [OK]
    assert [read(store, n) for n in (*range(30, 40), 50)] == [OK] * 11
    store.close()


def test_what_no_row_names_is_free_at_open(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 20)
    used = store.stats().used_bytes
    store.close()
    with (tmp_path / "frames.seg").open("ab") as frames:
        frames.write(b"garbage" * 100_000)
    store = open_store(tmp_path)
    assert store.stats().used_bytes == used
    fits = (nursery.CAPACITY - used) // allocated_bytes(5000)
    metas = [nursery.meta(4 * n + 1000) for n in range(fits)]
    assert set(store.write(metas, [nursery.content(4 * n + 1000, 1) for n in range(fits)])) == {OK}
    assert store.stats().counters["backed_bytes"] <= nursery.CAPACITY
    assert [read(store, n) for n in range(20)] == [OK] * 20
    store.close()


MOUNTS = """\
20 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
21 20 0:30 / /mnt/nas rw - nfs4 host:/x rw
22 20 0:31 / /var/lib/a\\040b rw - overlay overlay rw
23 22 254:1 / /var/lib/a\\040b/disk rw - xfs /dev/vdb rw
24 20 0:32 / /mnt/s3 rw - fuse.s3fs s3fs rw
25 20 0:33 / /mnt/again rw - nfs host:/y rw
26 20 254:2 / /mnt/again rw - ext4 /dev/vdc rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv", "ext4"),
        ("/mnt/nas", "nfs4"),
        ("/mnt/nasty", "ext4"),
        ("/var/lib/a b/store", "overlay"),
        ("/var/lib/a b/disk/store", "xfs"),
        ("/mnt/s3/x", "fuse.s3fs"),
        ("/mnt/again/x", "ext4"),
    ],
)
def test_filesystems_are_told_by_the_innermost_last_mount(path: str, kind: str) -> None:
    assert medium.filesystem_of(Path(path), MOUNTS) == kind


@pytest.mark.parametrize("kind", ["nfs4", "overlay", "fuse.s3fs"])
def test_unsafe_filesystems_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(medium, "filesystem_of", lambda _path: kind)
    with pytest.raises(HiCacheError, match=kind) as caught:
        LmdbStore.open(tmp_path / "s", 1 << 20, LmdbOptions(min_free_bytes=0), b"secret", nursery.Quiet())
    assert "local disk" in caught.value.remedy
    assert tree(tmp_path) == {}
    open_store(tmp_path / "s").close()  # allow_unsafe_fs

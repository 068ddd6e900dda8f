"""Files that vanish under an open store."""

import shutil
from pathlib import Path

import l3_nursery as nursery
import numpy as np
import pytest

from hicache.store.base import RecordStatus
from hicache.store.lmdb import LmdbOptions, LmdbStore


@pytest.mark.parametrize("what", ["folder", "renamed", "replaced", "frames.seg", "index/data.mdb"])
def test_files_that_are_gone_turn_the_store_off(tmp_path: Path, what: str) -> None:
    path = tmp_path / "store"
    options = LmdbOptions(min_free_bytes=0, allow_unsafe_fs=True, sync=False)
    store = LmdbStore.open(path, nursery.CAPACITY, options, b"s" * 32, nursery.Quiet())

    def write(n: int) -> RecordStatus:
        return store.write([nursery.meta(n)], [np.asarray(nursery.content(n, 0))])[0]

    assert write(1) is RecordStatus.OK
    store.tend()
    assert store.stats().mode == "rw"
    if what == "folder":
        shutil.rmtree(path)
    elif what in {"renamed", "replaced"}:
        path.rename(tmp_path / "elsewhere")
        if what == "replaced":
            shutil.copytree(tmp_path / "elsewhere", path)
    else:
        (path / what).unlink()
    for _ in range(2):  # and stays so
        store.tend()
        assert store.stats().mode == "off"
        assert "folder is gone" in store.stats().reason
        assert write(2) is RecordStatus.FAILED
    store.close()

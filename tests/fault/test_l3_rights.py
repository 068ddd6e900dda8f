"""The disk tier works for a user who is not root: in a container and under systemd the daemon never is."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534
CODE = """
import os, sys
import structlog
from pathlib import Path
from hicache.store.lmdb import LmdbOptions, LmdbStore
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
os.umask(0o077)
for word in ("made", "found again"):
    options = LmdbOptions(min_free_bytes=0, allow_unsafe_fs=True)
    LmdbStore.open(Path(sys.argv[1]), 32 << 20, options, None, structlog.get_logger()).close()
    print(word)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the other user may enter; pytest's own belongs to this one alone."""
    path = Path(tempfile.mkdtemp(prefix="hicache-rights-"))
    if os.getuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    yield path
    shutil.rmtree(path)


def test_an_ordinary_user_makes_and_reopens_the_store(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder / "l3")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line in {"made", "found again"}] == ["made", "found again"]
    assert (folder / "l3/index").stat().st_mode & 0o777 == 0o700

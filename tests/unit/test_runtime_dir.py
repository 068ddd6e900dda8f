"""The runtime directory: private, ours, and served by one daemon at a time."""

import os
import socket
from pathlib import Path

import pytest

from hicache.base.errors import ErrorCode, HiCacheError
from hicache_daemon.runtime_dir import RuntimeDir, check_usable


def test_is_created_private_and_cleared_of_stale_sockets(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o777)
    path.chmod(0o777)
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path / "control.sock"))
    stale.close()
    claimed = RuntimeDir.claim(path)
    assert path.stat().st_mode & 0o777 == 0o750
    assert not claimed.control.exists()
    claimed.close()


def test_a_second_daemon_is_told_the_pid_of_the_first_and_leaves_its_sockets(tmp_path: Path) -> None:
    first = RuntimeDir.claim(tmp_path / "run")
    first.control.touch()
    with pytest.raises(HiCacheError, match=f"pid {os.getpid()}") as caught:
        RuntimeDir.claim(tmp_path / "run")
    assert caught.value.code is ErrorCode.CONFIG
    assert first.control.exists()
    first.close()
    first.close()
    RuntimeDir.claim(tmp_path / "run").close()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_not_a_directory_of_ours_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run"
    if kind == "file":
        path.touch()
    else:
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere")
    for act in (RuntimeDir.claim, check_usable):
        with pytest.raises(HiCacheError, match="runtime_dir") as caught:
            act(path)
        assert caught.value.remedy


@pytest.mark.parametrize("free", [-20, 15])
def test_a_path_too_long_for_a_socket_is_named_before_anything_is_made(tmp_path: Path, free: int) -> None:
    """`free`: bytes left for names; the longest has 16, while its socket is not open yet."""
    path = tmp_path / ("x" * (107 - 1 - free - len(str(tmp_path)) - 1))
    with pytest.raises(HiCacheError, match="107"):
        RuntimeDir.claim(path)
    assert not path.exists()

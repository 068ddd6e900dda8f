"""sd_notify: one datagram, or silence."""

import socket
from pathlib import Path

import pytest

from hicache_daemon.notify import Notifier


@pytest.mark.parametrize("abstract", [False, True])
def test_the_manager_gets_the_text(tmp_path: Path, abstract: bool) -> None:
    name = f"@hicache-test-{tmp_path.name}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        assert Notifier(name).send("READY=1\nSTATUS=serving")
        assert manager.recv(4096) == b"READY=1\nSTATUS=serving"


def test_no_manager_and_a_dead_one_are_no_error(tmp_path: Path) -> None:
    assert not Notifier(None).send("READY=1")
    assert not Notifier(str(tmp_path / "nobody")).send("READY=1")

"""lifeline.py: what each side's end means."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.base.errors import ErrorCode, HiCacheError
from hicache_client.lifeline import Lifeline

LISTENER = """
import socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
listener.listen(4)
print("ready", flush=True)
connections = []
while True:
    connections.append(listener.accept())
"""


@pytest.fixture
def listener(tmp_path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(str(tmp_path / "l"))
    sock.listen(4)
    return sock


def test_the_daemons_end_is_over(listener: socket.socket, tmp_path: Path) -> None:
    line = Lifeline(tmp_path / "l")
    theirs, _ = listener.accept()
    assert line.alive()
    assert not line.over()
    theirs.send(b"noise is ignored")
    assert line.alive()
    theirs.close()
    assert not line.alive()
    assert line.over()
    line.close()
    assert line.over()


def test_our_own_end_is_not(listener: socket.socket, tmp_path: Path) -> None:
    line = Lifeline(tmp_path / "l")
    theirs, _ = listener.accept()
    line.close()
    line.close()
    assert theirs.recv(16) == b""
    assert not line.alive()
    theirs.close()
    assert not line.over()  # it may have closed because we did, with copies still running


def test_the_death_of_the_daemons_process_is(tmp_path: Path) -> None:
    path = tmp_path / "l"
    daemon = subprocess.Popen([sys.executable, "-c", LISTENER, str(path)], stdout=subprocess.PIPE)
    try:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        hung_up, kept = Lifeline(path), Lifeline(path)
        hung_up.close()
        assert not hung_up.over()
        assert not kept.over()
    finally:
        daemon.kill()
        daemon.communicate()
    assert hung_up.over()
    assert kept.over()


@pytest.mark.parametrize("name", ["absent", "x" * 120])
def test_nobody_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(HiCacheError) as caught:
        Lifeline(tmp_path / name)
    assert caught.value.code == ErrorCode.TIMEOUT
    assert "hicache serve" in caught.value.remedy


def test_a_full_backlog_does_not_block(listener: socket.socket, tmp_path: Path) -> None:
    listener.listen(0)
    kept = Lifeline(tmp_path / "l")
    with pytest.raises(HiCacheError):
        Lifeline(tmp_path / "l")
    assert kept.alive()

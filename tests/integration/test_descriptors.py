"""The daemon at the end of its file descriptors: it turns people away, and goes on."""

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hicache.protocol.messages import Refuse, Welcome
from tests.daemon_harness import PAGE_TOKENS, DaemonProcess, RawClient, tokens

LIMIT = 400


@contextmanager
def limited_daemon(root: Path, soft: int, hard: int) -> Iterator[DaemonProcess]:
    """A daemon under these limits; this process keeps its own."""
    with DaemonProcess(root, wait=False, nofile=(soft, hard)) as daemon:
        daemon.wait_ready()
        yield daemon


@pytest.mark.parametrize("name", ["control.sock", "lifeline.sock"])
def test_a_flood_of_connections_kills_nobody_and_ends_with_itself(tmp_path: Path, name: str) -> None:
    kind = socket.SOCK_STREAM if name == "control.sock" else socket.SOCK_SEQPACKET
    data = tokens(4 * PAGE_TOKENS, seed=1)
    with limited_daemon(tmp_path, LIMIT, LIMIT) as daemon, RawClient(daemon).open() as served:
        served.store(data, range(4))
        with ExitStack() as flood:
            for _ in range(2 * LIMIT):
                sock = flood.enter_context(socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK))
                try:
                    sock.connect(str(daemon.runtime_dir / name))
                except BlockingIOError:  # the queue at the door is full; the daemon gets its turn
                    served.lookup(data, lease=False)
            if name == "control.sock":
                daemon.wait_event("control.door_shut")
            assert served.lookup(data, lease=False).resumable_tokens == 4 * PAGE_TOKENS
            served.store(tokens(4 * PAGE_TOKENS, seed=2), range(4))
            assert daemon.process.poll() is None, daemon.log()
            assert daemon.fds() <= LIMIT
        with RawClient(daemon).open() as later:
            assert later.lookup(data, lease=False).resumable_tokens == 4 * PAGE_TOKENS
        assert daemon.process.poll() is None, daemon.log()


def test_sessions_beyond_the_descriptors_are_refused_with_the_knob_in_the_log(tmp_path: Path) -> None:
    with limited_daemon(tmp_path, 200, 200) as daemon, ExitStack() as stack:
        told = daemon.events("limits.sessions_lowered")[0]
        assert (told["wanted"], told["descriptors"]) == (1024, 200)
        assert "ulimit -n" in told["remedy"]
        answers = []
        for _ in range(told["sessions"] + 2):
            client = stack.enter_context(RawClient(daemon))
            client.attach()
            answers.append(type(client.hello()))
        assert answers == [Welcome] * told["sessions"] + [Refuse] * 2
        assert daemon.process.poll() is None, daemon.log()


def test_the_soft_limit_is_raised_to_the_hard_one(tmp_path: Path) -> None:
    hard = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    with limited_daemon(tmp_path, 256, hard) as daemon:
        assert resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
        assert not daemon.events("limits.sessions_lowered")


def test_a_session_costs_the_daemon_two_descriptors(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as daemon, ExitStack() as stack:
        stack.enter_context(RawClient(daemon).open())
        before = daemon.fds()
        for _ in range(5):
            stack.enter_context(RawClient(daemon).open())
        assert daemon.fds() - before == 10

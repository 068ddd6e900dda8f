"""The lifeline over a real socket: memory comes in, lies are refused, death is noticed, nothing leaks."""

import asyncio
import fcntl
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.limits import Limits
from hicache.protocol.messages import Attach, Attached, Refuse
from hicache.protocol.version import VERSION, text
from hicache.protocol.wire import decode_packet, encode_packet
from hicache_daemon import lifeline as module
from hicache_daemon.lifeline import Lifeline
from hicache_daemon.log import LevelGate, make_log

BOOT = 0x1234
INSTANCE = b"i" * 16
SAFETY_S = 20.0
LIMITS = Limits()
POOL_BYTES = 8192
SLOTS = 4


def memfd(size: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


async def until(condition: Callable[[], object]) -> None:
    """Poll: what is awaited happens in the code under test, which has no event for it."""
    for _ in range(int(SAFETY_S / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


class Peer:
    """A client's end."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.connect(str(path))
        self.sock.setblocking(False)

    def attach(
        self, fds: list[int], pool_bytes: int = POOL_BYTES, epoch: int = 1, instance: bytes = INSTANCE
    ) -> None:
        packet = encode_packet(Attach(instance, epoch, pool_bytes, SLOTS), 0, epoch)
        socket.send_fds(self.sock, [packet], fds)

    async def receive(self) -> bytes:
        for _ in range(int(SAFETY_S / 0.005)):
            try:
                return self.sock.recv(4096)
            except BlockingIOError:
                await asyncio.sleep(0.005)
        raise AssertionError("nothing came")

    async def answer(self) -> Attached | Refuse:
        message = decode_packet(await self.receive(), LIMITS).message
        assert isinstance(message, Attached | Refuse)
        return message


Scenario = Callable[[Lifeline, Path, list[int]], Awaitable[None]]


def run(tmp_path: Path, scenario: Scenario) -> None:
    """Run a scenario against an open lifeline and demand that it closes every descriptor."""

    async def body() -> None:
        died: list[int] = []
        path = tmp_path / "lifeline.sock"
        lifeline = Lifeline(path, BOOT, LIMITS, died.append, make_log(LevelGate("error"), "json"))
        lifeline.open(asyncio.get_running_loop())
        try:
            await scenario(lifeline, path, died)
        finally:
            lifeline.close()

    before = open_fds()
    asyncio.run(body())
    assert open_fds() == before


def test_attach_bind_and_death(tmp_path: Path) -> None:
    async def scenario(lifeline: Lifeline, path: Path, died: list[int]) -> None:
        assert os.stat(path).st_mode & 0o777 == 0o600
        peer, fds = Peer(path), [memfd(POOL_BYTES), memfd(SLOTS * 64)]
        peer.attach(fds)
        answer = await peer.answer()
        assert isinstance(answer, Attached)
        assert answer.boot == BOOT
        with pytest.raises(HiCacheError, match="no lifeline"):
            lifeline.waiting(INSTANCE, 1, bytes(16))
        attachment = lifeline.waiting(INSTANCE, 1, answer.token)
        assert attachment.pid == os.getpid()
        lifeline.bind(attachment, 7)
        assert lifeline.counts() == {"bound": 1, "unbound": 0}
        with pytest.raises(HiCacheError, match="no lifeline"):
            lifeline.waiting(INSTANCE, 1, answer.token)
        peer.sock.close()
        await until(lambda: died)
        assert died == [7]
        assert lifeline.counts() == {"bound": 0, "unbound": 0}
        for fd in fds:
            os.close(fd)

    run(tmp_path, scenario)


def test_release_closes_the_connection_without_calling_it_a_death(tmp_path: Path) -> None:
    async def scenario(lifeline: Lifeline, path: Path, died: list[int]) -> None:
        peer, fds = Peer(path), [memfd(POOL_BYTES), memfd(SLOTS * 64)]
        peer.attach(fds)
        answer = await peer.answer()
        assert isinstance(answer, Attached)
        lifeline.bind(lifeline.waiting(INSTANCE, 1, answer.token), 7)
        lifeline.release(7)
        lifeline.release(7)
        assert await peer.receive() == b""
        assert died == []
        peer.sock.close()
        for fd in fds:
            os.close(fd)

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("make_fds", "pool_bytes", "complaint"),
    [
        (lambda: [memfd(POOL_BYTES)], POOL_BYTES, "two file descriptors"),
        (lambda: [memfd(64) for _ in range(5)], POOL_BYTES, "two file descriptors"),
        (lambda: [memfd(POOL_BYTES - 1), memfd(SLOTS * 64)], POOL_BYTES, "at least 8192 bytes"),
        (lambda: [memfd(POOL_BYTES), memfd(SLOTS * 64 - 1)], POOL_BYTES, "fence area"),
        (lambda: [memfd(POOL_BYTES, fcntl.F_SEAL_GROW), memfd(SLOTS * 64)], POOL_BYTES, "shrink"),
        (lambda: [memfd(POOL_BYTES), os.open("/dev/null", os.O_RDWR)], POOL_BYTES, "memfd"),
        (lambda: [memfd(POOL_BYTES), memfd(SLOTS * 64)], 1 << 60, "pool_bytes"),
    ],
)
def test_memory_that_is_not_as_declared_is_refused(
    tmp_path: Path, make_fds: Callable[[], list[int]], pool_bytes: int, complaint: str
) -> None:
    async def scenario(lifeline: Lifeline, path: Path, died: list[int]) -> None:
        peer, fds = Peer(path), make_fds()
        peer.attach(fds, pool_bytes)
        refuse = await peer.answer()
        assert isinstance(refuse, Refuse)
        assert refuse.code == ErrorCode.BAD_SPEC
        assert complaint in refuse.reason
        assert await peer.receive() == b""
        assert lifeline.counts()["unbound"] == 0
        peer.sock.close()
        for fd in fds:
            os.close(fd)

    run(tmp_path, scenario)


def test_noise_a_second_attach_and_a_stolen_incarnation_are_refused(tmp_path: Path) -> None:
    async def scenario(lifeline: Lifeline, path: Path, died: list[int]) -> None:
        noise = Peer(path)
        noise.sock.send(os.urandom(100))
        answer = await noise.answer()
        assert isinstance(answer, Refuse)
        assert answer.code == ErrorCode.MALFORMED
        fds = [memfd(POOL_BYTES), memfd(SLOTS * 64)]
        first, thief = Peer(path), Peer(path)
        first.attach(fds)
        attached = await first.answer()
        assert isinstance(attached, Attached)
        thief.attach(fds)
        assert isinstance(await thief.answer(), Refuse)
        assert lifeline.waiting(INSTANCE, 1, attached.token).attach is not None  # the thief changed nothing
        first.attach(fds)
        assert isinstance(await first.answer(), Refuse)
        for peer in (noise, first, thief):
            peer.sock.close()
        for fd in fds:
            os.close(fd)

    run(tmp_path, scenario)


def test_an_attach_of_another_major_is_refused_naming_both_versions(tmp_path: Path) -> None:
    async def scenario(lifeline: Lifeline, path: Path, died: list[int]) -> None:
        peer, fds = Peer(path), [memfd(POOL_BYTES), memfd(SLOTS * 64)]
        packet = encode_packet(Attach(INSTANCE, 1, POOL_BYTES, SLOTS), 0, 1)
        socket.send_fds(peer.sock, [packet[:2] + bytes((1, 0)) + packet[4:]], fds)
        refuse = await peer.answer()
        assert isinstance(refuse, Refuse)
        assert refuse.code == ErrorCode.VERSION
        assert refuse.reason == f"protocol 1.0 came, this side speaks {text(VERSION)}"
        assert lifeline.counts() == {"bound": 0, "unbound": 0}
        peer.sock.close()
        for fd in fds:
            os.close(fd)

    run(tmp_path, scenario)


def test_what_never_says_hello_is_bounded_in_number_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ATTACH_TIMEOUT_S", 0.3)

    async def scenario(lifeline: Lifeline, path: Path, died: list[int]) -> None:
        peers = [Peer(path) for _ in range(module.MAX_UNBOUND)]
        await until(lambda: lifeline.counts()["unbound"] == module.MAX_UNBOUND)
        extra = Peer(path)
        refuse = await extra.answer()
        assert isinstance(refuse, Refuse)
        assert refuse.code == ErrorCode.BUSY
        await until(lambda: not lifeline.counts()["unbound"])
        for peer in peers:
            assert await peer.receive() == b""
            peer.sock.close()
        extra.sock.close()

    run(tmp_path, scenario)


@pytest.mark.parametrize(("uid", "admitted"), [(os.geteuid(), True), (0, True), (os.geteuid() + 1, False)])
def test_the_daemons_user_and_root_may_attach_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, admitted: bool
) -> None:
    monkeypatch.setattr(module, "_peer", lambda sock: (os.getpid(), uid))

    async def scenario(lifeline: Lifeline, path: Path, died: list[int]) -> None:
        peer, fds = Peer(path), [memfd(POOL_BYTES), memfd(SLOTS * 64)]
        if admitted:
            peer.attach(fds)
        answer = await peer.answer()
        assert isinstance(answer, Attached if admitted else Refuse)
        assert admitted or answer.code == ErrorCode.DENIED  # type: ignore[union-attr]
        peer.sock.close()
        for fd in fds:
            os.close(fd)

    run(tmp_path, scenario)

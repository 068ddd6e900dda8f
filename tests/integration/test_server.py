"""The control socket: nothing waits for an edge that was consumed, and a deaf client does not block others."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
import zmq

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.limits import Limits
from hicache_daemon.log import LevelGate, make_log
from hicache_daemon.server import BATCH, Sent, Server

SAFETY_S = 30.0
LOG = make_log(LevelGate("critical"), "json")


async def until(condition: Callable[[], object]) -> None:
    """Poll: what is awaited happens in the code under test, which has no event for it."""
    for _ in range(int(SAFETY_S / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


def dealer(context: "zmq.Context[zmq.Socket[bytes]]", path: Path) -> "zmq.Socket[bytes]":
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.connect(f"ipc://{path}")
    return sock


def loop_factory(kind: str) -> asyncio.AbstractEventLoop:
    if kind == "uvloop":
        return uvloop.new_event_loop()
    return asyncio.SelectorEventLoop()


@pytest.mark.parametrize("kind", ["uvloop", "asyncio"])
def test_bursts_from_several_clients_are_all_answered(tmp_path: Path, kind: str) -> None:
    """Far more messages than one drain takes, and replies in between: a lost edge would hang this."""
    clients, each = 4, 500
    path = tmp_path / "control.sock"

    def client(number: int) -> list[bytes]:
        with zmq.Context() as context:
            sock = dealer(context, path)
            got, sent = [], 0
            while len(got) < each:
                while sent < each and sent - len(got) < 100:
                    sock.send_multipart([b"%d-%d" % (number, sent), b"x" * 100])
                    sent += 1
                assert sock.poll(int(SAFETY_S * 1000)), f"hung after {len(got)} of {each}"
                got.append(sock.recv_multipart()[0])
            sock.close()
        return got

    async def body() -> list[list[bytes]]:
        loop = asyncio.get_running_loop()
        server = Server(
            path, Limits(), lambda identity, frames: answers.append(server.send(identity, frames[:1])), LOG
        )
        answers: list[Sent] = []
        server.open(loop)
        assert os.stat(path).st_mode & 0o077 == 0
        try:
            return await asyncio.gather(*(loop.run_in_executor(None, client, n) for n in range(clients)))
        finally:
            server.close()
            assert set(answers) == {Sent.OK}

    with asyncio.Runner(loop_factory=lambda: loop_factory(kind)) as runner:
        results = runner.run(body())
    for number, got in enumerate(results):
        assert got == [b"%d-%d" % (number, at) for at in range(each)]


def test_a_client_that_reads_nothing_is_found_out_and_others_are_served(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    limits = Limits(requests_in_flight=4)
    outcomes: dict[bytes, list[Sent]] = {}

    async def body() -> None:
        loop = asyncio.get_running_loop()

        def flood(identity: bytes, frames: list[bytes]) -> None:
            count = 1 if frames[0] == b"once" else 4000
            sent = [server.send(identity, [b"y" * 65536]) for _ in range(count)]
            outcomes.setdefault(frames[0], []).extend(sent)

        server = Server(path, limits, flood, LOG)
        server.open(loop)
        with zmq.Context() as context:
            deaf, fine = dealer(context, path), dealer(context, path)
            deaf.setsockopt(zmq.RCVHWM, 1)
            deaf.send(b"many")
            await until(lambda: b"many" in outcomes)
            assert outcomes[b"many"][-1] is Sent.FULL
            fine.send(b"once")
            await until(lambda: fine.poll(0))
            assert outcomes[b"once"] == [Sent.OK]
            assert server.send(b"nobody", [b"hello?"]) is Sent.GONE
            deaf.close()
            fine.close()
        server.close()

    asyncio.run(asyncio.wait_for(body(), SAFETY_S))


def test_a_message_of_too_many_frames_is_cut_but_consumed_whole(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    got: list[list[bytes]] = []

    async def body() -> None:
        server = Server(path, Limits(), lambda identity, frames: got.append(frames), LOG)
        server.open(asyncio.get_running_loop())
        with zmq.Context() as context:
            sock = dealer(context, path)
            sock.send_multipart([b"a"] * 1000)
            sock.send_multipart([b"next"])
            await until(lambda: len(got) == 2)
            sock.close()
        server.close()

    asyncio.run(asyncio.wait_for(body(), SAFETY_S))
    assert len(got[0]) == 2 + Limits().buffers + 1
    assert got[1] == [b"next"]


def test_a_turn_full_of_answers_finds_room_however_few_credits_there_are(tmp_path: Path) -> None:
    """The loop answers a batch before libzmq's thread may send anything: who reads must not look deaf for that."""
    path = tmp_path / "control.sock"
    outcomes: list[Sent] = []

    async def body() -> None:
        def answer(identity: bytes, frames: list[bytes]) -> None:
            outcomes.extend(server.send(identity, [b"y" * 65536]) for _ in range(2 * BATCH))

        server = Server(path, Limits(requests_in_flight=1), answer, LOG)
        server.open(asyncio.get_running_loop())
        with zmq.Context() as context:
            sock = context.socket(zmq.DEALER)
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.RCVHWM, 1)  # so that hardly anything leaves meanwhile
            sock.connect(f"ipc://{path}")
            sock.send(b"go")
            await until(lambda: outcomes)
            sock.close()
        server.close()

    asyncio.run(asyncio.wait_for(body(), SAFETY_S))
    assert outcomes == [Sent.OK] * 2 * BATCH


def test_a_libzmq_without_an_epoll_set_serves_without_a_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(fd: int) -> tuple[int, int]:
        raise HiCacheError(ErrorCode.INTERNAL, "the listener is in no epoll set", "use another libzmq")

    monkeypatch.setattr("hicache_daemon.descriptors._registration", nowhere)
    path = tmp_path / "control.sock"

    def client() -> list[bytes]:
        with zmq.Context() as context, dealer(context, path) as sock:
            sock.send_multipart([b"hello"])
            assert sock.poll(int(SAFETY_S * 1000))
            return sock.recv_multipart()

    async def body() -> list[bytes]:
        loop = asyncio.get_running_loop()
        server = Server(path, Limits(), lambda identity, frames: server.send(identity, frames) and None, LOG)
        server.open(loop)
        try:
            return await loop.run_in_executor(None, client)
        finally:
            server.close()

    assert asyncio.run(body()) == [b"hello"]
    assert not path.exists()

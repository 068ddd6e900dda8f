"""What only the async client has: many calls at once, cancellation, replies that nobody waits for."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from client_world import LAYOUT, MODEL, POOL_BYTES, SAFETY_S, last, leasing, options, silent_but_hello

from hicache.protocol.messages import (
    Accepted,
    DaemonMessage,
    Done,
    Hello,
    Load,
    Lookup,
    Match,
    Release,
    Store,
)
from hicache.spec.model import ShardSpec
from hicache_client.aio import AsyncClient
from hicache_client.options import EMPTY
from hicache_client.pool import SharedPool
from hicache_client.testing import FakeDaemon, FakeRequest, int32_bytes

pytestmark = pytest.mark.anyio
TOKENS = int32_bytes(range(8))
BLOCKS = [int32_bytes([0, 4])]


@pytest.fixture(params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


@asynccontextmanager
async def client_of(directory: Path, **changes: Any) -> AsyncIterator[AsyncClient]:
    pool = SharedPool(POOL_BYTES)
    async with AsyncClient(options(directory, **changes), MODEL, LAYOUT, ShardSpec(), pool) as client:
        yield client
    pool.close()


async def eventually(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SAFETY_S
    while not condition():
        assert time.monotonic() < end, f"never came true: {what}"
        await asyncio.sleep(0.001)


def echo(request: FakeRequest) -> Iterable[DaemonMessage] | None:
    if isinstance(request.message, Lookup):
        return [Match(0, request.message.tokens_count, 0, 0, 0)]
    return None


async def test_many_calls_share_one_session(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, echo) as daemon:
        async with client_of(tmp_path) as client:
            counts = range(200)  # more than the credits
            answers = await asyncio.gather(*(client.lookup(bytes(4 * count), 8) for count in counts))
            assert [answer.known_tokens for answer in answers] == list(counts)
            assert len(daemon.seen(Hello)) == 1


async def test_many_calls_without_a_daemon(tmp_path: Path) -> None:
    async with client_of(tmp_path, retry_initial_s=1000.0, retry_max_s=1000.0) as client:
        answers = await asyncio.gather(*(client.lookup(TOKENS, 8) for _ in range(50)))
        assert answers == [EMPTY] * 50
        with FakeDaemon(tmp_path, leasing):
            assert await client.connect()
            assert (await client.lookup(TOKENS, 8)).resumable_tokens == 8


async def test_many_calls_over_a_restart(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, leasing) as daemon:
        async with client_of(tmp_path) as client:
            await client.lookup(TOKENS, 8)
            daemon.stop()
            daemon.start()
            answers = await asyncio.gather(*(client.lookup(TOKENS, 8) for _ in range(20)))
            assert {answer.resumable_tokens for answer in answers} == {8}
            assert [request.epoch for request in daemon.seen(Hello)] == [1, 2]


async def test_a_cancelled_lookup_gives_its_lease_back(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, silent_but_hello) as daemon:
        async with client_of(tmp_path) as client:
            task = asyncio.create_task(client.lookup(TOKENS, 8))
            await eventually(lambda: bool(daemon.seen(Lookup)), "the lookup arrives")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            daemon.push(last(daemon), Match(77, 8, 8, 8, 0))
            await eventually(lambda: bool(daemon.seen(Release)), "the lease is returned")
            assert last(daemon).message == Release((77,))
            daemon.answer = leasing
            assert (await client.lookup(TOKENS, 8)).resumable_tokens == 8


async def test_a_call_cancelled_while_connecting_leaves_a_client_that_works(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, lambda request: [] if isinstance(request.message, Hello) else None) as daemon:
        async with client_of(tmp_path) as client:
            task = asyncio.create_task(client.lookup(TOKENS, 8))
            await eventually(lambda: bool(daemon.seen(Hello)), "Hello arrives")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            daemon.stop()
            daemon.answer = leasing
            daemon.start()
            assert await client.connect()
            assert (await client.lookup(TOKENS, 8)).resumable_tokens == 8


async def test_replies_are_taken_while_nobody_waits(tmp_path: Path) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        return [Accepted(1, 2)] if isinstance(request.message, Store) else None

    with FakeDaemon(tmp_path, answer) as daemon:
        async with client_of(tmp_path) as client:
            handle = await client.store(TOKENS, 0, BLOCKS)
            assert handle is not None
            last(daemon).fence.finish()
            daemon.push(last(daemon), Done(1, 2))
            await eventually(lambda: handle.done, "Done is read by the loop alone")
            assert await handle.wait_done()


async def test_a_dead_daemon_is_seen_while_nobody_waits(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, leasing) as daemon:
        async with client_of(tmp_path) as client:
            await client.lookup(TOKENS, 8)
            link = client._session.link
            assert link is not None
            daemon.stop()
            await eventually(lambda: bool(link.dead), "the lifeline's end is seen")
            assert not client.connected


async def test_waiting_for_a_layer_lets_others_run(tmp_path: Path) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        return [Accepted(1, 2)] if isinstance(request.message, Load) else leasing(request)

    with FakeDaemon(tmp_path, answer) as daemon:
        async with client_of(tmp_path) as client:
            handle = await client.load((await client.lookup(TOKENS, 8)).lease, 0, BLOCKS)
            assert handle is not None
            fence = last(daemon).fence
            waiting = asyncio.create_task(handle.wait_layer(1))
            assert (await client.lookup(TOKENS, 8)).resumable_tokens == 8
            assert not waiting.done()
            fence.progress(2)
            assert await waiting
            dying = asyncio.create_task(handle.wait_done())
            await asyncio.sleep(0)
            daemon.stop()
            assert not await dying
            assert handle.settled


async def test_a_cancelled_load_keeps_its_slot_until_the_copy_ends(tmp_path: Path) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        return [] if isinstance(request.message, Load) else leasing(request)

    with FakeDaemon(tmp_path, answer) as daemon:
        async with client_of(tmp_path, fence_slots=1) as client:
            lease = (await client.lookup(TOKENS, 8)).lease
            task = asyncio.create_task(client.load(lease, 0, BLOCKS))
            await eventually(lambda: bool(daemon.seen(Load)), "the load arrives")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await eventually(lambda: bool(daemon.seen(Release)), "the lease is returned")
            assert await client.store(TOKENS, 0, BLOCKS) is None
            daemon.seen(Load)[0].fence.finish()
            daemon.answer = None
            assert await client.store(TOKENS, 0, BLOCKS) is not None

"""hicache_client against the real daemon: bytes there and back, restarts, hangs, many calls at once."""

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.protocol.messages import Scope
from hicache.spec.model import ShardSpec
from hicache_client import EMPTY, AsyncClient, Client, ClientOptions, SharedPool, describe
from tests.daemon_harness import PAGE_TOKENS, POOL_BLOCKS, SAFETY_S, DaemonProcess, int32, layout, model, tokens

PAGES = 8
UNSCOPED = Scope()
PROMPT = tokens(PAGES * PAGE_TOKENS + 3)
FIRST, SECOND = [int32(range(PAGES))], [int32(range(PAGES, 2 * PAGES))]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("daemon")) as process:
        yield process


def options(daemon: DaemonProcess, **changes: Any) -> ClientOptions:
    times = {"request_timeout_s": SAFETY_S, "connect_timeout_s": SAFETY_S, "load_timeout_s": SAFETY_S}
    return ClientOptions(runtime_dir=daemon.runtime_dir, **(times | {"retry_max_s": 0.05} | changes))


@contextmanager
def client_of(daemon: DaemonProcess, **changes: Any) -> Iterator[tuple[Client, np.ndarray]]:
    """A client and its pool as [layer][block][bytes]."""
    pool = SharedPool(layout().pool_bytes)
    with Client(options(daemon, **changes), model(), layout(), ShardSpec(), pool) as client:
        yield (
            client,
            np.frombuffer(pool.buffer, np.uint8).reshape(len(layout().groups[0].layer_offsets), POOL_BLOCKS, -1),
        )
    pool.close()


def filled(memory: np.ndarray, seed: int) -> np.ndarray:
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.shape, np.uint8)
    return memory[:, :PAGES].copy()


def put(client: Client, scope: Scope = UNSCOPED) -> None:
    handle = client.store(PROMPT[: PAGES * PAGE_TOKENS * 4], 0, FIRST, scope)
    assert handle is not None
    assert handle.wait_done()
    assert handle.settled


def get(client: Client, scope: Scope = UNSCOPED) -> None:
    match = client.lookup(PROMPT, PAGES * PAGE_TOKENS, scope)
    assert match.resumable_tokens == PAGES * PAGE_TOKENS
    handle = client.load(match.lease, 0, SECOND)
    assert handle is not None
    for layer in range(3):
        assert handle.wait_layer(layer)
    assert handle.wait_done()
    client.release([match.lease])


def test_what_is_stored_comes_back(daemon: DaemonProcess) -> None:
    scope = Scope(salt="there and back")
    with client_of(daemon) as (client, memory):
        assert client.lookup(PROMPT, 64, scope) == EMPTY
        kept = filled(memory, 1)
        put(client, scope)
        memory[:] = 0
        get(client, scope)
        assert np.array_equal(memory[:, PAGES : 2 * PAGES], kept)
        assert not memory[:, 2 * PAGES :].any()
        assert client.renew() == 0
        assert client.stats.errors == client.stats.timeouts == 0
    assert describe("status", daemon.runtime_dir)["schema_version"] >= 1


def test_a_restart_is_survived_by_client_and_pages(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, l3=True) as daemon, client_of(daemon) as (client, memory):
        kept = filled(memory, 2)
        put(client)
        boot = client.boot_id
        assert daemon.stop() == 0
        assert client.lookup(PROMPT, 64) == EMPTY
        daemon.restart()
        assert client.connect(SAFETY_S)
        assert client.boot_id != boot
        memory[:] = 0
        get(client)
        assert np.array_equal(memory[:, PAGES : 2 * PAGES], kept)


def test_a_stopped_daemon_costs_little_and_is_found_again(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as daemon, client_of(daemon, request_timeout_s=0.05) as (client, memory):
        assert client.connect(SAFETY_S)
        filled(memory, 3)
        daemon.signal(signal.SIGSTOP)
        try:
            assert client.lookup(PROMPT, 64) == EMPTY
            stored = client.store(PROMPT[: PAGES * PAGE_TOKENS * 4], 0, FIRST)
            while client.stats.losses == 0:  # until the session is given up for silence
                assert client.lookup(PROMPT, 64) == EMPTY
                time.sleep(0.001)
        finally:
            daemon.signal(signal.SIGCONT)
        assert stored is None or not stored.done
        assert client.connect(SAFETY_S)
        assert client.describe()["schema_version"] >= 1


def test_a_killed_daemon_fails_the_wait_and_settles_it(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as daemon, client_of(daemon) as (client, memory):
        filled(memory, 4)
        put(client)
        match = client.lookup(PROMPT, 64)
        daemon.signal(signal.SIGSTOP)
        fast = ClientOptions(runtime_dir=daemon.runtime_dir, request_timeout_s=0.05, load_timeout_s=1e9)
        client._options = fast
        handle = client.load(match.lease, 0, SECOND)
        assert handle is not None
        assert handle.failed
        assert not handle.settled  # it may have been read already
        daemon.kill()
        assert handle.wait_settled()
        assert not handle.wait_layer(0)


def test_many_loads_at_once(daemon: DaemonProcess) -> None:
    scope = Scope(salt="many")

    async def run() -> None:
        pool = SharedPool(layout().pool_bytes)
        memory = np.frombuffer(pool.buffer, np.uint8).reshape(3, POOL_BLOCKS, -1)
        kept = filled(memory, 5)
        async with AsyncClient(options(daemon), model(), layout(), ShardSpec(), pool) as client:
            stored = await client.store(PROMPT[: PAGES * PAGE_TOKENS * 4], 0, FIRST, scope)
            assert stored is not None
            assert await stored.wait_done()
            matches = await asyncio.gather(*(client.lookup(PROMPT, 64, scope) for _ in range(100)))
            assert len({match.lease for match in matches}) == 100
            pages = 64 // PAGE_TOKENS

            async def load(number: int, lease: int) -> bool:
                start = PAGES + number % 10 * pages
                handle = await client.load(lease, 0, [int32(range(start, start + pages))])
                return handle is not None and await handle.wait_done()

            assert all(await asyncio.gather(*(load(i, match.lease) for i, match in enumerate(matches))))
            for number in range(10):
                start = PAGES + number * pages
                assert np.array_equal(memory[:, start : start + pages], kept[:, :pages])
            await client.release([match.lease for match in matches])
            assert client.stats.errors == client.stats.busy == 0
        pool.close()

    asyncio.run(run())


@pytest.mark.parametrize("dropped", [False, True])
def test_transfers_unanswered_when_we_hang_up_settle(tmp_path: Path, dropped: bool) -> None:
    """The daemon finds them in its queue together with the end of their session."""
    with DaemonProcess(tmp_path) as daemon:
        pool = SharedPool(layout().pool_bytes)
        client = Client(options(daemon, request_timeout_s=0.3), model(), layout(), ShardSpec(), pool)
        assert client.connect(SAFETY_S)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            handle = client.store(PROMPT[: PAGES * PAGE_TOKENS * 4], 0, FIRST)
            assert handle is not None
            if dropped:
                del client
            else:
                client.close()
            assert handle.failed
            assert not handle.settled  # the daemon may still come to it
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        assert handle.wait_settled(time.monotonic() + SAFETY_S)
        assert daemon.process.poll() is None  # it said so, not its death
        pool.close()

"""Transfers begun without waiting for the daemon's answer, and a session dropped to register anew."""

import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from client_world import LAYOUT, MODEL, POOL_BYTES, SAFETY_S, client_of, eventually, last, leasing, options

from hicache.base.errors import ErrorCode
from hicache.protocol.messages import (
    Accepted,
    Busy,
    DaemonMessage,
    Done,
    Error,
    Goodbye,
    Hello,
    Load,
    Lookup,
    Match,
    Release,
    Store,
)
from hicache.spec.model import ShardSpec
from hicache_client.aio import AsyncClient
from hicache_client.pool import SharedPool
from hicache_client.sync import Client
from hicache_client.testing import LIMITS, FakeDaemon, FakeRequest, int32_bytes

TOKENS = int32_bytes(range(8))
BLOCKS = [int32_bytes([0, 4])]
REFUSALS = [Error("no_space", "full"), Busy(0.1, "later"), Error(ErrorCode.UNKNOWN_SESSION, "who?")]


def no_transfer_answers(request: FakeRequest) -> Iterable[DaemonMessage] | None:
    """Loads and stores are taken in silence."""
    return [] if isinstance(request.message, Load | Store) else leasing(request)


def test_a_begun_load_returns_before_the_answer_and_completes_layer_by_layer(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, no_transfer_answers) as daemon, client_of(tmp_path) as client:
        handle = client.begin_load(client.lookup(TOKENS, 8).lease, 1, BLOCKS)
        assert handle is not None
        eventually(lambda: bool(daemon.seen(Load)), "the load arrives")
        assert not handle.failed, "not answered yet is not failed"
        assert not handle.settled
        assert handle.pages == 0
        request = last(daemon)
        assert isinstance(request.message, Load)
        assert (request.message.first_page, request.message.blocks_count) == (1, (2,))
        daemon.push(request, Accepted(9, 2))
        request.fence.progress(1)
        assert handle.wait_layer(0)
        client.poll()
        eventually(lambda: client.poll() or handle.pages == 2, "Accepted is taken by poll")
        request.fence.finish()
        assert handle.wait_done()
        assert handle.settled
        daemon.push(request, Done(9, 2))


def test_an_offer_returns_before_the_answer_and_becomes_visible_at_done(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, no_transfer_answers) as daemon, client_of(tmp_path) as client:
        assert client.connect()
        handle = client.offer(TOKENS, 0, BLOCKS)
        assert handle is not None
        eventually(lambda: bool(daemon.seen(Store)), "the store arrives")
        assert not handle.failed
        assert not handle.settled
        assert bytes(last(daemon).buffers[0]) == TOKENS
        last(daemon).fence.finish()
        daemon.push(last(daemon), Accepted(1, 2), Done(1, 2))
        assert handle.wait_done()
        assert handle.settled


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: getattr(refusal, "code", "busy"))
@pytest.mark.parametrize("wait", ["wait_layer", "wait_done", "wait_settled", "poll"])
def test_a_refused_load_fails_and_settles_as_soon_as_the_answer_is_taken(
    tmp_path: Path, wait: str, refusal: DaemonMessage
) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        return [refusal] if isinstance(request.message, Load) else leasing(request)

    with FakeDaemon(tmp_path, answer), client_of(tmp_path, fence_slots=1) as client:
        lease = client.lookup(TOKENS, 8).lease
        handle = client.begin_load(lease, 0, BLOCKS)
        assert handle is not None
        began = time.monotonic()
        match wait:
            case "wait_layer":
                assert not handle.wait_layer(0)
            case "wait_done":
                assert not handle.wait_done()
            case "wait_settled":
                assert handle.wait_settled()
            case _:
                eventually(lambda: client.poll() or handle.failed, "poll takes the refusal")
        assert time.monotonic() - began < SAFETY_S / 2, "waited for its deadline"
        assert handle.failed
        assert handle.settled, "the daemon said that it never begins"
        assert client.stats.busy + client.stats.errors == 1


def test_the_slot_of_a_refused_load_is_free_and_its_lease_still_held(tmp_path: Path) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        return [Error("no_space", "full")] if isinstance(request.message, Load) else leasing(request)

    with FakeDaemon(tmp_path, answer) as daemon, client_of(tmp_path, fence_slots=1) as client:
        lease = client.lookup(TOKENS, 8).lease
        handle = client.begin_load(lease, 0, BLOCKS)
        assert handle is not None
        assert not handle.wait_done()
        daemon.answer = leasing
        again = client.begin_load(lease, 0, BLOCKS)
        assert again is not None
        assert again.wait_done()
        assert not daemon.seen(Release)


def test_nothing_begins_without_a_session_and_none_is_opened(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, leasing) as daemon, client_of(tmp_path) as client:
        assert client.offer(TOKENS, 0, BLOCKS) is None
        assert client.begin_load(1, 0, BLOCKS) is None
        assert client.stats.bypassed == 2
        assert not daemon.seen(Hello)


def test_nothing_begins_in_a_session_that_ended(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, leasing) as daemon, client_of(tmp_path) as client:
        lease = client.lookup(TOKENS, 8).lease
        daemon.stop()
        assert client.begin_load(lease, 0, BLOCKS) is None
        daemon.start()
        assert client.offer(TOKENS, 0, BLOCKS) is None, "a begun transfer never connects"
        assert client.connect()
        assert client.begin_load(lease, 0, BLOCKS) is None, "the lease is of the old session"
        assert client.offer(TOKENS, 0, BLOCKS) is not None


@pytest.mark.parametrize("slots", [1, LIMITS.requests_in_flight + 1])
def test_nothing_begins_without_a_slot_or_a_credit(tmp_path: Path, slots: int) -> None:
    fit = min(slots, LIMITS.requests_in_flight)
    with FakeDaemon(tmp_path, no_transfer_answers) as daemon, client_of(tmp_path, fence_slots=slots) as client:
        assert client.connect()
        assert all(client.offer(TOKENS, 0, BLOCKS) is not None for _ in range(fit))
        began = time.monotonic()
        assert client.offer(TOKENS, 0, BLOCKS) is None
        assert time.monotonic() - began < SAFETY_S / 2
        assert client.stats.busy == 1
        daemon.stop()  # Goodbye would wait for a credit


def test_nothing_begins_while_another_thread_has_the_turn(tmp_path: Path) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        return [] if isinstance(request.message, Lookup) else None

    with FakeDaemon(tmp_path, answer) as daemon, client_of(tmp_path) as client:
        assert client.connect()
        asking = threading.Thread(target=client.lookup, args=(TOKENS, 8))
        asking.start()
        eventually(lambda: bool(daemon.seen(Lookup)), "the other thread asks")
        assert client.offer(TOKENS, 0, BLOCKS) is None
        assert not daemon.seen(Store)
        daemon.push(last(daemon), Match(0, 0, 0, 0, 0))
        asking.join(SAFETY_S)
        assert client.offer(TOKENS, 0, BLOCKS) is not None


def test_what_is_too_large_for_the_daemon_is_not_sent(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path) as daemon, client_of(tmp_path, fence_slots=1) as client:
        assert client.connect()
        assert client.offer(bytes(4 * (LIMITS.tokens_per_request + 1)), 0, BLOCKS) is None
        assert client.connected
        assert not daemon.seen(Store)
        assert client.offer(TOKENS, 0, BLOCKS) is not None, "its slot is free"


def test_a_begun_load_settles_when_the_daemon_dies_without_an_answer(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, no_transfer_answers) as daemon, client_of(tmp_path) as client:
        handle = client.begin_load(client.lookup(TOKENS, 8).lease, 0, BLOCKS)
        assert handle is not None
        eventually(lambda: bool(daemon.seen(Load)), "the load arrives")
        daemon.stop()
        assert not handle.wait_done()
        assert handle.settled


# ---- reattach ----------------------------------------------------------------------------------------------


def test_reattach_registers_anew_without_a_goodbye(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, no_transfer_answers) as daemon, client_of(tmp_path) as client:
        lease = client.lookup(TOKENS, 8).lease
        handle = client.begin_load(lease, 0, BLOCKS)
        assert handle is not None
        eventually(lambda: bool(daemon.seen(Load)), "the load arrives")
        client.reattach()
        assert not client.connected
        assert handle.failed
        assert not handle.settled, "who hung up knows nothing of the copy"
        assert not daemon.seen(Goodbye)
        daemon.seen(Load)[0].fence.finish(ok=False)
        assert handle.wait_settled()
        assert client.connect(), "no pause"
        assert [request.epoch for request in daemon.seen(Hello)] == [1, 2]
        assert client.begin_load(lease, 0, BLOCKS) is None, "its leases are gone"


def test_reattach_hands_over_the_memory_that_the_pool_has_by_then(tmp_path: Path) -> None:
    pool, other = SharedPool(POOL_BYTES), SharedPool(POOL_BYTES)
    other.buffer[0] = 77
    with FakeDaemon(tmp_path) as daemon, Client(options(tmp_path), MODEL, LAYOUT, ShardSpec(), pool) as client:
        assert client.connect()
        pool.fd, other.fd = other.fd, pool.fd
        client.reattach()
        assert client.connect()
        assert [session.pool[0] for session in daemon.sessions.values()] == [0, 77]
        pool.fd, other.fd = other.fd, pool.fd


def test_reattach_gives_up_a_registration_under_way_in_another_thread(tmp_path: Path) -> None:
    def deaf(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        return [] if isinstance(request.message, Hello) else None

    with FakeDaemon(tmp_path, deaf) as daemon, client_of(tmp_path) as client:
        connecting = threading.Thread(target=client.connect)
        connecting.start()
        eventually(lambda: bool(daemon.seen(Hello)), "Hello arrives")
        began = time.monotonic()
        client.reattach()
        assert time.monotonic() - began < SAFETY_S / 2
        connecting.join(SAFETY_S)
        daemon.answer = leasing
        assert client.lookup(TOKENS, 8).resumable_tokens == 8
        assert [request.epoch for request in daemon.seen(Hello)] == [1, 2]


def test_reattach_without_a_session_does_nothing(tmp_path: Path) -> None:
    with client_of(tmp_path) as client:
        client.reattach()
        assert not client.connected


@pytest.mark.anyio
async def test_the_async_client_begins_and_reattaches_alike(tmp_path: Path) -> None:
    pool = SharedPool(POOL_BYTES)
    with FakeDaemon(tmp_path, leasing) as daemon:
        async with AsyncClient(options(tmp_path), MODEL, LAYOUT, ShardSpec(), pool) as client:
            assert await client.offer(TOKENS, 0, BLOCKS) is None
            lease = (await client.lookup(TOKENS, 8)).lease
            load, store = await client.begin_load(lease, 0, BLOCKS), await client.offer(TOKENS, 0, BLOCKS)
            assert load is not None
            assert store is not None
            assert await load.wait_done()
            assert await store.wait_done()
            await client.reattach()
            assert await client.begin_load(lease, 0, BLOCKS) is None
            assert (await client.lookup(TOKENS, 8)).resumable_tokens == 8
            assert len(daemon.seen(Hello)) == 2
    pool.close()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"

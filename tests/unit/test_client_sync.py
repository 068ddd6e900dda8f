"""The sync client beside a fake daemon: what every verb does and the limits it keeps."""

import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from client_world import (
    LAYOUT,
    MODEL,
    POOL_BYTES,
    client_of,
    eventually,
    last,
    leasing,
    options,
)

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.protocol.messages import (
    Accepted,
    DaemonMessage,
    Describe,
    Description,
    Done,
    Error,
    Extend,
    Goodbye,
    Hello,
    Load,
    Lookup,
    Match,
    Prefetch,
    Release,
    Renew,
    Scope,
    Store,
    Welcome,
)
from hicache.protocol.version import VERSION
from hicache.spec.model import ShardSpec
from hicache_client.options import EMPTY
from hicache_client.pool import SharedPool
from hicache_client.probe import describe
from hicache_client.sync import Client
from hicache_client.testing import LIMITS, FakeDaemon, FakeRequest, int32_bytes

TOKENS = int32_bytes(range(8))
BLOCKS = [int32_bytes([0, 4])]


# ---- the way that goes well -------------------------------------------------------------------------


def test_first_call_registers_and_the_memory_is_shared(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, leasing) as daemon, client_of(tmp_path, tenant="acme", credential="c") as client:
        assert not client.connected
        match = client.lookup(TOKENS, 8)
        assert (match.known_tokens, match.resumable_tokens, match.lease) == (8, 8, 1)
        assert client.connected
        assert client.boot_id == daemon.boot_id
        hello = daemon.seen(Hello)[0].message
        assert isinstance(hello, Hello)
        assert (hello.model, hello.layout, hello.tenant, hello.credential) == (MODEL, LAYOUT, "acme", "c")
        session = daemon.sessions[hello.instance, 1]
        assert session.attach.pool_bytes == POOL_BYTES
        session.pool[17] = 5
        assert client._session._registration.pool.buffer[17] == 5


def test_verbs_carry_what_they_are_given(tmp_path: Path) -> None:
    scope = Scope(salt="s")

    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        if isinstance(request.message, Extend):
            return [Match(request.message.lease, 12, 12, 4, 8)]
        if isinstance(request.message, Prefetch):
            return [Accepted(3, 7), Done(3, 7)]
        return leasing(request)

    with FakeDaemon(tmp_path, answer) as daemon, client_of(tmp_path) as client:
        match = client.lookup(TOKENS, 5, scope, lease=True)
        assert last(daemon).message == Lookup(8, 5, True, scope)
        assert bytes(last(daemon).buffers[0]) == TOKENS
        remote = 40 + last(daemon).request_id
        longer = client.extend(match.lease, TOKENS[:16], 99)
        assert last(daemon).message == Extend(remote, 4, 99)
        assert (longer.lease, longer.l3_tokens) == (match.lease, 8)
        assert client.prefetch(TOKENS, scope) == 7
        assert last(daemon).message == Prefetch(8, scope)
        assert client.renew([match.lease]) == 1
        assert last(daemon).message == Renew((remote,))
        assert client.renew() == 0
        assert last(daemon).message == Renew(())
        client.load(match.lease, 1, BLOCKS)
        assert isinstance(last(daemon).message, Load)
        assert (last(daemon).message.lease, last(daemon).message.first_page) == (remote, 1)
        assert bytes(last(daemon).buffers[0]) == BLOCKS[0]
        client.store(TOKENS, 0, BLOCKS, scope)
        store = last(daemon)
        assert isinstance(store.message, Store)
        assert (store.message.tokens_count, store.message.blocks_count) == (8, (2,))
        assert [bytes(buffer) for buffer in store.buffers] == [TOKENS, *BLOCKS]
        client.release([match.lease, match.lease, 12345])
        eventually(lambda: bool(daemon.seen(Release)), "the release arrives")
        assert last(daemon).message == Release((remote,))
        client.release([match.lease])
        assert client.renew([match.lease]) == 0
        assert len(daemon.seen(Release)) == 1


def test_load_layer_by_layer(tmp_path: Path) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        return [Accepted(1, 2)] if isinstance(request.message, Load) else leasing(request)

    with FakeDaemon(tmp_path, answer) as daemon, client_of(tmp_path) as client:
        handle = client.load(client.lookup(TOKENS, 8).lease, 0, BLOCKS)
        assert handle is not None
        assert handle.pages == 2
        soon = time.monotonic()
        assert not handle.wait_layer(0, deadline=soon)
        fence = last(daemon).fence
        fence.progress(1)
        assert handle.wait_layer(0)
        assert not handle.wait_layer(1, deadline=soon)
        assert not handle.done
        assert not handle.settled
        threading.Timer(0.01, fence.finish).start()
        assert handle.wait_layer(1)
        assert handle.wait_done()
        assert handle.settled
        assert not handle.failed


def test_store_is_settled_by_its_fence_and_done_by_its_message(tmp_path: Path) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        return [Accepted(1, 2)] if isinstance(request.message, Store) else None

    with FakeDaemon(tmp_path, answer) as daemon, client_of(tmp_path) as client:
        handle = client.store(TOKENS, 0, BLOCKS)
        assert handle is not None
        assert not handle.settled
        last(daemon).fence.finish()
        assert handle.wait_settled()
        assert not handle.wait_done(deadline=time.monotonic())
        daemon.push(last(daemon), Done(1, 2))
        assert handle.wait_done()
        assert handle.pages == 2


def test_describe(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path) as daemon, client_of(tmp_path) as client:
        assert client.describe("l2") == {"schema_version": 1}
        assert last(daemon).message == Describe("l2")
        assert describe("sessions", tmp_path) == {"schema_version": 1}
        assert last(daemon).session is None
        daemon.answer = lambda request: [Error("unsupported", "no", "ask less")]
        assert client.describe() == {}
        with pytest.raises(HiCacheError, match="ask less"):
            describe("status", tmp_path)
        daemon.answer = lambda request: [Description(b"\x01")]
        assert client.describe() == {}
    with pytest.raises(HiCacheError) as caught:
        describe("status", tmp_path, timeout_s=0.05)
    assert caught.value.code == ErrorCode.TIMEOUT


def test_close_says_goodbye_and_ends_everything(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, leasing) as daemon:
        with client_of(tmp_path) as client:
            client.lookup(TOKENS, 8)
        client.close()
        assert isinstance(last(daemon).message, Goodbye)
        assert client.lookup(TOKENS, 8) == EMPTY
        assert client.store(TOKENS, 0, BLOCKS) is None
        assert not client.connected
        assert len(daemon.seen(Hello)) == 1


# ---- limits ------------------------------------------------------------------------------------------


def limited(**changes: int) -> Welcome:
    return Welcome(
        VERSION, 1, type(LIMITS)(**{name: getattr(LIMITS, name) for name in LIMITS.__struct_fields__} | changes)
    )


def test_credits_are_kept(tmp_path: Path) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        if isinstance(request.message, Hello):
            return [limited(requests_in_flight=2)]
        return [Accepted(1, 1)] if isinstance(request.message, Store) else None

    with FakeDaemon(tmp_path, answer) as daemon, client_of(tmp_path, request_timeout_s=0.5) as client:
        handles = [client.store(TOKENS, 0, BLOCKS) for _ in range(2)]
        assert all(handles)
        opened = daemon.seen(Store)
        assert client.store(TOKENS, 0, BLOCKS) is None
        assert len(daemon.seen(Store)) == 2
        timer = threading.Timer(0.01, daemon.push, (opened[0], Done(1, 1)))
        client.connect()
        timer.start()
        third = client.store(TOKENS, 0, BLOCKS)
        assert third is not None
        assert len(daemon.seen(Store)) == 3


@pytest.mark.parametrize("limit", [{"tokens_per_request": 7}, {"buffer_bytes": 31}])
def test_oversized_requests_are_not_sent(tmp_path: Path, limit: dict[str, int]) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        return [limited(**limit)] if isinstance(request.message, Hello) else leasing(request)

    with FakeDaemon(tmp_path, answer) as daemon, client_of(tmp_path) as client:
        assert client.lookup(TOKENS, 8) == EMPTY
        assert client.store(TOKENS, 0, BLOCKS) is None
        assert [type(request.message) for request in daemon.requests] == [Hello]
        assert client.stats.errors == 2
        assert client.lookup(TOKENS[:28], 8) != EMPTY


def test_wrong_arguments_raise(tmp_path: Path) -> None:
    with client_of(tmp_path) as client:
        with pytest.raises(ValueError, match="tokens"):
            client.lookup(b"123", 8)
        with pytest.raises(ValueError, match="limit_tokens"):
            client.lookup(TOKENS, -1)
        with pytest.raises(ValueError, match="first_page"):
            client.load(1, -1, BLOCKS)
        with pytest.raises(ValueError, match="cache groups"):
            client.store(TOKENS, 0, [])
    pool = SharedPool(POOL_BYTES // 2)
    with pytest.raises(ValueError, match="pool has"):
        Client(options(tmp_path), MODEL, LAYOUT, ShardSpec(), pool)


def test_threads_take_turns(tmp_path: Path) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        if isinstance(request.message, Lookup):
            return [Match(0, request.message.tokens_count, 0, 0, 0)]
        return None

    with FakeDaemon(tmp_path, answer), client_of(tmp_path) as client:
        wrong: list[int] = []

        def work(base: int) -> None:
            for step in range(50):
                count = base * 100 + step
                if client.lookup(bytes(4 * count), 8).known_tokens != count:
                    wrong.append(count)

        threads = [threading.Thread(target=work, args=(base,)) for base in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert client.stats.connects == 1

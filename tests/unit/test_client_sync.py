"""The sync client beside a fake daemon: sessions, failures, transfers. See test_client_aio.py for the other."""

import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from client_world import (
    LAYOUT,
    MODEL,
    POOL_BYTES,
    SAFETY_S,
    client_of,
    eventually,
    last,
    leasing,
    options,
    silent_but_hello,
)

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.protocol.messages import (
    Accepted,
    Busy,
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
    Refuse,
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


# ---- no daemon, and daemons that come and go ---------------------------------------------------------


def test_without_a_daemon_everything_is_a_miss_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hicache.client")
    with client_of(tmp_path, retry_initial_s=1000.0, retry_max_s=1000.0) as client:
        for _ in range(3):
            assert client.lookup(TOKENS, 8) == EMPTY
            assert client.extend(1, TOKENS, 8) == EMPTY
            assert client.load(1, 0, BLOCKS) is None
            assert client.store(TOKENS, 0, BLOCKS) is None
            assert client.prefetch(TOKENS) == 0
            assert client.renew([1]) == 0
            assert client.describe() == {}
            client.release([1])
            client.poll()
        assert client.stats.bypassed == client.stats.requests == 21
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "running uncached" in caplog.text
        with FakeDaemon(tmp_path, leasing) as daemon:
            assert client.lookup(TOKENS, 8) == EMPTY  # the pause is on
            assert daemon.requests == []
            assert client.connect()
            assert client.lookup(TOKENS, 8) != EMPTY
            assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_daemon_that_starts_later_is_found(tmp_path: Path) -> None:
    with client_of(tmp_path) as client:
        assert client.lookup(TOKENS, 8) == EMPTY
        with FakeDaemon(tmp_path, leasing):
            eventually(lambda: client.lookup(TOKENS, 8) != EMPTY, "the daemon is found")


def test_a_restarted_daemon_serves_the_very_next_call(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, leasing) as daemon, client_of(tmp_path) as client:
        old = client.lookup(TOKENS, 8)
        first_boot = client.boot_id
        daemon.stop()
        daemon.start()
        new = client.lookup(TOKENS, 8)
        assert new.resumable_tokens == 8
        assert client.boot_id == daemon.boot_id != first_boot
        hellos = [request.message for request in daemon.seen(Hello)]
        assert [hello.epoch for hello in hellos] == [1, 2]
        assert hellos[0].instance == hellos[1].instance
        assert client.stats.losses == 1
        assert new.lease != old.lease
        assert client.load(old.lease, 0, BLOCKS) is None  # may not name a lease of the new session
        assert client.renew([old.lease]) == 0
        assert client.extend(old.lease, TOKENS, 8) == EMPTY
        assert not daemon.seen(Load)
        assert client.load(new.lease, 0, BLOCKS) is not None


def test_an_unknown_session_is_opened_again_within_the_call(tmp_path: Path) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        if isinstance(request.message, Lookup) and request.epoch == 1 and len(daemon.seen(Lookup)) > 1:
            return [Error(ErrorCode.UNKNOWN_SESSION, "who?", "say Hello")]
        return leasing(request)

    with FakeDaemon(tmp_path, answer) as daemon, client_of(tmp_path) as client:
        client.lookup(TOKENS, 8)
        assert client.lookup(TOKENS, 8).resumable_tokens == 8
        assert [request.epoch for request in daemon.seen(Lookup)] == [1, 1, 2]


def test_another_boot_id_in_a_reply_ends_the_session(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, leasing) as daemon, client_of(tmp_path) as client:
        client.lookup(TOKENS, 8)
        daemon.push(last(daemon), Done(), boot_id=4711)
        eventually(lambda: client.poll() is None and not client.connected, "the reply is read")
        assert client.lookup(TOKENS, 8).resumable_tokens == 8
        assert client.stats.connects == 2


def test_nonsense_from_the_daemon_ends_the_session(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, leasing) as daemon, client_of(tmp_path) as client:
        client.lookup(TOKENS, 8)
        daemon.push(last(daemon), Goodbye())  # not a daemon's message
        eventually(lambda: client.poll() is None and not client.connected, "the reply is read")
        assert client.lookup(TOKENS, 8).resumable_tokens == 8


@pytest.mark.parametrize("at", ["attach", "hello"])
def test_a_refusal_is_logged_with_its_remedy_and_is_a_miss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at: str
) -> None:
    refuse = Refuse("denied", "unknown tenant", "set the credential")
    with FakeDaemon(tmp_path) as daemon, client_of(tmp_path) as client:
        daemon.refuse_attach = refuse if at == "attach" else None
        daemon.answer = lambda request: [refuse] if isinstance(request.message, Hello) else None
        for _ in range(3):
            assert client.lookup(TOKENS, 8) == EMPTY
            time.sleep(0.002)
        assert caplog.text.count("set the credential") == 1
        daemon.refuse_attach = daemon.answer = None
        assert client.connect()


def test_a_registration_that_is_slower_than_a_call_goes_on(tmp_path: Path) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        return [] if isinstance(request.message, Hello) else leasing(request)

    with FakeDaemon(tmp_path, answer) as daemon, client_of(tmp_path, request_timeout_s=0.02) as client:
        for _ in range(3):
            assert client.lookup(TOKENS, 8) == EMPTY
        eventually(lambda: client.lookup(TOKENS, 8) == EMPTY and bool(daemon.seen(Hello)), "Hello arrives")
        daemon.push(daemon.seen(Hello)[0], Welcome(VERSION, 1, LIMITS))
        assert client.connect(SAFETY_S)
        assert len(daemon.seen(Hello)) == 1


def test_a_lifeline_that_is_never_answered(tmp_path: Path) -> None:
    with (
        FakeDaemon(tmp_path, attach=False) as daemon,
        client_of(tmp_path, request_timeout_s=0.01, connect_timeout_s=0.03) as client,
    ):
        eventually(lambda: client.lookup(TOKENS, 8) == EMPTY and client._session._epoch > 1, "it is given up")
        daemon.attach = True
        assert client.connect(SAFETY_S)


def test_a_hung_daemon_costs_few_deadlines(tmp_path: Path) -> None:
    with (
        FakeDaemon(tmp_path, silent_but_hello) as daemon,
        client_of(tmp_path, request_timeout_s=0.02, retry_initial_s=1000.0, retry_max_s=1000.0) as client,
    ):
        assert client.connect(SAFETY_S)
        for _ in range(20):
            assert client.lookup(TOKENS, 8) == EMPTY
        assert client.stats.timeouts == 1
        assert client.stats.bypassed == 19
        daemon.push(daemon.seen(Lookup)[0], EMPTY)  # it lives: a late reply ends the pause
        daemon.answer = leasing
        eventually(lambda: client.lookup(TOKENS, 8) != EMPTY, "the client comes back")
        assert client.stats.connects == 1


def test_a_daemon_that_stays_silent_is_left(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, silent_but_hello), client_of(tmp_path, request_timeout_s=0.01) as client:
        eventually(lambda: client.lookup(TOKENS, 8) == EMPTY and client.stats.losses > 0, "the session is left")
        assert client.stats.timeouts >= 3


# ---- leases and late replies -------------------------------------------------------------------------


def test_a_late_match_gives_its_lease_back(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, silent_but_hello) as daemon, client_of(tmp_path, request_timeout_s=0.02) as client:
        assert client.connect(SAFETY_S)
        assert client.lookup(TOKENS, 8) == EMPTY
        eventually(lambda: bool(daemon.seen(Lookup)), "the lookup arrives")
        daemon.push(daemon.seen(Lookup)[0], Match(77, 8, 8, 8, 0))
        eventually(lambda: client.poll() is None and bool(daemon.seen(Release)), "the lease is returned")
        assert daemon.seen(Release)[0].message == Release((77,))
        assert client.stats.late_replies == 1


@pytest.mark.parametrize("reply", [Busy(0.1, "full"), Error("unknown_lease", "gone", "look up")])
def test_a_load_that_is_not_taken_frees_slot_and_lease(tmp_path: Path, reply: DaemonMessage) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        return [reply] if isinstance(request.message, Load) else leasing(request)

    with FakeDaemon(tmp_path, answer) as daemon, client_of(tmp_path, fence_slots=1) as client:
        for _ in range(3):
            assert client.load(client.lookup(TOKENS, 8).lease, 0, BLOCKS) is None
        assert len(daemon.seen(Load)) == 3
        eventually(lambda: len(daemon.seen(Release)) == 3, "the leases come back")
        assert client.stats.busy + client.stats.errors == 3


def test_an_unanswered_load_keeps_its_slot_until_it_ends(tmp_path: Path) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        return [] if isinstance(request.message, Load) else leasing(request)

    with (
        FakeDaemon(tmp_path, answer) as daemon,
        client_of(tmp_path, fence_slots=2, request_timeout_s=0.1, retry_initial_s=1e-6, retry_max_s=1e-6) as client,
    ):
        handles = []
        for _ in range(2):
            handle = client.load(client.lookup(TOKENS, 8).lease, 0, BLOCKS)
            assert handle is not None
            assert handle.failed
            assert not handle.settled
            assert not handle.wait_layer(0)
            handles.append(handle)
        match = client.lookup(TOKENS, 8)
        assert client.load(match.lease, 0, BLOCKS) is None  # no slot is free
        assert client.stats.busy == 1
        loads = daemon.seen(Load)
        assert len(loads) == 2
        loads[0].fence.progress(1)
        assert not handles[0].settled
        loads[0].fence.finish()
        assert handles[0].wait_settled()
        daemon.push(loads[1], Busy(0.1))  # late, but it says that the copy never began
        eventually(lambda: client.poll() is None and handles[1].settled, "the refusal is read")
        daemon.answer = leasing
        for _ in range(2):
            assert client.load(client.lookup(TOKENS, 8).lease, 0, BLOCKS) is not None
        slots = [request.message.fence for request in daemon.seen(Load) if isinstance(request.message, Load)]
        assert sorted(slots[2:]) == [0, 1]


def test_a_load_fails_at_its_fence_or_by_message(tmp_path: Path) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        return [Accepted(1, 2)] if isinstance(request.message, Load) else leasing(request)

    with FakeDaemon(tmp_path, answer) as daemon, client_of(tmp_path) as client:
        handle = client.load(client.lookup(TOKENS, 8).lease, 0, BLOCKS)
        assert handle is not None
        last(daemon).fence.progress(1)
        last(daemon).fence.finish(ok=False)
        assert handle.wait_layer(0)  # this one was in place before
        assert not handle.wait_layer(1)
        assert not handle.wait_done()
        assert handle.failed
        assert handle.settled
        second = client.load(client.lookup(TOKENS, 8).lease, 0, BLOCKS)
        assert second is not None
        daemon.push(last(daemon), Error("transfer_failed", "disk"))
        eventually(lambda: client.poll() is None and second.failed, "the error is read")
        assert not second.wait_done()
        assert not second.settled  # a word on the request is no word on the copy


def test_a_daemon_that_dies_in_a_load_is_noticed_in_the_wait(tmp_path: Path) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        return [Accepted(1, 2)] if isinstance(request.message, Load | Store) else leasing(request)

    with FakeDaemon(tmp_path, answer) as daemon, client_of(tmp_path, load_timeout_s=1e9) as client:
        load = client.load(client.lookup(TOKENS, 8).lease, 0, BLOCKS)
        store = client.store(TOKENS, 0, BLOCKS)
        assert load is not None
        assert store is not None
        timer = threading.Timer(0.02, daemon.stop)
        timer.start()
        assert not load.wait_layer(0)  # without a deadline to speak of
        assert not store.wait_done()
        timer.join()
        assert load.failed
        assert load.settled
        assert store.settled


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

"""The sync client beside a fake daemon: daemons that are away, die, restart, hang or refuse."""

import errno
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import zmq
from client_world import (
    SAFETY_S,
    client_of,
    eventually,
    last,
    leasing,
    silent_but_hello,
)

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
    Refuse,
    Release,
    Store,
    Welcome,
)
from hicache.protocol.version import VERSION, number, text
from hicache_client.options import EMPTY
from hicache_client.testing import LIMITS, FakeDaemon, FakeRequest, int32_bytes

TOKENS = int32_bytes(range(8))
BLOCKS = [int32_bytes([0, 4])]


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


def test_connect_does_not_wait_for_a_daemon_unless_told_to(tmp_path: Path) -> None:
    with client_of(tmp_path, retry_initial_s=1000.0, retry_max_s=1000.0) as client, FakeDaemon(tmp_path) as daemon:
        daemon.stop()
        start = time.monotonic()
        assert not client.connect()
        assert time.monotonic() - start < SAFETY_S / 2  # it would have waited for connect_timeout_s = SAFETY_S
        timer = threading.Timer(0.02, daemon.start)
        timer.start()
        assert client.connect(SAFETY_S)
        timer.join()


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


def test_sessions_that_end_leave_no_descriptors(tmp_path: Path) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    with FakeDaemon(tmp_path, leasing) as daemon, client_of(tmp_path) as client:
        counts = []
        for _ in range(6):
            assert client.lookup(TOKENS, 8) != EMPTY
            daemon.stop()
            daemon.sessions.clear()
            daemon.requests.clear()
            assert client.lookup(TOKENS, 8) == EMPTY
            counts.append(descriptors())
            daemon.start()
            assert client.connect()
        assert counts[-1] == counts[1], counts


FORGETFUL = """
import asyncio, sys
from pathlib import Path
from client_world import LAYOUT, MODEL, POOL_BYTES, ShardSpec, SharedPool, options
from hicache_client import AsyncClient, Client
make = AsyncClient if sys.argv[2] == "AsyncClient" else Client
client = make(options(Path(sys.argv[1])), MODEL, LAYOUT, ShardSpec(), SharedPool(POOL_BYTES))
answer = client.lookup(bytes(32), 8)
print(asyncio.run(answer) if make is AsyncClient else answer)
"""


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
def test_a_program_that_does_not_close_its_client_ends_all_the_same(tmp_path: Path, kind: str) -> None:
    with FakeDaemon(tmp_path, leasing):
        done = subprocess.run(
            [sys.executable, "-c", FORGETFUL, str(tmp_path), kind],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            text=True,
            timeout=SAFETY_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "resumable_tokens=8" in done.stdout
    assert done.stderr == ""


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


def test_a_daemon_of_another_major_is_named_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FakeDaemon(tmp_path) as daemon, client_of(tmp_path) as client:
        daemon.speaks = number(1, 0)
        for _ in range(3):
            assert client.lookup(TOKENS, 8) == EMPTY
            time.sleep(0.002)
        (line,) = caplog.messages
        for part in (
            "running uncached",
            "protocol 1.0 came",
            f"this side speaks {text(VERSION)}",
            "same hicache release",
        ):
            assert part in line
        assert client.failure is not None
        assert client.failure.code == ErrorCode.VERSION
        assert client.stats.late_replies == 0
        daemon.speaks = VERSION
        assert client.connect()


def test_a_daemon_that_turns_into_one_of_another_major_ends_the_session_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeDaemon(tmp_path, leasing) as daemon, client_of(tmp_path) as client:
        client.lookup(TOKENS, 8)
        daemon.speaks = number(1, 0)
        assert client.lookup(TOKENS, 8) == EMPTY
        assert "hicache session ended: version: protocol 1.0 came, this side speaks" in caplog.text


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


def test_a_session_that_we_end_settles_when_the_daemon_says_so(tmp_path: Path) -> None:
    def answer(request: FakeRequest) -> Iterable[DaemonMessage] | None:
        return [Accepted(1, 2)] if isinstance(request.message, Load | Store) else leasing(request)

    with FakeDaemon(tmp_path, answer) as daemon:
        with client_of(tmp_path) as client:
            load = client.load(client.lookup(TOKENS, 8).lease, 0, BLOCKS)
            fence = last(daemon).fence
            store = client.store(TOKENS, 0, BLOCKS)
            assert load is not None
            assert store is not None
        assert load.failed
        assert not load.settled  # the copy may still run
        assert not load.wait_layer(0)
        fence.finish(ok=False)
        assert load.settled
        assert not store.settled


def test_out_of_descriptors_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(*args: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    def no_fences(*args: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with FakeDaemon(tmp_path, leasing), client_of(tmp_path) as client:
        for name, fault in (("open_dealer", no_socket), ("FenceArea", no_fences)):
            with monkeypatch.context() as patch:
                patch.setattr(f"hicache_client.sync_session.{name}", fault)
                assert client.lookup(TOKENS, 8) == EMPTY
                assert client._session._attempt is None
        assert client.connect()

"""Start, second start, reload, drain, restart: the daemon as a supervisor sees it."""

import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache.base.errors import ErrorCode
from hicache.protocol.fence import STATE_DONE, STATE_FAILED, WORD_GENERATION, WORD_STATE
from hicache.protocol.messages import Accepted, Error, Lookup, Match, Store, Welcome
from hicache_daemon.lifeline import MAX_UNBOUND
from tests.daemon_harness import PAGE_TOKENS, SAFETY_S, DaemonProcess, RawClient, int32, tokens


def started(root: Path, overrides: tuple[str, ...] = (), l3: bool = False) -> Iterator[DaemonProcess]:
    with DaemonProcess(root, overrides, l3) as process:
        yield process


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    yield from started(tmp_path)


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[DaemonProcess]:
    yield from started(tmp_path, l3=True)


# ---- start ------------------------------------------------------------------------------------------


def test_a_second_daemon_on_the_same_directory_exits_1_and_harms_nothing(daemon: DaemonProcess) -> None:
    root = daemon.config.parent / "second"
    root.mkdir()
    second = DaemonProcess(root, [f"server.runtime_dir={daemon.runtime_dir}"], wait=False)
    assert second.wait() == 1
    (reason,) = second.events("daemon.cannot_start")
    assert f"pid {daemon.process.pid}" in reason["reason"]
    assert reason["remedy"]
    assert daemon.describe()["pid"] == daemon.process.pid


def test_after_kill_9_its_stale_sockets_are_replaced_and_the_boot_id_differs(daemon: DaemonProcess) -> None:
    first = daemon.describe()["boot_id"]
    daemon.kill()
    assert daemon.control.exists()
    daemon.restart()
    assert daemon.describe()["boot_id"] != first


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("l2.size=64TiB", "l2"),
        ("identity.secret_file=/nonexistent/secret", "secret_file"),
        ("l3.path=/proc/hicache", "l3.path"),
    ],
)
def test_what_cannot_work_is_said_in_one_line_with_exit_1_or_2(tmp_path: Path, override: str, complaint: str) -> None:
    with DaemonProcess(tmp_path, [override], l3=override.startswith("l3"), wait=False) as daemon:
        assert daemon.wait() in {1, 2}
        assert complaint in daemon.log()
        assert "Traceback" not in daemon.log()
        assert not daemon.control.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_the_arena_is_touched_exits_0(tmp_path: Path, number: int) -> None:
    starting = DaemonProcess(tmp_path, ["l2.size=3GiB"], wait=False)
    starting.wait_event("arena.touched")
    starting.signal(number)
    assert starting.wait() == 0
    assert not starting.events("daemon.ready")
    assert starting.events("daemon.stopped")


def test_a_reload_while_the_arena_is_touched_is_ignored_and_said(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, ["l2.size=3GiB"], wait=False) as starting:
        starting.wait_event("arena.touched")
        starting.signal(signal.SIGHUP)
        starting.wait_ready()
        assert starting.events("reload.ignored")


def test_the_service_manager_hears_ready_and_stopping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(SAFETY_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        with DaemonProcess(tmp_path) as daemon:
            assert f"READY=1\nMAINPID={daemon.process.pid}".encode() in manager.recv(4096)
            daemon.signal(signal.SIGTERM)
            while (got := manager.recv(4096)) != b"STOPPING=1":
                assert got == b"WATCHDOG=1"
            assert daemon.wait() == 0


# ---- restart ----------------------------------------------------------------------------------------


def test_pages_survive_a_drained_restart_through_l3_byte_for_byte(durable: DaemonProcess) -> None:
    data = tokens(8 * PAGE_TOKENS, seed=1)
    with RawClient(durable).open() as client:
        client.pool[:] = np.random.default_rng(1).integers(0, 256, client.pool.size, np.uint8)
        written = np.stack([client.block(at).copy() for at in range(8)])
        client.store(data, range(8))
        boot = client.boot_id
    assert durable.stop() == 0
    assert not durable.control.exists()
    durable.restart()
    assert durable.describe()["recovered_rows"] == 8
    with RawClient(durable).open() as client:
        match = client.lookup(data)
        assert (match.l2_tokens, match.l3_tokens) == (0, 128)
        client.load(match.lease, range(10, 18))
        assert np.array_equal(np.stack([client.block(at) for at in range(10, 18)]), written)
        assert client.boot_id != boot


def test_a_client_that_survives_the_restart_is_told_to_come_again(durable: DaemonProcess) -> None:
    data = tokens(PAGE_TOKENS, seed=2)
    with RawClient(durable).open() as client:
        client.store(data, range(1))
        boot = client.boot_id
        assert durable.stop() == 0
        assert client.hung_up_on()
        durable.restart()
        reply = client.ask(Lookup(PAGE_TOKENS, PAGE_TOKENS), (data,))
        assert isinstance(reply, Error)
        assert reply.code == ErrorCode.UNKNOWN_SESSION
        assert client.boot_id != boot  # noticed without any missed heartbeat
        client.open()
        assert client.lookup(data).l3_tokens == PAGE_TOKENS


def test_with_another_secret_nothing_is_served_from_l3(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, l3=True) as daemon:
        with RawClient(daemon).open() as client:
            client.store(tokens(PAGE_TOKENS), range(1))
        assert daemon.stop() == 0
    secret = tmp_path / "other"
    secret.write_text("00" * 32)
    secret.chmod(0o600)
    with DaemonProcess(tmp_path, [f"identity.secret_file={secret}"], l3=True, wait=False) as daemon:
        assert daemon.wait() == 1
        assert "secret" in daemon.events("daemon.cannot_start")[-1]["reason"]


# ---- stop -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_drains_and_exits_0(daemon: DaemonProcess, number: int) -> None:
    with RawClient(daemon).open() as client:
        client.store(tokens(PAGE_TOKENS), range(1))
        daemon.signal(number)
        assert client.hung_up_on()
        assert daemon.wait() == 0
    assert not daemon.events("daemon.drain_late")
    assert not daemon.control.exists()


def test_work_in_flight_ends_and_reaches_the_disk_before_the_daemon_goes(durable: DaemonProcess) -> None:
    """The stop signal arrives right behind a burst of stores: whatever was accepted is kept."""
    prompts = [tokens(16 * PAGE_TOKENS, seed=seed) for seed in range(20, 24)]
    with RawClient(durable).open() as client:
        requests = []
        for data in prompts:
            slot, generation = client.new_fence()
            message = Store(len(data) // 4, 0, (16,), slot, generation)
            requests.append(client.send(message, (data, int32(range(16)))))
        accepted = [client.receive(request) for request in requests]
        assert all(isinstance(reply, Accepted) and reply.pages == 16 for reply in accepted)
        durable.signal(signal.SIGTERM)
        assert durable.wait() == 0
    assert not durable.events("daemon.drain_late")
    durable.restart()
    assert durable.describe()["recovered_rows"] == 16 * len(prompts)


def test_a_drain_of_zero_waits_for_nothing(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, ["server.drain=0"], l3=True) as daemon, RawClient(daemon).open() as client:
        data = tokens(32 * PAGE_TOKENS, seed=3)
        slot, generation = client.new_fence()
        client.send(Store(len(data) // 4, 0, (32,), slot, generation), (data, int32(range(32))))
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
        assert not daemon.events("event.failed"), daemon.log()  # late answers find a closed socket


# ---- reload -----------------------------------------------------------------------------------------


def test_sighup_applies_hot_keys_names_cold_ones_and_keeps_their_values(daemon: DaemonProcess) -> None:
    assert not daemon.events("never")
    daemon.config.write_text("server:\n  log_level: debug\n  drain: 7s\nl2:\n  copy_threads: 1\n")
    daemon.signal(signal.SIGHUP)
    told = daemon.wait_event("config.reloaded")
    assert sorted(told["applied"]) == ["server.drain", "server.log_level"]
    assert told["need_restart"] == ["l2.copy_threads"]
    values = daemon.describe("config")["values"]
    assert (values["server.drain"], values["l2.copy_threads"]) == ("7s", 2)
    daemon.signal(signal.SIGHUP)
    told = daemon.wait_event("config.reloaded", count=2)
    assert (told["applied"], told["need_restart"]) == ([], ["l2.copy_threads"])


def test_the_free_space_floor_of_l3_can_be_raised_while_running(tmp_path: Path) -> None:
    """No file system has so much space: from the reload on nothing is written, and the daemon says why."""
    (tmp_path / "hicache.yaml").write_text("l3: {min_free: 0}\n")
    l3 = ["l3.enabled=true", f"l3.path={tmp_path / 'l3'}", "l3.size=64MiB"]
    with DaemonProcess(tmp_path, l3) as daemon:
        daemon.config.write_text("l3: {min_free: 1000TiB}\n")
        daemon.signal(signal.SIGHUP)
        assert daemon.wait_event("config.reloaded")["applied"] == ["l3.min_free"]
        with RawClient(daemon).open() as client:
            client.store(tokens(4 * PAGE_TOKENS), range(4))
            assert daemon.wait_event("store.mode")["mode"] == "ro"
            status = client.describe()
            assert status["ready"]
            assert "min_free" in status["reasons"][0]
            assert client.lookup(tokens(4 * PAGE_TOKENS)).l2_tokens == 64


def test_sighup_with_a_bad_file_keeps_everything_and_lists_all_errors(daemon: DaemonProcess) -> None:
    before = daemon.describe("config")["values"]
    daemon.config.write_text("server:\n  log_levle: debug\n  drain: soon\n")
    daemon.signal(signal.SIGHUP)
    told = daemon.wait_event("config.reload_refused")
    assert len(told["errors"]) == 2
    assert daemon.describe("config")["values"] == before
    daemon.config.write_text("server: {}\n")
    daemon.signal(signal.SIGHUP)
    assert daemon.wait_event("config.reloaded")["applied"] == []


# ---- clients that die -------------------------------------------------------------------------------


def test_a_client_that_hangs_up_at_any_step_leaves_nothing(daemon: DaemonProcess) -> None:
    with RawClient(daemon).open() as client:  # whatever is allocated once is there now
        client.store(tokens(PAGE_TOKENS), range(1))
    daemon.wait_event("session.dropped")
    before = daemon.fds()
    for step in ("connect", "attach", "hello", "store", "lease"):
        with RawClient(daemon) as client:
            if step == "connect":
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                    sock.connect(str(daemon.runtime_dir / "lifeline.sock"))
                continue
            client.attach()
            if step == "attach":
                continue
            assert isinstance(client.hello(), Welcome)
            if step == "store":
                client.store(tokens(2 * PAGE_TOKENS), range(2))
            elif step == "lease":
                assert client.lookup(tokens(2 * PAGE_TOKENS)).lease
    daemon.wait_event("session.dropped", count=4)
    status = daemon.describe()
    while status["lifelines"] != {"bound": 0, "unbound": 0} or status["cache"]["leases"]:
        status = daemon.describe()
    assert status["sessions"] == 0
    # The answer's own connection is open while the descriptors are counted; others may still be closing.
    assert any(daemon.fds() <= before for _ in range(2000))


def test_an_idle_session_is_not_reaped_while_its_lifeline_stands(tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path, ["limits.session_silence=1s", "limits.lease_ttl=1s"]) as daemon,
        RawClient(daemon).open() as client,
    ):
        data = tokens(PAGE_TOKENS)
        client.store(data, range(1))
        lease = client.lookup(data).lease
        (session,) = daemon.describe("sessions")["sessions"]
        while session["state"] != "SUSPECT" or session["leases"]:
            (session,) = daemon.describe("sessions")["sessions"]
        assert isinstance(client.ask(Lookup(PAGE_TOKENS, PAGE_TOKENS), (data,)), Match)
        assert lease
        assert os.path.exists(daemon.control)


def test_a_daemon_that_is_full_of_unbound_lifelines_still_serves_its_sessions(daemon: DaemonProcess) -> None:
    with RawClient(daemon).open() as client:
        crowd = []
        for _ in range(80):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.connect(str(daemon.runtime_dir / "lifeline.sock"))
            crowd.append(sock)
        client.store(tokens(PAGE_TOKENS), range(1))
        assert daemon.describe()["lifelines"] == {"bound": 1, "unbound": MAX_UNBOUND}
        for sock in crowd:
            sock.close()


def test_a_disk_folder_deleted_under_the_daemon_is_noticed_and_said(durable: DaemonProcess) -> None:
    with RawClient(durable).open() as client:
        client.store(tokens(2 * PAGE_TOKENS, seed=30), range(2))
        shutil.rmtree(durable.config.parent / "l3")
        durable.wait_event("store.mode")
        (reason,) = durable.describe()["reasons"]
        assert "folder is gone" in reason
        client.store(tokens(2 * PAGE_TOKENS, seed=31), range(2))  # L2 goes on


def test_a_store_that_a_paused_daemon_never_read_gets_its_last_word(daemon: DaemonProcess) -> None:
    """On waking the daemon sees the hang-up before the queued request; the fence must not stay open."""
    with RawClient(daemon).open() as client:
        daemon.signal(signal.SIGSTOP)
        slot, generation = client.new_fence()
        data = tokens(2 * PAGE_TOKENS, seed=40)
        client.send(Store(2 * PAGE_TOKENS, 0, (2,), slot, generation), (data, int32(range(2))))
        client.hang_up()
        daemon.signal(signal.SIGCONT)
        daemon.wait_event("session.dropped")
        assert client.fences[slot, WORD_STATE] in (STATE_FAILED, STATE_DONE)
        assert client.fences[slot, WORD_GENERATION] == generation

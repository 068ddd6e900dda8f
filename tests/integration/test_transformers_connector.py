"""transformers with a real daemon: every way a prompt can be served gives the output of the model alone."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
torch.set_num_threads(1)

from transformers import LlamaForCausalLM  # noqa: E402

from hicache_client.connectors.transformers import HiCacheConnector  # noqa: E402
from tests.daemon_harness import SAFETY_S, DaemonProcess  # noqa: E402
from tests.transformers_world import agree, bare, expected, padded, prompt, tiny_llama, whole  # noqa: E402


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), l3=True) as process:
        yield process
        assert process.process.poll() is None, process.log()


def connect(model, daemon: DaemonProcess, salt: str, **options) -> HiCacheConnector:
    """A connector whose prompts nobody else knows, without reuse in L1."""
    options = {"pool_tokens": 1024, "l1_reuse": False} | options
    return HiCacheConnector(model, runtime_dir=daemon.runtime_dir, salt=salt, **options)


@pytest.fixture
def connector(model, daemon, request) -> Iterator[HiCacheConnector]:
    with connect(model, daemon, request.node.name) as made:
        assert made.connected
        yield made


@pytest.mark.parametrize("run", [bare, whole])
@pytest.mark.parametrize(("length", "served"), [(5, 0), (16, 15), (40, 32), (100, 96)])
def test_second_run_is_served_and_equal(connector, run, length, served) -> None:
    model, ids = connector.model, prompt(length)
    want = expected(model, ids)
    assert agree(run(model, connector, ids), want)
    got = run(model, connector, ids)
    assert agree(got, want)
    assert (got[2][0].tokens_l2, got[2][0].recomputed) == (served, length - served)


@pytest.mark.parametrize("run", [bare, whole])
def test_batch_with_different_hit_lengths(connector, run) -> None:
    model = connector.model
    first, second, third, short = prompt(70), prompt(35, 1), prompt(50, 2), prompt(4, 3)
    run(model, connector, first)
    run(model, connector, second[:, :20])
    ids, mask = padded(first, second, third, short)
    for served in ([64, 16, 0, 0], [64, 32, 48, 0]) if run is whole else ([20, 0, 0, 0], [64, 29, 44, 0]):
        got = run(model, connector, ids, mask)
        assert agree(got, expected(model, ids, mask))
        assert [row.tokens_l2 for row in got[2]] == served


def test_conversation_hits_generated_tokens(connector) -> None:
    model, ids, previous = connector.model, prompt(30), 1
    for turn in range(3):
        got = whole(model, connector, ids)
        assert agree(got, expected(model, ids))
        assert got[2][0].tokens_l2 == (previous - 1) // 16 * 16
        previous = got[0].shape[1]
        ids = torch.cat([got[0], prompt(9, seed=10 + turn)], dim=1)


def test_other_process_other_namespace(model, daemon, request) -> None:
    ids, salt = prompt(60), request.node.name
    with connect(model, daemon, salt) as one, connect(model, daemon, salt) as two:
        whole(model, one, ids)
        got = whole(model, two, ids)
        assert agree(got, expected(model, ids))
        assert got[2][0].tokens_l2 == 48
    with connect(model, daemon, salt + "x") as other, connect(model, daemon, salt, tenant="b") as third:
        assert whole(model, other, ids)[2][0].recomputed == 60
        assert whole(model, third, ids)[2][0].recomputed == 60


def test_a_tenant_with_a_credential_is_served_and_one_without_runs_uncached(model, tmp_path) -> None:
    credential = tmp_path / "credential"
    credential.write_text("sesame\n")
    credential.chmod(0o600)
    (tmp_path / "hicache.yaml").write_text(f"tenants:\n  alice:\n    credential_file: {credential}\n")
    ids = prompt(60)
    with DaemonProcess(tmp_path) as guarded:
        with connect(model, guarded, "", tenant="alice", credential="sesame") as alice:
            whole(model, alice, ids)
            assert whole(model, alice, ids)[2][0].tokens_l2 == 48
        with connect(model, guarded, "", tenant="alice", credential="guess") as mallory:
            assert not mallory.connected
            got = whole(model, mallory, ids)
            assert got[2][0].recomputed == 60
            assert agree(got, expected(model, ids))


def test_no_daemon_is_said_once_and_served_in_process(model, tmp_path, caplog) -> None:
    ids = prompt(60)
    with caplog.at_level(logging.INFO), HiCacheConnector(model, runtime_dir=tmp_path, pool_tokens=512) as connector:
        assert not connector.connected
        for served in (0, 59):
            got = whole(model, connector, ids)
            assert agree(got, expected(model, ids))
            assert (got[2][0].tokens_l1, got[2][0].tokens_l2) == (served, 0)
    assert len([r for r in caplog.records if r.name.startswith("hicache")]) == 1


def test_daemon_restart_serves_from_l3(model, tmp_path) -> None:
    ids = prompt(100)
    with DaemonProcess(tmp_path, l3=True) as daemon, connect(model, daemon, "") as connector:
        want = expected(model, ids)
        assert agree(whole(model, connector, ids), want)
        assert daemon.stop() == 0
        assert agree(whole(model, connector, ids), want)  # without a daemon
        daemon.restart()
        got = whole(model, connector, ids)
        assert agree(got, want)
        assert (got[2][0].tokens_l2, got[2][0].tokens_l3) == (0, 96)
        got = whole(model, connector, ids)  # promoted
        assert agree(got, want)
        assert (got[2][0].tokens_l2, got[2][0].tokens_l3) == (96, 0)


def test_daemon_stopped_dead_under_a_load(model, tmp_path, monkeypatch) -> None:
    """The daemon is killed after it accepted a load; what did not come is computed."""
    ids = prompt(100)
    with DaemonProcess(tmp_path) as daemon, connect(model, daemon, "") as connector:
        want = expected(model, ids)
        whole(model, connector, ids)
        port = connector._context.port
        load = port.load

        def load_and_die(*args):
            os.kill(daemon.process.pid, signal.SIGSTOP)  # it takes the request, and never answers
            os.kill(daemon.process.pid, signal.SIGKILL)
            return load(*args)

        monkeypatch.setattr(port, "load", load_and_die)
        got = whole(model, connector, ids)
        assert agree(got, want)
        assert got[2][0].recomputed == 100
        monkeypatch.undo()
        daemon.process.wait()
        daemon.restart()
        deadline = time.monotonic() + SAFETY_S
        while not connector._context.port.client.connect():
            assert time.monotonic() < deadline
        assert agree(whole(model, connector, ids), want)
        got = whole(model, connector, ids)
        assert agree(got, want)
        assert got[2][0].tokens_l2 == 96


def test_corrupted_records_are_recomputed(model, tmp_path) -> None:
    """Flipped bits on disk: the load fails, the prefix is computed, the output stays."""
    ids = prompt(100)
    with DaemonProcess(tmp_path, l3=True) as daemon, connect(model, daemon, "") as connector:
        want = expected(model, ids)
        whole(model, connector, ids)
        assert daemon.stop() == 0
        frames = max((p for p in (tmp_path / "l3").rglob("*") if p.is_file()), key=lambda p: p.stat().st_blocks)
        data = bytearray(frames.read_bytes())
        for at in range(2048, len(data), 4096):
            data[at] ^= 0xFF
        frames.write_bytes(data)
        daemon.restart()
        got = whole(model, connector, ids)
        assert agree(got, want)
        assert got[2][0].recomputed == 100
        assert connector.counters.loads_failed == 1
        got = whole(model, connector, ids)  # it was stored again
        assert agree(got, want)
        assert got[2][0].tokens_l2 == 96


def test_small_l2_and_many_prompts(model, tmp_path) -> None:
    """L2 far smaller than what is stored: whatever is left of a prompt, the output is right."""
    with DaemonProcess(tmp_path, ["l2.size=1MiB"]) as daemon, connect(model, daemon, "") as connector:
        prompts = [prompt(100, seed) for seed in range(40)]
        for ids in (*prompts[:20], *prompts[:4], *prompts[20:], *prompts[::7]):
            assert agree(whole(model, connector, ids, new=3), expected(model, ids, new=3))
        assert daemon.process.poll() is None


ENGINE = """
import sys, torch
sys.path.insert(0, sys.argv[2])
torch.set_num_threads(1)
from tests.transformers_world import prompt, tiny_llama
from hicache_client.connectors.transformers import HiCacheConnector
connector = HiCacheConnector(tiny_llama(), runtime_dir=sys.argv[1], salt="killed", pool_tokens=1024)
connector.generate(prompt(100), max_new_tokens=2)
print("stored", flush=True)
while True:
    connector.generate(prompt(100, 5), max_new_tokens=400)
"""


def test_engine_killed_in_a_request(model, daemon) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", ENGINE, str(daemon.runtime_dir), str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as engine:
        assert engine.stdout.readline() == b"stored\n"
        engine.kill()
    ids = prompt(100)
    with connect(model, daemon, "killed") as connector:
        got = whole(model, connector, ids)
        assert agree(got, expected(model, ids))
        assert got[2][0].tokens_l2 == 96

"""Whatever happens to daemon or engine: every request is answered rightly, and hits come back by themselves."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from engine import EXACT, Engine, compare_one

from tests.daemon_harness import DaemonProcess

PROMPTS = [[(seed * 977 + i * 7919) % 3900 + 50 for i in range(400 + 37 * seed)] for seed in range(6)]
ARGUMENTS: dict[str, Any] = {"block_size": 32}
REQUESTS = [{"id": f"p{i}", "tokens": prompt, "max_tokens": 12, "arrive": 2 * i} for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What the model alone answers."""
    with Engine("llama", None, enable_prefix_caching=False, **ARGUMENTS) as engine:
        return engine.run(REQUESTS)


def check(expected: dict[str, Any], got: dict[str, Any], what: str) -> None:
    for name, mine in expected.items():
        compare_one(EXACT, mine, got[name], f"{what}, {name}")


def hits(engine: Engine, seconds: float = 20.0) -> int:
    """Run until something is served by the daemon again; cached tokens then."""
    deadline = time.monotonic() + seconds
    while True:
        engine.ask("settle")
        engine.ask("reset")
        cached = sum(each["cached"] for each in engine.run(REQUESTS).values())
        if cached or time.monotonic() > deadline:
            return cached
        time.sleep(0.2)


def test_two_engines_share_one_daemon(daemon: DaemonProcess, expected: dict[str, Any]) -> None:
    extra = {"runtime_dir": str(daemon.runtime_dir)}
    with Engine("llama", extra, **ARGUMENTS) as first, Engine("llama", extra, **ARGUMENTS) as second:
        check(expected, first.run(REQUESTS), "first engine")
        first.ask("settle")
        got = second.run(REQUESTS)
        check(expected, got, "second engine")
        assert [got[each["id"]]["cached"] for each in REQUESTS] == [len(each["tokens"]) - 1 for each in REQUESTS]
        first.kill()
        second.ask("reset")
        check(expected, second.run(REQUESTS), "after the first was killed")
    with Engine("llama", extra, **ARGUMENTS) as third:
        got = third.run(REQUESTS)
        check(expected, got, "a restarted engine")
        assert all(got[each["id"]]["cached"] == len(each["tokens"]) - 1 for each in REQUESTS)


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4])
def test_daemon_killed_in_the_middle_of_requests(
    delay_s: float, daemon: DaemonProcess, expected: dict[str, Any]
) -> None:
    """At six times: while requests are looked up, loaded, decoded, stored."""
    with Engine("llama", {"runtime_dir": str(daemon.runtime_dir)}, **ARGUMENTS) as engine:
        check(expected, engine.run(REQUESTS), "cold")
        engine.ask("settle")
        engine.ask("reset")
        engine.start("run", requests=REQUESTS, step_s=0.01)
        time.sleep(delay_s)
        daemon.kill()
        check(expected, engine.finish()["outputs"], f"killed after {delay_s} s")
        engine.ask("reset")
        check(expected, engine.run(REQUESTS), "without a daemon")
        daemon.restart()
        assert hits(engine) > 0, "hits come back without restarting vLLM"
        engine.ask("reset")
        got = engine.run(REQUESTS)
        check(expected, got, "after the daemon is back")
        assert engine.ask("settle")["idle"]
        assert not engine.ask("stats").get("caught")


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.1])
def test_daemon_stopped_in_the_middle_of_requests(
    delay_s: float, daemon: DaemonProcess, expected: dict[str, Any]
) -> None:
    """SIGSTOP: it neither answers nor dies. Then it goes on where it was."""
    extra = {"runtime_dir": str(daemon.runtime_dir), "load_timeout_s": 1.0}
    with Engine("llama", extra, **ARGUMENTS) as engine:
        check(expected, engine.run(REQUESTS), "cold")
        engine.ask("settle")
        engine.ask("reset")
        engine.start("run", requests=REQUESTS, step_s=0.01)
        time.sleep(delay_s)
        os.kill(daemon.process.pid, signal.SIGSTOP)
        begun = time.monotonic()
        check(expected, engine.finish()["outputs"], f"stopped after {delay_s} s")
        assert time.monotonic() - begun < 60
        os.kill(daemon.process.pid, signal.SIGCONT)
        engine.ask("reset")
        check(expected, engine.run(REQUESTS), "going on")
        assert hits(engine) > 0
        assert engine.ask("settle")["idle"]


def test_daemon_absent_at_start_joins_later(tmp_path: Path, expected: dict[str, Any]) -> None:
    with DaemonProcess(tmp_path, ["l2.size=256MiB"]) as daemon:
        daemon.kill()
        with Engine("llama", {"runtime_dir": str(daemon.runtime_dir)}, **ARGUMENTS) as engine:
            assert engine.said("running uncached"), "one line says so"
            check(expected, engine.run(REQUESTS), "without a daemon")
            daemon.restart()
            assert hits(engine) > 0
            check(expected, engine.run(REQUESTS), "joined")


def test_a_daemon_restarted_with_its_disk_serves_what_it_had(tmp_path: Path, expected: dict[str, Any]) -> None:
    with DaemonProcess(tmp_path, ["l2.size=64MiB"], l3=True) as daemon:  # noqa: SIM117
        with Engine("llama", {"runtime_dir": str(daemon.runtime_dir)}, **ARGUMENTS) as engine:
            check(expected, engine.run(REQUESTS), "cold")
            engine.ask("settle")
            daemon.stop()
            daemon.restart()
            assert hits(engine) > 0
            engine.ask("reset")
            engine.ask("stats")
            check(expected, engine.run(REQUESTS), "from L2, brought from L3")
            assert engine.ask("stats")["tokens_l2"] > 0

"""The daemon is killed or stopped at each point of a request's life: what is said stays right, and hits come back."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import EXACT, Engine, compare_one
from phases import PHASES

from tests.daemon_harness import DaemonProcess

BLOCK = 32  # of which KNOWN leave 22 in the last one: enough to be stored
KNOWN = [[(seed * 977 + i * 7919) % 3900 + 50 for i in range(310 + 32 * seed)] for seed in range(3)]
NEW = [[(seed * 661 + i * 6007) % 3900 + 50 for i in range(290 + 31 * seed)] for seed in range(3)]


def requests(round_number: int) -> list[dict[str, Any]]:
    """Two that the daemon knows and one that it does not, so that loads, decodes and stores fall together."""
    new = [round_number % 7 + 10, *NEW[round_number % 3]]
    prompts = [KNOWN[0], new, KNOWN[1], KNOWN[2][:200] + new[:90]]
    return [{"id": f"p{i}", "tokens": each, "max_tokens": 10, "arrive": 2 * i} for i, each in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Any]]:
    """What the model alone answers, by round."""
    with Engine("llama", None, block_size=BLOCK, enable_prefix_caching=False) as engine:
        return [engine.run(requests(number)) for number in range(len(PHASES))]


@pytest.fixture(scope="module", params=[False, True], ids=["steps", "overlapping"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One engine that lives through everything, and its daemon."""
    root: Path = tmp_path_factory.mktemp("phases")
    with DaemonProcess(root, ["l2.size=128MiB"]) as daemon:
        extra = {"runtime_dir": str(daemon.runtime_dir), "load_timeout_s": 1.0}
        with Engine("llama", extra, block_size=BLOCK, async_scheduling=request.param) as engine:
            yield engine, daemon


def warm(engine: Engine) -> None:
    """The daemon knows `KNOWN` and the engine's own cache is empty. Fails if there are no hits."""
    for _ in range(40):
        engine.run([{"id": f"k{i}", "tokens": each, "max_tokens": 1} for i, each in enumerate(KNOWN)])
        engine.ask("settle")
        engine.ask("reset")
        got = engine.run([{"id": "k", "tokens": KNOWN[0], "max_tokens": 1}])
        engine.ask("settle")
        engine.ask("reset")
        if got["k"]["cached"] == len(KNOWN[0]) - 1:
            return
    raise AssertionError("no hits any more")


def check(expected: dict[str, Any], got: dict[str, Any], what: str) -> None:
    assert set(got) == set(expected)
    for name, mine in expected.items():
        compare_one(EXACT, mine, got[name], f"{what}, {name}")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("blow", ["kill", "stop"])
def test_the_daemon_is_struck(phase: str, blow: str, world: Any, expected: list[dict[str, Any]]) -> None:
    engine, daemon = world
    number = PHASES.index(phase)
    warm(engine)
    kind = signal.SIGKILL if blow == "kill" else signal.SIGSTOP
    engine.ask("arm", phase=phase, pid=daemon.process.pid, number=int(kind))
    try:
        check(expected[number], engine.run(requests(number)), f"{blow} at {phase}")
        assert engine.ask("disarm")["struck"] == 1, "the point was never reached"
    finally:
        if blow == "kill":
            daemon.kill()
            daemon.restart()
        else:
            os.kill(daemon.process.pid, signal.SIGCONT)
    check(expected[number], engine.run(requests(number)), "once it is back")
    warm(engine)
    check(expected[number], engine.run(requests(number)), "with hits again")
    assert engine.ask("settle")["idle"], "blocks or requests are left over"
    assert not engine.ask("stats").get("caught"), "\n".join(engine.log[-40:])

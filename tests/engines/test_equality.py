"""With the cache on, an engine says what it says with the cache off: random conversations on every path."""

from pathlib import Path
from typing import Any

import pytest
from engine import Engine, assert_equal
from workload import alone

from tests.daemon_harness import DaemonProcess

# Chunked prefill, and a pool for about two of the longest requests: preemption.
SMALL = {"max_model_len": 800, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 3 << 20}
CASES = {
    "llama-32": ("llama", 14, {"block_size": 32, **SMALL}),
    "llama-128": ("llama", 14, {"block_size": 128, **SMALL}),
    "mla": ("mla", 14, {**SMALL, "kv_cache_memory_bytes": 5 << 20}),
    "smollm2": ("smollm2", 6, {"block_size": 32, "kv_cache_memory_bytes": 96 << 20, "longest": 400}),
}


def play(engine: Engine, model: str, rounds: list[Any], what: str) -> dict[str, int]:
    """All rounds, vLLM's own cache forgotten before each; what the connector counted in them."""
    total: dict[str, int] = {}
    for number, (requests, expected) in enumerate(rounds):
        engine.ask("reset")
        got = engine.run(requests)
        assert_equal(model, finished(requests, expected), got, f"{what}, round {number}")
        for name, n in engine.ask("stats").items():
            total[name] = total.get(name, 0) + n
    assert engine.ask("settle")["idle"], "blocks or requests are left over"
    return total


def finished(requests: list[dict[str, Any]], expected: dict[str, Any]) -> dict[str, Any]:
    """Aborted requests end where they end."""
    whole = {each["id"] for each in requests if each["abort"] is None}
    return {name: output for name, output in expected.items() if name in whole}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_random_conversations(case: str, tmp_path: Path) -> None:
    model, rounds_count, arguments = CASES[case]
    rounds = alone(model, 7, rounds_count, 16, **arguments)
    arguments.pop("longest", None)
    preempted = 0
    with DaemonProcess(tmp_path, ["l2.size=512MiB"]) as daemon:
        with Engine(model, {"runtime_dir": str(daemon.runtime_dir)}, **arguments) as engine:
            first = play(engine, model, rounds, "first time")
            again = play(engine, model, rounds, "all known")
            preempted = engine.ask("run", requests=[])["preemptions"]
        status = daemon.describe("l2")
    assert first.get("tokens_l2", 0) > 0, "later turns of a conversation are found"
    assert again["tokens_l2"] > first["tokens_l2"]
    for counted in (first, again):
        assert not counted.get("loads_failed")
        assert not counted.get("caught")
        assert not counted.get("tokens_l3")
    assert status
    if "max_num_batched_tokens" in arguments:
        assert preempted > 0, "the pool is too large for this test"


@pytest.mark.timeout(600)
def test_random_conversations_served_from_disk(tmp_path: Path) -> None:
    arguments = {"block_size": 32, **SMALL}
    rounds = alone("llama", 8, 8, 16, **arguments)
    overrides = ["l2.size=8MiB", "l3.size=1GiB"]
    with DaemonProcess(tmp_path, overrides, l3=True) as daemon:
        with Engine("llama", {"runtime_dir": str(daemon.runtime_dir)}, **arguments) as engine:
            play(engine, "llama", rounds, "first time")
            again = play(engine, "llama", rounds, "all known")
            assert again.get("tokens_l3", 0) > 0
        daemon.stop()
        daemon.restart()
        with Engine("llama", {"runtime_dir": str(daemon.runtime_dir)}, **arguments) as engine:
            restarted = play(engine, "llama", rounds, "after a restart of both")
            assert restarted.get("tokens_l3", 0) > 0
            assert not restarted.get("loads_failed")

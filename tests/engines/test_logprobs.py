"""What tells a restored cache from a wrong one: log-probabilities with one token left to compute.

Equal greedy tokens prove little on random weights. So the last token of a prompt is computed on loaded KV and the
log-probabilities are compared; and with a layer that is not restored the same comparison must fail.
"""

from pathlib import Path
from typing import Any

import pytest
from engine import EXACT, Engine

from tests.daemon_harness import DaemonProcess

PROMPT = [(i * 7919) % 3900 + 50 for i in range(641)]
# 641 = 20·32 + 1 = 5·128 + 1 = 40·16 + 1: all but one token can be loaded
CASES = {"llama-32": ("llama", {"block_size": 32}), "llama-128": ("llama", {"block_size": 128}), "mla": ("mla", {})}


def first(output: dict[str, Any]) -> float:
    """Log-probability of the first token."""
    value: float = output["logprobs"][0][0]
    return value


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_one_token_left(case: str, async_scheduling: bool, tmp_path: Path) -> None:
    """With overlapping steps loads run between them, else inside the step: both are tried."""
    model, arguments = CASES[case]
    tolerance = EXACT / 10
    with (
        DaemonProcess(tmp_path, ["l2.size=256MiB"]) as daemon,
        Engine(
            model, {"runtime_dir": str(daemon.runtime_dir)}, async_scheduling=async_scheduling, **arguments
        ) as engine,
    ):
        cold = engine.one(PROMPT)
        assert cold["cached"] == 0
        engine.ask("reset")
        hit = engine.one(PROMPT)
        assert hit["cached"] == len(PROMPT) - 1
        assert first(hit) == pytest.approx(first(cold), abs=tolerance)
        assert hit["tokens"] == cold["tokens"]
        engine.ask("reset")
        engine.ask("spoil", layer=1)
        spoiled = engine.one(PROMPT)
        assert spoiled["cached"] == len(PROMPT) - 1
        assert abs(first(spoiled) - first(cold)) > tolerance, "a layer that is not restored must show"
        engine.ask("reset")
        engine.ask("spoil", layer=None)
        again = engine.one(PROMPT)
        assert first(again) == pytest.approx(first(cold), abs=tolerance)


@pytest.mark.parametrize("tail", [1, 2, 17, 31])
def test_resuming_inside_a_block(tail: int, daemon: DaemonProcess) -> None:
    """Two prompts part inside a block: what they share is loaded to the token."""
    with Engine("llama", {"runtime_dir": str(daemon.runtime_dir)}, block_size=32) as engine:
        engine.one(PROMPT)
        engine.ask("settle")
        shared = PROMPT[: 10 * 32 + tail]
        other = shared + [3000 + i for i in range(40)]
        engine.ask("reset")
        got = engine.one(other)
        assert got["cached"] == len(shared)
    with Engine("llama", None, block_size=32, enable_prefix_caching=False) as alone:
        expected = alone.one(other)
    assert got["tokens"] == expected["tokens"]
    assert got["logprobs"][0] == pytest.approx(expected["logprobs"][0], abs=EXACT)


def test_the_last_block_of_a_conversation_is_kept_though_it_is_not_full(daemon: DaemonProcess) -> None:
    with Engine("llama", {"runtime_dir": str(daemon.runtime_dir)}, block_size=128) as engine:
        turn = engine.one(PROMPT[:300], max_tokens=20)
        engine.ask("settle")
        engine.ask("reset")
        follow = PROMPT[:300] + turn["tokens"][0] + [77, 78, 79]
        got = engine.one(follow)
        assert got["cached"] == 300 + 19, "KV of the last output token was never computed"
    with Engine("llama", None, block_size=128, enable_prefix_caching=False) as alone:
        assert alone.one(follow)["tokens"] == got["tokens"]

"""What tells a restored cache from a wrong one: log-probabilities with one token left to compute.

Equal greedy tokens prove little on random weights. So the last token of a prompt is computed on loaded KV and its
log-probability is compared with that on KV which vLLM kept itself: the same sums of the same numbers. With a layer
that is not restored the same comparison must fail.
"""

from pathlib import Path
from typing import Any

import pytest
from engine import EXACT, Engine

from tests.daemon_harness import DaemonProcess

PROMPT = [(i * 7919) % 3900 + 50 for i in range(641)]
# 641 = 20·32 + 1 = 5·128 + 1 = 40·16 + 1: all but one token can be loaded
CASES = {
    "llama-32": ("llama", {"block_size": 32}),
    "llama-32-async": ("llama", {"block_size": 32, "async_scheduling": True}),
    "llama-128": ("llama", {"block_size": 128}),
    "mla": ("mla", {}),
}


def first(output: dict[str, Any]) -> float:
    """Log-probability of the first token."""
    value: float = output["logprobs"][0][0]
    return value


@pytest.mark.parametrize("case", CASES)
def test_one_token_left(case: str, tmp_path: Path) -> None:
    """With overlapping steps loads run between them, else inside the step: both are tried."""
    model, arguments = CASES[case]
    tolerance = 1e-5
    with (
        DaemonProcess(tmp_path, ["l2.size=256MiB"]) as daemon,
        Engine(model, {"runtime_dir": str(daemon.runtime_dir)}, **arguments) as engine,
    ):
        cold = engine.one(PROMPT)
        assert cold["cached"] == 0
        own = engine.one(PROMPT)
        assert own["cached"] == len(PROMPT) - 1
        if model != "mla":  # of which vLLM keeps less than it could
            assert not engine.ask("stats").get("loads")
        engine.ask("reset")
        hit = engine.one(PROMPT)
        assert hit["cached"] == len(PROMPT) - 1
        assert engine.ask("stats")["loads"]
        assert first(hit) == pytest.approx(first(own), abs=tolerance)
        assert first(hit) == pytest.approx(first(cold), abs=5 * EXACT)
        assert hit["tokens"] == own["tokens"]
        engine.ask("reset")
        engine.ask("spoil", layer=1)
        spoiled = engine.one(PROMPT)
        assert spoiled["cached"] == len(PROMPT) - 1
        assert abs(first(spoiled) - first(own)) > 10 * tolerance, "a layer that is not restored must show"
        engine.ask("reset")
        engine.ask("spoil", layer=None)
        again = engine.one(PROMPT)
        assert first(again) == pytest.approx(first(own), abs=tolerance)


@pytest.fixture(scope="module")
def alone() -> Any:
    with Engine("llama", None, block_size=128, enable_prefix_caching=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with (
        DaemonProcess(tmp_path_factory.mktemp("partial"), ["l2.size=256MiB"]) as daemon,
        Engine("llama", {"runtime_dir": str(daemon.runtime_dir)}, block_size=128) as engine,
    ):
        engine.one(PROMPT)
        engine.ask("settle")
        yield engine


@pytest.mark.parametrize("tail", [1, 2, 17, 127])
def test_resuming_inside_a_block(tail: int, alone: Engine, cached: Engine) -> None:
    """Two prompts part inside a block: what they share is loaded to the token."""
    shared = PROMPT[: 2 * 128 + tail]
    other = shared + [3000 + i for i in range(40)]
    cached.ask("reset")
    got, expected = cached.one(other), alone.one(other)
    assert got["cached"] == len(shared)
    assert got["tokens"] == expected["tokens"]
    assert got["logprobs"][0] == pytest.approx(expected["logprobs"][0], abs=EXACT)


def test_the_last_block_of_a_conversation_is_kept_though_it_is_not_full(alone: Engine, cached: Engine) -> None:
    question = [token + 1 for token in PROMPT[:300]]
    turn = cached.one(question, max_tokens=20)
    cached.ask("settle")
    cached.ask("reset")
    follow = question + turn["tokens"][0] + [77, 78, 79]
    got = cached.one(follow)
    assert got["cached"] == 300 + 19, "KV of the last output token was never computed"
    assert alone.one(follow)["tokens"] == got["tokens"]

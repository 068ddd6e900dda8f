"""What vLLM can do with a request, with the cache on: handled rightly, or not cached."""

import random
from pathlib import Path
from typing import Any

import pytest
from engine import EXACT, Engine, EngineEnded, compare_one
from models import TINY, path_of
from workload import words

from tests.daemon_harness import DaemonProcess

PROMPT = words(random.Random(3), 330)
ARGUMENTS: dict[str, Any] = {"block_size": 32}


def extra(daemon: DaemonProcess, **more: Any) -> dict[str, Any]:
    return {"runtime_dir": str(daemon.runtime_dir)} | more


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One daemon and one engine for what does not disturb each other."""
    with (
        DaemonProcess(tmp_path_factory.mktemp("features"), ["l2.size=256MiB"]) as daemon,
        Engine("llama", extra(daemon), scheduling_policy="priority", **ARGUMENTS) as engine,
    ):
        engine.one(PROMPT, max_tokens=40)
        engine.ask("settle")
        yield engine


@pytest.fixture(scope="module")
def alone() -> Any:
    with Engine("llama", None, enable_prefix_caching=False, scheduling_policy="priority", **ARGUMENTS) as engine:
        yield engine


def same(alone: Engine, shared: Engine, requests: list[dict[str, Any]]) -> dict[str, Any]:
    shared.ask("reset")
    expected, got = alone.run(requests), shared.run(requests)
    for name, mine in expected.items():
        compare_one(EXACT, mine, got[name], name)
    return got


def test_parallel_sampling(alone: Engine, shared: Engine) -> None:
    got = same(alone, shared, [{"id": "n", "tokens": PROMPT, "n": 3}])
    assert len(got["n"]["tokens"]) == 3


def test_prompt_logprobs_are_computed_not_loaded(alone: Engine, shared: Engine) -> None:
    request = [{"id": "p", "tokens": PROMPT, "prompt_logprobs": 1}]
    got, expected = same(alone, shared, request)["p"], alone.run(request)["p"]
    assert got["cached"] == 0
    assert len(got["prompt_logprobs"]) == len(PROMPT)
    for mine, theirs in zip(expected["prompt_logprobs"][1:], got["prompt_logprobs"][1:], strict=True):
        assert mine == pytest.approx(theirs, abs=EXACT)


def test_another_salt_is_another_cache(alone: Engine, shared: Engine) -> None:
    salted = {"id": "s", "tokens": PROMPT, "salt": "somebody"}
    assert same(alone, shared, [salted])["s"]["cached"] == 0
    shared.ask("settle")
    assert same(alone, shared, [salted])["s"]["cached"] == len(PROMPT) - 1
    assert same(alone, shared, [salted | {"salt": "somebody else"}])["s"]["cached"] == 0


def test_priorities(alone: Engine, shared: Engine) -> None:
    requests = [{"id": f"q{i}", "tokens": PROMPT[: 100 + 30 * i], "priority": 5 - i, "arrive": i} for i in range(5)]
    got = same(alone, shared, requests)
    assert all(output["cached"] for output in got.values())


def test_a_short_prompt(alone: Engine, shared: Engine) -> None:
    for length in (1, 2, 15, 16, 17, 31, 32, 33):
        same(alone, shared, [{"id": f"s{length}", "tokens": PROMPT[:length]}])


def test_reset_with_the_connector_serves_nothing_old(daemon: DaemonProcess) -> None:
    with Engine("llama", extra(daemon), **ARGUMENTS) as engine:
        engine.one(PROMPT)
        engine.ask("settle")
        engine.ask("reset", connector=True)
        assert engine.one(PROMPT)["cached"] == 0
        engine.ask("settle")
        engine.ask("reset")
        assert engine.one(PROMPT)["cached"] == len(PROMPT) - 1, "what was stored since then is served"


@pytest.mark.parametrize(
    "changes",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}},
        {"async_scheduling": True},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 96, "long_prefill_token_threshold": 64},
        {"enforce_eager": False},
        {"environ": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}},
    ],
    ids=["speculation", "async", "no-own-cache", "chunks", "compiled", "processes"],
)
def test_ways_to_run(changes: dict[str, Any], daemon: DaemonProcess, alone: Engine) -> None:
    repeating = (PROMPT[:40] * 9)[:330]
    requests = [
        {"id": "a", "tokens": PROMPT, "max_tokens": 30},
        {"id": "b", "tokens": repeating, "max_tokens": 60},
        {"id": "c", "tokens": PROMPT[:200], "max_tokens": 5, "arrive": 3},
    ]
    expected = alone.run(requests)
    with Engine("llama", extra(daemon), **ARGUMENTS, **changes) as engine:
        for what in ("cold", "warm"):
            got = engine.run(requests)
            for name, mine in expected.items():
                compare_one(EXACT, mine, got[name], f"{what} {name}")
            engine.ask("settle")
            if changes.get("enable_prefix_caching", True):
                engine.ask("reset")
        assert got["a"]["cached"] == len(PROMPT) - 1
    lines = [line for line in engine.log if "hicache" in line and "Traceback" in line]
    assert not lines


@pytest.mark.parametrize("family", ["gemma3", "mistral-swa", "qwen3next"])
def test_kinds_of_cache_that_are_not_carried_run_uncached(family: str, daemon: DaemonProcess) -> None:
    assert family in TINY
    with Engine(family, None, enable_prefix_caching=False) as bare:
        expected = bare.one(PROMPT)
    with Engine(family, extra(daemon), enable_prefix_caching=False) as engine:
        assert len(engine.said("hicache: running uncached")) == 1
        assert "is not carried yet" in engine.said("hicache: running uncached")[0]
        got = engine.one(PROMPT)
        assert got["tokens"] == expected["tokens"]
        assert engine.one(PROMPT)["cached"] == 0
    if family == "gemma3":
        with pytest.raises(EngineEnded, match="is not carried yet"):
            Engine(family, extra(daemon, on_error="refuse"))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"rutime_dir": "/x"}, "did you mean 'runtime_dir'"),
        ({"load_timeout_s": "soon"}, "load_timeout_s: expected a number"),
        ({"page_tokens": 48}, "page_tokens is 48, expected 32"),
        ({"runtime_dir": "/nowhere/at/all"}, "no daemon at /nowhere/at/all"),
    ],
)
def test_what_does_not_fit_is_said_once_and_refused_on_demand(
    options: dict[str, Any], line: str, daemon: DaemonProcess
) -> None:
    given = extra(daemon) | options
    if "load_timeout_s" not in options:
        with Engine("llama", given, **ARGUMENTS) as engine:
            assert len(engine.said(line)) == 1, engine.log
            assert engine.one(PROMPT)["tokens"]
    with pytest.raises(EngineEnded, match=line):
        Engine("llama", given | {"on_error": "refuse"}, **ARGUMENTS)


def test_a_page_that_is_larger_than_l2(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, ["l2.size=64KiB"]) as daemon, Engine("llama", extra(daemon), **ARGUMENTS) as engine:
        assert engine.said("one page of this model takes")
        assert engine.one(PROMPT)["tokens"]


@pytest.mark.parametrize("model", ["llama", "mla"])
def test_tensor_parallel(model: str, tmp_path: Path) -> None:
    """Two ranks: each its own shard; of a latent cache, which both have, one copy."""
    arguments = {} if model == "mla" else ARGUMENTS
    ranks = {
        "tensor_parallel_size": 2,
        "environ": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    }
    with DaemonProcess(tmp_path, ["l2.size=256MiB"]) as daemon:  # noqa: SIM117
        with Engine(model, extra(daemon), **arguments, **ranks) as engine:
            cold = engine.one(PROMPT)
            engine.ask("settle", seconds=1.0)
            engine.ask("reset")
            hit = engine.one(PROMPT)
            compare_one(0.06 if model == "mla" else EXACT, cold, hit, model)
            assert hit["cached"] == len(PROMPT) - 1 - (0 if model == "llama" else (len(PROMPT) - 1) % 16 * 0)
            sessions = daemon.describe("sessions")["sessions"]
    workers = [each for each in sessions if each["memory"]]
    askers = [each for each in sessions if not each["memory"]]
    assert len(workers) == 2
    assert len(askers) == (1 if model == "mla" else 2)


def test_the_models_are_made_once() -> None:
    before = path_of("llama").stat().st_mtime
    assert path_of("llama").stat().st_mtime == before

"""`vllm serve` under a recorded load: only 200s, what it says without hicache, and the hits that a replay predicts.

data/conversation-300.jsonl is the beginning of Mooncake's conversation trace (Apache-2.0). Each of its blocks of 512
tokens becomes one of 32, so that a model for tests can serve it.
"""

import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine import CONNECTOR, environment
from models import path_of

from tests.daemon_harness import DaemonProcess

TRACE = Path(__file__).parent / "data" / "conversation-300.jsonl"
SCALE, BLOCK, LONGEST = 16, 32, 640
MIN_LOAD = 16


def prompts() -> list[list[int]]:
    """Token ids of each request of the trace."""
    found = []
    for line in TRACE.read_text().splitlines():
        request = json.loads(line)
        length = max(1, min(LONGEST, request["input_length"] // SCALE))
        text: list[int] = []
        for block in request["hash_ids"]:
            rng = random.Random(block)
            text += [rng.randrange(10, 4000) for _ in range(BLOCK)]
        found.append(text[:length])
    return found


def predicted(sequences: list[list[int]]) -> list[int]:
    """Hit tokens of each request if all before it are kept: the longest common prefix, one token left to compute."""
    hits = []
    for at, mine in enumerate(sequences):
        longest = 0
        for theirs in sequences[:at]:
            if mine[:longest] == theirs[:longest]:
                shared = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
                longest = max(longest, min(len(mine), len(theirs)) if shared is None else shared)
        usable = min(longest, len(mine) - 1)
        hits.append(usable if usable >= MIN_LOAD else 0)
    return hits


@contextmanager
def server(port: int, log: Path, extra: dict[str, Any] | None) -> Iterator[str]:
    """An OpenAI-compatible server; its base address."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path_of("llama"))]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "1024", "--block-size", str(BLOCK), "--max-num-seqs", "8"]
    command += ["--kv-cache-memory-bytes", str(64 << 20), "--no-enable-prefix-caching"]
    command += ["--enable-prompt-tokens-details", "--uvicorn-log-level", "warning"]
    if extra is not None:
        config = CONNECTOR | {"kv_connector_extra_config": extra}
        command += ["--kv-transfer-config", json.dumps(config)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="1"), stdout=output, stderr=output
        )
    base = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{base}/health", timeout=2)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        yield base
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def complete(base: str, tokens: list[int]) -> tuple[str, int]:
    """(text, cached tokens) of one completion; anything but a 200 raises."""
    body = {"model": "m", "prompt": tokens, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200
        found = json.load(answer)
    details = found["usage"].get("prompt_tokens_details") or {}
    return found["choices"][0]["text"], details.get("cached_tokens") or 0


def metric(base: str, name: str, **labels: str) -> float:
    """Sum of a counter's samples with these labels."""
    text = urllib.request.urlopen(f"{base}/metrics", timeout=10).read().decode()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((f"{name}{{", f"{name}_total{{")) and all(each in line for each in wanted)
    )


@pytest.mark.timeout(900)
def test_a_recorded_load_over_http(tmp_path: Path) -> None:
    requests = prompts()
    assert len(requests) == 300
    port = 18000 + os.getpid() % 10000
    with server(port, tmp_path / "off.log", None) as base, ThreadPoolExecutor(4) as threads:
        expected = [text for text, _ in threads.map(lambda tokens: complete(base, tokens), requests)]
    with DaemonProcess(tmp_path, ["l2.size=1GiB"]) as daemon:
        extra = {"runtime_dir": str(daemon.runtime_dir), "lookup_timeout_s": 5.0}
        with server(port + 1, tmp_path / "on.log", extra) as base:
            one_by_one = [complete(base, tokens) for tokens in requests]
            hits = [cached for _, cached in one_by_one]
            with ThreadPoolExecutor(4) as threads:
                together = list(threads.map(lambda tokens: complete(base, tokens), requests))
            assert metric(base, "vllm:hicache_hit_tokens", tier="l2") == sum(hits) + sum(c for _, c in together)
            assert metric(base, "vllm:hicache_errors") == 0
            assert metric(base, "vllm:external_prefix_cache_hits") == sum(hits) + sum(c for _, c in together)
        counters = daemon.describe("status")["cache"]["counters"]
    same = [text for text, _ in one_by_one]
    assert sum(a != b for a, b in zip(expected, same, strict=True)) == 0
    assert sum(a != b for a, b in zip(expected, [text for text, _ in together], strict=True)) == 0
    assert hits == predicted(requests)
    assert all(
        cached == len(tokens) - 1
        for (_, cached), tokens in zip(together, requests, strict=True)
        if len(tokens) > MIN_LOAD
    )
    assert counters["tokens_l2"] >= sum(hits), "the daemon promised what vLLM used"

"""A router that is not ours follows the daemon: Dynamo's standalone indexer (`ai-dynamo-runtime`).

Skipped unless `HICACHE_DYNAMO_PYTHON` names an interpreter that has it, by itself or from an environment of its own.
"""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest

from tests.daemon_harness import PAGE_TOKENS, SAFETY_S, DaemonProcess, RawClient, tokens

PYTHON = os.environ.get("HICACHE_DYNAMO_PYTHON", "")
SMALL_L2 = "l2.size=1MiB"  # 170 pages
pytestmark = pytest.mark.skipif(not PYTHON, reason="HICACHE_DYNAMO_PYTHON names no interpreter with dynamo.indexer")


class Indexer:
    """`python -m dynamo.indexer` that subscribes to one daemon. A context manager: it is killed at the end."""

    def __init__(self, daemon: DaemonProcess, root: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [PYTHON, "-m", "dynamo.indexer", "--port", str(self.port), "--threads", "1"]
        self.log_path = root / f"indexer-{self.port}.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self._until(lambda: self._post("/health") is not None)
        registered = self._post(
            "/register",
            {
                "instance_id": 1,
                "endpoint": f"ipc://{daemon.runtime_dir}/events.sock",
                "replay_endpoint": f"ipc://{daemon.runtime_dir}/replay.sock",
                "model_name": "tiny",
                "block_size": PAGE_TOKENS,
            },
        )
        assert registered is not None, self.log_path.read_text()

    def matched(self, data: bytes) -> dict[str, int]:
        """Tokens of a prompt that the indexer says this daemon has, by the fastest tier that still matches."""
        answer = self._post("/query", {"token_ids": np.frombuffer(data, "<i4").tolist(), "model_name": "tiny"})
        assert answer is not None
        found = json.loads(answer)["instances"].get("1", {})
        return {name: found.get(name, 0) for name in ("longest_matched", "cpu", "disk")}

    def wait(self, data: bytes, **figures: int) -> None:
        """Until the figures are those: events travel on their own."""
        self._until(lambda: self.matched(data).items() >= figures.items(), lambda: f"{self.matched(data)}")

    def _post(self, path: str, body: dict[str, Any] | None = None) -> str | None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=SAFETY_S) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.URLError:
            return None

    def _until(self, condition: Any, story: Any = lambda: "") -> None:
        deadline = time.monotonic() + SAFETY_S
        while not condition():
            assert self.process.poll() is None, self.log_path.read_text()
            assert time.monotonic() < deadline, f"{story()}\n{self.log_path.read_text()}"
            time.sleep(0.05)

    def __enter__(self) -> "Indexer":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()


def daemon_of(root: Path, *more: str, l3: bool = False) -> DaemonProcess:
    return DaemonProcess(root, ["kv_events.enabled=true", *more], l3=l3)


def test_an_indexer_follows_stores_and_evictions(tmp_path: Path) -> None:
    prompts = [tokens(32 * PAGE_TOKENS, seed) for seed in range(6)]
    whole = 32 * PAGE_TOKENS
    with (
        daemon_of(tmp_path, SMALL_L2) as daemon,
        Indexer(daemon, tmp_path) as indexer,
        RawClient(daemon).open() as client,
    ):
        assert indexer.matched(prompts[0])["longest_matched"] == 0
        client.store(prompts[0], range(32))
        indexer.wait(prompts[0], longest_matched=whole, cpu=whole)
        assert indexer.matched(prompts[0][: whole * 2] + tokens(64, 99))["longest_matched"] == whole // 2
        for prompt in prompts[1:]:
            client.store(prompt, range(32))
        indexer.wait(prompts[-1], longest_matched=whole)
        left = client.lookup(prompts[0], lease=False).resumable_tokens
        assert 0 <= left < whole
        indexer.wait(prompts[0], longest_matched=left, cpu=left)
        for prompt in prompts:
            assert indexer.matched(prompt)["cpu"] == client.lookup(prompt, lease=False).l2_tokens


def test_an_indexer_tells_the_tiers_apart(tmp_path: Path) -> None:
    prompts = [tokens(32 * PAGE_TOKENS, seed) for seed in range(7)]
    with (
        daemon_of(tmp_path, SMALL_L2, l3=True) as daemon,
        Indexer(daemon, tmp_path) as indexer,
        RawClient(daemon).open() as client,
    ):
        for prompt in prompts:
            client.store(prompt, range(32))
            indexer.wait(prompt, disk=32 * PAGE_TOKENS)
        for prompt in prompts:
            match = client.lookup(prompt, lease=False)
            indexer.wait(prompt, cpu=match.l2_tokens, longest_matched=match.resumable_tokens)
        assert client.lookup(prompts[0], lease=False).l2_tokens < 32 * PAGE_TOKENS


@pytest.mark.parametrize("buffer", ["64MiB", "4KiB"])
def test_an_indexer_that_comes_late_is_told_everything(tmp_path: Path, buffer: str) -> None:
    """Nothing is stored after it came: the beat makes it ask. The small buffer holds none of what it asks for."""
    prompts = [tokens(16 * PAGE_TOKENS, seed) for seed in range(12)]
    with (
        daemon_of(tmp_path, SMALL_L2, f"kv_events.replay_buffer={buffer}") as daemon,
        RawClient(daemon).open() as client,
    ):
        for prompt in prompts:
            client.store(prompt, range(16))
        with Indexer(daemon, tmp_path) as indexer:
            for prompt in prompts:
                indexer.wait(prompt, longest_matched=client.lookup(prompt, lease=False).resumable_tokens)
            client.store(tokens(PAGE_TOKENS, 99), range(1))
            indexer.wait(tokens(PAGE_TOKENS, 99), longest_matched=PAGE_TOKENS)
        counters = daemon.describe()["kv_events"]["counters"]
        assert (counters["replays"] > 0, counters["snapshots"] > 0) == (buffer == "64MiB", buffer == "4KiB")


def test_an_indexer_gets_over_a_killed_daemon(tmp_path: Path) -> None:
    prompt, other = tokens(32 * PAGE_TOKENS, 1), tokens(4 * PAGE_TOKENS, 2)
    whole = 32 * PAGE_TOKENS
    with daemon_of(tmp_path, l3=True) as daemon, Indexer(daemon, tmp_path) as indexer:
        with RawClient(daemon).open() as client:
            client.store(prompt, range(32))
            indexer.wait(prompt, longest_matched=whole, disk=whole)
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        daemon.restart()
        indexer.wait(prompt, longest_matched=0)  # it has the pages, and does not know their tokens
        with RawClient(daemon).open() as client:
            client.store(other, range(4))
            indexer.wait(other, cpu=4 * PAGE_TOKENS)
            assert client.lookup(prompt, lease=False).l3_tokens == whole
            indexer.wait(prompt, longest_matched=whole, cpu=0, disk=whole)

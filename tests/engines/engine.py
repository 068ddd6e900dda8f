"""Starts engines for the tests and speaks to them; compares what they say."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from models import path_of
from nursery import Born, Nursery

HERE = Path(__file__).parent
START_S, ANSWER_S = 180.0, 300.0
CONNECTOR = {
    "kv_connector": "HiCacheConnector",
    "kv_connector_module_path": "hicache_client.connectors.vllm",
    "kv_role": "kv_both",
}
DTYPES = {"qwen3next": "bfloat16"}  # all that its kernel takes
TOLERANCE = {"qwen3next": 0.06}  # of log-probabilities
EXACT = 2e-3  # float32: other shapes of the same sums


def environment(**changes: str) -> dict[str, str]:
    """For an engine on this machine's CPUs, without a word to the outside."""
    ours = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",  # it would compile a line of the sampler, for seconds in each process
    }
    return os.environ | ours | changes


class Engine:
    """One vLLM process. A context manager: it is killed at the end."""

    def __init__(self, model: str, extra: dict[str, Any] | None = None, **arguments: Any) -> None:
        """`extra`: the connector's options; None: without the connector."""
        settings: dict[str, Any] = {
            "model": str(path_of(model)),
            "dtype": DTYPES.get(model, "float32"),
            "skip_tokenizer_init": model != "smollm2",
            "enforce_eager": True,
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 64 << 20,
            "disable_log_stats": False,
            "seed": 0,
        }
        changes = arguments.pop("environ", {})
        settings |= arguments
        if not settings["enforce_eager"]:
            changes = changes | {"TORCHDYNAMO_DISABLE": "0"}
        if model != "mla":
            settings.setdefault("block_size", 32)
        if extra is not None:
            settings["kv_transfer_config"] = CONNECTOR | {"kv_connector_extra_config": extra}
        self.log: list[str] = []
        self.process = _fresh(environment(**changes)) if changes else _nursery().bear(environment())
        threading.Thread(target=self._read_log, daemon=True).start()
        self._write(settings)
        self.ready = self._read(START_S)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())

    def _write(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        watch = threading.Timer(seconds, _kill, [self.process])
        watch.start()
        try:
            line = self.process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            self.process.wait()
            raise EngineEnded("\n".join(self.log[-60:]))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Do something, wait for its answer. Raises `EngineEnded`."""
        self._write({"op": op} | arguments)
        return self._read(ANSWER_S)

    def start(self, op: str, **arguments: Any) -> None:
        """Do something; `finish` gets the answer."""
        self._write({"op": op} | arguments)

    def finish(self) -> dict[str, Any]:
        """The answer of what was started."""
        return self._read(ANSWER_S)

    def run(self, requests: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Outputs by request id."""
        outputs: dict[str, Any] = self.ask("run", requests=requests, **more)["outputs"]
        return outputs

    def one(self, tokens: list[int], **more: Any) -> dict[str, Any]:
        """The output of one request."""
        found: dict[str, Any] = self.run([{"id": "one", "tokens": tokens} | more])["one"]
        return found

    def said(self, text: str) -> list[str]:
        """Lines of its log with this text."""
        return [line for line in self.log if text in line]

    def kill(self) -> None:
        """kill -9."""
        _kill(self.process)
        self.process.wait()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None and kind is None:
            self._write({"op": "exit"})
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        self.kill()


@functools.cache
def _nursery() -> Nursery:
    """The one of this test run."""
    return Nursery(environment())


def _fresh(environ: dict[str, str]) -> "subprocess.Popen[str]":
    """An engine that differs from its first import on, or whose processes start each from the beginning."""
    command = [sys.executable, str(HERE / "engine_main.py")]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def _kill(process: "subprocess.Popen[str] | Born") -> None:
    """It and its children."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class EngineEnded(Exception):
    """The engine's process is gone; the message is the end of its log."""


def assert_equal(model: str, expected: dict[str, Any], got: dict[str, Any], what: str) -> None:
    """Token for token, and log-probabilities within the precision of the sums. Where the two part, it must have been
    a tie, and what follows is another text."""
    tolerance = TOLERANCE.get(model, EXACT)
    for name, mine in expected.items():
        theirs = got[name]
        compare_one(tolerance, mine, theirs, f"{what}, {name}")


def compare_one(tolerance: float, mine: dict[str, Any], theirs: dict[str, Any], what: str) -> None:
    """One request's output."""
    tokens, others = mine["tokens"][0], theirs["tokens"][0]
    shared = min(len(tokens), len(others))
    for at in range(shared):
        if tokens[at] != others[at]:
            gap = min(mine["gaps"][at], theirs["gaps"][at])
            assert gap <= tolerance, f"{what}: token {at} is {others[at]}, not {tokens[at]}; the gap was {gap}"
            return
        off = abs(mine["logprobs"][0][at] - theirs["logprobs"][0][at])
        assert off <= tolerance, f"{what}: log-probability of token {at} is off by {off}"
    if mine["finished"] and theirs["finished"]:
        assert len(tokens) == len(others), what

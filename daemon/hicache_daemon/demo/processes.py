"""The demo's subprocesses: the daemon, and engines that speak JSON lines. All die with the demo."""

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hicache_daemon.demo.model import DemoImpossible

READY_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 40.0
_PR_SET_PDEATHSIG = 1
# Torch's threads spin at every barrier, by default so long that two of them on two cores shared with anything
# else (the daemon's copies, the next engine) take ten times as long. 10,000 rounds cost nothing on idle cores.
_SETTINGS = {"GOMP_SPINCOUNT": "10000", "PYTHONUNBUFFERED": "1"}
_DAEMON = """
from hicache_daemon.demo.processes import die_with_parent
from hicache_daemon.cli.app import serve_main
die_with_parent()
serve_main()
"""
_CONVERT = """
import pathlib, sys
from hicache_daemon.demo.model import convert
convert(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
"""


class DemoFailed(Exception):
    """Something that the demo started did not do what it should; the message says what and where its log is."""


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _tail(path: Path, lines: int = 12) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""


class Child:
    """A subprocess whose stderr goes to a log file."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=_SETTINGS | os.environ,
            )

    def failed(self, what: str) -> DemoFailed:
        """An error that carries the end of the log."""
        return DemoFailed(f"{self.name} {what}; the end of {self.log}:\n{_tail(self.log)}")

    def kill(self) -> None:
        """kill -9, whatever it is doing."""
        self.process.kill()
        self._gone()

    def end(self) -> None:
        """Whatever it takes, for the end of the demo."""
        if self.process.poll() is None:
            self.process.kill()
        self._gone()

    def _gone(self) -> None:
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Daemon(Child):
    """`hicached` with the demo's configuration."""

    def __init__(self, config: Path, runtime_dir: Path, log: Path) -> None:
        super().__init__("hicached", [sys.executable, "-c", _DAEMON, "--config", str(config)], log)
        self._runtime_dir = runtime_dir

    def wait_ready(self) -> None:
        """Return once it answers. Raises `DemoFailed`."""
        from hicache.base.errors import HiCacheError
        from hicache_client.probe import describe

        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            if self.process.poll() is not None:
                raise self.failed(f"ended with code {self.process.returncode}")
            try:
                if describe("status", self._runtime_dir, timeout_s=0.5):
                    return
            except HiCacheError as error:
                if time.monotonic() > deadline:
                    raise self.failed("did not become ready") from error

    def stop(self) -> None:
        """SIGTERM: drain and flush. Raises `DemoFailed` unless it ends with code 0."""
        self.process.terminate()
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise self.failed("did not stop on SIGTERM") from error
        self._gone()
        if code:
            raise self.failed(f"ended with code {code} on SIGTERM")


class EngineProcess(Child):
    """One engine. `ready` holds what it said when its model was loaded."""

    def __init__(self, name: str, model: Path, runtime_dir: Path, log: Path) -> None:
        command = [sys.executable, "-m", "hicache_daemon.demo.engine", str(model), str(runtime_dir)]
        super().__init__(name, command, log)
        self.ready: dict[str, Any] = {}

    def wait_ready(self) -> None:
        """Return once the model is loaded. Raises `DemoFailed`."""
        self.ready = self._answer(READY_TIMEOUT_S)

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request without waiting for its answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self.failed("is gone") from error

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises `DemoFailed`."""
        self.send(request)
        return self._answer(ANSWER_TIMEOUT_S)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise self.failed(f"gave no answer within {timeout_s:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise self.failed(f"ended with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def convert_model(gguf: Path, target: Path, log: Path) -> None:
    """Convert in a process of its own, so that its memory goes with it. Raises `DemoImpossible`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as stderr:
        command = [sys.executable, "-c", _CONVERT, str(gguf), str(target)]
        done = subprocess.run(command, stderr=stderr, stdout=stderr, check=False)
    if done.returncode:
        raise DemoImpossible(f"the model could not be read; the end of {log}:\n{_tail(log)}")

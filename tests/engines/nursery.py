"""Engines as forks of a process that has imported vLLM: the import is most of an engine's start.

    test ── environment, 3 descriptors ──► nursery ──fork──► engine_main.main()
         ◄────────── pid ────────────────

Run as a script with the number of its socket it is the nursery; it ends when the tests do.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

COMMON = ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama")  # what all need
MESSAGE_BYTES = 1 << 20
FAILED = 1


class Born:
    """A process that is not our child, with what of `subprocess.Popen` is of use: it leads a group of its own."""

    def __init__(self, pid: int, ends: tuple[int, int, int]) -> None:
        """`ends`: ours of its standard input, output and error."""
        self.pid = pid
        self.stdin, self.stdout, self.stderr = (os.fdopen(end, mode) for end, mode in zip(ends, "wrr", strict=True))
        self._alive: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._alive = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(["engine"], timeout or 0.0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        """Its exit code is its parent's to know: here it is always `FAILED`."""
        if self._alive is None:
            return FAILED
        if not select.select([self._alive], [], [], timeout)[0]:
            return None
        os.close(self._alive)
        self._alive = None
        return FAILED


class Nursery:
    """The tests' end."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(Path(__file__)), str(theirs.fileno())]
            self.process = subprocess.Popen(command, env=dict(environ), pass_fds=[theirs.fileno()])

    def bear(self, environ: Mapping[str, str]) -> Born:
        """A new engine in this environment."""
        pipes = [os.pipe() for _ in range(3)]
        ours = (pipes[0][1], pipes[1][0], pipes[2][0])
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        try:
            socket.send_fds(self._socket, [json.dumps(dict(environ)).encode()], theirs)
        finally:
            for end in theirs:
                os.close(end)
        answer = self._socket.recv(MESSAGE_BYTES)
        assert answer, "the nursery is gone"
        return Born(int(answer), ours)


def main() -> None:
    """Bear engines until the tests hang up."""
    import engine_main  # noqa: PLC0415 - the tests import this module without vLLM

    for name in COMMON:
        importlib.import_module(name)

    channel = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        message, ends, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 3)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            break
        for end in ends:
            os.close(end)
        channel.send(str(pid).encode())
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    channel.close()
    for at, end in enumerate(ends):
        os.dup2(end, at)
        os.close(end)
    os.environ.clear()
    os.environ.update(json.loads(message))
    engine_main.main()


if __name__ == "__main__":
    main()

"""Processes that a benchmark starts, and ends."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

END_S = 10.0  # what a child gets to end by itself


def daemon_command(folder: Path, arena_bytes: int) -> list[str]:
    """A daemon with this much L2 (whole MiB), no L3, and its sockets in `folder`."""
    command = [sys.executable, "-c", "from hicache_daemon.cli.app import serve_main; serve_main()"]
    for override in (f"server.runtime_dir={folder}", f"l2.size={arena_bytes >> 20}MiB", "server.log_level=warning"):
        command += ["--set", override]
    return command


@contextlib.contextmanager
def process(
    command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """A child that ends with the block; what it says goes to `log`."""
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env=environ)
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

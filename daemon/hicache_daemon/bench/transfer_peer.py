"""LMCache's server beside ours: its own benchmark client, the same shape of KV, in the same run."""

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache.base.errors import ErrorCode, HiCacheError
from hicache_daemon.bench.children import process
from hicache_daemon.bench.report import Progress

MODES = ("engine_driven", "lmcache_driven")
START_S, RUN_S = 120.0, 300.0
SILENT = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class Peer:
    """Medians of one way of moving bytes, in seconds. `lookup_s`: of a prompt that is there."""

    mode: str
    store_s: float
    retrieve_s: float
    lookup_s: float


def measure_peer(folder: Path, shape: str, tokens: int, room: tuple[int, int], progress: Progress) -> list[Peer]:
    """Both ways, each with a server of its own.

    `folder` holds the program `lmcache`. `room`: bytes of the server's memory, and rounds. The first rounds fill that
    memory, which is not touched before, so there are as many more of them, and the middle of all is taken.
    Raises `HiCacheError` if the program is missing, does not come up, or reports no figures."""
    program = folder / "lmcache"
    if not program.exists():
        raise HiCacheError(ErrorCode.BAD_SPEC, f"there is no program {program}", "name the folder that holds it")
    return [_measure(program, mode, shape, (tokens, *room), progress) for mode in MODES]


def _measure(program: Path, mode: str, shape: str, size: tuple[int, int, int], progress: Progress) -> Peer:
    tokens, memory_bytes, rounds = size
    progress(f"LMCache, {mode}: {2 * rounds} rounds")
    with (
        lmcache_server(program, memory_bytes) as server,
        tempfile.TemporaryDirectory(prefix="hicache-bench-") as name,
    ):
        log, out = Path(name) / "bench.log", Path(name) / "bench.json"
        bench = [str(program), "bench", "server", "--rpc-url", f"tcp://127.0.0.1:{server.port}"]
        bench += ["--url", f"http://127.0.0.1:{server.http_port}", "--mode", "cpu", "--transfer-mode", mode]
        bench += ["--kvcache-shape-spec", shape, "--num-tokens", str(tokens)]
        bench += ["--start", "0", "--end", str(2 * rounds), "--interval", "0.1"]
        bench += ["--format", "json", "--output", str(out)]
        with process(bench, log, os.environ | SILENT) as client:
            _await_end(client, log)
        return peer_of(mode, json.loads(out.read_text()))


@dataclass(frozen=True, slots=True)
class Server:
    """Where a running `lmcache server` listens, on 127.0.0.1."""

    port: int
    http_port: int


@contextlib.contextmanager
def lmcache_server(program: Path, memory_bytes: int) -> Iterator[Server]:
    """`lmcache server` with so much shared memory. Raises `HiCacheError` if it does not come up."""
    port, http_port, metrics_port = free_ports(3)
    shared = f"hicache-bench-{os.getpid()}-{port}"
    command = [str(program), "server", "--host", "127.0.0.1", "--port", str(port), "--http-host", "127.0.0.1"]
    command += ["--http-port", str(http_port), "--prometheus-port", str(metrics_port), "--eviction-policy", "LRU"]
    command += ["--l1-size-gb", f"{max(1.0, memory_bytes / (1 << 30)):g}", "--max-workers", "2"]
    command += ["--supported-transfer-mode", "auto", "--shm-name", shared]
    try:
        with tempfile.TemporaryDirectory(prefix="hicache-bench-") as name:
            log = Path(name) / "server.log"
            with process(command, log, os.environ | SILENT) as child:
                await_port(port, child, log)
                yield Server(port, http_port)
    finally:
        for left in Path("/dev/shm").glob(f"*{shared}*"):  # it leaves its memory behind
            left.unlink(missing_ok=True)


def peer_of(mode: str, report: Mapping[str, Any]) -> Peer:
    """The medians of LMCache's report (times in ms). Raises `HiCacheError` if it says that bytes were lost."""
    metrics = report["metrics"]
    if metrics["results"]["checksum_fail"] or not metrics["results"]["checksum_ok"]:
        raise HiCacheError(ErrorCode.INTERNAL, f"LMCache's benchmark failed: {metrics['results']}")
    store, retrieve, lookup = (
        metrics[name][f"{name}_p50"] / 1e3 for name in ("cold_store", "warm_retrieve", "warm_lookup")
    )
    return Peer(mode, store, retrieve, lookup)


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def await_port(port: int, child: "subprocess.Popen[bytes]", log: Path) -> None:
    """Until the child listens there. Raises `HiCacheError` with the end of its log if it does not."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and child.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise HiCacheError(ErrorCode.TIMEOUT, f"the server did not come up: {_end_of(log)}")


def _await_end(child: "subprocess.Popen[bytes]", log: Path) -> None:
    try:
        code = child.wait(RUN_S)
    except subprocess.TimeoutExpired:
        raise HiCacheError(ErrorCode.TIMEOUT, f"LMCache's benchmark takes longer than {RUN_S:.0f} s") from None
    if code:
        raise HiCacheError(ErrorCode.INTERNAL, f"LMCache's benchmark ended with {code}: {_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-600:]

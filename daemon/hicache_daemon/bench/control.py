"""`bench control`: lookup round trips of a fully matched 8k-token prompt, idle and while pages are copied.

A real daemon runs in a subprocess, the sync client in this process: what an engine sees, decoding and all. Beside
each lookup one empty echo round trip over a ROUTER in another process carries frames of the same sizes; the two
alternate, so that both meet the same machine. `copy`: loads of the whole prompt are kept in flight, at least
COPY_BYTES in all, by as many threads as the daemon is configured with by default.
"""

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zmq

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.protocol.messages import Lookup
from hicache.protocol.wire import encode
from hicache.spec.group import GroupSpec
from hicache.spec.layout import GroupLayout, L1Layout
from hicache.spec.model import ModelSpec, ShardSpec
from hicache_client.link import open_dealer
from hicache_client.options import ClientOptions
from hicache_client.pool import SharedPool
from hicache_client.sync import Client
from hicache_client.sync_handles import LoadHandle
from hicache_daemon.bench.children import daemon_command, process
from hicache_daemon.bench.report import Case, Progress
from hicache_daemon.runtime_dir import LIFELINE_NAME

TOKENS = 8192
PAGE_TOKENS = 16
PAGES = TOKENS // PAGE_TOKENS
LAYERS, HEADS, HEAD_DIM = 30, 3, 64  # 720 KiB a page in float32: 360 MiB a prompt
COPY_BYTES = 1 << 30
LOADS_IN_FLIGHT = 2
SAMPLES = 4000
QUICK_SAMPLES = 300
WARM_UP = 200
START_S = 60.0
ANSWER_S = 10.0
BUCKETS_US = (100, 150, 200, 300, 400, 500, 750, 1000, 1500, 2000, 3000, 5000, 10_000)


@dataclass(slots=True)
class _Figures:
    """Round trips of one phase in ms, and what an echo took beside them."""

    lookup_ms: list[float]
    echo_ms: list[float]

    def cases(self, name: str) -> list[Case]:
        cases = []
        for percent in (50, 99):
            value = float(np.percentile(self.lookup_ms, percent))
            limit = float(np.percentile(self.echo_ms, percent))
            cases.append(Case(f"lookup_8k_{name}_p{percent}", value, "ms", limit, value / limit))
        return cases

    def histogram(self) -> str:
        """Counts per bucket, by upper edge in µs."""
        edges = [0.0, *(edge / 1000 for edge in BUCKETS_US), float("inf")]
        counts, _ = np.histogram(self.lookup_ms, edges)
        names = [*(f"≤{edge}" for edge in BUCKETS_US), f">{BUCKETS_US[-1]}"]
        return " ".join(f"{name}:{count}" for name, count in zip(names, counts, strict=True) if count) + " µs"


def run(quick: bool, progress: Progress) -> list[Case]:
    """Raises `HiCacheError` if the daemon does not come up or does not keep what was stored."""
    samples = QUICK_SAMPLES if quick else SAMPLES
    model, layout = _shape(4 if quick else LAYERS)
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        page_bytes = model.groups[0].block_bytes()
        arena_bytes = -(-(PAGES + 64) * page_bytes // (64 << 20)) * (64 << 20)
        progress(f"starting a daemon with {arena_bytes >> 20} MiB of L2")
        stack.enter_context(process(daemon_command(folder, arena_bytes), folder / "daemon.log"))
        stack.enter_context(process(_echo_command(folder / "echo.sock"), folder / "echo.log"))
        pool = SharedPool(layout.pool_bytes, pretouch=True)
        stack.callback(pool.close)
        options = ClientOptions(runtime_dir=folder, engine="bench")
        client = stack.enter_context(Client(options, model, layout, ShardSpec(), pool))
        _await_file(folder / LIFELINE_NAME)  # else the client says that it runs uncached
        if not client.connect(START_S):
            raise HiCacheError(
                ErrorCode.TIMEOUT, f"the daemon did not come up: {(folder / 'daemon.log').read_text()}"
            )
        bench = stack.enter_context(contextlib.closing(_Bench(client, folder / "echo.sock", page_bytes)))
        bench.fill()
        cases = []
        for phase, loads in (("idle", 0), ("copy", LOADS_IN_FLIGHT)):
            progress(f"{samples} lookups, {phase}")
            figures = bench.measure(samples, loads)
            progress(f"{phase}: {figures.histogram()}")
            cases += figures.cases(phase)
        return cases


class _Bench:
    """A prompt in the cache, and the two sides to ask."""

    def __init__(self, client: Client, echo: Path, page_bytes: int) -> None:
        self._client = client
        self._page_bytes = page_bytes
        self._tokens = np.random.default_rng(1).integers(0, 49_000, TOKENS).astype("<i4").tobytes()
        self._blocks = np.arange(PAGES, dtype="<i4").tobytes()
        self._context = zmq.Context()
        self._echo = open_dealer(self._context, echo)
        self._frames = encode(Lookup(TOKENS, TOKENS), 1, 0, 1, (self._tokens,))
        self._loads: list[LoadHandle] = []
        self._copied_bytes = 0

    def fill(self) -> None:
        """Store the prompt and see that all of it is found."""
        handle = self._client.store(self._tokens, 0, [self._blocks])
        if handle is None or not handle.wait_done():
            raise HiCacheError(ErrorCode.TRANSFER_FAILED, "the prompt was not stored")
        self._lookup()
        if not self._echo.poll(int(START_S * 1000), zmq.POLLOUT):
            raise HiCacheError(ErrorCode.TIMEOUT, "the echo did not come up")

    def measure(self, samples: int, loads: int) -> _Figures:
        """At least `samples` of each, and with `loads` until COPY_BYTES were copied meanwhile."""
        self._copied_bytes = 0
        figures = _Figures([], [])
        for _ in range(WARM_UP):
            self._timed(self._lookup)
            self._timed(self._echo_once)
        while len(figures.lookup_ms) < samples or (loads and self._copied_bytes < COPY_BYTES):
            self._keep_loading(loads)
            figures.lookup_ms.append(self._timed(self._lookup))
            self._client.release([self._lease])
            self._keep_loading(loads)
            figures.echo_ms.append(self._timed(self._echo_once))
        for handle in self._loads:
            handle.wait_done()
        self._loads.clear()
        return figures

    def close(self) -> None:
        self._echo.close()
        self._context.term()

    @staticmethod
    def _timed(act: Callable[[], None]) -> float:
        began = time.perf_counter()
        act()
        return (time.perf_counter() - began) * 1e3

    def _lookup(self) -> None:
        match = self._client.lookup(self._tokens, TOKENS)
        if match.resumable_tokens != TOKENS:
            raise HiCacheError(ErrorCode.INTERNAL, f"{match.resumable_tokens} of {TOKENS} tokens were found")
        self._lease = match.lease

    def _echo_once(self) -> None:
        self._echo.send_multipart(self._frames)
        self._echo.poll(int(ANSWER_S * 1000))
        self._echo.recv_multipart(zmq.NOBLOCK)

    def _keep_loading(self, loads: int) -> None:
        """Replace loads that have ended; all copy the whole prompt to the same blocks."""
        if not loads:
            return
        running = [handle for handle in self._loads if not handle.settled]
        self._copied_bytes += (len(self._loads) - len(running)) * PAGES * self._page_bytes
        self._loads = running
        while len(self._loads) < loads:
            match = self._client.lookup(self._tokens, TOKENS)
            handle = self._client.load(match.lease, 0, [self._blocks])
            if handle is None:
                raise HiCacheError(ErrorCode.TRANSFER_FAILED, "a load was not begun")
            self._client.release([match.lease])
            self._loads.append(handle)


def _shape(layers: int) -> tuple[ModelSpec, L1Layout]:
    """SmolLM2-135M's heads with a paged pool that holds the prompt once: block after block in each layer."""
    group = GroupSpec("full", "full", tuple(range(layers)), HEADS, HEAD_DIM, "float32", PAGE_TOKENS)
    block, region = group.block_layer_bytes(), PAGES * group.block_layer_bytes()
    offsets = tuple(layer * region for layer in range(layers))
    place = GroupLayout("full", offsets, PAGES, block, (), block)
    return ModelSpec("bench", "0", (group,), PAGE_TOKENS), L1Layout(layers * region, (place,))


def _await_file(path: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while not path.exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)


def _echo_command(path: Path) -> list[str]:
    return [sys.executable, "-m", "hicache_daemon.bench.control", str(path)]


def serve_echo(path: Path) -> None:
    """A ROUTER that sends a header and a body of a Match's size back for each message. Never returns."""
    reply = [bytes(32), bytes(80)]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        sock.bind(f"ipc://{path}")
        while True:
            identity, *_ = sock.recv_multipart()
            sock.send_multipart([identity, *reply])


if __name__ == "__main__":
    serve_echo(Path(sys.argv[1]))

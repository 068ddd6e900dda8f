"""`bench transfer`: a prompt's KV to a real daemon and back, through the client that engines use.

2,048 tokens of a paged pool [K/V, 1024 blocks, 16 tokens, 8 heads, 128] × 32 layers in bfloat16 are 268 MB. Each
round is a new prompt: a lookup that misses, a store until all of it can be found, lookups that hit, a load until its
last byte is there. Daemon and pool hold touched memory, as in an engine that has run for a while; L2 is filled over
and over, so that stores also evict. The yardsticks are plain copies of as many bytes by one and by two threads, in
turns with the rounds, and, if it is asked for, LMCache's server measured by its own benchmark (transfer_peer.py).
"""

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.spec.group import DTYPE_BYTES, GroupSpec
from hicache.spec.layout import Axis, GroupLayout, L1Layout
from hicache.spec.model import ModelSpec, ShardSpec
from hicache_client.options import ClientOptions
from hicache_client.pool import SharedPool
from hicache_client.sync import Client
from hicache_daemon.bench.children import daemon_command, process
from hicache_daemon.bench.report import Case, Progress
from hicache_daemon.bench.transfer_peer import Peer, measure_peer
from hicache_daemon.runtime_dir import LIFELINE_NAME

TOKENS, PAGE_TOKENS = 2048, 16
PAGES = TOKENS // PAGE_TOKENS
BLOCKS, HEADS, HEAD_DIM, LAYERS = 1024, 8, 128, 32
QUICK_LAYERS, QUICK_BLOCKS = 2, 256
ARENA_PROMPTS = 8  # what L2 holds
ROUNDS = 16
QUICK_ROUNDS = 3
LOOKUPS = 20  # a round
START_S = 60.0
COPY_THREADS = (1, 2)

Array = npt.NDArray[np.uint8]


@dataclass(slots=True)
class _Figures:
    """Seconds of each round, and of each lookup."""

    store: list[float] = field(default_factory=list)
    retrieve: list[float] = field(default_factory=list)
    lookup: list[float] = field(default_factory=list)
    plain: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in COPY_THREADS})


def run(quick: bool, progress: Progress, beside_lmcache: Path | None = None) -> list[Case]:
    """`beside_lmcache`: the folder with LMCache's programs; it is measured between two halves of our own rounds.

    Raises `HiCacheError` if the daemon, or LMCache's server, does not come up or loses what was stored."""
    layers, blocks = (QUICK_LAYERS, QUICK_BLOCKS) if quick else (LAYERS, BLOCKS)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    model, layout = _shape(layers, blocks)
    prompt_bytes = PAGES * model.groups[0].block_bytes()
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        arena_bytes = -(-ARENA_PROMPTS * prompt_bytes // (64 << 20)) * (64 << 20)
        progress(f"starting a daemon with {arena_bytes >> 20} MiB of L2; {prompt_bytes / 1e6:.0f} MB a prompt")
        stack.enter_context(process(daemon_command(folder, arena_bytes), folder / "daemon.log"))
        pool = SharedPool(layout.pool_bytes, pretouch=True)
        stack.callback(pool.close)
        client = stack.enter_context(_client(folder, model, layout, pool))
        bench = _Bench(client, pool, layers, prompt_bytes)
        bench.warm_up()
        bench.rounds(-(-rounds // 2))
        peers: list[Peer] = []
        if beside_lmcache is not None:
            shape = f"(2,{blocks},{PAGE_TOKENS},{HEADS},{HEAD_DIM}):bfloat16:{layers}"
            peers = measure_peer(beside_lmcache, shape, TOKENS, (arena_bytes, rounds), progress)
        bench.rounds(rounds // 2)
    progress(f"{rounds} rounds; stores from {min(bench.figures.store) * 1e3:.0f} ms on")
    return _cases(bench.figures, prompt_bytes, peers)


def _client(folder: Path, model: ModelSpec, layout: L1Layout, pool: SharedPool) -> Client:
    client = Client(ClientOptions(runtime_dir=folder, engine="bench"), model, layout, ShardSpec(), pool)
    deadline_s = time.monotonic() + START_S
    while not (folder / LIFELINE_NAME).exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)  # else the client says that it runs uncached
    if not client.connect(START_S):
        client.close()
        raise HiCacheError(ErrorCode.TIMEOUT, f"the daemon did not come up: {(folder / 'daemon.log').read_text()}")
    return client


class _Bench:
    """Rounds of new prompts. A store reads one range of the pool's blocks, its load writes another."""

    def __init__(self, client: Client, pool: SharedPool, layers: int, prompt_bytes: int) -> None:
        self.figures = _Figures()
        self._client = client
        self._rng = np.random.default_rng(1)
        planes = np.frombuffer(pool.buffer, np.uint8)
        self._pool = planes.reshape(2 * layers, -1, PAGE_TOKENS * HEADS * HEAD_DIM * DTYPE_BYTES["bfloat16"])
        self._ranges = self._pool.shape[1] // PAGES
        self._copy = (np.zeros(prompt_bytes, np.uint8), np.ones(prompt_bytes, np.uint8))
        self._count = 0

    def warm_up(self) -> None:
        """Rounds until L2 was filled once and evicts; they do not count. All bytes of the first are compared.

        Raises `HiCacheError` if other bytes come back than were stored."""
        source, target = self._next_ranges()
        self._pool[:, source] = self._rng.integers(0, 256, self._pool[:, source].shape, np.uint8)
        self._round(source, target)
        if not np.array_equal(self._pool[:, source], self._pool[:, target]):
            raise HiCacheError(ErrorCode.INTERNAL, "other bytes came back than were stored")
        for _ in range(ARENA_PROMPTS):
            self._round(*self._next_ranges())
        self.figures = _Figures()

    def rounds(self, count: int) -> None:
        """Add so many rounds to the figures, and plain copies in turns with them."""
        for _ in range(count):
            self._round(*self._next_ranges())
            for threads in COPY_THREADS:
                self.figures.plain[threads].append(_plain_s(*self._copy, threads))

    def _next_ranges(self) -> tuple[slice, slice]:
        """Blocks to store from and to load to."""
        first, second = (PAGES * ((self._count + step) % self._ranges) for step in (0, 1))
        self._count += 1
        return slice(first, first + PAGES), slice(second, second + PAGES)

    def _round(self, source: slice, target: slice) -> None:
        tokens = self._rng.integers(0, 49_000, TOKENS).astype("<i4").tobytes()
        self._look(tokens, 0)
        begin = time.perf_counter()
        store = self._client.store(tokens, 0, [_int32s(source)])
        if store is None or not store.wait_done():
            raise HiCacheError(ErrorCode.TRANSFER_FAILED, "a prompt was not stored")
        stored = time.perf_counter()
        lease = self._look_often(tokens)
        begin_load = time.perf_counter()
        load = self._client.load(lease, 0, [_int32s(target)])
        if load is None or not load.wait_done():
            raise HiCacheError(ErrorCode.TRANSFER_FAILED, "a prompt was not loaded")
        loaded = time.perf_counter()
        self._client.release([lease])
        self.figures.store.append(stored - begin)
        self.figures.retrieve.append(loaded - begin_load)

    def _look_often(self, tokens: bytes) -> int:
        """Timed lookups of what was stored; the lease of the last."""
        lease = 0
        for _ in range(LOOKUPS):
            self._client.release([lease])
            begin = time.perf_counter()
            lease = self._look(tokens, TOKENS)
            self.figures.lookup.append(time.perf_counter() - begin)
        return lease

    def _look(self, tokens: bytes, expected: int) -> int:
        """The lease of what is known."""
        match = self._client.lookup(tokens, TOKENS)
        if match.resumable_tokens != expected:
            raise HiCacheError(ErrorCode.INTERNAL, f"{match.resumable_tokens} tokens were found, not {expected}")
        return match.lease


def _int32s(blocks: slice) -> bytes:
    return np.arange(blocks.start, blocks.stop, dtype="<i4").tobytes()


def _plain_s(target: Array, source: Array, threads: int) -> float:
    """Seconds to copy one array to another, each thread an equal part."""
    cuts = [len(target) * i // threads // 64 * 64 for i in range(threads)] + [len(target)]
    parts = list(pairwise(cuts))
    others = [threading.Thread(target=np.copyto, args=(target[a:b], source[a:b])) for a, b in parts[1:]]
    begin = time.perf_counter()
    for other in others:
        other.start()
    np.copyto(target[: cuts[1]], source[: cuts[1]])
    for other in others:
        other.join()
    return time.perf_counter() - begin


def _cases(figures: _Figures, size: int, peers: Sequence[Peer]) -> list[Case]:
    """Each figure beside each yardstick, all of them the middle of their rounds."""
    cases = []
    for name, seconds in (("store", figures.store), ("retrieve", figures.retrieve)):
        value = size / statistics.median(seconds) / 1e9
        limits = {f"memcpy{n}": statistics.median(plain) for n, plain in figures.plain.items()}
        limits |= {f"lmcache_{peer.mode}": getattr(peer, f"{name}_s") for peer in peers}
        for yardstick, limit_s in limits.items():
            limit = size / limit_s / 1e9
            cases.append(Case(f"{name}_vs_{yardstick}", value, "GB/s", limit, value / limit))
    lookup = statistics.median(figures.lookup) * 1e3
    cases.append(Case("lookup", lookup, "ms"))
    for peer in peers:
        limit = peer.lookup_s * 1e3
        cases.append(Case(f"lookup_vs_lmcache_{peer.mode}", lookup, "ms", limit, lookup / limit))
    return cases


def _shape(layers: int, blocks: int) -> tuple[ModelSpec, L1Layout]:
    """Layer after layer, in each [K/V][block][token][head][dim]."""
    group = GroupSpec("full", "full", tuple(range(layers)), HEADS, HEAD_DIM, "bfloat16", PAGE_TOKENS)
    run_bytes = group.block_layer_bytes() // 2
    region = 2 * blocks * run_bytes
    offsets = tuple(layer * region for layer in range(layers))
    axes = (Axis(2, blocks * run_bytes),)
    place = GroupLayout("full", offsets, blocks, run_bytes, axes, run_bytes, "kv,token,head,dim")
    return ModelSpec("bench", "0", (group,), PAGE_TOKENS), L1Layout(layers * region, (place,))

"""Engines that reuse their blocks the moment they may, beside a daemon that is stopped every few milliseconds.

What a page holds follows from the tokens up to its end, so every page that is ever loaded can be checked, whoever
stored it. Two engines with pools of a few blocks share one cache that is too small for the sequences; pages come
back from L2 and L3. A store's source is overwritten as soon as it has settled, or was revoked; a load that is late
is revoked, and if it does not settle, the pool is severed.

HICACHE_STRESS_S is how long it goes on, 12 seconds unless it is set.
"""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache.spec.group import GroupSpec
from hicache.spec.layout import GroupLayout, L1Layout
from hicache.spec.model import ModelSpec, ShardSpec
from hicache_client import Client, ClientOptions, SharedPool
from hicache_client.sync_handles import LoadHandle, StoreHandle
from tests.daemon_harness import SAFETY_S, DaemonProcess, int32

LAYERS, PAGE_TOKENS, BLOCKS, LONGEST = 8, 16, 48, 24
GROUP = GroupSpec("full", "full", tuple(range(LAYERS)), 4, 64, "float16", PAGE_TOKENS)
LAYER_BYTES = GROUP.block_layer_bytes()
MODEL = ModelSpec("stress", "r1", (GROUP,), PAGE_TOKENS)
OFFSETS = tuple(i * BLOCKS * LAYER_BYTES for i in range(LAYERS))
LAYOUT = L1Layout(
    LAYERS * BLOCKS * LAYER_BYTES, (GroupLayout("full", OFFSETS, BLOCKS, LAYER_BYTES, (), LAYER_BYTES),)
)

Words = npt.NDArray[np.uint64]


class Sequence:
    """Token ids, and what their pages hold: uint64 of shape (LAYERS, pages, 1), the same in all words of a page."""

    def __init__(self, ids: npt.NDArray[np.int32]) -> None:
        self.pages = len(ids) // PAGE_TOKENS
        self._bytes = ids.astype("<i4").tobytes()
        digests = [hashlib.blake2b(self.tokens(page + 1), digest_size=8).digest() for page in range(self.pages)]
        of_page = np.frombuffer(b"".join(digests), np.uint64)
        self.contents: Words = (of_page[None, :] ^ np.arange(LAYERS, dtype=np.uint64)[:, None])[:, :, None]

    def tokens(self, pages: int) -> bytes:
        return self._bytes[: 4 * PAGE_TOKENS * pages]


def sequences(rng: np.random.Generator, count: int) -> list[Sequence]:
    """Many with a common beginning, as conversations have it."""
    ids: list[npt.NDArray[np.int32]] = [np.zeros(0, np.int32)]
    while len(ids) <= count:
        parent = ids[int(rng.integers(len(ids)))]
        kept = int(rng.integers(min(len(parent) // PAGE_TOKENS, LONGEST - 1) + 1))
        fresh = int(rng.integers(1, LONGEST - kept + 1))
        own = rng.integers(0, 50_000, PAGE_TOKENS * fresh, np.int32)
        ids.append(np.concatenate((parent[: PAGE_TOKENS * kept], own)))
    return [Sequence(each) for each in ids[1:]]


@dataclass
class Counts:
    """What happened. `wrong`: loaded pages that held something else than they must."""

    operations: int = 0
    stores: int = 0
    published: int = 0
    revoked: int = 0
    loaded_pages: int = 0
    late_loads: int = 0
    severed: int = 0
    wrong: int = 0


@dataclass
class OpenStore:
    handle: StoreHandle
    blocks: npt.NDArray[np.int32]


@dataclass
class Engine:
    """One client and its pool. `careless`: it reuses the source of a store at once and revokes nothing."""

    client: Client
    pool: SharedPool
    prompts: list[Sequence]
    rng: np.random.Generator
    counts: Counts
    careless: bool
    free: list[int] = field(default_factory=lambda: list(range(BLOCKS)))
    stores: list[OpenStore] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory: Words = np.frombuffer(self.pool.buffer, np.uint64).reshape(LAYERS, BLOCKS, -1)

    def step(self) -> None:
        self.counts.operations += 1
        act = self.rng.choice([self.store, self.store, self.load, self.reap])
        act()

    def take(self, count: int) -> npt.NDArray[np.int32] | None:
        """Any free blocks, in any order."""
        if len(self.free) < count:
            return None
        self.rng.shuffle(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        return np.array(taken, np.int32)

    def give(self, blocks: npt.NDArray[np.int32]) -> None:
        """Overwrite them and let the next one have them."""
        self.memory[:, blocks] = self.rng.integers(1 << 63, dtype=np.uint64)
        self.free += blocks.tolist()

    def prompt(self) -> Sequence:
        return self.prompts[int(self.rng.integers(len(self.prompts)))]

    # ---- stores -----------------------------------------------------------------------------------------

    def store(self) -> None:
        prompt = self.prompt()
        pages = int(self.rng.integers(1, prompt.pages + 1))
        first = int(self.rng.integers(pages)) if self.rng.random() < 0.3 else 0
        blocks = self.take(pages - first)
        if blocks is None:
            self.reap()
            return
        self.memory[:, blocks] = prompt.contents[:, first:pages]
        handle = self.client.offer(prompt.tokens(pages), first, [int32(blocks.tolist())])
        if handle is None or self.careless:
            self.give(blocks)
        else:
            self.counts.stores += 1
            self.stores.append(OpenStore(handle, blocks))
            if self.rng.random() < 0.3:
                self.reap()

    def reap(self) -> None:
        """Reuse what has settled, and some of what has not."""
        self.client.poll()
        going = []
        for store in self.stores:
            if not store.handle.settled:
                if self.rng.random() < 0.6:
                    going.append(store)
                    continue
                store.handle.revoke()
                self.counts.revoked += 1
            self.counts.published += store.handle.done
            self.give(store.blocks)
        self.stores = going

    # ---- loads ------------------------------------------------------------------------------------------

    def load(self) -> None:
        prompt = self.prompt()
        match = self.client.lookup(prompt.tokens(prompt.pages), prompt.pages * PAGE_TOKENS)
        pages = match.resumable_tokens // PAGE_TOKENS
        if not match.lease:
            return
        first = int(self.rng.integers(pages))
        blocks = self.take(pages - first)
        if blocks is not None:
            handle = self.client.load(match.lease, first, [int32(blocks.tolist())])
            if handle is None:
                self.give(blocks)
            else:
                self.wait(handle, prompt.contents[:, first:pages], blocks)
        self.client.release([match.lease])

    def wait(self, handle: LoadHandle, contents: Words, blocks: npt.NDArray[np.int32]) -> None:
        patience = float(self.rng.choice([0, 0.002, 0.02, SAFETY_S], p=[0.05, 0.05, 0.1, 0.8]))
        layers = int(self.rng.integers(1, LAYERS + 1))
        if handle.wait_layer(layers - 1, time.monotonic() + patience):
            got = self.memory[:layers, blocks]
            self.counts.wrong += int((got != contents[:layers]).any(axis=(0, 2)).sum())
            self.counts.loaded_pages += len(blocks)
        else:
            self.counts.late_loads += 1
        if not handle.wait_settled(time.monotonic() + patience):
            handle.revoke()
            if not handle.wait_settled(time.monotonic() + 0.001):
                self.sever()
        self.give(blocks)

    def sever(self) -> None:
        self.pool.sever()
        if self.rng.random() < 0.5:
            self.client.reattach()
        self.counts.severed += 1


@contextmanager
def stopped_now_and_then(daemon: DaemonProcess, rng: np.random.Generator) -> Iterator[None]:
    """The daemon stands still for some milliseconds, again and again."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(float(rng.uniform(0.001, 0.02))):
            daemon.signal(signal.SIGSTOP)
            over.wait(float(rng.uniform(0.001, 0.01)))
            daemon.signal(signal.SIGCONT)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        daemon.signal(signal.SIGCONT)


def run(root: Path, seconds: float, careless: bool, enough: Callable[[Counts], bool]) -> Counts:
    """Random work of two engines for so long, or until `enough`."""
    rng, counts = np.random.default_rng(11), Counts()
    prompts = sequences(rng, 60)
    with DaemonProcess(root, ["l2.size=16MiB"], l3=True) as daemon:
        engines = []
        for _ in range(2):
            pool = SharedPool(LAYOUT.pool_bytes)
            times = {"request_timeout_s": SAFETY_S, "connect_timeout_s": SAFETY_S, "load_timeout_s": SAFETY_S}
            options = ClientOptions(runtime_dir=daemon.runtime_dir, retry_initial_s=1e-3, retry_max_s=1e-2, **times)
            client = Client(options, MODEL, LAYOUT, ShardSpec(), pool)
            engines.append(Engine(client, pool, prompts, rng, counts, careless))
            assert client.connect(SAFETY_S)
        try:
            with stopped_now_and_then(daemon, np.random.default_rng(12)):
                end = time.monotonic() + seconds
                while time.monotonic() < end and not enough(counts):
                    engines[int(rng.integers(2))].step()
        finally:
            for engine in engines:
                engine.client.close()
                engine.pool.close()
        assert daemon.process.poll() is None, daemon.log()
        assert daemon.stop() == 0
    return counts


def test_no_wrong_page_is_ever_loaded_however_blocks_are_reused(tmp_path: Path) -> None:
    counts = run(tmp_path, float(os.environ.get("HICACHE_STRESS_S", "12")), False, lambda _: False)
    assert counts.wrong == 0, counts
    assert counts.operations > 1000, counts
    assert counts.loaded_pages > 1000, counts
    assert min(counts.published, counts.revoked, counts.late_loads, counts.severed) > 0, counts


def test_an_engine_that_reuses_blocks_without_revoking_is_found_out(tmp_path: Path) -> None:
    counts = run(tmp_path, 20, True, lambda counts: counts.wrong > 0)
    assert counts.wrong, counts

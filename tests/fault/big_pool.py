"""A pool and a model so large that a copy of a sequence takes long enough to be stopped in the middle."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache.protocol.fence import STATE_RUNNING
from hicache.spec.group import GroupSpec
from hicache.spec.layout import GroupLayout, L1Layout
from hicache.spec.model import ModelSpec, ShardSpec
from hicache_client import Client, ClientOptions, SharedPool, describe
from hicache_client.sync_handles import LoadHandle, StoreHandle
from tests.daemon_harness import SAFETY_S, DaemonProcess, int32, tokens

LAYERS, PAGE_TOKENS = 16, 16
PAGES = 96  # of one sequence
BLOCKS = 2 * PAGES
GROUP = GroupSpec("full", "full", tuple(range(LAYERS)), 8, 128, "float16", PAGE_TOKENS)
LAYER_BYTES = GROUP.block_layer_bytes()
MODEL = ModelSpec("big", "r1", (GROUP,), PAGE_TOKENS)
LAYOUT = L1Layout(
    LAYERS * BLOCKS * LAYER_BYTES,
    (
        GroupLayout(
            "full", tuple(i * BLOCKS * LAYER_BYTES for i in range(LAYERS)), BLOCKS, LAYER_BYTES, (), LAYER_BYTES
        ),
    ),
)
OVERRIDES = ("l2.size=400MiB",)
SOURCE, TARGET = slice(0, PAGES), slice(PAGES, BLOCKS)
SOURCE_STARTS, TARGET_STARTS = [int32(range(PAGES))], [int32(range(PAGES, BLOCKS))]

Words = npt.NDArray[np.uint64]


def sequence(seed: int) -> bytes:
    """Token ids of PAGES pages."""
    return tokens(PAGES * PAGE_TOKENS, seed)


def contents(seed: int) -> Words:
    """What the pages of a sequence hold: one number per page, of shape (1, PAGES, 1)."""
    return (np.arange(PAGES, dtype=np.uint64) + np.uint64((seed + 1) << 20)).reshape(1, PAGES, 1)


class Engine:
    """A client beside a daemon that can be stopped. `memory`: the pool as uint64 [layer][block][word]."""

    def __init__(self, daemon: DaemonProcess) -> None:
        times = {"request_timeout_s": SAFETY_S, "connect_timeout_s": SAFETY_S, "load_timeout_s": SAFETY_S}
        options = ClientOptions(runtime_dir=daemon.runtime_dir, retry_max_s=0.05, **times)
        self.daemon = daemon
        self.pool = SharedPool(LAYOUT.pool_bytes, pretouch=True)
        self.client = Client(options, MODEL, LAYOUT, ShardSpec(), self.pool)
        self.memory: Words = np.frombuffer(self.pool.buffer, np.uint64).reshape(LAYERS, BLOCKS, -1)
        assert self.client.connect(SAFETY_S)

    def store(self, seed: int) -> None:
        """Put a sequence into the cache and wait until it is there."""
        self.memory[:, SOURCE] = contents(seed)
        handle = self.client.store(sequence(seed), 0, SOURCE_STARTS)
        assert handle is not None
        assert handle.wait_done()

    def lease(self, seed: int) -> int:
        match = self.client.lookup(sequence(seed), PAGES * PAGE_TOKENS)
        assert match.resumable_tokens == PAGES * PAGE_TOKENS
        return match.lease

    def known(self, seed: int) -> int:
        """How many pages of a sequence a lookup finds."""
        return self.client.lookup(sequence(seed), PAGES * PAGE_TOKENS, lease=False).resumable_tokens // PAGE_TOKENS

    def fetched(self, seed: int) -> Words:
        """What the cache holds of a sequence, as [layer][page][word]."""
        lease = self.lease(seed)
        handle = self.client.load(lease, 0, TARGET_STARTS)
        assert handle is not None
        assert handle.wait_done()
        self.client.release([lease])
        return self.memory[:, TARGET]

    def stop(self) -> None:
        """Freeze the daemon where it is."""
        self.daemon.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.daemon.process.pid, os.WSTOPPED | os.WNOWAIT)

    def stop_within(self, handle: LoadHandle | StoreHandle, layers: int, wait_s: float) -> bool:
        """Freeze the daemon `wait_s` after the copy has `layers` layers; whether it was still under way then."""
        end = time.monotonic() + SAFETY_S
        while handle.fence.layers_done < layers and not handle.fence.terminal:
            assert time.monotonic() < end
        time.sleep(wait_s)
        self.stop()
        return handle.fence.state == STATE_RUNNING

    def go_on(self) -> None:
        self.daemon.signal(signal.SIGCONT)

    def copies(self) -> int:
        """How many copies the daemon has ended so far."""
        copies = describe("l2", self.daemon.runtime_dir, SAFETY_S)["copies"]
        return int(copies["copies_ok"] + copies["copies_failed"])

    def wait_copies(self, count: int) -> None:
        end = time.monotonic() + SAFETY_S
        while self.copies() < count:
            assert time.monotonic() < end
            time.sleep(0.005)


@contextmanager
def engine_of(root: Path) -> Iterator[Engine]:
    with DaemonProcess(root, OVERRIDES) as daemon:
        engine = Engine(daemon)
        try:
            yield engine
        finally:
            engine.go_on()
            engine.client.close()
            engine.pool.close()

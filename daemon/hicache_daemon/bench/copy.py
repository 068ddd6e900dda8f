"""`bench copy`: pages between L1 and L2 against one plain copy of the same bytes, in one process and run.

Both ends are shared memory that was touched before, larger than the caches; pages are scattered at random on
both sides, the hardest case: a sequence that was stored at once lies in neighbouring blocks. The whole lane is
measured, fence and completion included. Cases: `l2_to_l1_page{P}` and `l1_to_l2_page{P}` for a paged pool of
32 layers × 8 KV heads × 128 × fp16; `_strided` for a pool with one row per position and head; `_smollm2` for
30 layers × 3 heads × 64 × fp32. The work runs in a child whose memcpy is set as the daemon's is.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hicache.base.ids import SessionId, TicketId
from hicache.copy.base import Bytes
from hicache.core.commands import CopyPages, GroupCopy
from hicache.core.events import CopyEnded, Event
from hicache.protocol import fence as f
from hicache.spec.group import DTYPE_BYTES, GroupSpec
from hicache.spec.layout import Axis, GroupLayout, L1Layout
from hicache.spec.model import ModelSpec
from hicache_daemon.arena import Arena
from hicache_daemon.bench.report import Case, Progress
from hicache_daemon.lanes import CpuLane
from hicache_daemon.memcpy import tuned_environment

PAGES = (1, 16, 64, 128)
MEMORY_BYTES = 512 << 20  # per end
QUICK_BYTES = 256 << 20
ROUNDS = 5
QUICK_ROUNDS = 2
TIMEOUT_S = 900
_SESSION = SessionId(1)


@dataclass(frozen=True, slots=True)
class _Shape:
    """A model's cache and how its L1 pool is laid out."""

    suffix: str
    layers: int
    heads: int
    head_dim: int
    dtype: str
    strided: bool


SHAPES = (
    _Shape("", 32, 8, 128, "float16", False),
    _Shape("_strided", 32, 8, 128, "float16", True),
    _Shape("_smollm2", 30, 3, 64, "float32", False),
    _Shape("_smollm2_strided", 30, 3, 64, "float32", True),
)


def run(quick: bool, progress: Progress) -> list[Case]:
    """Measure in a child process and read its cases. Raises `CalledProcessError` if it fails."""
    command = [sys.executable, "-m", "hicache_daemon.bench.copy", *(["--quick"] if quick else [])]
    environ = tuned_environment(os.environ) or dict(os.environ)
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    cases: list[Case] = []
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            case = Case(**json.loads(line))
            cases.append(case)
            progress(f"{case.case}: {case.value:.2f} {case.unit} of {case.limit:.2f}")
    code = child.wait(TIMEOUT_S)
    if code:
        raise subprocess.CalledProcessError(code, command)
    return cases


def _layout(shape: _Shape, page: int, size: int) -> tuple[ModelSpec, L1Layout, int]:
    """Model, layout and number of pages so that all pages together fill about `size` bytes."""
    spec = GroupSpec("full", "full", tuple(range(shape.layers)), shape.heads, shape.head_dim, shape.dtype, page)
    pages = size // spec.block_bytes()
    region = pages * spec.block_layer_bytes()
    offsets = tuple(i * region for i in range(shape.layers))
    if shape.strided:  # [K/V][head][position][dim], a start is a position
        row = shape.head_dim * DTYPE_BYTES[shape.dtype]
        plane = pages * page * row
        axes = (Axis(2, shape.heads * plane), Axis(shape.heads, plane))
        group = GroupLayout("full", offsets, (pages - 1) * page + 1, row, axes, page * row)
    else:
        group = GroupLayout("full", offsets, pages, spec.block_layer_bytes(), (), spec.block_layer_bytes())
    return ModelSpec("bench", "0", (spec,), page), L1Layout(region * shape.layers, (group,)), pages


class _Rig:
    """A lane, an arena and a pool of the same size, and an engine's fence slot."""

    def __init__(self, size: int, threads: int) -> None:
        self.threads = threads
        self.arena = Arena.create(size, "off", threads, lambda ready, total: None)
        self.pool = Arena.create(size, "off", threads, lambda ready, total: None)
        self.fences = Arena.create(4096, "off", 1, lambda ready, total: None)
        self.words: npt.NDArray[np.uint64] = self.fences.bytes.view(np.uint64)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.lane = CpuLane(self.arena.bytes, threads, self.events.put)
        self._ticket = 0

    def attach(self, model: ModelSpec, layout: L1Layout) -> None:
        slots = len(self.words) // f.SLOT_WORDS
        pool, fences = self.pool, self.fences
        self.lane.attach(_SESSION, pool.fd, len(pool.bytes), fences.fd, slots, model=model, layout=layout)

    def copy_s(self, copy: GroupCopy, to_l1: bool) -> float:
        """Seconds from submitting one job to its completion."""
        self._ticket += 1
        self.words[: f.SLOT_WORDS] = 0
        self.words[f.WORD_MAGIC], self.words[f.WORD_GENERATION] = f.MAGIC, self._ticket
        command = CopyPages(TicketId(self._ticket), _SESSION, to_l1, (copy,), 0, self._ticket)
        begin = time.perf_counter()
        self.lane.submit(command)
        event = self.events.get(timeout=TIMEOUT_S)
        end = time.perf_counter()
        assert isinstance(event, CopyEnded)
        assert event.ok, event.reason
        assert self.words[f.WORD_STATE] == f.STATE_DONE
        return end - begin

    def plain_s(self, size: int, to_l1: bool) -> float:
        """Seconds for np.copyto of `size` bytes, each thread an equal part."""
        target, source = (self.pool, self.arena) if to_l1 else (self.arena, self.pool)
        cuts = [size * i // self.threads // 64 * 64 for i in range(self.threads)] + [size]
        return _threads_s([_copyto(target.bytes, source.bytes, a, b) for a, b in pairwise(cuts)])

    def close(self) -> None:
        self.lane.close()
        for memory in (self.arena, self.pool, self.fences):
            memory.close()


def _copyto(target: Bytes, source: Bytes, low: int, high: int) -> Callable[[], None]:
    return lambda: np.copyto(target[low:high], source[low:high])


def _threads_s(works: list[Callable[[], None]]) -> float:
    """Seconds until all have ended; one alone runs on the caller."""
    threads = [threading.Thread(target=work) for work in works[1:]]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    works[0]()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def measure(quick: bool) -> Iterator[Case]:
    """All cases, in this process. The best of several rounds; case and limit take turns within each."""
    size, rounds = (QUICK_BYTES, QUICK_ROUNDS) if quick else (MEMORY_BYTES, ROUNDS)
    rig = _Rig(size, min(2, len(os.sched_getaffinity(0))))
    rng = np.random.default_rng(2)
    try:
        for shape in SHAPES:
            for page in PAGES:
                model, layout, pages = _layout(shape, page, size)
                rig.attach(model, layout)
                block_bytes = model.groups[0].block_bytes()
                l2 = rng.permutation(pages).astype(np.int32)
                l1 = (rng.permutation(pages) * (page if shape.strided else 1)).astype(np.int32)
                copy = GroupCopy(0, l2, l2.astype(np.int64) * block_bytes, l1)
                for to_l1, name in ((True, "l2_to_l1"), (False, "l1_to_l2")):
                    yield _case(rig, f"{name}_page{page}{shape.suffix}", copy, pages * block_bytes, (to_l1, rounds))
                rig.lane.detach(_SESSION)
    finally:
        rig.close()


def _case(rig: _Rig, name: str, copy: GroupCopy, size: int, how: tuple[bool, int]) -> Case:
    to_l1, rounds = how
    rig.plain_s(size, to_l1)  # page tables of this direction
    plain, paged = [], []
    for _ in range(rounds):
        plain.append(rig.plain_s(size, to_l1))
        paged.append(rig.copy_s(copy, to_l1))
    value, limit = size / min(paged) / 1e9, size / min(plain) / 1e9
    return Case(name, value, "GB/s", limit, value / limit)


if __name__ == "__main__":
    for found in measure("--quick" in sys.argv[1:]):
        print(json.dumps(asdict(found)), flush=True)

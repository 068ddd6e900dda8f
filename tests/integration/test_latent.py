"""Latent groups and blocks of several starts through the real daemon: what is stored comes back, from memory and
from disk, byte for byte and nowhere else."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hicache.spec.group import GroupSpec
from hicache.spec.layout import Axis, GroupLayout, L1Layout, check_layout
from hicache.spec.model import ModelSpec, ShardSpec
from hicache_client import Client, ClientOptions, SharedPool
from tests.daemon_harness import PAGE_TOKENS, SAFETY_S, DaemonProcess, int32, tokens

PAGES, BLOCKS, CUT = 6, 8, 4  # a block of the engine has 64 tokens, a page 16
VECTOR = 24 * 2
PADDING = 80  # bytes after each latent block
LATENT_BLOCK = CUT * PAGE_TOKENS * VECTOR + PADDING
HEADS, ROW = 2, 2 * 8 * 2  # of the full group: [block][head][token][K and V]
FULL_BLOCK = HEADS * CUT * PAGE_TOKENS * ROW

LATENT = GroupSpec("latent", "latent", (0, 1, 3), 1, 24, "bfloat16", PAGE_TOKENS)
FULL = GroupSpec("full", "full", (2,), HEADS, 8, "bfloat16", PAGE_TOKENS)
LATENT_PLACE = GroupLayout(
    "latent",
    tuple(i * BLOCKS * LATENT_BLOCK for i in range(3)),
    BLOCKS * CUT,
    LATENT_BLOCK,
    (),
    PAGE_TOKENS * VECTOR,
    "token,content",
    CUT,
    PAGE_TOKENS * VECTOR,
)
FULL_PLACE = GroupLayout(
    "full",
    (3 * BLOCKS * LATENT_BLOCK,),
    BLOCKS * CUT,
    FULL_BLOCK,
    (Axis(HEADS, CUT * PAGE_TOKENS * ROW),),
    PAGE_TOKENS * ROW,
    "head,token,kv,dim",
    CUT,
    PAGE_TOKENS * ROW,
)
POOL_BYTES = 3 * BLOCKS * LATENT_BLOCK + BLOCKS * FULL_BLOCK
ONLY_LATENT = (
    ModelSpec("mla", "r1", (GroupSpec("latent", "latent", (0, 1, 2), 1, 24, "bfloat16", PAGE_TOKENS),), PAGE_TOKENS),
    L1Layout(POOL_BYTES, (LATENT_PLACE,)),
)
MIXED = (ModelSpec("mixed", "r1", (LATENT, FULL), PAGE_TOKENS), L1Layout(POOL_BYTES, (LATENT_PLACE, FULL_PLACE)))
PROMPT = tokens(PAGES * PAGE_TOKENS)
SOURCE, TARGET = [1, 2, 3, 4, 9, 17], [30, 11, 12, 13, 14, 5]  # within blocks, over their ends, out of order


def places_of(place: GroupLayout, start: int) -> list[slice]:
    """The bytes of one start in all layers, in L2's order."""
    block, inside = divmod(start, CUT)
    steps = range(place.axes[0].count) if place.axes else range(1)
    stride = place.axes[0].stride if place.axes else 0
    firsts = [
        offset + block * place.block_stride + inside * place.start_stride + i * stride
        for offset in place.layer_offsets
        for i in steps
    ]
    return [slice(first, first + place.run_bytes) for first in firsts]


@pytest.mark.parametrize(("model", "layout"), [ONLY_LATENT, MIXED], ids=["latent", "latent and full"])
def test_latent_pages_come_back_from_memory_and_disk(model: ModelSpec, layout: L1Layout, tmp_path: Path) -> None:
    check_layout(model, layout)
    pool = SharedPool(layout.pool_bytes)
    memory: npt.NDArray[np.uint8] = np.frombuffer(pool.buffer, np.uint8)
    memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), np.uint8)
    expected = memory.copy()
    for place in layout.groups:
        for source, target in zip(SOURCE, TARGET, strict=True):
            for low, high in zip(places_of(place, source), places_of(place, target), strict=True):
                expected[high] = memory[low]
    original = memory.copy()
    with DaemonProcess(tmp_path, l3=True) as daemon:
        options = ClientOptions(daemon.runtime_dir, request_timeout_s=SAFETY_S, connect_timeout_s=SAFETY_S)
        with Client(options, model, layout, ShardSpec(), pool) as client:
            stored = client.store(PROMPT, 0, [int32(SOURCE)] * len(layout.groups))
            assert stored is not None
            assert stored.wait_done()
            for tier in ("memory", "disk"):
                memory[:] = original
                match = client.lookup(PROMPT, PAGES * PAGE_TOKENS)
                assert match.resumable_tokens == PAGES * PAGE_TOKENS
                assert (match.l2_tokens > 0) == (tier == "memory")
                loaded = client.load(match.lease, 0, [int32(TARGET)] * len(layout.groups))
                assert loaded is not None
                assert loaded.wait_done()
                assert np.array_equal(memory, expected), tier
                client.release([match.lease])
                if tier == "memory":
                    assert daemon.stop() == 0
                    daemon.restart()
                    assert client.connect(SAFETY_S)
    pool.close()

"""The CPU lane: every job answered once, fences told in order, memory let go of before it is unmapped."""

import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.ids import SessionId, TicketId
from hicache.copy.base import Bytes, GroupGeometry, Share, Transfer
from hicache.copy.cpu import CpuMover
from hicache.core.commands import CopyPages, DoneFence, FailFence, GroupCopy
from hicache.core.events import CopyEnded, Event
from hicache.protocol import fence as f
from hicache.spec.group import GroupSpec
from hicache.spec.layout import Axis, GroupLayout, L1Layout
from hicache.spec.model import ModelSpec
from hicache_daemon import lanes
from hicache_daemon.lanes import CpuLane

SAFETY_S = 20
LAYERS, TOKENS, BLOCKS = 4, 2, 16
BLOCK_LAYER = 2 * TOKENS * 2 * 8 * 4  # K and V, 2 heads of 8 float32
BLOCK = LAYERS * BLOCK_LAYER
POOL = LAYERS * BLOCKS * BLOCK_LAYER
SLOTS = 8

MODEL = ModelSpec("m", "r", (GroupSpec("g", "full", tuple(range(LAYERS)), 2, 8, "float32", TOKENS),), TOKENS)
LAYOUT = L1Layout(
    POOL,
    (
        GroupLayout(
            "g",
            tuple(i * BLOCKS * BLOCK_LAYER for i in range(LAYERS)),
            BLOCKS,
            BLOCK_LAYER,
            (Axis(2, BLOCK_LAYER // 2),),
            BLOCK_LAYER // 2,
        ),
    ),
)


def memfd(size: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@dataclass
class Client:
    """An engine's side: its pool and fence area."""

    pool_fd: int = field(default_factory=lambda: memfd(POOL))
    fence_fd: int = field(default_factory=lambda: memfd(SLOTS * f.SLOT_BYTES))

    def __post_init__(self) -> None:
        self.pool: Bytes = np.frombuffer(mmap.mmap(self.pool_fd, POOL), np.uint8)
        area = mmap.mmap(self.fence_fd, SLOTS * f.SLOT_BYTES)
        self.words: npt.NDArray[np.uint64] = np.frombuffer(area, np.uint64).reshape(SLOTS, f.SLOT_WORDS)

    def arm(self, slot: int, generation: int) -> None:
        self.words[slot] = 0
        self.words[slot, f.WORD_MAGIC] = f.MAGIC
        self.words[slot, f.WORD_GENERATION] = generation

    def state(self, slot: int) -> int:
        return int(self.words[slot, f.WORD_STATE])

    def layers(self, slot: int) -> int:
        return int(self.words[slot, f.WORD_LAYERS_DONE])

    def close(self) -> None:
        os.close(self.pool_fd)
        os.close(self.fence_fd)


class Rig:
    """A lane over a small arena, and what it posted."""

    def __init__(self, threads: int) -> None:
        self.arena: Bytes = np.random.default_rng(5).integers(0, 256, 32 * BLOCK, dtype=np.uint8)
        self.events: queue.Queue[Event] = queue.Queue()
        self.lane = CpuLane(self.arena, threads, self.events.put)
        self.clients: list[Client] = []

    def attach(self, session: int) -> Client:
        client = Client()
        self.clients.append(client)
        self.lane.attach(SessionId(session), client.pool_fd, POOL, client.fence_fd, SLOTS, model=MODEL, layout=LAYOUT)
        return client

    def ended(self) -> CopyEnded:
        event = self.events.get(timeout=SAFETY_S)
        assert isinstance(event, CopyEnded)
        return event


@pytest.fixture(params=[1, 3])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(lanes, "PART_BYTES", 2 * BLOCK)  # so that small jobs are shared between threads too
    monkeypatch.setattr(lanes, "MIN_STEP_BYTES", BLOCK)
    made = Rig(request.param)
    yield made
    made.lane.close()
    for client in made.clients:
        client.close()
    assert made.events.empty()


def job(ticket: int, pages: list[tuple[int, int]], to_l1: bool = True, session: int = 1, slot: int = 0) -> CopyPages:
    """`pages`: (L2 block, L1 start) each; the generation is the ticket."""
    l2 = np.array([a for a, _ in pages], np.int32)
    copy = GroupCopy(0, l2, l2.astype(np.int64) * BLOCK, np.array([b for _, b in pages], np.int32))
    return CopyPages(TicketId(ticket), SessionId(session), to_l1, (copy,), slot, ticket)


def l1_block(client: Client, start: int) -> bytes:
    """Block `start` of all layers in L2's order."""
    per_layer = client.pool.reshape(LAYERS, BLOCKS, BLOCK_LAYER)
    return per_layer[:, start].tobytes()


def l2_block(rig: Rig, block: int) -> bytes:
    return rig.arena[block * BLOCK : (block + 1) * BLOCK].tobytes()


class Held(CpuMover):
    """A mover that stops at its first layer until told to go on."""

    reached = threading.Semaphore(0)
    go = threading.Event()

    def copy(
        self,
        pool: Bytes,
        geometry: tuple[GroupGeometry, ...],
        transfers: tuple[Transfer, ...],
        to_l1: bool,
        share: Share,
    ) -> None:
        Held.reached.release()
        assert Held.go.wait(SAFETY_S)
        super().copy(pool, geometry, transfers, to_l1, share)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> type[Held]:
    Held.reached, Held.go = threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(lanes, "CpuMover", Held)
    return Held


def test_load_moves_bytes_and_tells_the_fence_before_the_event(rig: Rig) -> None:
    client = rig.attach(1)
    client.arm(0, 7)
    pages = [(9, 3), (10, 4), (2, 15), (31, 0), (5, 8)]
    rig.lane.submit(job(7, pages))
    assert rig.ended() == CopyEnded(TicketId(7), True)
    assert (client.state(0), client.layers(0)) == (f.STATE_DONE, LAYERS)
    for block, start in pages:
        assert l1_block(client, start) == l2_block(rig, block)
    assert rig.lane.stats().bytes_to_l1 == len(pages) * BLOCK


def test_store_moves_bytes_back(rig: Rig) -> None:
    client = rig.attach(1)
    client.pool[:] = np.random.default_rng(1).integers(0, 256, POOL, dtype=np.uint8)
    client.arm(3, 8)
    pages = [(1, 1), (4, 2), (3, 9)]
    rig.lane.submit(job(8, pages, to_l1=False, slot=3))
    assert rig.ended() == CopyEnded(TicketId(8), True)
    assert (client.state(3), client.layers(3)) == (f.STATE_DONE, LAYERS)
    for block, start in pages:
        assert l2_block(rig, block) == l1_block(client, start)
    assert rig.lane.stats().bytes_to_l2 == len(pages) * BLOCK


def test_job_without_pages_is_done_at_once(rig: Rig) -> None:
    client = rig.attach(1)
    client.arm(0, 1)
    rig.lane.submit(job(1, []))
    assert rig.ended().ok
    assert (client.state(0), client.layers(0)) == (f.STATE_DONE, LAYERS)


def test_start_out_of_range_fails_the_fence_and_moves_nothing(rig: Rig) -> None:
    client = rig.attach(1)
    client.arm(0, 1)
    rig.lane.submit(job(1, [(0, 0), (1, BLOCKS)]))
    ended = rig.ended()
    assert not ended.ok
    assert ErrorCode.OUT_OF_RANGE in ended.reason
    assert client.state(0) == f.STATE_FAILED
    assert rig.lane.stats().copies_failed == 1


@pytest.mark.parametrize("word", [f.WORD_GENERATION, f.WORD_MAGIC])
def test_slot_of_another_transfer_stays_untouched(rig: Rig, word: int) -> None:
    client = rig.attach(1)
    client.arm(0, 5)
    client.words[0, word] += np.uint64(1)
    before = client.words.copy()
    rig.lane.submit(job(5, [(0, 0)]))
    assert not rig.ended().ok
    assert np.array_equal(client.words, before)
    assert not client.pool.any()


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_unknown_slot_and_unknown_session_are_answered(rig: Rig, slot: int) -> None:
    rig.attach(1)
    rig.lane.submit(job(5, [(0, 0)], slot=slot))
    assert ErrorCode.OUT_OF_RANGE in rig.ended().reason
    rig.lane.submit(job(6, [(0, 0)], session=2))
    assert ErrorCode.UNKNOWN_SESSION in rig.ended().reason


def test_group_that_is_not_there_is_answered(rig: Rig) -> None:
    client = rig.attach(1)
    client.arm(0, 5)
    bad = job(5, [(0, 0)])
    copy = GroupCopy(3, bad.copies[0].l2, bad.copies[0].l2_offsets, bad.copies[0].l1)
    rig.lane.submit(CopyPages(bad.ticket, bad.session, True, (copy,), 0, 5))
    assert ErrorCode.OUT_OF_RANGE in rig.ended().reason
    assert client.state(0) == f.STATE_FAILED


def test_loads_overtake_stores(held: type[Held]) -> None:
    rig = Rig(1)
    client = rig.attach(1)
    for ticket in (1, 2, 3, 4):
        client.arm(ticket, ticket)
    rig.lane.submit(job(1, [(0, 0)], to_l1=False, slot=1))
    assert held.reached.acquire(timeout=SAFETY_S)  # the only thread is busy
    rig.lane.submit(job(2, [(1, 1)], to_l1=False, slot=2))
    rig.lane.submit(job(3, [(2, 2)], slot=3))
    rig.lane.submit(job(4, [(3, 3)], slot=4))
    assert (rig.lane.stats().queued_loads, rig.lane.stats().queued_stores) == (2, 1)
    held.go.set()
    assert [rig.ended().ticket for _ in range(4)] == [1, 3, 4, 2]
    rig.lane.close()


def test_cancel_ends_waiting_and_running_jobs(held: type[Held]) -> None:
    rig = Rig(1)
    client = rig.attach(1)
    client.arm(1, 1)
    client.arm(2, 2)
    rig.lane.submit(job(1, [(0, 0)], slot=1))
    assert held.reached.acquire(timeout=SAFETY_S)
    rig.lane.submit(job(2, [(1, 1)], slot=2))
    rig.lane.cancel(TicketId(2))
    assert rig.ended() == CopyEnded(TicketId(2), False, "transfer_failed: cancelled")
    assert client.state(2) == f.STATE_FAILED
    rig.lane.cancel(TicketId(1))
    held.go.set()
    assert rig.ended() == CopyEnded(TicketId(1), False, "transfer_failed: cancelled")
    assert client.state(1) == f.STATE_FAILED
    assert not client.pool.any()
    rig.lane.cancel(TicketId(1))  # it may just have ended
    rig.lane.close()
    assert rig.events.empty()


def test_detach_waits_for_the_running_copy_and_ends_the_waiting(held: type[Held]) -> None:
    rig = Rig(1)
    client = rig.attach(1)
    rig.attach(2)
    client.arm(1, 1)
    client.arm(2, 2)
    rig.lane.submit(job(1, [(0, 0)], slot=1))
    assert held.reached.acquire(timeout=SAFETY_S)
    rig.lane.submit(job(2, [(1, 1)], slot=2))
    detached = threading.Event()

    def detach() -> None:
        rig.lane.detach(SessionId(1))
        detached.set()

    thread = threading.Thread(target=detach)
    thread.start()
    assert rig.ended().ticket == 2
    assert not detached.is_set()  # the mover is in the middle of session 1's memory
    held.go.set()
    assert rig.ended() == CopyEnded(TicketId(1), False, "unknown_session: the session's memory is gone")
    thread.join(SAFETY_S)
    assert detached.is_set()
    assert client.state(1) == f.STATE_FAILED
    rig.lane.submit(job(3, [(0, 0)]))
    assert not rig.ended().ok
    rig.lane.detach(SessionId(1))  # idempotent
    rig.lane.close()


def mapped(inode: int) -> bool:
    with open("/proc/self/maps") as maps:
        return any(line.split()[4] == str(inode) for line in maps)


def test_detach_unmaps_both_memories(rig: Rig) -> None:
    pool_fd, fence_fd = memfd(POOL), memfd(SLOTS * f.SLOT_BYTES)
    rig.lane.attach(SessionId(9), pool_fd, POOL, fence_fd, SLOTS, model=MODEL, layout=LAYOUT)
    inodes = [os.fstat(fd).st_ino for fd in (pool_fd, fence_fd)]
    with mmap.mmap(fence_fd, SLOTS * f.SLOT_BYTES) as area:
        area[:16] = f.MAGIC.to_bytes(8, "little") + (1).to_bytes(8, "little")
    assert all(mapped(inode) for inode in inodes)
    for ticket in (1, 1, 1):
        rig.lane.submit(job(ticket, [(0, 0), (3, 5), (7, 6), (8, 9)], session=9))
        assert rig.ended().ok
    rig.lane.submit(job(1, [(0, BLOCKS)], session=9))  # a failure must not keep views alive either
    assert not rig.ended().ok
    rig.lane.detach(SessionId(9))
    assert not any(mapped(inode) for inode in inodes)
    os.close(pool_fd)
    os.close(fence_fd)


@pytest.mark.parametrize(
    ("pool", "fence", "match"),
    [
        (POOL - 4096, SLOTS * f.SLOT_BYTES, "L1 pool"),
        (POOL, SLOTS * f.SLOT_BYTES - 1, "fence area"),
    ],
)
def test_memory_smaller_than_declared_is_refused(rig: Rig, pool: int, fence: int, match: str) -> None:
    pool_fd, fence_fd = memfd(pool), memfd(fence)
    inode = os.fstat(pool_fd).st_ino
    with pytest.raises(HiCacheError, match=match) as caught:
        rig.lane.attach(SessionId(9), pool_fd, POOL, fence_fd, SLOTS, model=MODEL, layout=LAYOUT)
    assert caught.value.code == ErrorCode.BAD_SPEC
    assert caught.value.remedy
    assert not mapped(inode)
    os.close(pool_fd)
    os.close(fence_fd)


def test_memory_that_may_shrink_is_refused(rig: Rig) -> None:
    pool_fd, fence_fd = memfd(POOL, seals=0), memfd(SLOTS * f.SLOT_BYTES)
    with pytest.raises(HiCacheError, match="shrinking"):
        rig.lane.attach(SessionId(9), pool_fd, POOL, fence_fd, SLOTS, model=MODEL, layout=LAYOUT)
    os.close(pool_fd)
    os.close(fence_fd)


def test_descriptor_that_is_no_memfd_is_refused(rig: Rig) -> None:
    read, write = os.pipe()
    with pytest.raises(HiCacheError, match="memfd"):
        rig.lane.attach(SessionId(9), read, POOL, write, SLOTS, model=MODEL, layout=LAYOUT)
    os.close(read)
    os.close(write)


def test_layout_beyond_the_attached_pool_is_refused(rig: Rig) -> None:
    pool_fd, fence_fd = memfd(POOL), memfd(SLOTS * f.SLOT_BYTES)
    with pytest.raises(HiCacheError, match="attach the whole pool"):
        rig.lane.attach(SessionId(9), pool_fd, POOL - 4096, fence_fd, SLOTS, model=MODEL, layout=LAYOUT)
    os.close(pool_fd)
    os.close(fence_fd)


def test_fences_without_a_copy(rig: Rig) -> None:
    client = rig.attach(1)
    client.arm(0, 4)
    assert rig.lane.fail_fence(FailFence(SessionId(1), 0, 4, "store"))
    assert client.state(0) == f.STATE_FAILED
    client.arm(1, 5)
    assert rig.lane.done_fence(DoneFence(SessionId(1), 1, 5))
    assert client.state(1) == f.STATE_DONE
    client.arm(2, 6)
    assert not rig.lane.done_fence(DoneFence(SessionId(1), 2, 5))
    assert client.state(2) == f.STATE_IDLE
    assert not rig.lane.fail_fence(FailFence(SessionId(2), 0, 4, "store"))
    assert not rig.lane.fail_fence(FailFence(SessionId(1), SLOTS, 4, "store"))


def test_drain_waits_for_all_and_tells_when_it_gave_up(held: type[Held]) -> None:
    rig = Rig(2)
    client = rig.attach(1)
    client.arm(1, 1)
    rig.lane.submit(job(1, [(0, 0)], slot=1))
    assert held.reached.acquire(timeout=SAFETY_S)
    assert not rig.lane.drain(0.0)
    held.go.set()
    assert rig.lane.drain(SAFETY_S)
    assert rig.ended().ok
    rig.lane.close()


def test_full_queue_is_busy(held: type[Held]) -> None:
    events: queue.Queue[Event] = queue.Queue()
    lane = CpuLane(np.zeros(32 * BLOCK, np.uint8), 1, events.put, max_parts=1)
    client = Client()
    lane.attach(SessionId(1), client.pool_fd, POOL, client.fence_fd, SLOTS, model=MODEL, layout=LAYOUT)
    for ticket in (1, 2, 3):
        client.arm(ticket, ticket)
        lane.submit(job(ticket, [(0, 0)], slot=ticket))
        if ticket == 1:
            assert held.reached.acquire(timeout=SAFETY_S)
    busy = events.get(timeout=SAFETY_S)
    assert isinstance(busy, CopyEnded)
    assert (busy.ticket, busy.ok) == (3, False)
    assert ErrorCode.BUSY in busy.reason
    held.go.set()
    lane.close()
    assert client.state(3) == f.STATE_FAILED
    client.close()


def test_close_answers_everything_and_ends_the_threads() -> None:
    rig = Rig(2)
    client = rig.attach(1)
    for slot in range(SLOTS):
        client.arm(slot, slot + 1)
        rig.lane.submit(job(slot + 1, [(slot, slot)], slot=slot))
    rig.lane.close()
    assert sorted(rig.ended().ticket for _ in range(SLOTS)) == list(range(1, SLOTS + 1))
    assert all(client.state(slot) in (f.STATE_DONE, f.STATE_FAILED) for slot in range(SLOTS))
    assert not any(thread.name.startswith("hicache-copy") for thread in threading.enumerate())
    client.close()


@pytest.mark.parametrize("seed", range(4))
def test_any_interleaving_answers_each_job_once_and_agrees_with_its_fence(seed: int) -> None:
    """Loads and cancels from the caller while three threads copy; every load has its own slot and pages."""
    rng = np.random.default_rng(seed)
    rig = Rig(3)
    clients = {session: rig.attach(session) for session in (1, 2, 3)}
    jobs: dict[int, tuple[int, int, list[tuple[int, int]]]] = {}
    ticket = 0
    for slot in range(SLOTS):
        for session, client in clients.items():
            ticket += 1
            pages = [(int(rng.integers(32)), 2 * slot + i) for i in (0, 1)]
            jobs[ticket] = (session, slot, pages)
            client.arm(slot, ticket)
            rig.lane.submit(job(ticket, pages, session=session, slot=slot))
            if rng.random() < 0.5:
                rig.lane.cancel(TicketId(int(rng.integers(1, ticket + 1))))
    rig.lane.detach(SessionId(3))
    events = [rig.ended() for _ in jobs]
    assert sorted(event.ticket for event in events) == sorted(jobs)
    for event in events:
        session, slot, pages = jobs[event.ticket]
        client = clients[session]
        assert client.state(slot) == (f.STATE_DONE if event.ok else f.STATE_FAILED)
        if event.ok:
            assert client.layers(slot) == LAYERS
            assert all(l1_block(client, start) == l2_block(rig, block) for block, start in pages)
    rig.lane.close()
    assert rig.events.empty()

"""A pool that takes its bytes elsewhere: the same addresses, and nobody else's writes any more."""

import contextlib
import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from client_world import client_of, eventually, leasing

from hicache.protocol.fence import (
    SLOT_BYTES,
    SLOT_WORDS,
    STATE_DONE,
    STATE_FAILED,
    STATE_RUNNING,
    WORD_LAYERS_DONE,
    WORD_STATE,
)
from hicache.protocol.messages import Accepted, Attach, Load, Store
from hicache_client import pool as pool_module
from hicache_client.fences import Fence, FenceArea
from hicache_client.memory import MemoryBound
from hicache_client.pool import SharedPool
from hicache_client.testing import FakeDaemon, FakeRequest, int32_bytes

PAGE = mmap.PAGESIZE
SIZE = 64 * PAGE + 100

WRITER = """
import mmap, sys
pool = mmap.mmap(int(sys.argv[1]), int(sys.argv[2]))
while True:
    for value in range(256):
        pool[:] = bytes([value]) * len(pool)
        print(value, flush=True)
"""


def array_of(pool: SharedPool) -> npt.NDArray[np.uint8]:
    return np.frombuffer(pool.buffer, np.uint8)


def filled(pool: SharedPool, seed: int = 1) -> npt.NDArray[np.uint8]:
    """A copy of the random bytes that the pool holds afterwards."""
    view = array_of(pool)
    view[:] = np.random.default_rng(seed).integers(0, 256, view.size, np.uint8)
    return view.copy()


@pytest.mark.parametrize("stopped", [True, False])
def test_another_process_writes_to_what_nobody_sees(stopped: bool) -> None:
    """Stopped meanwhile, as a daemon that hangs, or writing on all the time."""
    pool = SharedPool(SIZE)
    before = filled(pool)
    numbers, tensor = array_of(pool), torch.frombuffer(pool.buffer, dtype=torch.uint8)
    fd = os.dup(pool.fd)  # as the daemon's: another descriptor of the same file
    command = [sys.executable, "-c", WRITER, str(fd), str(SIZE)]
    writer = subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        with writer.stdout:
            for _ in range(3):
                writer.stdout.readline()
            assert not np.array_equal(numbers, before)  # it does reach us
            if stopped:
                writer.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
                numbers[:] = before
            pool.sever()
            if not stopped:
                before = numbers.copy()
            writer.send_signal(signal.SIGCONT)
            for _ in range(300):
                writer.stdout.readline()
    finally:
        writer.kill()
        writer.wait()
    assert np.array_equal(numbers, before)
    assert np.array_equal(tensor.numpy(), before)
    with mmap.mmap(fd, SIZE) as former:
        assert former[:] != before.tobytes()  # it did go on
    os.close(fd)
    tensor[5] = 77 if before[5] != 77 else 78  # all views are of one memory
    assert before[5] != numbers[5] == pool.buffer[5]
    pool.close()


def descriptors(inode: int) -> int:
    """How many of our descriptors are of this file."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            count += os.fstat(int(name)).st_ino == inode
    return count


def test_the_new_memory_is_what_the_descriptor_names() -> None:
    pool = SharedPool(SIZE)
    before = filled(pool)
    number, address, inode = pool.fd, pool.address, os.fstat(pool.fd).st_ino
    for round_ in range(3):
        backing = pool.backing
        pool.sever()
        assert (backing.leaving, backing.severed) == (True, True)
        assert (pool.backing.leaving, pool.backing.severed) == (False, False)
        assert (pool.fd, pool.address) == (number, address)
        former, inode = inode, os.fstat(pool.fd).st_ino
        assert (descriptors(former), descriptors(inode)) == (0, 1)
        with mmap.mmap(pool.fd, SIZE) as daemons:
            assert daemons[:] == before.tobytes()
            daemons[round_] = before[round_] = 77
        assert np.array_equal(array_of(pool), before)
        for size in (PAGE, 2 * SIZE):
            with pytest.raises(PermissionError):  # sealed as the first was
                os.ftruncate(pool.fd, size)
        assert not os.get_inheritable(pool.fd)
    assert address % PAGE == 0
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.sever()


def mapped(inode: int) -> bool:
    return any(line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines())


def test_memory_goes_with_the_last_view() -> None:
    pool = SharedPool(SIZE)
    first = os.fstat(pool.fd).st_ino
    before = filled(pool)
    tensor = torch.frombuffer(pool.buffer, dtype=torch.uint8)  # torch holds the buffer without exporting it
    pool.sever()
    second = os.fstat(pool.fd).st_ino
    assert not mapped(first)
    pool.close()
    pool.close()
    assert pool.fd == -1
    assert len(pool.buffer) == 0
    assert mapped(second)
    assert np.array_equal(tensor.numpy(), before)
    del tensor
    assert not mapped(second)


def test_what_was_never_touched_takes_no_memory_and_stays_zero() -> None:
    size = 1 << 30
    pool = SharedPool(size)
    view = array_of(pool)
    for at in (0, 5 * PAGE + 7, 1 << 29, size - 1):
        view[at] = 9
    used = os.fstat(pool.fd).st_blocks * 512
    pool.sever()
    assert os.fstat(pool.fd).st_blocks * 512 <= used
    assert [int(view[at]) for at in (0, 5 * PAGE + 7, 1 << 29, size - 1)] == [9] * 4
    assert not view[PAGE : 5 * PAGE].any()
    pool.close()


@pytest.mark.parametrize("short", [0, 1])
def test_too_little_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch, short: int) -> None:
    pool = SharedPool(SIZE)
    before = filled(pool)
    backing, inode = pool.backing, os.fstat(pool.fd).st_ino
    needed = 65 * PAGE
    monkeypatch.setattr(pool_module, "memory_bound", lambda: MemoryBound(needed - short, "the machine's memory"))
    if not short:
        pool.sever()
        assert os.fstat(pool.fd).st_ino != inode
        return
    with pytest.raises(OSError, match=rf"{needed:,} bytes.*{needed - 1:,} bytes left of the machine") as caught:
        pool.sever()
    assert caught.value.errno == errno.ENOMEM
    assert pool.backing is backing
    assert (backing.leaving, backing.severed) == (False, False)
    assert os.fstat(pool.fd).st_ino == inode
    assert np.array_equal(array_of(pool), before)
    pool.close()


@pytest.mark.parametrize("step", ["pwrite", "show"])
def test_a_move_that_fails_half_way_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    pool = SharedPool(SIZE)
    before, backing = filled(pool), pool.backing
    made: list[int] = []
    sealed_memfd = pool_module.sealed_memfd

    def make(name: str, size: int) -> int:
        fd = sealed_memfd(name, size)
        made.append(os.fstat(fd).st_ino)
        return fd

    monkeypatch.setattr(pool_module, "sealed_memfd", make)

    def fail(*args: object) -> int:
        assert backing.leaving
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(*((os, "pwrite") if step == "pwrite" else (pool._mapping, "show")), fail)
    with pytest.raises(OSError, match="no room"):
        pool.sever()
    assert (backing.leaving, backing.severed) == (False, False)
    assert pool.backing is backing
    array_of(pool)[0] = before[0] = 3
    with mmap.mmap(pool.fd, SIZE) as other:
        assert other[:] == before.tobytes()
    assert [descriptors(inode) for inode in made] == [0]
    pool.close()


# ---- what waits for the daemon's words -----------------------------------------------------------------------


class Rig:
    """A pool, a fence area on it, and the daemon's view of the words."""

    def __init__(self) -> None:
        self.pool = SharedPool(SIZE)
        self.area = FenceArea(4, lambda: False, self.pool.backing)
        self.words = memoryview(mmap.mmap(self.area.fd, 4 * SLOT_BYTES)).cast("Q")

    def fence(self) -> Fence:
        fence = self.area.acquire()
        assert fence is not None
        return fence

    def tell(self, fence: Fence, state: int, layers: int) -> None:
        self.words[fence.slot * SLOT_WORDS + WORD_LAYERS_DONE] = layers
        self.words[fence.slot * SLOT_WORDS + WORD_STATE] = state


def test_what_had_not_ended_has_failed_whatever_its_word_says_later() -> None:
    rig = Rig()
    unseen, running, done = rig.fence(), rig.fence(), rig.fence()
    rig.tell(running, STATE_RUNNING, 2)
    rig.tell(done, STATE_DONE, 5)
    assert (running.layers_done, done.layers_done) == (2, 5)
    rig.pool.sever()
    for fence in (unseen, running):
        rig.tell(fence, STATE_DONE, 5)
    assert [fence.state for fence in (unseen, running, done)] == [STATE_FAILED, STATE_FAILED, STATE_DONE]
    assert [fence.layers_done for fence in (unseen, running, done)] == [0, 2, 5]
    assert all(fence.settled for fence in (unseen, running, done))
    assert rig.area.severed()
    assert rig.area.acquire() is None
    assert FenceArea(1, lambda: False, rig.pool.backing).acquire() is not None


@pytest.mark.parametrize("fails", [False, True])
def test_a_word_that_comes_while_the_bytes_move_is_not_believed(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Its bytes may have come behind the copy's back."""
    rig = Rig()
    filled(rig.pool)
    fence = rig.fence()
    pwrite = os.pwrite

    def copying(fd: int, data: memoryview, at: int) -> int:
        rig.tell(fence, STATE_DONE, 5)
        assert (fence.state, fence.layers_done, fence.settled) == (0, 0, False)
        assert rig.area.acquire() is None
        if fails:
            raise OSError(errno.ENOSPC, "no room")
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", copying)
    if fails:
        with pytest.raises(OSError, match="no room"):
            rig.pool.sever()
        assert (fence.state, fence.layers_done) == (STATE_DONE, 5)
    else:
        rig.pool.sever()
        assert (fence.state, fence.layers_done) == (STATE_FAILED, 0)


@pytest.mark.parametrize("reattach", [False, True])
def test_a_client_registers_the_new_memory(tmp_path: Path, reattach: bool) -> None:
    def answer(request: FakeRequest) -> list[Accepted] | None:
        return [Accepted(1, 2)] if isinstance(request.message, Load | Store) else leasing(request)  # type: ignore[return-value]

    with FakeDaemon(tmp_path, answer) as daemon, client_of(tmp_path) as client:
        pool = client._session._registration.pool
        tokens, blocks = int32_bytes(range(8)), [int32_bytes([3, 4])]
        handle = client.load(client.lookup(tokens, 8).lease, 0, blocks)
        store = client.store(tokens, 0, blocks)
        assert handle is not None
        assert store is not None
        old = daemon.seen(Load)[0]
        assert not handle.settled
        waited: list[bool] = []
        waiting = threading.Thread(target=lambda: waited.append(handle.wait_layer(0)))
        waiting.start()
        pool.sever()
        waiting.join()
        assert waited == [False]
        old.fence.finish()
        assert handle.failed
        assert handle.settled
        assert not handle.done
        assert store.failed
        assert store.settled
        if reattach:
            client.reattach()
        assert not client.connected
        assert client.lookup(tokens, 8).resumable_tokens == 8
        eventually(lambda: len(daemon.sessions) == 2, "a second session")
        assert [attach.pool_bytes for attach in map(attach_of, daemon.requests[-1:])] == [pool.size_bytes]
        session = daemon.requests[-1].session
        assert session is not None
        session.pool[11] = 211
        assert pool.buffer[11] == 211
        assert old.session is not None
        old.session.pool[11] = 5
        assert pool.buffer[11] == 211


def attach_of(request: FakeRequest) -> Attach:
    assert request.session is not None
    return request.session.attach

"""Pages that exist are entered into the page tables; none is taken; and it stops when it is told to."""

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator

import pytest

from hicache_daemon import prefault
from hicache_daemon.client_memory import ClientMemory
from hicache_daemon.prefault import CHUNK_BYTES, Prefault

SAFETY_S = 20
PAGE = mmap.PAGESIZE
SIZE = 2 * CHUNK_BYTES + 5 * PAGE


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(made, SIZE)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    yield made
    os.close(made)


def entered_bytes(fd: int) -> int:
    """Bytes of the file that are in this process's page tables."""
    inode, found, ours = str(os.fstat(fd).st_ino), 0, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            fields = line.split()
            if "-" in fields[0]:
                ours = len(fields) > 4 and fields[4] == inode
            elif ours and fields[0] == "Rss:":
                found += int(fields[1]) << 10
    return found


def taken_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_what_exists_is_entered_and_nothing_is_taken(fd: int) -> None:
    for first, pages in ((0, 1), (3, 2), (CHUNK_BYTES // PAGE - 1, 2), (SIZE // PAGE - 2, 2)):
        os.pwrite(fd, b"x" * pages * PAGE, first * PAGE)
    memory = ClientMemory(fd, SIZE, "test")
    assert entered_bytes(fd) == 0
    entering = Prefault(memory.bytes)
    assert entering.wait(SAFETY_S)
    assert entered_bytes(fd) == taken_bytes(fd) == 7 * PAGE
    memory.bytes[3 * PAGE] = 7  # entered to be written to as well
    assert os.pread(fd, 1, 3 * PAGE) == b"\x07"
    entering.stop()
    memory.close()


def test_an_older_kernel_leaves_everything_as_it_is(fd: int) -> None:
    os.pwrite(fd, b"x" * SIZE, 0)
    memory = ClientMemory(fd, SIZE, "test")
    entering = Prefault(memory.bytes, advice=1 << 20)
    assert entering.wait(SAFETY_S)
    assert entered_bytes(fd) == 0
    memory.close()


def test_it_stops_between_chunks(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    begun, told = threading.Event(), threading.Event()

    def slow(address: int, size: int) -> Iterator[tuple[int, int]]:
        seen.append(size)
        begun.set()
        assert told.wait(SAFETY_S)
        yield address, address + PAGE

    monkeypatch.setattr(prefault, "_resident", slow)
    memory = ClientMemory(fd, SIZE, "test")
    entering = Prefault(memory.bytes)
    assert begun.wait(SAFETY_S)
    monkeypatch.setattr(entering._stopped, "set", lambda: (threading.Event.set(entering._stopped), told.set()))
    entering.stop()
    assert seen == [CHUNK_BYTES]
    assert entered_bytes(fd) == 0
    memory.close()

"""A client's memory as the daemon maps it: no descriptor kept, no view outlives the mapping."""

import fcntl
import os

import pytest

from hicache_daemon.client_memory import ClientMemory

SIZE = 8192


def memfd() -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def test_a_mapping_keeps_no_descriptor_and_shares_the_bytes() -> None:
    before = os.listdir("/proc/self/fd")
    fd = memfd()
    memory = ClientMemory(fd, SIZE, "it")
    memory.bytes[100] = 7
    assert os.pread(fd, 1, 100) == b"\x07"
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    memory.bytes[SIZE - 1] = 9
    assert memory.bytes[100] == 7
    memory.close()
    memory.close()


def test_a_view_that_is_alive_keeps_the_mapping_and_is_told() -> None:
    fd = memfd()
    memory = ClientMemory(fd, SIZE, "it")
    os.close(fd)
    view = memory.bytes[10:20][2:]
    with pytest.raises(BufferError):
        memory.close()
    view[:] = 3  # still mapped
    del view
    memory.close()

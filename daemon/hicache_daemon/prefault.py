"""Page tables for memory that a client lent, filled in the background.

Its pages exist, but not yet in this process's page tables: the first load into each would take a fault per 4 KiB,
which costs twice as much as the copy itself (docs/internals/copy.md). A thread of its own has the kernel enter them
in bulk, at a fifth of that price and before a load comes.

Only pages that exist are entered. Touching others would take memory here, in this process's name, for what the
engine may never use.
"""

import ctypes
import mmap
import threading
from collections.abc import Iterator

import numpy as np

from hicache.copy.base import Bytes

CHUNK_BYTES = 16 << 20  # about 1 ms; between chunks the thread looks whether it is to stop
MADV_POPULATE_READ = 22  # Linux 5.14; enters shared memory writable


class Prefault:
    """A thread that enters the existing pages of `memory` into the page tables, from its beginning on, and ends.

    `memory` starts on a page boundary. It must stay mapped until `stop` has returned.
    """

    def __init__(self, memory: Bytes, advice: int = MADV_POPULATE_READ) -> None:
        self._advice = advice
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(memory.ctypes.data, len(memory)), name="hicache-prefault", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Wait for the thread, at most about as long as one chunk takes. Idempotent."""
        self._stopped.set()
        self._thread.join()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has come to its end by itself, within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, address: int, size: int) -> None:
        for chunk in range(0, size, CHUNK_BYTES):
            for low, high in _resident(address + chunk, min(CHUNK_BYTES, size - chunk)):
                if self._stopped.is_set() or _libc.madvise(low, high - low, self._advice):
                    return  # an older kernel, say: then the faults come one by one, as they would have


def _resident(address: int, size: int) -> Iterator[tuple[int, int]]:
    """Address ranges [low, high) of whole pages that exist in [address, address + size)."""
    pages = -(-size // mmap.PAGESIZE)
    state = np.zeros(pages, np.uint8)
    if _libc.mincore(address, size, state.ctypes.data):
        return
    edges = np.flatnonzero(np.diff(state & 1, prepend=0, append=0)).tolist()
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        yield address + first * mmap.PAGESIZE, address + last * mmap.PAGESIZE


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

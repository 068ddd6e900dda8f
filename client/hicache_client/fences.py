"""The client's half of protocol/fence.py: an area of slots, and one `Fence` per transfer.

    free ─acquire─► busy ─terminal word seen─► free (at the back of the queue, with a new generation next time)
                     └─ given up: stays busy until the daemon writes a terminal word, as it may still write

An area belongs to one session. A new session brings a new area, so a copy of the old one that is still
running writes to memory that nobody reads any more.

An area also belongs to one backing of the pool. When the pool is severed, what the words say from then on is about
memory that the engine does not see: every fence that had not ended ends FAILED, with the layers it had.
"""

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

from hicache.protocol.fence import (
    MAGIC,
    SLOT_BYTES,
    SLOT_WORDS,
    STATE_DONE,
    STATE_FAILED,
    STATE_IDLE,
    STATE_RUNNING,
    WORD_CODE,
    WORD_GENERATION,
    WORD_LAYERS_DONE,
    WORD_MAGIC,
    WORD_REVOKED,
    WORD_STATE,
    WORD_TICKET,
)
from hicache_client.pool import Backing, sealed_memfd


class Fence:
    """One transfer's progress. Reading it costs a few loads from shared memory, no message."""

    __slots__ = ("_area", "_layers", "_state", "generation", "revoked", "slot")

    def __init__(self, area: "FenceArea", slot: int, generation: int) -> None:
        self._area = area
        self._state = STATE_IDLE
        self._layers = 0
        self.slot = slot
        self.generation = generation
        self.revoked = False

    @property
    def state(self) -> int:
        """STATE_IDLE … STATE_FAILED; once terminal it stays."""
        if self._state not in (STATE_DONE, STATE_FAILED):
            self._area.refresh(self)
        return self._state

    @property
    def layers_done(self) -> int:
        """Layers that are in place, counted in the model's order."""
        self.state  # noqa: B018 (the state is written after the layers, so it is read before them)
        return self._layers

    @property
    def terminal(self) -> bool:
        return self.state in (STATE_DONE, STATE_FAILED)

    @property
    def settled(self) -> bool:
        """Neither end of the transfer is touched any more: it ended, or the daemon has done with the session."""
        return self.terminal or self._area.over()

    def revoke(self) -> None:
        """Tell whoever copies that the transfer is not wanted any more. Idempotent, from any thread."""
        self.revoked = True
        self._area.revoke(self)

    def reject(self) -> None:
        """The daemon answered that the transfer will not begin; the slot is free at once."""
        self._area.reject(self)

    def _note(self, state: int, layers: int) -> None:
        self._state = state
        self._layers = layers


class FenceArea:
    """A sealed memfd of `slots` slots. Thread-safe."""

    def __init__(self, slots: int, over: Callable[[], bool], backing: Backing | None = None) -> None:
        """`over` says whether the daemon is known not to write here any more. `backing`: what the pool showed when
        its descriptor was handed to the same session; None for memory that is never severed."""
        self.slots = slots
        self._backing = Backing() if backing is None else backing
        self.fd = sealed_memfd("hicache-fences", slots * SLOT_BYTES)
        self._close_fd = weakref.finalize(self, os.close, self.fd)  # also if nobody calls `close`
        self._close_fd.atexit = False
        self._words = memoryview(mmap.mmap(self.fd, slots * SLOT_BYTES, mmap.MAP_SHARED)).cast("Q")
        self._lock = threading.Lock()
        self._free = deque(range(slots))
        self._busy: dict[int, Fence] = {}
        self._generation = 0
        self.over = over

    @property
    def busy(self) -> int:
        return len(self._busy)

    def severed(self) -> bool:
        """Whether the daemon's end of this session is not what the engine sees any more."""
        return self._backing.severed

    def acquire(self) -> Fence | None:
        """A fence in a fresh slot, or None if every slot's transfer is still open, or the pool is severed."""
        with self._lock:
            if self._backing.leaving:
                return None
            if not self._free:
                self._reap()
            if not self._free:
                return None
            slot = self._free.popleft()
            self._generation += 1
            fence = Fence(self, slot, self._generation)
            self._busy[slot] = fence
            base, words = slot * SLOT_WORDS, self._words
            words[base + WORD_STATE] = STATE_IDLE
            words[base + WORD_LAYERS_DONE] = 0
            words[base + WORD_TICKET] = 0
            words[base + WORD_CODE] = 0
            words[base + WORD_MAGIC] = MAGIC
            words[base + WORD_GENERATION] = fence.generation
            return fence

    def refresh(self, fence: Fence) -> None:
        """Read the words into the fence; a terminal state frees the slot."""
        with self._lock:
            self._refresh(fence)

    def revoke(self, fence: Fence) -> None:
        """Write the transfer's generation into its slot, if it still is the transfer's.

        Under the lock, so that a late call for an old transfer cannot overwrite a newer one's word; and letting go
        of the lock orders the word before whatever the caller writes next (hicache/copy/fence_area.py)."""
        with self._lock:
            if self._busy.get(fence.slot) is fence:
                self._words[fence.slot * SLOT_WORDS + WORD_REVOKED] = fence.generation

    def reject(self, fence: Fence) -> None:
        """Free the slot of a transfer that the daemon did not take."""
        with self._lock:
            if self._busy.get(fence.slot) is fence:
                self._end(fence, STATE_FAILED, 0)

    def close(self) -> None:
        """The session ended on our side. The daemon may still end its copies: fences go on to show that, the
        mapping lives as long as they do. Idempotent."""
        with self._lock:
            self._close_fd()
            self.fd = -1

    def _reap(self) -> None:
        for fence in list(self._busy.values()):
            self._refresh(fence)

    def _refresh(self, fence: Fence) -> None:
        if self._busy.get(fence.slot) is not fence:
            return  # ended already; the slot may be another's
        base = fence.slot * SLOT_WORDS
        state = self._words[base + WORD_STATE]  # before the layers: it is written after them
        layers = self._words[base + WORD_LAYERS_DONE]
        # After the words: if the pool was not being moved by now, what they speak of moves with it.
        if self._backing.severed:
            self._end(fence, STATE_FAILED, fence._layers)
        elif self._backing.leaving:
            return
        elif state in (STATE_DONE, STATE_FAILED):
            self._end(fence, state, layers)
        elif state == STATE_RUNNING:
            fence._note(STATE_RUNNING, layers)

    def _end(self, fence: Fence, state: int, layers: int) -> None:
        fence._note(state, layers)
        del self._busy[fence.slot]
        self._free.append(fence.slot)

"""The daemon's end of the fence slots: plain stores into the client's shared memory.

    IDLE -running-> RUNNING -layers_done…-> RUNNING -done-> DONE
      |                |
      '----failed------+----failed-> FAILED

Why plain stores are enough: every word is 8 bytes, aligned, and written by one store, so a reader sees the old
or the new value. The order matters too: a layer's bytes must be visible before LAYERS_DONE says so, LAYERS_DONE
before STATE. x86 keeps the order of ordinary stores of one thread; non-temporal stores and `rep movs`, which
`memcpy` uses for large pieces, are weaker, but libc ends a non-temporal copy with `sfence`, and the stores after
a string instruction are not seen before it. Bytes written by *other* threads come first because a wave is only
reported after those threads took a lock. On a machine with a weaker order (arm64) a release barrier must go
where `_set` is; Python has none to offer, so hicache refuses to start a CPU lane there (`require_store_order`).

REVOKED goes the other way, and needs an order of loads: the client writes the word and then, from any thread, new
bytes into the source; here the source is read first and the word last. If any new byte was read, the word must be
seen. x86 gives that without a fence: one thread's loads are not reordered with each other (those of `rep movs` and
of a copy with non-temporal *stores* included: the source is read with ordinary loads of ordinary memory), and all
threads see the client's two stores in their order. Threads that copied other parts read their source before they
took the job's lock, a locked instruction, and the word is read under that lock. The client writes the word under a
lock of its own: letting go of it is a locked instruction too, so not even a non-temporal store to the source comes
before the word.
"""

import platform

import numpy as np
import numpy.typing as npt

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.protocol import fence as f

Words = npt.NDArray[np.uint64]


def require_store_order() -> None:
    """Raise `HiCacheError(UNSUPPORTED)` unless stores of one thread are seen in order on this machine."""
    if platform.machine().lower() not in ("x86_64", "amd64", "i686", "i386"):
        raise HiCacheError(
            ErrorCode.UNSUPPORTED,
            f"fences in shared memory need the store order of x86, this machine is {platform.machine()}",
            "run the daemon and its CPU engines on x86-64",
        )


class FenceSlot:
    """One slot for one transfer.

    Every call raises `HiCacheError(TRANSFER_FAILED)` and writes nothing when the slot is no longer the one that
    the transfer named (another MAGIC or GENERATION): the client gave it to a newer transfer.
    """

    __slots__ = ("_generation", "_words")

    def __init__(self, words: Words, generation: int) -> None:
        self._words = words
        self._generation = generation

    def check(self) -> None:
        """Raise unless the slot still belongs to this transfer."""
        magic, generation = int(self._words[f.WORD_MAGIC]), int(self._words[f.WORD_GENERATION])
        if magic != f.MAGIC or generation != self._generation:
            raise HiCacheError(
                ErrorCode.TRANSFER_FAILED,
                f"fence slot holds generation {generation}, the transfer named {self._generation}",
                "use a fence slot for one transfer at a time and write MAGIC and GENERATION before the request",
            )

    def _set(self, word: int, value: int) -> None:
        self.check()
        self._words[word] = value

    def revoked(self) -> bool:
        """Whether the client has taken this transfer back. A store asks once more after its last byte."""
        return int(self._words[f.WORD_REVOKED]) == self._generation

    def running(self) -> None:
        self._set(f.WORD_STATE, f.STATE_RUNNING)

    def layers_done(self, count: int) -> None:
        """`count` layers, in model order and of every group, are complete. Called after their bytes."""
        self._set(f.WORD_LAYERS_DONE, count)

    def done(self) -> None:
        self._set(f.WORD_STATE, f.STATE_DONE)

    def failed(self, code: str) -> None:
        """Terminal. `code` goes to the client in its message; the slot only says that it failed."""
        del code
        self._set(f.WORD_STATE, f.STATE_FAILED)


class FenceArea:
    """All slots of one session: a uint64 view of shape (slots, SLOT_WORDS) over the client's memory."""

    def __init__(self, memory: npt.NDArray[np.uint8], slots: int) -> None:
        """`memory` holds at least `slots` · SLOT_BYTES bytes and starts on a word boundary."""
        self._words: Words = memory[: slots * f.SLOT_BYTES].view(np.uint64).reshape(slots, f.SLOT_WORDS)

    def slot(self, index: int, generation: int) -> FenceSlot:
        """Raise `HiCacheError(OUT_OF_RANGE)` for an index that the client did not attach."""
        if not 0 <= index < len(self._words):
            raise HiCacheError(
                ErrorCode.OUT_OF_RANGE, f"fence {index} is not in [0, {len(self._words)})", "attach more fence slots"
            )
        return FenceSlot(self._words[index], generation)

    def fail_open(self) -> None:
        """Write FAILED into every slot that a client has armed and nobody has ended; its generation stays.

        For the end of a session, when no transfer touches the area any more: also a request that the daemon never
        read, because the client hung up before it, gets its terminal word."""
        states = self._words[:, f.WORD_STATE]
        ended = (states == f.STATE_DONE) | (states == f.STATE_FAILED)
        states[(self._words[:, f.WORD_MAGIC] == f.MAGIC) & ~ended] = f.STATE_FAILED

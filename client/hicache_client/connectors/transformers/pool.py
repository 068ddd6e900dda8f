"""The L1 pool as columns: who holds which range, and what an idle range still knows.

One column is one token of one sequence, in every layer. A batch of B rows holds one range of B·capacity
columns, row after row, so that the batch is a strided view of the pool. A finished batch stays as *idle*
until its columns are needed; a range under a transfer that outlived its request is *busy* until it ends.

    FREE -allocate-> HELD -park-> IDLE -evict-> FREE
                      |  \\-retire-> BUSY -transfer ends-> FREE
                      \\-free-> FREE            IDLE -claim-> HELD
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hicache.protocol.messages import Scope

from .port import Handle

SETTLE_BUDGET_S = 0.2  # what one request waits for transfers at most, before it runs without columns
SETTLE_PAUSE_S = 1e-3

Tokens = npt.NDArray[np.int32]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Number of leading tokens that two sequences share."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


@dataclass(slots=True, eq=False)
class Range:
    """Columns start … start+size-1."""

    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(slots=True, eq=False)
class Resident:
    """One sequence in L1: its tokens, the column of its first token, transfers that still read it."""

    tokens: Tokens
    column: int
    scope: Scope
    offered_tokens: int = 0  # so many were offered to the daemon, a store of them may be under way
    transfers: list[Handle] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Idle:
    range: Range
    residents: tuple[Resident, ...]

    def finished(self) -> bool:
        return all(t.finished for r in self.residents for t in r.transfers)


class ColumnPool:
    """Hands out contiguous column ranges. Single-threaded; knows nothing of tensors."""

    def __init__(
        self,
        columns: int,
        settle_timeout_s: float = SETTLE_BUDGET_S,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`settle_timeout_s` lowers the time that an `allocate` may wait for transfers, SETTLE_BUDGET_S."""
        self.columns = columns
        self._budget_s = min(settle_timeout_s, SETTLE_BUDGET_S)
        self._now, self._sleep = now, sleep
        self._free: list[Range] = [Range(0, columns)]  # ascending, never adjacent
        self._idle: list[Idle] = []  # least recently used first
        self._busy: list[tuple[Range, tuple[Handle, ...]]] = []

    def held(self) -> int:
        """Columns that are neither free nor idle."""
        return self.columns - sum(r.size for r in self._free) - sum(i.range.size for i in self._idle)

    def allocate(self, size: int) -> Range | None:
        """A range of `size` columns, evicting idle sequences; None if it can't be had.

        Those without a transfer go first, oldest first. Only when none is left are transfers waited for, all
        of them together and within one budget; none is waited for that could not make enough room."""
        self._reap()
        if not self._could_fit(size):
            return None
        deadline = self._now() + self._budget_s
        while (taken := self._take(size)) is None:
            if self._evict_settled():
                continue
            if self._now() >= deadline:
                return None
            self._sleep(SETTLE_PAUSE_S)
            self._reap()
        return taken

    def _take(self, size: int) -> Range | None:
        for piece in self._free:
            if piece.size >= size:
                taken = Range(piece.start, size)
                piece.start, piece.size = piece.start + size, piece.size - size
                if not piece.size:
                    self._free.remove(piece)
                return taken
        return None

    def _could_fit(self, size: int) -> bool:
        """Whether there is room once everything is given back that nobody holds."""
        pieces = [*self._free, *(i.range for i in self._idle), *(held for held, _ in self._busy)]
        start = end = 0
        for piece in sorted(pieces, key=lambda r: r.start):
            if piece.start != end:
                start = piece.start
            end = piece.end
            if end - start >= size:
                return True
        return False

    def extend(self, held: Range, size: int) -> bool:
        """Grow `held` to `size` columns in place, if what follows it is free."""
        extra = size - held.size
        if extra <= 0:
            return True
        for piece in self._free:
            if piece.start == held.end and piece.size >= extra:
                piece.start, piece.size = piece.start + extra, piece.size - extra
                if not piece.size:
                    self._free.remove(piece)
                held.size = size
                return True
        return False

    def free(self, held: Range) -> None:
        """Give a range back. Nothing may write to it or read it any more."""
        pieces = sorted([*self._free, Range(held.start, held.size)], key=lambda r: r.start)
        merged = [pieces[0]]
        for piece in pieces[1:]:
            if piece.start < merged[-1].end:
                raise AssertionError(f"columns {piece.start}… were freed twice")
            if piece.start == merged[-1].end:
                merged[-1].size += piece.size
            else:
                merged.append(piece)
        self._free = merged

    def retire(self, held: Range, transfers: Sequence[Handle]) -> None:
        """Give a range back once these transfers have ended."""
        if all(t.finished for t in transfers):
            self.free(held)
        else:
            self._busy.append((held, tuple(transfers)))

    def park(self, held: Range, residents: tuple[Resident, ...]) -> None:
        """Keep a finished batch's columns for reuse until they are needed."""
        if residents:
            self._idle.append(Idle(held, residents))
        else:
            self.free(held)

    def best(self, tokens: Tokens, scope: Scope) -> tuple[Idle, Resident, int] | None:
        """The idle sequence that shares the longest prefix, with its length; None if none shares a token."""
        found: tuple[Idle, Resident, int] | None = None
        for idle in self._idle:
            for resident in idle.residents:
                if resident.scope == scope:
                    length = common_prefix(tokens, resident.tokens)
                    if length > (found[2] if found else 0):
                        found = (idle, resident, length)
        return found

    def claim(self, idle: Idle) -> Range:
        """Take an idle range over, to go on in place."""
        self._idle.remove(idle)
        return idle.range

    def touch(self, idle: Idle) -> None:
        """Make an idle range the last to be evicted."""
        self._idle.remove(idle)
        self._idle.append(idle)

    def drop_idle(self) -> None:
        """Forget all idle sequences (their columns no longer mean what their tokens say)."""
        for idle in self._idle:
            self.retire(idle.range, [t for r in idle.residents for t in r.transfers])
        self._idle = []

    def _reap(self) -> None:
        busy, self._busy = self._busy, []
        for held, transfers in busy:
            self.retire(held, transfers)

    def _evict_settled(self) -> bool:
        """Free the oldest idle range that no transfer reads; False if there is none."""
        for idle in self._idle:
            if idle.finished():
                self._idle.remove(idle)
                self.free(idle.range)
                return True
        return False

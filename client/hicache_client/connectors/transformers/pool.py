"""The L1 pool as columns: who holds which range, and what an idle range still knows.

One column is one token of one sequence, in every layer. A batch of B rows holds one range of B·capacity
columns, row after row, so that the batch is a strided view of the pool. A finished batch stays as *idle*
until its columns are needed; a range under a transfer that outlived its request is *busy* until it ends.

    FREE -allocate-> HELD -park-> IDLE -evict-> FREE
                      |  \\-retire-> BUSY -transfer ends-> FREE
                      \\-free-> FREE            IDLE -claim-> HELD
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hicache.protocol.messages import Scope

from .port import Handle

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

    def __init__(self, columns: int, settle_timeout_s: float = 5.0) -> None:
        self.columns = columns
        self._settle_timeout_s = settle_timeout_s
        self._free: list[Range] = [Range(0, columns)]  # ascending, never adjacent
        self._idle: list[Idle] = []  # least recently used first
        self._busy: list[tuple[Range, tuple[Handle, ...]]] = []

    def held(self) -> int:
        """Columns that are neither free nor idle."""
        return self.columns - sum(r.size for r in self._free) - sum(i.range.size for i in self._idle)

    def allocate(self, size: int) -> Range | None:
        """A range of `size` columns, evicting idle sequences, oldest first; None if it can't be had."""
        if size > self.columns:
            return None
        self._reap()
        while True:
            for piece in self._free:
                if piece.size >= size:
                    taken = Range(piece.start, size)
                    piece.start, piece.size = piece.start + size, piece.size - size
                    if not piece.size:
                        self._free.remove(piece)
                    return taken
            if not self._evict_one():
                return None

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

    def _evict_one(self) -> bool:
        """Free the oldest idle range; a store that still reads it is waited for, within bounds."""
        if not self._idle:
            return False
        idle = self._idle.pop(0)
        transfers = [t for r in idle.residents for t in r.transfers]
        for transfer in transfers:
            if not transfer.finished:
                transfer.wait(self._settle_timeout_s)
        self.retire(idle.range, transfers)
        return True

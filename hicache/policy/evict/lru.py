"""Least recently used, in runs of rows.

    stamp   one int64 per row: the tick of its last use, 0 if it is no member
    queue   (tick, rows) per use, oldest first; an entry of it is stale once the row's stamp is another tick

A use costs one vector store and one append however many rows it has. Stale entries are dropped when they come up
or when the queue holds more than twice the members, so that everything is O(rows named), amortised.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hicache.base.errors import LawBroken
from hicache.policy.evict.base import Mask, Rows

_SLACK_ROWS = 4096  # stale entries that are always tolerated
_CHUNK_ROWS = 256  # of a long record, looked at by one step of `victims`


class Lru:
    """An `Evictor` whose victims are those not used for longest."""

    def __init__(self, rows: int = 1024, slack_rows: int = _SLACK_ROWS) -> None:
        self.slack_rows = slack_rows
        self.stamp: npt.NDArray[np.int64] = np.zeros(rows, np.int64)
        self.queue: deque[tuple[int, Rows]] = deque()
        self.queued = 0  # rows in `queue`, stale ones included
        self.tick = 0
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def insert(self, rows: Rows) -> None:
        if not rows.size:
            return
        top = int(rows.max())
        if top >= self.stamp.size:
            grown = np.zeros(max(top + 1, 2 * self.stamp.size), np.int64)
            grown[: self.stamp.size] = self.stamp
            self.stamp = grown
        self.size += rows.size - int(np.count_nonzero(self.stamp[rows]))
        self._use(rows.copy())
        self._trim()

    def touch(self, rows: Rows) -> None:
        rows = rows[self.members(rows)]
        if rows.size:
            self._use(rows)
            self._trim()

    def remove(self, rows: Rows) -> None:
        rows = rows[rows < self.stamp.size]
        self.size -= int(np.count_nonzero(self.stamp[rows]))
        self.stamp[rows] = 0
        self._trim()

    def members(self, rows: Rows) -> Mask:
        if rows.size and int(rows.max()) >= self.stamp.size:
            known = rows < self.stamp.size
            known[known] = self.stamp[rows[known]] > 0
            return known
        return self.stamp[rows] > 0

    def victims(self, count: int, allowed: Callable[[Rows], Mask]) -> Rows:
        found: list[Rows] = []
        need, newest = count, self.tick
        while need > 0 and self.queue and self.queue[0][0] <= newest:
            tick, rows = self.queue.popleft()
            chunk = max(_CHUNK_ROWS, 2 * need)
            if rows.size > chunk:
                self.queue.appendleft((tick, rows[chunk:]))
                rows = rows[:chunk]
            self.queued -= rows.size
            rows = rows[self.stamp[rows] == tick]
            if not rows.size:
                continue
            may = allowed(rows)
            hits = np.flatnonzero(may)
            if hits.size > need:  # those behind the last victim keep their place
                rest = rows[hits[need] :]
                self.queue.appendleft((tick, rest))
                self.queued += rest.size
                rows, may = rows[: hits[need]], may[: hits[need]]
            taken = rows[may]
            self.stamp[taken] = 0
            self.size -= taken.size
            need -= taken.size
            found.append(taken)
            if taken.size < rows.size:
                self._use(rows[~may])
        self._trim()
        return np.concatenate(found) if found else np.zeros(0, np.int32)

    def _use(self, rows: Rows) -> None:
        self.tick += 1
        self.stamp[rows] = self.tick
        self.queue.append((self.tick, rows))
        self.queued += rows.size

    def _trim(self) -> None:
        if self.queued <= 2 * self.size + self.slack_rows:
            return
        live = [rows[self.stamp[rows] == tick] for tick, rows in self.queue]
        rows = np.concatenate(live)
        self.tick += 1
        self.stamp[rows] = self.tick
        self.queue = deque([(self.tick, rows)])
        self.queued = rows.size

    def check(self) -> None:
        if int(np.count_nonzero(self.stamp)) != self.size:
            raise LawBroken(f"law 12: {int(np.count_nonzero(self.stamp))} rows are stamped, {self.size} counted")
        if sum(rows.size for _, rows in self.queue) != self.queued or self.queued > 2 * self.size + self.slack_rows:
            raise LawBroken(f"law 12: the queue's {self.queued} rows are miscounted or too many")
        live = [rows[self.stamp[rows] == tick] for tick, rows in self.queue]
        rows = np.concatenate(live) if live else np.zeros(0, np.int32)
        if rows.size != self.size or np.unique(rows).size != self.size:
            raise LawBroken(f"law 12: {rows.size} live entries for {self.size} members")

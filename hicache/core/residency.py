"""Where each page is: columns indexed by row, one row per page key. No object per page.

State of a row in one tier (all cache groups of a page move together):

    ABSENT ── begin_* ──► FILLING ── finish_* ──► READY ── leave_* ──► LEAVING ── drop_* ──► ABSENT
       ▲                     │                      └──────── drop_l2: nothing waits for it ────┘
       └─── abort_*: copy, read or write failed ────┘         LEAVING ── rescue ──► READY (L2, used again)

Reservation and fill begin in one event, so RESERVED needs no state of its own; FILLING never becomes ABSENT by way
of READY. A row lives while a tier knows it, somebody pins it or a page below it has a row. One without a tier but
with pages below (its record was corrupt) is a *ghost*: unusable, filled again when the page is stored again.

`kids` counts rows below a row; `kids_l2` and `kids_l3` those of them that are FILLING or READY in that tier, so
that a row goes before its parent does.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hicache.base.errors import LawBroken
from hicache.base.ids import PageKey

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

ABSENT, FILLING, READY, LEAVING = 0, 1, 2, 3
STATES = ("ABSENT", "FILLING", "READY", "LEAVING")
ROOT = -1  # parent of a first page
ORPHAN = -2  # the parent's key has no row: found at start, or gone
NO_ROWS: Int32s = np.zeros(0, np.int32)
_NO_KEY = PageKey(b"")


class Residency:
    """The columns, and every transition of them. Arrays of rows hold no row twice."""

    def __init__(self, rows: int = 1024, groups: int = 1) -> None:
        self.key: list[PageKey] = [_NO_KEY] * rows
        self.row_of: dict[PageKey, int] = {}
        self.awaited: dict[PageKey, list[int]] = {}  # key without row -> orphans that name it as parent
        self.parent_key: dict[int, PageKey] = {}  # of orphans
        self.parent: Int32s = np.full(rows, ROOT, np.int32)
        self.namespace: Int32s = np.full(rows, -1, np.int32)  # -1: the row is free
        self.l2: npt.NDArray[np.uint8] = np.zeros(rows, np.uint8)
        self.l3: npt.NDArray[np.uint8] = np.zeros(rows, np.uint8)
        self.pins: Int32s = np.zeros(rows, np.int32)
        self.kids: Int32s = np.zeros(rows, np.int32)
        self.kids_l2: Int32s = np.zeros(rows, np.int32)
        self.kids_l3: Int32s = np.zeros(rows, np.int32)
        self.scratch: Int32s = np.zeros(rows, np.int32)  # zero between calls; see leaves.py
        self.in_tree: Mask = np.zeros(rows, np.bool_)
        self.padded: Mask = np.zeros(rows, np.bool_)  # has tokens that no sequence has; known of rows in the tree
        self.block: Int32s = np.full((groups, rows), -1, np.int32)  # L2 block per group, in the group's view
        self.l3_groups: npt.NDArray[np.uint16] = np.zeros(rows, np.uint16)  # bit per group of the namespace
        self.l3_bytes: Int64s = np.zeros(rows, np.int64)  # allocated on the medium, all groups
        self.told: npt.NDArray[np.uint8] = np.zeros(rows, np.uint8)  # what routers were told; see announce.py
        self.moved: list[Int32s] | None = None  # rows of which routers may have to be told; None: there are none
        self._free: list[int] = list(range(rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.row_of)

    # ---- rows come and go ---------------------------------------------------------------------------

    def add_run(self, keys: Sequence[PageKey], parent: int, namespace: int) -> Int32s:
        """Rows for new keys of consecutive pages; `parent` is the row above the first, or ROOT."""
        count = len(keys)
        rows = self._take(count)
        if not count:
            return rows
        self.parent[rows[0]] = parent
        self.parent[rows[1:]] = rows[:-1]
        self.namespace[rows] = namespace
        self.kids[rows[:-1]] = 1
        if parent >= 0:
            self.kids[parent] += 1
        for key, row in zip(keys, rows.tolist(), strict=True):
            self.key[row] = key
            self.row_of[key] = row
        if self.awaited:
            for key in keys:
                if key in self.awaited:
                    self._link_orphans(key)
        return rows

    def add_found(self, key: PageKey, parent_key: PageKey | None, namespace: int) -> int:
        """One row of which only the parent's key is known; it is linked when that key gets a row."""
        parent = ROOT if parent_key is None else self.row_of.get(parent_key, ORPHAN)
        row = int(self.add_run([key], parent, namespace)[0])
        if parent == ORPHAN and parent_key is not None:
            self.parent_key[row] = parent_key
            self.awaited.setdefault(parent_key, []).append(row)
        return row

    def _link_orphans(self, key: PageKey) -> None:
        row = self.row_of[key]
        below = np.array(self.awaited.pop(key), np.int32)
        for orphan in below.tolist():
            del self.parent_key[orphan]
        self.parent[below] = row
        self.kids[row] += below.size
        self.kids_l2[row] += _held(self.l2[below])
        self.kids_l3[row] += _held(self.l3[below])

    def _take(self, count: int) -> Int32s:
        while len(self._free) < count:
            self._grow()
        cut = len(self._free) - count
        taken = self._free[cut:]
        del self._free[cut:]
        return np.array(taken[::-1], np.int32)

    def _grow(self) -> None:
        old = self.parent.size
        new = 2 * old

        def wider(column: npt.NDArray[np.generic], fill: int) -> npt.NDArray[np.generic]:
            grown = np.full((*column.shape[:-1], new), fill, column.dtype)
            grown[..., :old] = column
            return grown

        for name, fill in (("parent", ROOT), ("namespace", -1), ("block", -1)):
            setattr(self, name, wider(getattr(self, name), fill))
        for name in (
            "l2",
            "l3",
            "pins",
            "kids",
            "kids_l2",
            "kids_l3",
            "scratch",
            "in_tree",
            "padded",
            "l3_groups",
            "l3_bytes",
            "told",
        ):
            setattr(self, name, wider(getattr(self, name), 0))
        self.key.extend([_NO_KEY] * old)
        self._free[:0] = range(new - 1, old - 1, -1)

    def need_groups(self, groups: int) -> None:
        """Make room for the block ids of `groups` cache groups."""
        missing = groups - self.block.shape[0]
        if missing > 0:
            more = np.full((missing, self.block.shape[1]), -1, np.int32)
            self.block = np.concatenate((self.block, more))

    def dead(self, rows: Int32s) -> Int32s:
        """Those of `rows` that nothing keeps: no tier, no pin. They may still have rows below them."""
        keep = (self.namespace[rows] >= 0) & (self.l2[rows] == ABSENT) & (self.l3[rows] == ABSENT)
        keep &= self.pins[rows] == 0
        found: Int32s = rows[keep]
        return found

    def forget(self, rows: Int32s) -> Int32s:
        """Free dead rows without rows below other than these; return the parents that lost one."""
        parents = self.parent[rows]
        self._count(self.kids, rows, -1)
        self.namespace[rows] = -1
        self.in_tree[rows] = False
        self.padded[rows] = False
        self.told[rows] = 0
        for row in rows.tolist():
            del self.row_of[self.key[row]]
            self.key[row] = _NO_KEY
        for row in rows[parents == ORPHAN].tolist():
            key = self.parent_key.pop(row)
            waiting = self.awaited[key]
            waiting.remove(row)
            if not waiting:
                del self.awaited[key]
        self.parent[rows] = ROOT
        self._free.extend(rows[::-1].tolist())
        above: Int32s = np.unique(parents[parents >= 0])
        return above

    # ---- L2 -----------------------------------------------------------------------------------------

    def begin_fill(self, rows: Int32s) -> None:
        self._move(self.l2, rows, ABSENT, FILLING)
        self._count(self.kids_l2, rows, 1)

    def finish_fill(self, rows: Int32s, blocks: Sequence[Int32s]) -> None:
        """The bytes are complete. `blocks[g][i]` is the block of `rows[i]`; the columns own it from now on."""
        self._move(self.l2, rows, FILLING, READY)
        for group, ids in enumerate(blocks):
            self.block[group, rows] = ids
        self._note(rows)

    def abort_fill(self, rows: Int32s) -> None:
        self._move(self.l2, rows, FILLING, ABSENT)
        self._count(self.kids_l2, rows, -1)

    def leave_l2(self, rows: Int32s) -> None:
        self._move(self.l2, rows, READY, LEAVING)
        self._count(self.kids_l2, rows, -1)

    def rescue(self, rows: Int32s) -> None:
        """Rows that were leaving L2 are used again: their bytes are still whole."""
        self._move(self.l2, rows, LEAVING, READY)
        self._count(self.kids_l2, rows, 1)

    def drop_l2(self, rows: Int32s, groups: int) -> list[Int32s]:
        """READY or LEAVING to ABSENT; returns the blocks per group, which the caller must release."""
        state = self.l2[rows]
        if not (state >= READY).all():
            raise LawBroken(f"law 3: rows {rows[state < READY][:8].tolist()} leave L2 without being in it")
        self._count(self.kids_l2, rows[state == READY], -1)
        self.l2[rows] = ABSENT
        blocks = [self.block[group, rows] for group in range(groups)]
        self.block[:, rows] = -1
        self._note(rows)
        return blocks

    # ---- L3 -----------------------------------------------------------------------------------------

    def begin_write(self, rows: Int32s, allocated_bytes: int) -> None:
        self._move(self.l3, rows, ABSENT, FILLING)
        self._count(self.kids_l3, rows, 1)
        self.l3_bytes[rows] = allocated_bytes

    def finish_write(self, rows: Int32s, groups: int) -> None:
        self._move(self.l3, rows, FILLING, READY)
        self.l3_groups[rows] = (1 << groups) - 1
        self._note(rows)

    def found_l3(self, row: int, group: int, allocated_bytes: int) -> bool:
        """The store has the record of one group. True if that makes the row known in L3."""
        self.l3_groups[row] |= np.uint16(1 << group)
        self.l3_bytes[row] += allocated_bytes
        if self.l3[row] == READY:
            return False
        rows = np.array([row], np.int32)
        self._move(self.l3, rows, ABSENT, READY)
        self._count(self.kids_l3, rows, 1)
        if self.in_tree[row]:
            self._note(rows)
        return True

    def leave_l3(self, rows: Int32s) -> None:
        """From READY, or from FILLING when only a part was written."""
        state = self.l3[rows]
        if not ((state == READY) | (state == FILLING)).all():
            raise LawBroken(f"law 3: rows {rows[:8].tolist()} leave L3 without being in it")
        self._count(self.kids_l3, rows, -1)
        self.l3[rows] = LEAVING
        self._note(rows)

    def drop_l3(self, rows: Int32s) -> None:
        """Any state to ABSENT: the record is gone, or the tier is."""
        self._count(self.kids_l3, rows[(self.l3[rows] == READY) | (self.l3[rows] == FILLING)], -1)
        self.l3[rows] = ABSENT
        self.l3_groups[rows] = 0
        self.l3_bytes[rows] = 0
        self._note(rows)

    # ---- the tree -----------------------------------------------------------------------------------

    def enter_tree(self, rows: Int32s) -> None:
        """These pages can be found by their tokens now."""
        if self.moved is not None:
            self._note(rows[~self.in_tree[rows]])
        self.in_tree[rows] = True

    # ---- help ---------------------------------------------------------------------------------------

    def _move(self, column: npt.NDArray[np.uint8], rows: Int32s, before: int, after: int) -> None:
        wrong = column[rows] != before
        if wrong.any():
            raise LawBroken(
                f"law 3: rows {rows[wrong][:8].tolist()} go to {STATES[after]} and are not {STATES[before]}"
            )
        column[rows] = after

    def _note(self, rows: Int32s) -> None:
        if self.moved is not None:
            self.moved.append(rows)

    def _count(self, column: Int32s, rows: Int32s, step: int) -> None:
        parents = self.parent[rows]
        parents = parents[parents >= 0]
        if parents.size:
            np.add.at(column, parents, np.int32(step))


def _held(states: npt.NDArray[np.uint8]) -> int:
    return int(((states == FILLING) | (states == READY)).sum())

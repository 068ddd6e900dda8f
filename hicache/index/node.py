"""Nodes of a radix tree, pins on them, and the column that says which node holds a row."""

import numpy as np
import numpy.typing as npt

from hicache.base.errors import LawBroken

Int32s = npt.NDArray[np.int32]

NO_ROWS: Int32s = np.zeros(0, np.int32)
NO_ROWS.flags.writeable = False


class Node:
    """One edge of the tree and what hangs below it.

    `edge` holds the tokens of positions start … end-1 as little-endian int32; `rows` the rows of the pages whose
    last token lies in there, in order: end // P - start // P of them. `children` are keyed by the four bytes of
    their first token. `id` is -1 once the node has left its tree.
    """

    __slots__ = ("children", "edge", "end", "id", "parent", "pins", "rows", "start")

    def __init__(self, parent: "Node | None", start: int, edge: bytes, rows: Int32s) -> None:
        self.parent = parent
        self.start = start
        self.end = start + len(edge) // 4
        self.edge = edge
        self.rows = rows
        self.children: dict[bytes, Node] = {}
        self.pins: set[Pin] | None = None
        self.id = -1


class Pin:
    """The right to find the first `pages` pages of one path in the tree until `RadixTree.unpin`.

    It hangs on the node that holds the last of those pages. Nothing more is needed: nodes above it have a child
    with rows and thus cannot lose theirs. `node` follows splits and merges.
    """

    __slots__ = ("node", "pages")

    def __init__(self, node: Node, pages: int) -> None:
        self.node: Node | None = node
        self.pages = pages


class RowOwners:
    """Row → node, one int32 per row, shared by all trees whose rows come from one table.

    Grows to the largest row it meets. `marks` is scratch space for `RadixTree.prune`, all False between calls.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self.owner: Int32s = np.full(capacity, -1, np.int32)
        self.marks: npt.NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        self.nodes: list[Node | None] = []
        self._free: list[int] = []

    def enter(self, node: Node) -> None:
        """Give `node` an id and its rows to it."""
        if self._free:
            node.id = self._free.pop()
            self.nodes[node.id] = node
        else:
            node.id = len(self.nodes)
            self.nodes.append(node)
        self.assign(node.rows, node)

    def leave(self, node: Node) -> None:
        """Take the id of `node` back; its rows are somebody else's business."""
        self.nodes[node.id] = None
        self._free.append(node.id)
        node.id = -1

    def of(self, rows: Int32s) -> Int32s:
        """Id of the node of each row. Raises `LawBroken` for a row that is in no tree."""
        inside = rows[rows < self.owner.size]
        ids = self.owner[inside]
        if inside.size < rows.size or ids.min() < 0:
            stray = inside[ids < 0] if inside.size == rows.size else rows[rows >= self.owner.size]
            raise LawBroken(f"row {int(stray[0])} is in no tree")
        return ids

    def assign(self, rows: Int32s, node: Node) -> None:
        if not rows.size:
            return
        try:
            self.owner[rows] = node.id
        except IndexError:
            self._grow(int(rows.max()) + 1)
            self.owner[rows] = node.id

    def _grow(self, needed: int) -> None:
        size = max(needed, 2 * self.owner.size)
        owner = np.full(size, -1, np.int32)
        owner[: self.owner.size] = self.owner
        self.owner = owner
        self.marks = np.zeros(size, np.bool_)

"""Which prefixes of token sequences are known: a radix tree over runs of tokens.

An edge is a run of tokens as raw bytes, so walking down costs one dict lookup and one memcmp per edge; numpy is
used only at the point where a sequence leaves an edge. Pages need not end where edges do:

    P = 4                       root
    A = 1 2 3 4 5 6 7 8          └─ "1 2 3 4 5"   rows [a0]       page 0 ends in here
    B = 1 2 3 4 5 9 9 9              ├─ "6 7 8"   rows [a1]       A's page 1 ends in here
                                     └─ "9 9 9"   rows [b1]       B's page 1 ends in here

Lookups change nothing, inserts split where sequences part. Pages leave from the leaves upwards (`prune`), so
that a page in the tree always follows its parent's page.

An edge has at most EDGE_TOKENS tokens, which bounds the copying in splits, cuts and merges. An only child is
merged into its parent when it is at least half as long and both fit one edge; chains stay short however small
the steps were in which a sequence grew, and the copying stays amortised.

A leaf without rows is *bare*: tokens beyond the last full page of a sequence, where it parted from all others.
No page ever takes them away while their parent's page lives, so their number is bounded: the oldest is forgotten.
"""

from collections.abc import Iterable

import numpy as np

from hicache.base.errors import LawBroken
from hicache.base.ids import TOKEN_BYTES
from hicache.index import laws
from hicache.index.node import NO_ROWS, Int32s, Node, Pin, RowOwners

EDGE_TOKENS = 16384
BARE_LEAVES = 4096


class PathMatch:
    """How far a sequence is known. Valid until the next insert or prune of its tree.

    `known_tokens`: to the token. `runs`: rows of the full pages within them, in pieces. `node`: the deepest node
    touched.
    """

    __slots__ = ("known_tokens", "node", "runs")

    def __init__(self, known_tokens: int, runs: list[Int32s], node: Node) -> None:
        self.known_tokens = known_tokens
        self.runs = runs
        self.node = node

    @property
    def rows(self) -> Int32s:
        """Rows of all full pages within `known_tokens`, int32 (pages,). Read only."""
        runs = self.runs
        if len(runs) == 1:
            return runs[0]
        # A third cheaper than np.concatenate for a few short runs. Arrays are buffers, typeshed says so from 3.12 on.
        return np.frombuffer(b"".join(runs), np.int32)  # type: ignore[arg-type]


def _own(rows: Int32s) -> Int32s:
    """A copy for a node. Read only, for `PathMatch.rows` hands out what the node holds."""
    mine = rows.copy()
    mine.setflags(write=False)
    return mine


def common_bytes(edge: bytes, tokens: bytes, at: int) -> int:
    """Length of the common prefix of `edge` and `tokens[at:]`, in bytes, a multiple of the token size.

    Looks at ever larger pieces: most sequences part early or not at all.
    """
    end = min(len(edge), len(tokens) - at) // TOKEN_BYTES
    done, step = 0, 256
    while done < end:
        count = min(step, end - done)
        mine = np.frombuffer(edge, np.int32, count, done * TOKEN_BYTES)
        theirs = np.frombuffer(tokens, np.int32, count, at + done * TOKEN_BYTES)
        differs = mine != theirs
        first = int(differs.argmax())
        if differs[first]:
            return (done + first) * TOKEN_BYTES
        done += count
        step *= 8
    return end * TOKEN_BYTES


class RadixTree:
    """The known prefixes of one namespace, in pages of `page_tokens` tokens.

    Rows are opaque to the tree: non-negative, dense, each in at most one page. Trees whose rows come from one
    table share one `RowOwners`; a tree without one makes its own.
    """

    def __init__(
        self,
        page_tokens: int,
        owners: RowOwners | None = None,
        *,
        edge_tokens: int = EDGE_TOKENS,
        bare_leaves: int = BARE_LEAVES,
    ) -> None:
        if page_tokens <= 0 or edge_tokens <= 0:
            raise ValueError(f"page_tokens and edge_tokens must be positive, got {page_tokens} and {edge_tokens}")
        self.page_tokens = page_tokens
        self.edge_tokens = edge_tokens
        self.owners = RowOwners() if owners is None else owners
        self.root = Node(None, 0, b"", NO_ROWS)
        self.tokens_held = 0
        self.pages_held = 0
        self.nodes = 0  # without the root
        self.bare: dict[Node, None] = {}  # oldest first
        self._bare_leaves = bare_leaves

    def match(self, tokens: bytes) -> PathMatch:
        """Find the longest known prefix of `tokens` (little-endian int32). Changes nothing.

        Costs one step per edge on the path plus the comparison of the bytes.
        """
        node = self.root
        at = 0
        runs: list[Int32s] = []
        while True:
            child = node.children.get(tokens[at : at + TOKEN_BYTES])
            if child is None:
                return PathMatch(at // TOKEN_BYTES, runs, node)
            edge = child.edge
            if not tokens.startswith(edge, at):
                break
            at += len(edge)
            runs.append(child.rows)
            node = child
        known = (at + common_bytes(edge, tokens, at)) // TOKEN_BYTES
        pages = known // self.page_tokens - child.start // self.page_tokens
        if pages:
            runs.append(child.rows[:pages])
        return PathMatch(known, runs, child)

    def continuation(self, match: PathMatch) -> int:
        """Row of the page in which `match` ends short of the page's end: it begins with the same tokens and goes on
        with others, or further. -1 if no known page does. Of several any one."""
        known, size = match.known_tokens, self.page_tokens
        if known % size == 0:
            return -1
        end, node = known - known % size + size, match.node
        while node.end < end:
            if not node.children:
                return -1
            node = next(iter(node.children.values()))
        return int(node.rows[end // size - 1 - node.start // size])

    @staticmethod
    def tokens_of(node: Node, first: int, last: int) -> bytes:
        """Tokens of positions `first` … `last - 1` on the path that ends in `node`, which must reach that far."""
        parts = []
        while True:
            if last > node.start:
                begin = max(0, first - node.start)
                parts.append(node.edge[begin * TOKEN_BYTES : (last - node.start) * TOKEN_BYTES])
            if first >= node.start or node.parent is None:
                return b"".join(reversed(parts))
            last = min(last, node.start)
            node = node.parent

    def insert(self, tokens: bytes, rows: Int32s) -> int:
        """Make `tokens` known to its end; return the number of pages that are new.

        `rows` (int32) are those of all full pages of `tokens`. Pages already known keep theirs, and these must be
        the same. Raises `ValueError` when the lengths disagree, `LawBroken` when a known page has another row.
        """
        size = self.page_tokens
        count, odd = divmod(len(tokens), TOKEN_BYTES)
        if odd or len(rows) != count // size:
            raise ValueError(f"{len(tokens)} bytes of tokens need {count // size} rows of {size}, got {len(rows)}")
        found = self.match(tokens)
        known = found.known_tokens
        old_pages = known // size
        for run in reversed(found.runs):
            if run.size:  # equal rows mean equal keys, and a key stands for all pages before it: one is enough
                if run[-1] != rows[old_pages - 1]:
                    theirs = rows[old_pages - 1]
                    raise LawBroken(f"page {old_pages - 1} has row {run[-1]} in the tree, {theirs} outside")
                break
        if known == count:
            return 0
        node = found.node
        if known < node.end:
            node = self._split(node, known)
        while known < count:
            stop = min(count, known + self.edge_tokens)
            mine = _own(rows[known // size : stop // size])
            node = self._add(node, tokens[known * TOKEN_BYTES : stop * TOKEN_BYTES], mine)
            known = stop
        self._merge_upwards(node)
        if len(self.bare) > self._bare_leaves:
            lone: list[Node] = []
            self._remove_leaf(next(iter(self.bare)), lone)
            self._merge_lone(lone)
        return count // size - old_pages

    def pin(self, match: PathMatch, pages: int) -> Pin:
        """Keep the first `pages` pages of a match in the tree. Raises `ValueError` if it has fewer."""
        if pages > match.known_tokens // self.page_tokens or pages < 0:
            raise ValueError(f"{pages} pages to pin, the match has {match.known_tokens // self.page_tokens}")
        node = match.node
        while node.parent is not None and node.start // self.page_tokens >= pages:
            node = node.parent
        pin = Pin(node, pages)
        if node.pins is None:
            node.pins = set()
        node.pins.add(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Release a pin. Raises `LawBroken` on a second release."""
        node = pin.node
        if node is None or node.pins is None:
            raise LawBroken("a path pin was released twice")
        node.pins.remove(pin)
        pin.node = None

    def prune(self, rows: Int32s) -> Int32s:
        """Take pages out of the tree, as far as they may leave; return the rows that left, deepest first.

        `rows` (int32, any order, any nodes) are pages that nobody holds any more. One that is pinned, or has a page
        below it that stays, stays too: offer it again later. Tokens beyond the last page of what becomes a leaf
        leave with the page. Costs O(rows + nodes touched). Raises `LawBroken` for a row that is in no tree.
        """
        if not rows.size:
            return NO_ROWS
        owners = self.owners
        ids, counts = np.unique(owners.of(rows), return_counts=True)
        touched = [(owners.nodes[i], n) for i, n in zip(ids.tolist(), counts.tolist(), strict=True)]
        work = [(node.end, node, n) for node, n in touched if node is not None]
        work.sort(key=lambda item: item[0], reverse=True)  # what is below goes first
        marks = owners.marks
        marks[rows] = True
        gone: list[Int32s] = []
        lone: list[Node] = []
        for _, node, n in work:
            self._prune_node(node, n, gone, lone)
        marks[rows] = False
        self._merge_lone(lone)
        if not gone:
            return NO_ROWS
        left = np.concatenate(gone)
        owners.owner[left] = -1
        self.pages_held -= left.size
        return left

    def check(self) -> None:
        """Raise `LawBroken` unless every law of laws.py holds. O(nodes + pages): for tests and idle time."""
        laws.check(self)

    # ---- changes of shape -----------------------------------------------------------------------------

    def _add(self, parent: Node, edge: bytes, rows: Int32s) -> Node:
        node = Node(parent, parent.end, edge, rows)
        parent.children[edge[:TOKEN_BYTES]] = node
        self.owners.enter(node)
        self.nodes += 1
        self.tokens_held += len(edge) // TOKEN_BYTES
        self.pages_held += rows.size
        self.bare.pop(parent, None)
        if not rows.size:
            self.bare[node] = None
        return node

    def _split(self, lower: Node, at: int) -> Node:
        """Part `lower` at token position `at`; return the new upper part. `lower` keeps its identity."""
        cut = (at - lower.start) * TOKEN_BYTES
        pages = at // self.page_tokens - lower.start // self.page_tokens
        upper = Node(lower.parent, lower.start, lower.edge[:cut], _own(lower.rows[:pages]))
        assert lower.parent is not None, "the root has no edge to split"
        lower.parent.children[upper.edge[:TOKEN_BYTES]] = upper
        lower.parent, lower.start = upper, at
        lower.edge, lower.rows = lower.edge[cut:], _own(lower.rows[pages:])
        upper.children[lower.edge[:TOKEN_BYTES]] = lower
        self.owners.enter(upper)
        self.nodes += 1
        if lower.pins:
            self._move_pins(lower, [pin for pin in lower.pins if pin.pages <= at // self.page_tokens], upper)
        if not lower.rows.size and not lower.children:
            self.bare[lower] = None
        return upper

    @staticmethod
    def _move_pins(source: Node, pins: Iterable[Pin], target: Node) -> None:
        if target.pins is None:
            target.pins = set()
        for pin in pins:
            pin.node = target
            target.pins.add(pin)
            if source.pins is not None:
                source.pins.discard(pin)

    def _merge_upwards(self, node: Node) -> None:
        """Merge an only child into its parent while the rule in the module's docstring asks for it."""
        while True:
            parent = node.parent
            if parent is None or parent.parent is None or len(parent.children) != 1:
                return
            mine, above = len(node.edge), len(parent.edge)
            if 2 * mine < above or mine + above > self.edge_tokens * TOKEN_BYTES:
                return
            self._absorb(parent, node)
            node = parent

    def _merge_lone(self, parents: list[Node]) -> None:
        for node in parents:
            if node.id >= 0 and len(node.children) == 1:
                self._merge_upwards(next(iter(node.children.values())))

    def _absorb(self, parent: Node, child: Node) -> None:
        self.owners.assign(child.rows, parent)
        parent.edge += child.edge
        parent.end = child.end
        parent.rows = np.concatenate((parent.rows, child.rows))
        parent.rows.setflags(write=False)
        parent.children = child.children
        for below in child.children.values():
            below.parent = parent
        if child.pins:
            self._move_pins(child, list(child.pins), parent)
        self.bare.pop(child, None)
        if not parent.rows.size and not parent.children:
            self.bare[parent] = None
        self.owners.leave(child)
        self.nodes -= 1

    def _prune_node(self, node: Node, count: int, gone: list[Int32s], lone: list[Node]) -> None:
        """Cut the marked rows, at most `count`, off the end of `node`, unless a page below stays."""
        below = self._bare_below(node)
        if below is None:
            return
        marked = self.owners.marks[node.rows[-count:]]
        leaving = marked.size if marked.all() else int((~marked[::-1]).argmax())
        if node.pins:
            first_page = node.start // self.page_tokens
            pinned = max(pin.pages for pin in node.pins) - first_page
            leaving = min(leaving, node.rows.size - pinned)
        if leaving <= 0:
            return
        for tail in below:
            self._forget(tail)
        node.children = {}
        kept = node.rows.size - leaving
        gone.append(node.rows[kept:][::-1])
        if kept:
            self._cut(node, kept)
        else:
            self._remove_leaf(node, lone)

    @staticmethod
    def _bare_below(node: Node) -> list[Node] | None:
        """All nodes below `node` if none of them has rows, else None."""
        below = list(node.children.values())
        for each in below:  # grows while it is walked
            if each.rows.size:
                return None
            below.extend(each.children.values())
        return below

    def _cut(self, node: Node, pages: int) -> None:
        """Keep the first `pages` > 0 pages of a leaf and nothing beyond."""
        end = (node.start // self.page_tokens + pages) * self.page_tokens
        if end == node.end:
            return
        self.tokens_held -= node.end - end
        node.end = end
        node.edge = node.edge[: (end - node.start) * TOKEN_BYTES]
        node.rows = _own(node.rows[:pages])

    def _remove_leaf(self, node: Node, lone: list[Node]) -> None:
        """Take a leaf out, and above it what was there only for its sake. Its rows are the caller's business.

        Parents left with one child are added to `lone`; merging them here would pull nodes from under `prune`.
        """
        while True:
            parent = node.parent
            assert parent is not None, "the root does not leave"
            del parent.children[node.edge[:TOKEN_BYTES]]
            self._forget(node)
            if parent.children:
                if len(parent.children) == 1 and parent.parent is not None:
                    lone.append(parent)
                return
            if parent.parent is None:
                return
            if parent.rows.size:
                self._cut(parent, parent.rows.size)
                return
            node = parent

    def _forget(self, node: Node) -> None:
        self.bare.pop(node, None)
        self.owners.leave(node)
        self.nodes -= 1
        self.tokens_held -= node.end - node.start

"""The structural laws of a radix tree, for tests and for an idle daemon."""

from typing import TYPE_CHECKING

from hicache.base.errors import LawBroken
from hicache.base.ids import TOKEN_BYTES
from hicache.index.node import Node

if TYPE_CHECKING:
    from hicache.index.radix import RadixTree


def _need(ok: bool, law: str, node: Node) -> None:
    if not ok:
        raise LawBroken(f"radix tree: {law} (node {node.id}, tokens {node.start} to {node.end})")


def _check_node(tree: "RadixTree", node: Node) -> None:
    size = tree.page_tokens
    _need(node.id >= 0 and tree.owners.nodes[node.id] is node, "a node has an id and is found by it", node)
    _need(len(node.edge) == (node.end - node.start) * TOKEN_BYTES, "an edge holds the tokens start to end", node)
    _need(0 < node.end - node.start <= tree.edge_tokens, "an edge is neither empty nor longer than edge_tokens", node)
    # With this on every node the pages of any path are numbered without a gap: a child follows its parent's page.
    _need(node.rows.size == node.end // size - node.start // size, "a node has the rows that end in it", node)
    _need(bool((tree.owners.owner[node.rows] == node.id).all()), "a row is found at its node", node)
    bare = not node.rows.size and not node.children
    _need(bare == (node in tree.bare), "a leaf without rows, and nothing else, is bare", node)
    for pin in node.pins or ():
        _need(pin.node is node, "a pin knows its node", node)
        inside = node.start // size < pin.pages <= node.end // size
        _need(inside, "a pin hangs on the node of its last page", node)


def check(tree: "RadixTree") -> None:
    """Raise `LawBroken` with the first law that does not hold. O(nodes + pages)."""
    _need(tree.root.parent is None and not tree.root.edge and not tree.root.rows.size, "the root is empty", tree.root)
    nodes = tokens = pages = 0
    rows: set[int] = set()
    stack = [tree.root]
    while stack:
        node = stack.pop()
        for first, child in node.children.items():
            _need(child.edge[:TOKEN_BYTES] == first, "a child is keyed by its first token", child)
            _need(child.parent is node and child.start == node.end, "a child begins where its parent ends", child)
            _check_node(tree, child)
            nodes, tokens, pages = nodes + 1, tokens + child.end - child.start, pages + child.rows.size
            rows.update(child.rows.tolist())
            stack.append(child)
    _need(nodes == tree.nodes, "nodes are counted", tree.root)
    _need(tokens == tree.tokens_held, "tokens are counted", tree.root)
    _need(pages == tree.pages_held == len(rows), "pages are counted and no row stands twice", tree.root)
    _need(not tree.owners.marks.any(), "no mark outlives a prune", tree.root)

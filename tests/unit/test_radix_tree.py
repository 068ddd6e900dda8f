"""The radix tree's own promises: bounds, errors, shape, and laws that notice damage."""

from collections.abc import Callable

import numpy as np
import pytest

from hicache.base.errors import LawBroken
from hicache.index.node import Node, RowOwners
from hicache.index.radix import RadixTree, common_bytes


def raw(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def int32s(*rows: int) -> np.ndarray:
    return np.array(rows, np.int32)


def path_nodes(tree: RadixTree, tokens: bytes) -> int:
    node: Node | None = tree.match(tokens).node
    count = -1  # the root is no step
    while node is not None:
        node, count = node.parent, count + 1
    return count


@pytest.fixture
def parted() -> RadixTree:
    """The tree that the module's docstring draws: A and B part in the middle of page 1."""
    tree = RadixTree(4)
    assert tree.insert(raw(1, 2, 3, 4, 5, 6, 7, 8), int32s(10, 11)) == 2
    assert tree.insert(raw(1, 2, 3, 4, 5, 9, 9, 9), int32s(10, 21)) == 1
    return tree


def test_sequences_part_in_the_middle_of_a_page(parted: RadixTree) -> None:
    assert (parted.nodes, parted.tokens_held, parted.pages_held) == (3, 11, 3)
    found = parted.match(raw(1, 2, 3, 4, 5, 9, 9, 9, 1))
    assert (found.known_tokens, found.rows.tolist()) == (8, [10, 21])
    found = parted.match(raw(1, 2, 3, 4, 5, 9, 7))
    assert (found.known_tokens, found.rows.tolist()) == (6, [10])
    found = parted.match(raw(2))
    assert (found.known_tokens, found.rows.tolist(), found.node) == (0, [], parted.root)
    assert parted.match(b"").known_tokens == 0


def test_tokens_of_a_page_are_put_together_from_the_edges_it_spans(parted: RadixTree) -> None:
    leaf = parted.match(raw(1, 2, 3, 4, 5, 9, 9, 9)).node
    assert leaf.start == 5
    assert parted.tokens_of(leaf, 4, 8) == raw(5, 9, 9, 9)
    assert parted.tokens_of(leaf, 0, 8) == raw(1, 2, 3, 4, 5, 9, 9, 9)
    assert parted.tokens_of(leaf, 6, 7) == raw(9)
    assert parted.tokens_of(leaf, 1, 3) == raw(2, 3)


def test_a_match_changes_nothing(parted: RadixTree) -> None:
    for tokens in (raw(1, 2), raw(1, 2, 9), raw(1, 2, 3, 4, 5, 6), raw(7)):
        parted.match(tokens)
    assert (parted.nodes, parted.tokens_held, parted.pages_held) == (3, 11, 3)
    parted.check()


def test_a_page_leaves_with_the_tokens_that_only_led_to_it(parted: RadixTree) -> None:
    assert parted.prune(int32s(11)).tolist() == [11]
    assert parted.match(raw(1, 2, 3, 4, 5, 6)).known_tokens == 5  # B still goes over 5
    assert parted.prune(int32s(21)).tolist() == [21]
    assert parted.match(raw(1, 2, 3, 4, 5)).known_tokens == 4
    assert (parted.nodes, parted.tokens_held) == (1, 4)
    parted.check()


def test_a_page_with_a_page_below_it_stays_until_that_one_left(parted: RadixTree) -> None:
    assert parted.prune(int32s(10, 11)).tolist() == [11]
    assert parted.prune(int32s(10)).tolist() == []
    assert parted.prune(int32s(10, 21)).tolist() == [21, 10]  # deepest first, whatever the order given
    assert (parted.nodes, parted.tokens_held, parted.pages_held) == (0, 0, 0)
    parted.check()


def test_rows_leave_a_node_from_its_end_only() -> None:
    tree = RadixTree(1)
    tree.insert(raw(1, 2, 3, 4), int32s(0, 1, 2, 3))
    assert tree.prune(int32s(0, 2)).tolist() == []
    assert tree.prune(int32s(1, 3)).tolist() == [3]
    assert tree.prune(int32s(1, 2)).tolist() == [2, 1]
    assert tree.match(raw(1, 2)).known_tokens == 1


def test_a_pinned_path_stays_through_splits_and_merges(parted: RadixTree) -> None:
    first = parted.pin(parted.match(raw(1, 2, 3, 4, 5, 6, 7, 8)), 1)
    both = parted.pin(parted.match(raw(1, 2, 3, 4, 5, 6, 7, 8)), 2)
    assert parted.prune(int32s(21, 11, 10)).tolist() == [21]
    assert parted.nodes == 1, "the two nodes that are left were merged"
    parted.insert(raw(1, 2, 3, 4, 5, 6, 8, 8), int32s(10, 31))  # and are split again
    parted.check()
    assert parted.prune(int32s(31, 11, 10)).tolist() == [31]
    parted.unpin(both)
    assert parted.prune(int32s(11, 10)).tolist() == [11]
    parted.unpin(first)
    assert parted.prune(int32s(10)).tolist() == [10]
    parted.check()


def test_more_pages_than_matched_cannot_be_pinned(parted: RadixTree) -> None:
    found = parted.match(raw(1, 2, 3, 4, 5, 6))
    with pytest.raises(ValueError, match="2 pages to pin, the match has 1"):
        parted.pin(found, 2)


def test_a_second_release_of_a_pin_breaks_a_law(parted: RadixTree) -> None:
    pin = parted.pin(parted.match(raw(1, 2, 3, 4)), 1)
    parted.unpin(pin)
    with pytest.raises(LawBroken, match="released twice"):
        parted.unpin(pin)


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [(raw(1, 2, 3, 4)[:-1], int32s()), (raw(1, 2, 3, 4), int32s()), (raw(1, 2, 3), int32s(5))],
)
def test_lengths_that_disagree_are_refused(tokens: bytes, rows: np.ndarray) -> None:
    tree = RadixTree(4)
    with pytest.raises(ValueError, match="bytes of tokens need"):
        tree.insert(tokens, rows)
    assert tree.nodes == 0


def test_another_row_for_a_known_page_breaks_a_law(parted: RadixTree) -> None:
    with pytest.raises(LawBroken, match="page 1 has row 11 in the tree, 99 outside"):
        parted.insert(raw(1, 2, 3, 4, 5, 6, 7, 8, 1), int32s(10, 99))


def test_pruning_a_row_of_no_tree_breaks_a_law(parted: RadixTree) -> None:
    for stray in (12, 5_000_000):
        with pytest.raises(LawBroken, match=f"row {stray} is in no tree"):
            parted.prune(int32s(11, stray))
    parted.check()
    assert parted.match(raw(1, 2, 3, 4, 5, 6, 7, 8)).rows.tolist() == [10, 11]
    assert parted.prune(int32s(11)).tolist() == [11]
    with pytest.raises(LawBroken, match="row 11 is in no tree"):
        parted.prune(int32s(11))


def test_the_callers_arrays_are_copied() -> None:
    tree, rows = RadixTree(1), int32s(4, 5)
    tree.insert(raw(1, 2), rows)
    rows[:] = 0
    assert tree.match(raw(1, 2)).rows.tolist() == [4, 5]


def test_rows_of_a_match_cannot_be_written_to(parted: RadixTree) -> None:
    parted.prune(int32s(21))  # cuts and merges
    for tokens in (raw(1, 2, 3, 4), raw(1, 2, 3, 4, 5, 6, 7, 8), raw(9)):
        assert not parted.match(tokens).rows.flags.writeable
    parted.insert(raw(1, 2, 3, 4, 5, 6, 8, 8), int32s(10, 31))
    for tokens in (raw(1, 2, 3, 4), raw(1, 2, 3, 4, 5, 6, 7, 8)):
        assert not parted.match(tokens).rows.flags.writeable


def test_tokens_beyond_the_last_page_are_known_and_bounded() -> None:
    tree = RadixTree(4, bare_leaves=3)
    tree.insert(raw(0, 0, 0, 0), int32s(0))
    for token in range(1, 11):
        tree.insert(raw(0, 0, 0, 0, token), int32s(0))
        tree.check()
        assert tree.match(raw(0, 0, 0, 0, token)).known_tokens == 5
    known = [token for token in range(1, 11) if tree.match(raw(0, 0, 0, 0, token)).known_tokens == 5]
    assert known == [8, 9, 10], "the oldest are forgotten"
    assert tree.prune(int32s(0)).tolist() == [0], "they do not hold the page above them"
    assert (tree.nodes, tree.tokens_held, len(tree.bare)) == (0, 0, 0)


@pytest.mark.parametrize("step_pages", [1, 3, 64])
def test_a_sequence_that_grew_in_small_steps_is_a_short_chain(step_pages: int) -> None:
    """4,096 pages one by one: a chain of as many nodes would cost a lookup thousands of steps."""
    tree = RadixTree(16)
    tokens = np.arange(4096 * 16, dtype="<i4").tobytes()
    rows = np.arange(4096, dtype=np.int32)
    for pages in range(step_pages, 4097, step_pages):
        tree.insert(tokens[: pages * 64], rows[:pages])
    tree.check()
    pages = 4096 // step_pages * step_pages
    assert tree.match(tokens).rows.tolist() == list(range(pages))
    assert path_nodes(tree, tokens) <= 4 + 14, "4 full edges and at most one of each half, quarter …"


def test_a_long_prompt_costs_one_step_per_edge_whatever_else_is_known() -> None:
    tree, row = RadixTree(16), 0
    rng = np.random.default_rng(7)
    long = rng.integers(0, 1000, 131072, dtype=np.int32)
    for cut in [0, *range(10, 90, 10)]:
        tokens = np.concatenate((long[:cut], rng.integers(1000, 2000, 4096 - cut, dtype=np.int32)))
        shared = tree.match(tokens.tobytes()).rows
        rows = np.concatenate((shared, np.arange(row, row + 256 - shared.size, dtype=np.int32)))
        tree.insert(tokens.tobytes(), rows)
        row += 256
    shared = tree.match(long.tobytes()).rows
    tree.insert(long.tobytes(), np.concatenate((shared, np.arange(row, row + 8192 - shared.size, dtype=np.int32))))
    tree.check()
    assert tree.match(long.tobytes()).known_tokens == 131072
    assert path_nodes(tree, long.tobytes()) <= 8 + 9  # full edges, and one more for each fork


@pytest.mark.parametrize("at", [0, 1, 255, 256, 257, 2303, 2304, 9999, 10000])
def test_the_point_of_divergence_is_found_to_the_token(at: int) -> None:
    edge = np.zeros(10000, "<i4")
    tokens = np.zeros(10003, "<i4")
    if at < edge.size:
        tokens[3 + at] = 1 << 24  # differs in the last byte only
    assert common_bytes(edge.tobytes(), tokens.tobytes(), 12) == at * 4
    assert common_bytes(edge.tobytes(), tokens[: 3 + at].tobytes(), 12) == at * 4


def test_rows_beyond_the_owners_first_size_are_found() -> None:
    owners = RowOwners(capacity=2)
    trees = [RadixTree(1, owners), RadixTree(1, owners)]
    for index, tree in enumerate(trees):
        tree.insert(raw(1, 2, 3), int32s(1000 * index, 1000 * index + 1, 5000 + index))
    for index, tree in enumerate(trees):
        assert tree.prune(int32s(5000 + index)).tolist() == [5000 + index]
        tree.check()


def test_page_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        RadixTree(0)


def shorten_edge(tree: RadixTree, leaf: Node) -> None:
    leaf.edge = leaf.edge[:-4]


def lose_row(tree: RadixTree, leaf: Node) -> None:
    leaf.rows = leaf.rows[:-1]


def repeat_row(tree: RadixTree, leaf: Node) -> None:
    leaf.rows = tree.match(raw(1, 2, 3, 4)).rows.copy()
    tree.owners.assign(leaf.rows, leaf)


def misplace_row(tree: RadixTree, leaf: Node) -> None:
    tree.owners.assign(leaf.rows, tree.root)


def rekey_child(tree: RadixTree, leaf: Node) -> None:
    assert leaf.parent is not None
    leaf.parent.children[raw(77)] = leaf.parent.children.pop(leaf.edge[:4])


def orphan(tree: RadixTree, leaf: Node) -> None:
    leaf.parent = tree.root


def miscount(tree: RadixTree, leaf: Node) -> None:
    tree.tokens_held += 1


def call_bare(tree: RadixTree, leaf: Node) -> None:
    tree.bare[leaf] = None


@pytest.mark.parametrize(
    ("damage", "law"),
    [
        (shorten_edge, "holds the tokens start to end"),
        (lose_row, "has the rows that end in it"),
        (repeat_row, "is found at its node|no row stands twice"),
        (misplace_row, "is found at its node"),
        (rekey_child, "keyed by its first token"),
        (orphan, "begins where its parent ends"),
        (miscount, "tokens are counted"),
        (call_bare, "is bare"),
    ],
)
def test_the_laws_notice_damage(parted: RadixTree, damage: Callable[[RadixTree, Node], None], law: str) -> None:
    parted.check()
    damage(parted, parted.match(raw(1, 2, 3, 4, 5, 6, 7, 8)).node)
    with pytest.raises(LawBroken, match=law):
        parted.check()

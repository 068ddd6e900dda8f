"""The page in which a match ends, against the plain list of what was inserted."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hicache.index.radix import RadixTree

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=8)


@given(st.integers(2, 4), SEQUENCES, st.lists(st.integers(0, 2), max_size=14), st.integers(1, 6))
def test_continuation_is_a_page_with_the_same_first_tokens(
    size: int, stored: list[list[int]], asked: list[int], edge: int
) -> None:
    tree, rows = RadixTree(size, edge_tokens=edge), dict[tuple[int, ...], int]()
    for ids in stored:
        pages = [tuple(ids[: (i + 1) * size]) for i in range(len(ids) // size)]
        mine = np.array([rows.setdefault(page, len(rows)) for page in pages], np.int32)
        tree.insert(np.array(ids, "<i4").tobytes(), mine)
    match = tree.match(np.array(asked, "<i4").tobytes())
    row = tree.continuation(match)
    known = asked[: match.known_tokens]
    whole = len(known) // size * size
    fitting = {row for page, row in rows.items() if len(page) == whole + size and list(page[: len(known)]) == known}
    if len(known) % size == 0:
        assert row == -1
    elif row >= 0:
        assert row in fitting
    else:
        bare = [ids for ids in stored if ids[: len(known)] == known and len(ids) // size * size < whole + size]
        assert bare or not fitting, "a page is there and no shorter sequence hides it"

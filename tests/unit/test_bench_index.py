"""The index benchmark runs, names its cases as promised and refuses an index that answers wrongly."""

import numpy as np
import pytest

from hicache_daemon.bench.index import Figures, Ours, make_workload, measure, run


def test_cases_have_their_stable_names_and_a_yardstick() -> None:
    cases = {case.case: case for case in run(True, lambda _: None)}
    compared = {f"{what}_{label}" for what in ("match", "insert") for label in ("2k", "32k", "128k")}
    assert compared | {"miss_2k", "hash_page"} <= cases.keys()
    for name in (*compared, "hash_page"):
        case = cases[name]
        assert case.unit == "µs"
        assert case.limit is not None
        assert case.value > 0
        assert case.ratio == pytest.approx(case.value / case.limit)


def test_the_workload_is_the_published_one() -> None:
    work = make_workload(groups=2, long_count=1)
    assert len(work.short) == 200
    assert {tokens.size for tokens in work.short} == {2048}
    heads = [tokens[: 28 * 16].tobytes() for tokens in work.short]
    assert sorted(heads.count(head) for head in set(heads)) == [100, 100]
    assert len({tokens.tobytes() for tokens in work.short}) == 200
    assert [tokens.size for sequences in work.long.values() for tokens in sequences] == [32768, 131072]


class Forgetful(Ours):
    """Finds one token less than there is."""

    def matched_tokens(self, item: tuple[bytes, np.ndarray]) -> int:
        return super().matched_tokens(item) - 1


def test_an_index_that_finds_too_little_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="match_2k did not find all of 2048 tokens"):
        measure(Forgetful, make_workload(groups=1, long_count=1), 1, "", Figures())

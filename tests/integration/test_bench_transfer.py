"""`bench transfer` against a real daemon, with a small shape."""

from hicache_daemon.bench import transfer


def test_a_quick_run_measures_and_compares() -> None:
    said: list[str] = []
    cases = {each.case: each for each in transfer.run(quick=True, progress=said.append)}
    assert {"store_vs_memcpy1", "store_vs_memcpy2", "retrieve_vs_memcpy1", "retrieve_vs_memcpy2", "lookup"} == set(
        cases
    )
    assert all(each.value > 0 for each in cases.values())
    assert said

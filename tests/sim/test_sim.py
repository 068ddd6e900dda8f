"""Seeded runs of the whole state machine, all laws checked after every event."""

from collections import Counter

import pytest

from tests.sim.run import simulate

SEEDS = 200
STEPS = 480  # about 300 events
PER_TEST = 20

_totals: Counter[str] = Counter()


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_seeds_hold_all_laws(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        _totals.update(simulate(seed, STEPS).counters)


def test_runs_meet_what_they_are_for() -> None:
    """A simulation in which nothing happens proves nothing."""
    if not _totals:  # run by itself
        for seed in range(PER_TEST):
            _totals.update(simulate(seed, STEPS).counters)
    for name in (
        "tokens_l2",
        "tokens_l3",
        "tokens_loaded",
        "tokens_failed",
        "stored_pages",
        "duplicate_pages",
        "promoted_pages",
        "evicted_l2",
        "evicted_l3",
        "written_pages",
        "failed_copies",
        "failed_reads",
        "failed_writes",
        "late_answers",
        "expired_leases",
        "rejected_requests",
        "engine_loads",
        "engine_loads_outlived_the_lease",
        "engine_releases",
    ):
        assert _totals[name] > 0, name


def test_a_seed_is_a_run() -> None:
    assert simulate(7, 200) == simulate(7, 200)

"""One suite for every eviction policy; what only LRU promises stands at the end."""

from collections import OrderedDict
from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from hicache.policy.evict.base import Evictor, Mask, Rows
from hicache.policy.evict.lru import Lru

POLICIES: dict[str, Callable[[], Evictor]] = {"lru": Lru}


@pytest.fixture(params=POLICIES)
def evictor(request: pytest.FixtureRequest) -> Evictor:
    return POLICIES[request.param]()


def rows(*values: int) -> Rows:
    return np.array(values, np.int32)


def everything(some: Rows) -> Mask:
    return np.ones(some.size, np.bool_)


def test_members_come_and_go(evictor: Evictor) -> None:
    evictor.insert(rows(3, 1, 2))
    evictor.insert(rows(2, 5000))
    assert len(evictor) == 4
    assert evictor.members(rows(0, 1, 2, 3, 5000, 90000)).tolist() == [False, True, True, True, True, False]
    evictor.remove(rows(1, 7, 90000))
    assert len(evictor) == 3
    evictor.check()


def test_victims_are_members_once_and_then_no_more(evictor: Evictor) -> None:
    evictor.insert(np.arange(100, dtype=np.int32))
    first, second = evictor.victims(30, everything), evictor.victims(100, everything)
    assert first.size == 30
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(100))
    assert len(evictor) == 0
    assert evictor.victims(5, everything).size == 0
    evictor.check()


def test_refused_rows_stay(evictor: Evictor) -> None:
    evictor.insert(np.arange(1000, dtype=np.int32))
    found = evictor.victims(1000, lambda some: some % 3 == 0)
    assert sorted(found.tolist()) == list(range(0, 1000, 3))
    assert len(evictor) == 1000 - found.size
    assert sorted(evictor.victims(1000, everything).tolist()) == [row for row in range(1000) if row % 3]


def test_each_row_is_asked_about_once_per_call(evictor: Evictor) -> None:
    evictor.insert(np.arange(2000, dtype=np.int32))
    asked: list[int] = []

    def refuse(some: Rows) -> Mask:
        asked.extend(some.tolist())
        return np.zeros(some.size, np.bool_)

    assert evictor.victims(10, refuse).size == 0
    assert len(asked) == len(set(asked)) == 2000
    evictor.check()


def test_touch_passes_over_strangers(evictor: Evictor) -> None:
    evictor.insert(rows(1, 2))
    evictor.touch(rows(2, 3, 70000))
    assert len(evictor) == 2
    evictor.check()


def test_empty_batches_are_fine(evictor: Evictor) -> None:
    for act in (evictor.insert, evictor.touch, evictor.remove):
        act(rows())
    assert evictor.victims(0, everything).size == 0
    assert len(evictor) == 0
    evictor.check()


@pytest.mark.parametrize("seed", range(20))
def test_random_use_keeps_the_books(evictor: Evictor, seed: int) -> None:
    rng = Random(seed)
    model: set[int] = set()
    for _ in range(300):
        some = rng.sample(range(400), rng.randint(0, 60))
        act = rng.choice(("insert", "touch", "remove", "victims"))
        if act == "insert":
            evictor.insert(rows(*some))
            model.update(some)
        elif act == "touch":
            evictor.touch(rows(*some))
        elif act == "remove":
            evictor.remove(rows(*some))
            model.difference_update(some)
        else:
            forbidden = set(some)
            count = rng.randint(0, 80)
            found = evictor.victims(count, lambda r, f=forbidden: np.array([x not in f for x in r.tolist()], bool))
            assert found.size == min(count, len(model - forbidden))
            assert set(found.tolist()) <= model - forbidden
            model.difference_update(found.tolist())
        evictor.check()
        assert set(np.flatnonzero(evictor.members(np.arange(400, dtype=np.int32))).tolist()) == model


# ---- LRU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_lru_goes_by_last_use_and_by_place_in_the_batch(seed: int) -> None:
    rng, lru, model = Random(seed), Lru(4), OrderedDict[int, None]()
    for _ in range(400):
        some = rng.sample(range(300), rng.randint(0, 40))
        if rng.random() < 0.6:
            lru.insert(rows(*some))
            for row in some:
                model[row] = None
                model.move_to_end(row)
        elif rng.random() < 0.5:
            lru.touch(rows(*some))
            for row in some:
                if row in model:
                    model.move_to_end(row)
        else:
            count = rng.randint(0, 50)
            right = list(model)[:count]
            assert lru.victims(count, everything).tolist() == right
            for row in right:
                del model[row]


def test_lru_evicts_a_path_from_its_leaf() -> None:
    lru = Lru()
    lru.insert(rows(9, 8, 7))  # leaf first
    lru.insert(rows(19, 18))
    lru.touch(rows(9, 8, 7))
    assert lru.victims(5, everything).tolist() == [19, 18, 9, 8, 7]


def test_lru_queue_stays_within_its_bound() -> None:
    lru = Lru()
    lru.insert(np.arange(64, dtype=np.int32))
    for _ in range(2000):
        lru.touch(np.arange(64, dtype=np.int32))
    assert lru.queued <= 2 * 64 + 4096
    lru.check()


def test_lru_victims_cost_by_victims_not_by_members() -> None:
    """Few victims of one long record must not walk all of it each time."""
    lru = Lru()
    lru.insert(np.arange(100_000, dtype=np.int32))
    asked = 0

    def count(some: Rows) -> Mask:
        nonlocal asked
        asked += some.size
        return everything(some)

    for _ in range(100):
        assert lru.victims(1, count).size == 1
    assert asked <= 100 * 256

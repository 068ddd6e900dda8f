"""Loads: what the workers are told, when leases go back, and what is never stored because a load failed."""

from tests import vllm_fakes  # noqa: F401 - stand-ins for vLLM's classes, before our modules import them

# isort: split
from typing import Any

import numpy as np
import pytest

from hicache_client.connectors.vllm import stats
from hicache_client.connectors.vllm.flights import OVERDUE_S
from hicache_client.connectors.vllm.metadata import StepPlan, WorkerReport
from hicache_client.connectors.vllm.options import VllmOptions
from hicache_client.connectors.vllm.scheduler import HOLD_S
from tests.vllm_fakes import FakeReport, FakeRequest
from tests.vllm_rig import Rig

# ---- loads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "known", "whole", "later"),
    [
        ({}, 16, 16, False),
        ({"ks": (2, 2)}, 16, 16, True),  # vLLM maps failed blocks to requests for one group only
        ({"sync_loads": False}, 16, 16, True),  # steps overlap
        ({}, 18, 16, True),  # the last page holds another sequence's tokens too
        ({}, 19, 20, False),
    ],
)
def test_which_loads_run_inside_a_step(more: dict[str, Any], known: int, whole: int, later: bool) -> None:
    rig = Rig(**more)
    request = rig.new(prompt=20)
    rig.scout.answer(known, whole=whole)
    assert rig.match(request) == (known, later)


def test_a_plan_names_pages_places_blocks_and_leases() -> None:
    rig = Rig(ks=(2, 1), ranks=2)
    request = rig.new(prompt=23)
    rig.scout.answer(18, whole=16)
    assert rig.match(request, 8) == (10, True)
    rig.alloc(request, ([5, 9, 7], [11, 12, 13, 14, 15]), 10)
    (load,) = rig.plan().loads
    assert (load.request, load.first_page, load.tokens, load.sync) == ("r", 2, 10, False)
    assert [column.tolist() for column in load.starts] == [[18, 19, 14], [13, 14, 15]]
    assert load.blocks == ((9, 7), (13, 14, 15))
    assert all(column.dtype == np.int32 for column in load.starts)
    assert load.leases == rig.scout.asks[0]._refs
    assert len(load.leases) == 2
    assert rig.plan().loads == (), "once"


def test_the_lease_goes_back_when_all_workers_are_through() -> None:
    rig = Rig(ranks=2)
    request = rig.new(prompt=20)
    plan, _ = rig.load(request, 16)
    ask, (load,) = rig.scout.asks[0], plan.loads
    assert ask._handed
    assert not ask.released
    rig.side.update_connector_output(FakeReport(kv_connector_worker_meta=WorkerReport({load.load: 1})))
    assert not ask.released
    rig.side.update_connector_output(FakeReport(kv_connector_worker_meta=WorkerReport({load.load: 1})))
    assert ask.released


def test_vllm_may_take_less_than_was_promised() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    rig.scout.answer(19)
    assert rig.match(request)[0] == 19
    rig.alloc(request, rig.table(20), 8)
    (load,) = rig.plan().loads
    assert (load.tokens, load.starts[0].size) == (8, 2)


def test_vllm_may_take_nothing_of_what_was_promised() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    rig.scout.answer(16)
    assert rig.match(request)[0] == 16
    rig.alloc(request, rig.table(20), 0)
    assert rig.scout.asks[0].released
    assert rig.plan().loads == ()


def test_the_second_allocation_of_a_load_between_steps_keeps_its_lease() -> None:
    rig = Rig(sync_loads=False)
    request = rig.new(prompt=20)
    rig.scout.answer(16)
    assert rig.match(request) == (16, True)
    table = rig.table(16)
    rig.alloc(request, table, 16)
    (load,) = rig.plan().loads
    request.num_computed_tokens = 16
    rig.report(ended=[load.load], finished_recving={"r"})
    assert rig.scout.asks[0].released
    rig.alloc(request, rig.table(20, table), 0)
    plan = rig.plan(r=(request, 4, rig.table(20, table)))
    assert (plan.loads, [store.starts[0].size for store in plan.stores]) == ((), [5])


def test_a_request_whose_load_failed_is_never_looked_up_again() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    plan, _ = rig.load(request, 16)
    (load,) = plan.loads
    rig.report(ended=[load.load], failed=[load.load], invalid_block_ids=set(load.blocks[0]))
    request.num_computed_tokens = 0
    assert rig.scout.asks[0].released
    request.num_preemptions += 1
    assert rig.match(request) == (0, False)
    assert len(rig.scout.asks) == 1
    assert rig.counted(stats.LOADS_FAILED) == 1


def test_a_load_that_failed_between_steps_may_leave_the_request_without_blocks() -> None:
    rig = Rig(ks=(2, 2))
    request = rig.new(prompt=20)
    rig.scout.answer(16)
    found, _ = rig.match(request)
    rig.alloc(request, rig.table(16), found or 0)
    (load,) = rig.plan().loads
    rig.report(ended=[load.load], failed=[load.load], failed_recving={"r"}, finished_recving={"r"})
    assert rig.match(request) == (0, False)
    table = rig.table(20)
    rig.alloc(request, table, 0)
    (store,) = rig.plan(r=(request, 20, table)).stores
    assert store.first_page == 0, "what could not be loaded is stored anew"


def test_a_load_that_can_not_be_planned_fails_at_the_worker() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    rig.scout.answer(16)
    rig.match(request)
    table = rig.table(20)
    rig.alloc(request, table, 17)  # more than was promised
    (load,) = rig.plan().loads
    assert (load.leases, load.blocks, load.sync) == ((), tuple(map(tuple, table)), True)
    assert rig.side._guard.caught == {"update_state_after_alloc": 1}
    assert rig.scout.asks[0].released
    rig.report(ended=[load.load], failed=[load.load])
    assert not rig.side._flights


def test_a_worker_that_never_says_its_load_is_over_is_not_waited_for_for_ever() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    rig.load(request, 16)
    rig.clock[0] += VllmOptions().load_timeout_s + OVERDUE_S - 1
    rig.plan()
    assert not rig.scout.asks[0].released
    rig.clock[0] += 2
    rig.plan()
    assert rig.scout.asks[0].released
    assert not rig.side._flights


def test_hits_are_told_by_tier() -> None:
    rig = Rig(prefetch="wait_complete")
    request = rig.new(prompt=20)
    ask = rig.scout.answer(16, l3=4)
    ask.memory_tokens, ask.prefetching = 16, False
    assert rig.match(request, 8) == (8, False)
    rig.alloc(request, rig.table(20), 8)
    assert rig.side.get_external_cache_hit_sources(request, 8) == {"host": 4, "disk": 4}
    assert rig.side.get_external_cache_hit_sources(request, 7) == {}, "vLLM would reject a wrong sum"
    taken = rig.side.take_stats()
    assert taken is not None
    counted = {name: taken.counts.get(name) for name in (stats.TOKENS_L2, stats.TOKENS_L3, stats.TOKENS_OWN)}
    assert counted == {stats.TOKENS_L2: 4, stats.TOKENS_L3: 4, stats.TOKENS_OWN: 8}
    assert taken.counts[stats.TOKENS_ASKED] == 20


# ---- doubts ---------------------------------------------------------------------------------------------


def sharing(rig: Rig) -> tuple[FakeRequest, FakeRequest, StepPlan, tuple[list[int], ...], tuple[list[int], ...]]:
    """Two requests in one step: `a` loads 16 tokens into blocks that vLLM shares with `b` at once."""
    a, b = rig.new("a", prompt=20), rig.new("b", prompt=32)
    rig.scout.answer(16, ask=rig.scout.asks[0])
    rig.scout.answer(0, ask=rig.scout.asks[1])
    assert rig.match(a) == (16, False)
    table_a = rig.table(20)
    rig.alloc(a, table_a, 16)
    a.num_computed_tokens = 16
    assert rig.match(b, 16) == (0, False)
    table_b = rig.table(32, tuple(ids[:2] for ids in table_a))
    rig.alloc(b, table_b, 0)
    b.num_computed_tokens = 16
    return a, b, rig.plan(a=(a, 4, table_a), b=(b, 16, table_b)), table_a, table_b


def test_nothing_computed_on_a_running_load_is_stored_before_it_went_well() -> None:
    rig = Rig()
    a, b, plan, _, _ = sharing(rig)
    assert len(plan.loads) == 1
    assert plan.stores == ()
    rig.report(ended=[plan.loads[0].load])
    later = rig.plan(a=(a, 1), b=(b, 1))
    assert {store.request: len(store.tokens) // 16 for store in later.stores} == {"a": 5, "b": 8}


def test_what_was_computed_on_a_failed_load_is_never_stored() -> None:
    rig = Rig()
    a, b, plan, table_a, table_b = sharing(rig)
    (load,) = plan.loads
    rig.report(ended=[load.load], failed=[load.load])
    a.num_computed_tokens, b.num_computed_tokens = 0, 16  # as vLLM sets them
    again = rig.plan(a=(a, 8), b=(b, 8))
    assert [store.request for store in again.stores] == ["a"], "a computes its own again; b may read it too early"
    c = rig.new("c", prompt=32)
    rig.scout.answer(0)
    assert rig.match(c, 16) == (0, False)
    table_c = rig.table(32, tuple(ids[:2] for ids in table_a))
    rig.alloc(c, table_c, 0)
    c.num_computed_tokens = 16
    assert rig.plan(c=(c, 16, table_c)).stores == (), "nor c, which found those blocks in vLLM's cache"
    assert rig.plan(a=(a, 12)).stores
    rig.plan(a=(a, 1))
    d = rig.new("d", prompt=32)
    rig.scout.answer(0)
    rig.match(d, 16)
    table_d = rig.table(32, tuple(ids[:2] for ids in table_a))
    rig.alloc(d, table_d, 0)
    d.num_computed_tokens = 16
    assert rig.plan(d=(d, 16, table_d)).stores, "a has computed them again"
    assert rig.finish(b, table_b) is False


def test_blocks_of_a_failed_load_that_vllm_hands_out_anew_are_like_any_other() -> None:
    rig = Rig()
    a, _, plan, table_a, _ = sharing(rig)
    (load,) = plan.loads
    rig.report(ended=[load.load], failed=[load.load])
    rig.finish(a, ([], []))
    c = rig.new("c", prompt=16)
    rig.scout.answer(0)
    rig.match(c, 0)
    rig.alloc(c, (table_a[0][:2],), 0)
    assert rig.plan(c=(c, 16, (table_a[0][:2],))).stores


def test_a_request_that_ends_before_its_load_is_proven_is_kept_and_stored_after() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    plan, table = rig.load(request, 16)
    assert rig.finish(request, table)
    waiting = rig.plan()
    assert (waiting.held, waiting.stores) == (frozenset(), ()), "its last stores are still to come"
    rig.report(ended=[plan.loads[0].load])
    last = rig.plan()
    assert last.held == {"r"}
    assert [(store.request, store.first_page, store.starts[0].size) for store in last.stores] == [("r", 0, 5)]
    assert rig.plan().held == {"r"}
    rig.report(finished_sending={"r"})
    assert rig.plan().held == frozenset()


def test_a_request_that_ends_and_whose_load_failed_is_given_back_unstored() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    plan, table = rig.load(request, 16)
    (load,) = plan.loads
    assert rig.finish(request, table)  # policy "fail": vLLM ends it before it tells us
    rig.report(ended=[load.load], failed=[load.load])
    last = rig.plan()
    assert (last.held, last.stores) == ({"r"}, ())


def test_blocks_are_not_kept_for_ever_for_a_load_to_be_proven() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    _, table = rig.load(request, 16)
    assert rig.finish(request, table)
    rig.clock[0] += VllmOptions().load_timeout_s + HOLD_S + 1
    last = rig.plan()
    assert (last.held, last.stores) == ({"r"}, ())

"""What is stored, which blocks are kept, and what is left when a request has gone.

First single hooks, then thousands of random runs of a model of vLLM (tests/vllm_engine.py) with its laws.
"""

from tests import vllm_fakes  # noqa: F401 - stand-ins for vLLM's classes, before our modules import them

# isort: split
import pickle
from typing import Any

import numpy as np
import pytest

from hicache.protocol.messages import Scope
from hicache_client.connectors.vllm import stats
from hicache_client.connectors.vllm.guard import RefusedError
from hicache_client.connectors.vllm.metadata import WorkerShard
from hicache_client.connectors.vllm.options import VllmOptions
from hicache_client.connectors.vllm.scheduler import Manner, SchedulerSide, engine_group
from hicache_client.connectors.vllm.tracked import Paging
from tests.vllm_engine import World
from tests.vllm_fakes import FakeCached, FakeFeature, FakePosition, FakeRequest, FakeStep
from tests.vllm_rig import Rig, Scout, shard

# ---- stores ---------------------------------------------------------------------------------------------


def test_a_prompt_is_stored_page_by_page_as_it_is_computed() -> None:
    rig = Rig()
    request = rig.new(prompt=30)
    rig.scout.answer(0)
    plan, table = rig.admit(request, 10)
    (store,) = plan.stores
    assert (store.first_page, store.scope) == (0, Scope())
    assert np.frombuffer(store.tokens, "<i4").tolist() == request.script[:8]
    assert store.starts[0].tolist() == [table[0][0] * 2, table[0][0] * 2 + 1]
    assert rig.plan(r=(request, 1)).stores == (), "no page is full"
    (store,) = rig.plan(r=(request, 9)).stores
    assert (store.first_page, len(store.tokens)) == (2, 80)


def test_output_is_stored_when_a_block_is_full_and_the_rest_at_the_end() -> None:
    rig = Rig()
    request = rig.new(prompt=9)
    rig.scout.answer(0)
    _, table = rig.admit(request)
    stored: list[int] = []
    for _ in range(14):
        request.known += 1
        stored += [len(store.tokens) // 4 for store in rig.plan(r=(request, 1)).stores]
    assert stored == [16], "blocks have 8 tokens"
    request.known += 1
    assert (request.num_computed_tokens, request.num_tokens) == (23, 24)
    assert rig.finish(request, table)
    (last,) = rig.plan().stores
    assert (len(last.tokens) // 4, last.first_page) == (24, 0), "23 tokens have KV"


def test_a_last_page_that_is_not_full_is_stored_if_it_is_worth_a_load() -> None:
    for tail, padded in ((3, False), (5, True)):
        rig = Rig(ks=(1,), min_load_tokens=4)
        rig.side._paging = rig.side._lookups.paging = Paging(8, (1,))
        request = rig.new(prompt=8 + tail)
        rig.scout.answer(0)
        _, table = rig.admit(request)
        assert rig.finish(request, table)
        stores = rig.plan().stores
        assert len(stores) == padded
        for store in stores:
            assert store.tokens == np.array([*request.prompt_token_ids, *[-1] * (8 - tail)], "<i4").tobytes()


def test_drafts_and_placeholders_are_not_stored() -> None:
    rig = Rig()
    request = rig.new(prompt=7)
    rig.scout.answer(0)
    rig.admit(request)
    request.known += 1
    plan = rig.plan(r=(request, 5))  # one token and four drafts
    assert [len(store.tokens) // 4 for store in plan.stores] == [8]
    assert request.num_computed_tokens == 12


def test_pages_that_the_daemon_has_are_not_offered_and_need_no_blocks_kept() -> None:
    rig = Rig()
    request = rig.new(prompt=17)
    plan, table = rig.load(request, 16)
    rig.report(ended=[plan.loads[0].load])
    request.num_computed_tokens = 16
    assert rig.plan(r=(request, 1)).stores == ()
    request.num_computed_tokens = 16
    assert not rig.finish(request, table)


def test_what_vllm_has_and_the_daemon_has_not_is_offered() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    rig.scout.answer(0)
    assert rig.match(request, 16) == (0, False)
    table = rig.table(20)
    rig.alloc(request, table, 0)
    request.num_computed_tokens = 16
    (store,) = rig.plan(r=(request, 4, table)).stores
    assert (store.first_page, store.starts[0].size) == (0, 5)


def test_pages_that_were_not_taken_are_offered_again() -> None:
    rig = Rig()
    request = rig.new(prompt=30)
    rig.scout.answer(0)
    plan, _ = rig.admit(request, 10)
    assert plan.stores
    rig.report(unstored=["r"])
    (store,) = rig.plan(r=(request, 6)).stores
    assert (store.first_page, store.starts[0].size) == (0, 4)


@pytest.mark.parametrize(
    "changes", [{"prompt_embeds": object()}, {"mm_features": [FakeFeature("", FakePosition(0))]}]
)
def test_what_is_not_cacheable_is_not_stored(changes: dict[str, Any]) -> None:
    rig = Rig()
    plan, table = rig.admit(request := rig.new(**changes))
    assert plan.stores == ()
    assert not rig.finish(request, table)
    assert rig.counted(stats.UNCACHEABLE) == 1


def test_a_reader_stores_nothing() -> None:
    rig = Rig(write=False)
    request = rig.new()
    rig.scout.answer(0)
    plan, table = rig.admit(request)
    assert plan.stores == ()
    assert not rig.finish(request, table)


def test_prompt_logprobs_are_not_looked_up_but_stored() -> None:
    rig = Rig()
    plan, _ = rig.admit(rig.new(skip_reading_prefix_cache=True))
    assert plan.stores
    assert rig.scout.asks == []


def test_blocks_of_a_running_request_are_followed() -> None:
    rig = Rig()
    request = rig.new(prompt=8)
    rig.scout.answer(0)
    table = ([4],)
    rig.match(request)
    rig.alloc(request, table, 0)
    rig.plan(r=(request, 8, table))
    request.known = 16
    step = FakeStep(num_scheduled_tokens={"r": 8}, scheduled_cached_reqs=FakeCached(["r"], [([9],)]))
    (store,) = rig.side.build_connector_meta(step).stores
    assert store.starts[0].tolist() == [18, 19]


def test_plans_travel_between_processes() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    plan, _ = rig.load(request, 16)
    rig.report(ended=[plan.loads[0].load])
    for sent in (plan, rig.plan(r=(request, 0))):
        again = pickle.loads(pickle.dumps(sent))
        assert again.shards == sent.shards == ((0, 0),)
        assert repr(again) == repr(sent)


# ---- preemption -----------------------------------------------------------------------------------------


def preempt(request: FakeRequest) -> FakeStep:
    request.num_computed_tokens = 0
    request.num_preemptions += 1
    return FakeStep(preempted_req_ids={request.request_id})


def test_a_preempted_request_is_named_asked_for_again_and_stored_from_its_new_blocks() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    rig.scout.answer(0)
    _, table = rig.admit(request)
    request.known = 24
    plan = rig.side.build_connector_meta(preempt(request))
    assert (plan.preempted, plan.stores) == ({"r"}, ())
    assert len(rig.scout.asks) == 2
    assert len(rig.scout.asks[-1].tokens) == 4 * 24, "with what it has put out"
    rig.scout.answer(20)
    assert rig.match(request) == (20, False)
    rig.alloc(request, rig.table(24), 20)
    (load,) = rig.plan().loads
    assert not set(load.blocks[0]) & set(table[0])


def test_preempted_and_resumed_in_one_step_it_is_looked_up_first() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    rig.scout.answer(0)
    rig.admit(request)
    step = preempt(request)  # reset_prefix_cache(reset_running_requests=True), between two steps
    assert rig.match(request) == (None, False)
    assert len(rig.scout.asks) == 2
    rig.scout.answer(0)
    assert rig.match(request) == (0, False)
    table = rig.table(20)
    rig.alloc(request, table, 0)
    step.num_scheduled_tokens = {"r": 20}
    step.scheduled_cached_reqs = FakeCached(["r"], [table], {"r"})
    plan = rig.side.build_connector_meta(step)
    assert plan.preempted == {"r"}
    assert plan.stores[0].starts[0].tolist()[0] == table[0][0] * 2
    assert len(rig.scout.asks) == 2


def test_a_preempted_request_that_ends_keeps_nothing() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    rig.scout.answer(0)
    rig.admit(request)
    step = preempt(request)
    assert not rig.finish(request, ([],))
    assert rig.side.build_connector_meta(step).preempted == {"r"}
    assert all(ask.released for ask in rig.scout.asks)


# ---- the end of a request -------------------------------------------------------------------------------


def test_aborted_before_the_answer_while_waiting_and_while_it_computes() -> None:
    rig = Rig()
    waiting, promised, running = rig.new("w"), rig.new("p"), rig.new("r")
    rig.scout.answer(16, ask=rig.scout.asks[1])
    rig.scout.answer(0, ask=rig.scout.asks[2])
    assert rig.match(promised)[0] == 16
    _, table = rig.admit(running)
    assert not rig.finish(waiting, ([],))
    assert not rig.finish(promised, ([],))
    assert rig.finish(running, table)
    assert all(ask.released for ask in rig.scout.asks)
    assert rig.plan().held == {"r"}


def test_aborted_while_vllm_waits_for_the_load_its_blocks_are_vllms_affair() -> None:
    rig = Rig(sync_loads=False)
    request = rig.new(prompt=20)
    rig.scout.answer(16)
    rig.match(request)
    table = rig.table(16)
    rig.alloc(request, table, 16)
    (load,) = rig.plan().loads
    request.num_computed_tokens = 16
    assert not rig.finish(request, table), "vLLM would free them twice"
    assert not rig.scout.asks[0].released, "the workers still load on it"
    rig.report(ended=[load.load], finished_recving={"r"})
    assert rig.scout.asks[0].released
    assert rig.plan().held == frozenset()


def test_blocks_that_come_free_soon_are_waited_for_instead_of_preempting() -> None:
    rig = Rig()
    request = rig.new()
    rig.scout.answer(0)
    _, table = rig.admit(request)
    assert not rig.side.has_pending_block_frees()
    rig.finish(request, table)
    assert rig.side.has_pending_block_frees()
    rig.plan()
    rig.report(finished_sending={"r"})
    assert not rig.side.has_pending_block_frees()


def test_one_group_may_also_end_by_the_older_hook() -> None:
    rig = Rig()
    request = rig.new()
    rig.scout.answer(0)
    _, table = rig.admit(request)
    assert rig.side.request_finished(request, table[0]) == (True, None)


def test_unknown_requests_are_no_error() -> None:
    rig = Rig()
    stranger = FakeRequest("x", [1] * 40, 20)
    assert rig.match(stranger) == (0, False)
    rig.alloc(stranger, rig.table(20), 0)
    assert not rig.finish(stranger, rig.table(20))
    rig.report(ended=[99], failed=[99], unstored=["x"], finished_recving={"x"}, finished_sending={"x"})
    assert not rig.side._guard.caught


# ---- reset ----------------------------------------------------------------------------------------------


def test_after_a_reset_nothing_from_before_is_found() -> None:
    rig = Rig()
    waiting = rig.new("w", cache_salt="s")
    before = rig.scout.answer(16)
    assert rig.match(waiting)[0] == 16
    assert rig.side.reset_cache()
    assert before.released
    assert rig.match(waiting) == (None, False)
    after = rig.scout.asks[-1]
    assert after.scope.salt != before.scope.salt
    assert after.scope.salt.endswith("s")
    rig.new("n", cache_salt="s")
    assert rig.scout.asks[-1].scope == after.scope


def test_what_computes_across_a_reset_is_stored_no_more() -> None:
    rig = Rig()
    running, ending = rig.new("r", prompt=30), rig.new("e", prompt=20)
    for ask in rig.scout.asks:
        rig.scout.answer(0, ask=ask)
    rig.admit(running, 10)
    _, table = rig.admit(ending, 10)
    ending.num_computed_tokens = 20
    assert rig.finish(ending, table)
    assert rig.side.reset_cache()
    plan = rig.plan(r=(running, 10))
    assert (plan.stores, plan.held) == ((), {"e"})


def test_a_preempted_request_is_stored_under_the_new_epoch() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    rig.scout.answer(0)
    rig.admit(request)
    preempt(request)
    assert rig.side.reset_cache()
    rig.scout.answer(0)
    (store,) = rig.admit(request)[0].stores
    assert store.scope.salt.startswith("\0")


def test_a_load_that_is_under_way_can_not_be_called_back() -> None:
    rig = Rig(sync_loads=False)
    request = rig.new(prompt=20)
    rig.scout.answer(16)
    rig.match(request)
    rig.alloc(request, rig.table(16), 16)
    rig.plan()
    assert rig.side.reset_cache() is False


# ---- start and end --------------------------------------------------------------------------------------


def test_workers_with_equal_kv_share_a_shard() -> None:
    rig = Rig()
    side = SchedulerSide(VllmOptions(), scout := Scout([0.0], 1), Manner(), stats.Tally())
    side.set_workers({(0, rank): shard(0, 1) for rank in range(4)})
    assert len(scout.started) == 1
    assert side._shards == ((0, 0),)
    assert side._flights.workers == 4
    assert rig.side._shards == ((0, 0),)


def test_shards_are_in_the_order_of_the_plan() -> None:
    side = SchedulerSide(VllmOptions(), scout := Scout([0.0], 2), Manner(), stats.Tally())
    side.set_workers({(0, rank): shard(rank, 3) for rank in (2, 0, 1)})
    assert side._shards == ((0, 0), (0, 1), (0, 2))
    assert [each.shard.tp_rank for each in scout.started] == [0, 1, 2]


@pytest.mark.parametrize(
    ("shards", "word"),
    [
        ({(0, 0): shard(refused="no such layout")}, "no such layout"),
        ({(0, 0): shard(model=None)}, "no worker"),
        ({}, "no worker"),
        ({(0, 0): shard(0, 2), (0, 1): shard(1, 2, (4,))}, "page alike"),
    ],
)
def test_a_worker_that_does_not_fit_is_said_once_or_ends_the_start(
    shards: dict[tuple[int, int], WorkerShard], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    side = SchedulerSide(VllmOptions(), scout := Scout([0.0], 1), Manner(), stats.Tally())
    side.set_workers(shards)
    assert not scout.started
    (record,) = caplog.records
    assert word in record.getMessage()
    assert "running uncached" in record.getMessage()
    request = FakeRequest("r", [1] * 40, 20)
    side.on_new_request(request)
    assert side.get_num_new_matched_tokens(request, 0) == (0, False)
    assert side.build_connector_meta(FakeStep(num_scheduled_tokens={"r": 20})).stores == ()
    assert side.request_finished_all_groups(request, ([1],)) == (False, None)
    strict = SchedulerSide(VllmOptions(on_error="refuse"), Scout([0.0], 1), Manner(), stats.Tally())
    with pytest.raises(RefusedError, match=word):
        strict.set_workers(shards)


def test_without_a_daemon_a_strict_engine_does_not_start() -> None:
    scout = Scout([0.0], 1)
    scout.connected = False
    SchedulerSide(VllmOptions(), scout, Manner(), stats.Tally()).set_workers({(0, 0): shard()})
    strict = SchedulerSide(VllmOptions(on_error="refuse", runtime_dir="/x"), scout, Manner(), stats.Tally())
    with pytest.raises(RefusedError, match="hicache serve"):
        strict.set_workers({(0, 0): shard()})


def test_an_engine_group_is_sixteen_bytes_of_its_id() -> None:
    assert len(engine_group("a")) == 16
    assert engine_group("a") == engine_group("a") != engine_group("b")


def test_the_end_closes_the_lookups() -> None:
    rig = Rig()
    rig.side.shutdown()
    assert rig.scout.closed


# ---- whatever breaks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["_arrive", "_match", "_reported", "_reset"])
def test_a_bug_in_a_hook_is_a_miss(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    def broken(*args: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(rig.side, hook, broken)
    request = rig.new()
    if hook != "_arrive":
        rig.scout.answer(0)
    assert rig.match(request) == (0, False)
    rig.report()
    rig.side.reset_cache()
    rig.alloc(request, table := rig.table(20), 0)
    rig.plan(r=(request, 20, table))
    rig.finish(request, table)
    assert rig.side._guard.caught
    taken = rig.side.take_stats()
    assert taken is not None
    assert taken.counts[stats.CAUGHT] == 1


def test_a_bug_in_planning_loses_stores_but_no_load_and_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    loading, ending = rig.new("l", prompt=20), rig.new("e", prompt=20)
    rig.scout.answer(16, ask=rig.scout.asks[0])
    rig.scout.answer(0, ask=rig.scout.asks[1])
    _, table = rig.admit(ending)
    assert rig.finish(ending, table)
    assert rig.match(loading)[0] == 16
    rig.alloc(loading, rig.table(20), 16)

    def broken(*args: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(rig.side, "_update_tables", broken)
    plan = rig.side.build_connector_meta(FakeStep(preempted_req_ids={"gone"}))
    assert len(plan.loads) == 1
    assert (plan.held, plan.preempted, plan.stores) == ({"e"}, {"gone"}, ())


def test_a_bug_at_the_end_of_a_request_has_its_stores_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    request = rig.new()
    rig.scout.answer(0)
    _, table = rig.admit(request)

    def broken(*args: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(rig.side, "_finish", broken)
    assert not rig.finish(request, table)
    assert rig.plan().preempted == {"r"}
    assert rig.plan().preempted == frozenset()


# ---- a model of vLLM ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", range(10))
def test_random_runs_of_vllm_keep_the_laws(chunk: int) -> None:
    loads = 0
    for seed in range(chunk * 200, chunk * 200 + 200):
        world = World(seed)
        try:
            world.run(20)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        loads += world.tally.counts.get(stats.LOADS, 0)
    assert loads > 20, "the runs try too little"


@pytest.mark.parametrize("chunk", range(2))
def test_random_runs_with_failing_loads_keep_the_laws(chunk: int) -> None:
    failed = 0
    for seed in range(chunk * 250, chunk * 250 + 250):
        world = World(seed, storm=True)
        try:
            world.run(25)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        failed += world.tally.counts.get(stats.LOADS_FAILED, 0)
    assert failed > 20, "the runs try too little"

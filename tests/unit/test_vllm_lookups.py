"""What vLLM's scheduler is told of a request: how many tokens can be loaded, when, or to come again."""

from tests import vllm_fakes  # noqa: F401 - stand-ins for vLLM's classes, before our modules import them

# isort: split
from typing import Any

import numpy as np
import pytest

from hicache.protocol.messages import Scope
from hicache_client.connectors.vllm import stats
from hicache_client.connectors.vllm.lookups import ASK_AGAIN_S, ASKS_AHEAD
from hicache_client.connectors.vllm.scope import NotYet
from tests.vllm_rig import Rig

# ---- lookups --------------------------------------------------------------------------------------------


def test_a_request_is_looked_up_when_it_arrives() -> None:
    rig = Rig()
    request = rig.new(prompt=19, cache_salt="s")
    (ask,) = rig.scout.asks
    assert np.frombuffer(ask.tokens, "<i4").tolist() == request.prompt_token_ids
    assert (ask.limit_tokens, ask.scope) == (19, Scope(salt="s"))


def test_until_the_answer_vllm_is_told_to_come_again_and_then_the_tokens() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    assert rig.match(request) == (None, False)
    rig.scout.answer(16)
    assert rig.match(request) == (16, False)
    assert rig.match(request, 8) == (8, False), "vLLM's own hit is not counted"


@pytest.mark.parametrize(
    ("known", "prompt", "local", "found"),
    [
        (20, 20, 0, 19),  # one token is computed
        (20, 20, 16, 3),
        (16, 20, 16, 0),
        (8, 20, 16, 0),  # vLLM has more
        (4, 4, 0, 3),
        (19, 20, 8, 11),  # inside a page
    ],
)
def test_what_is_reported_is_beyond_vllms_own_and_leaves_one_token(
    known: int, prompt: int, local: int, found: int
) -> None:
    rig = Rig()
    request = rig.new(prompt=prompt)
    rig.scout.answer(known)
    assert rig.match(request, local)[0] == found


def test_a_short_hit_is_recomputed_and_its_lease_goes_back() -> None:
    rig = Rig(min_load_tokens=9)
    request = rig.new(prompt=20)
    ask = rig.scout.answer(16)
    assert rig.match(request, 8) == (0, False)
    assert rig.match(request, 0) == (16, False), "not yet admitted: vLLM's own hit may shrink"
    assert rig.match(request, 8) == (0, False)
    rig.alloc(request, rig.table(20), 0)
    assert ask.released


def test_an_answer_that_does_not_come_is_not_waited_for_beyond_the_timeout() -> None:
    rig = Rig(lookup_timeout_s=0.5)
    request = rig.new()
    rig.clock[0] += 60  # in the queue, where nobody waited for it
    assert rig.match(request) == (None, False)
    rig.clock[0] += 0.4
    assert rig.match(request) == (None, False)
    rig.clock[0] += 0.2
    assert rig.match(request) == (0, False)
    assert rig.scout.asks[0].released
    assert rig.match(request) == (0, False), "it is not asked again"
    assert len(rig.scout.asks) == 1
    assert rig.counted(stats.LOOKUPS_LATE) == 1


def test_the_scheduler_waits_a_little_only_if_nothing_runs() -> None:
    def wait(seconds: float) -> bool:
        waits.append(seconds)
        rig.clock[0] += 2 * seconds
        return False

    rig, waits = Rig(lookup_wait_ms=2.0), list[float]()
    first, second = rig.new("a"), rig.new("b")
    for ask in rig.scout.asks:
        ask.wait = wait  # type: ignore[method-assign]
    assert rig.match(first) == (None, False)
    assert rig.match(second) == (None, False)
    assert waits == [0.002], "for all requests of a step together"
    rig.plan()
    rig.match(first)
    assert len(waits) == 2
    rig.plan()
    rig.scout.answer(0, ask=rig.scout.asks[0])
    _, table = rig.admit(first)
    rig.match(second)
    assert len(waits) == 2, "now one runs"
    rig.finish(first, table)
    rig.match(second)
    assert len(waits) == 3


def test_reads_that_are_not_wanted_are_not_asked_for() -> None:
    rig = Rig()
    rig.new("logprobs", skip_reading_prefix_cache=True)
    rig.new("embeddings", prompt_embeds=object())
    rig.new("gone", abort_immediately=True)
    rig.new("short", prompt=1)
    producer = Rig(read=False)
    producer.new()
    assert rig.scout.asks == producer.scout.asks == []


def test_only_so_many_wait_with_a_lease_the_others_ask_when_their_turn_comes() -> None:
    rig = Rig()
    requests = [rig.new(f"r{i}") for i in range(ASKS_AHEAD + 3)]
    assert len(rig.scout.asks) == ASKS_AHEAD
    assert rig.match(requests[-1]) == (None, False)
    assert len(rig.scout.asks) == ASKS_AHEAD + 1
    rig.scout.answer(16)
    assert rig.match(requests[-1]) == (16, False)


def test_an_old_answer_that_left_something_is_asked_again() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    old = rig.scout.answer(8)
    rig.clock[0] += ASK_AGAIN_S / 2
    assert rig.match(request) == (8, False)
    rig.clock[0] += ASK_AGAIN_S
    assert rig.match(request) == (None, False)
    assert old.released
    rig.scout.answer(16)
    assert rig.match(request) == (16, False)


def test_an_old_answer_that_left_nothing_is_good() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    rig.scout.answer(19, whole=20)
    rig.clock[0] += 100
    assert rig.match(request) == (19, False)
    assert len(rig.scout.asks) == 1


def test_a_lease_that_is_gone_is_a_miss_and_is_asked_for_again_later() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    rig.scout.answer(19, whole=20)
    rig.scout.alive = False
    assert rig.match(request) == (0, False)
    rig.clock[0] += ASK_AGAIN_S
    assert rig.match(request) == (None, False)
    rig.scout.alive = True
    rig.scout.answer(19, whole=20)
    assert rig.match(request) == (19, False)


def test_an_adapter_that_is_being_read_is_waited_for_like_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    scope: list[Any] = [NotYet()]
    monkeypatch.setattr(rig.side._lookups.scopes, "of", lambda request: scope[0])
    request = rig.new()
    assert rig.match(request) == (None, False)
    scope[0] = Scope(lora="abc")
    assert rig.match(request) == (None, False)
    rig.scout.answer(16)
    assert rig.match(request) == (16, False)
    scope[0] = NotYet()
    late = rig.new("late")
    assert rig.match(late) == (None, False)
    rig.clock[0] += 1
    assert rig.match(late) == (0, False)
    scope[0] = Scope(lora="abc")
    table = rig.table(20)
    rig.alloc(late, table, 0)
    assert rig.plan(late=(late, 20, table)).stores, "it is stored all the same"


# ---- prefetch -------------------------------------------------------------------------------------------


def test_pages_on_disk_are_waited_for_until_the_timeout_and_then_what_is_in_memory_counts() -> None:
    rig = Rig(prefetch="timeout", prefetch_base_s=1.0, prefetch_per_1024_tokens_s=64.0)  # 8 tokens: half a second
    request = rig.new(prompt=20)
    ask = rig.scout.answer(16, l3=8)
    assert rig.match(request) == (None, False)
    rig.clock[0] += 1.4
    assert rig.match(request) == (None, False)
    ask.memory_tokens = 12
    rig.clock[0] += 0.2
    assert rig.match(request) == (12, False)
    assert rig.counted(stats.PREFETCHES_LATE) == 1


def test_when_nothing_runs_the_end_of_a_prefetch_is_waited_for_a_little() -> None:
    rig = Rig(lookup_wait_ms=2.0)
    request = rig.new(prompt=20)
    ask = rig.scout.answer(16, l3=8)
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        rig.clock[0] += 0.0015
        ask.memory_tokens, ask.prefetching = 16, False
        return True

    ask.wait_prefetched = wait  # type: ignore[method-assign]
    assert rig.match(request) == (16, False)
    assert waits == [0.002]
    times = rig.tally._stats.times
    assert stats.quantile_s(times[stats.WAIT_S], 1) == pytest.approx(0.0015, rel=0.2)
    assert sum(times[stats.HOOK_S].values()) == 2


def test_a_prefetch_that_is_through_makes_a_load_inside_the_step() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    ask = rig.scout.answer(16, l3=8)
    assert rig.match(request) == (None, False)
    ask.memory_tokens, ask.prefetching, ask.prefetched = 16, False, True
    assert rig.match(request) == (16, False)


def test_a_prefetch_that_ended_early_leaves_the_rest_to_be_computed() -> None:
    rig = Rig()
    request = rig.new(prompt=20)
    ask = rig.scout.answer(16, l3=8)
    ask.prefetching = False
    assert rig.match(request) == (8, False)


def test_best_effort_loads_from_disk_between_steps() -> None:
    rig = Rig(prefetch="best_effort")
    request = rig.new(prompt=20)
    rig.scout.answer(16, l3=8)
    assert rig.match(request) == (16, True)


def test_wait_complete_waits_for_a_minute_at_most_and_then_loads_from_disk() -> None:
    rig = Rig(prefetch="wait_complete")
    request = rig.new(prompt=20)
    rig.scout.answer(16, l3=8)
    assert rig.match(request) == (None, False)
    rig.clock[0] += 59
    assert rig.match(request) == (None, False)
    rig.clock[0] += 2
    assert rig.match(request) == (16, True)

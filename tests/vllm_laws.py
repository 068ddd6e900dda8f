"""What must hold at every step of vllm_engine.py's model, and at its end."""

from tests import vllm_fakes  # noqa: F401 - stand-ins for vLLM's classes, before our modules import them

# isort: split
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_client.connectors.vllm.metadata import StepPlan
from tests.vllm_fakes import FakeStep
from tests.vllm_model import FINISHED, LOOKUP_TIMEOUT_S, PREFETCH_S, REMOTE, RUNNING, P, Req

if TYPE_CHECKING:
    from tests.vllm_engine import World


def check_answer(world: "World", request: Req, local: int, found: int | None, sent_async: bool) -> None:
    if found is None:
        assert not sent_async
        if request.none_step != world.steps - 1 or request.none_since is None:
            request.none_since, request.none_last, request.none_gap_s = world.clock, world.clock, 0.0
        request.none_gap_s = max(request.none_gap_s, world.clock - request.none_last)
        request.none_last, request.none_step = world.clock, world.steps
        bound = LOOKUP_TIMEOUT_S + PREFETCH_S + request.none_gap_s
        assert world.clock - request.none_since <= bound, "vLLM was told to come again for ever"
        return
    request.none_since = None
    if not found:
        assert not sent_async
        return
    tracked = world.side._requests[request.request_id]
    assert tracked.ask is not None
    assert local + found <= tracked.ask.resumable_tokens, "more than can be resumed"
    assert local + found < request.num_tokens, "nothing left to compute"
    assert sent_async or (not world.overlap and len(world.ks) == 1)
    assert not request.skip_reading_prefix_cache


def check_plan(world: "World", plan: StepPlan, output: FakeStep) -> None:
    assert plan.preempted >= output.preempted_req_ids
    for load in plan.loads:
        request = world.requests[load.request]
        assert request.status in (REMOTE, RUNNING)
        _check_owned(world, request, load.starts)
        assert request.request_id in output.num_scheduled_tokens or request.status == REMOTE
    for store in plan.stores:
        request = world.requests[store.request]
        assert request.status == RUNNING or request.request_id in plan.held, "a store nobody waits for"
        assert request.request_id not in daemon_done(world), "a store after its blocks were given back"
        ids = np.frombuffer(store.tokens, "<i4")
        real = ids[ids >= 0]
        assert (ids[len(real) :] == -1).all(), "only the end of the last page is padded"
        assert len(ids) - len(real) < P
        assert len(ids) == len(real) or request.request_id in plan.held, "a page that is not full is a last one"
        assert real.tolist() == request.script[: len(real)]
        assert len(real) <= request.known, "tokens that nobody knows yet"
        assert len(store.tokens) == 4 * P * (store.first_page + store.starts[0].size)
        _check_owned(world, request, store.starts)
    for name in plan.held:
        assert world.requests[name].status == FINISHED


def daemon_done(world: "World") -> set[str]:
    return set.intersection(*(rank.reported for rank in world.ranks))


def _check_owned(world: "World", request: Req, starts: tuple[Any, ...]) -> None:
    for group, column in enumerate(starts):
        owned = set(request.table[group])
        assert {start // world.ks[group] for start in column.tolist()} <= owned, "blocks of somebody else"


def check_leases(world: "World") -> None:
    asked = [tracked.ask for tracked in world.side._requests.values() if tracked.ask is not None]
    flown = [flight.ask for flight in world.side._flights._open.values() if flight.ask is not None]
    known = {id(ask) for ask in (*asked, *flown) if not ask.released}
    assert world.daemon.held.keys() <= known, "a lease that nobody will give back"
    owned = sum(world.pool.refs.values())
    tables = sum(len(ids) for request in world.requests.values() for ids in request.table)
    assert owned == tables + sum(len(blocks) for _, blocks in world.pool.deferred)


def check_end(world: "World") -> None:
    """Nothing is left of anybody."""
    side = world.side
    assert not world.daemon.held, "leases that nobody gave back"
    assert not side._requests
    assert not side._held
    assert not side._running
    assert not side._lookups._ahead
    assert not side._flights._open
    assert not side._revoked
    assert len(world.pool.free) == world.pool.count, "blocks that nobody gave back"
    assert not side._guard.caught, side._guard.caught

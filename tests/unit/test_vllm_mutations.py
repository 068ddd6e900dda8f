"""The model of vLLM finds bugs: each of these, planted in the scheduler side, breaks a law within some runs."""

from tests import vllm_fakes  # noqa: F401 - stand-ins for vLLM's classes, before our modules import them

# isort: split
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hicache_client.connectors.vllm.flights import Flights
from hicache_client.connectors.vllm.lookups import LATER, Lookups
from hicache_client.connectors.vllm.scheduler import SchedulerSide
from tests.vllm_engine import World

RUNS = 600


def blocks_are_given_back_at_once(real: Callable[..., bool]) -> Callable[..., bool]:
    def finish(self: SchedulerSide, request: Any, table: Any) -> bool:
        real(self, request, table)
        self._held.pop(request.request_id, None)
        return False

    return finish


def leases_are_forgotten(real: Callable[..., None]) -> Callable[..., None]:
    def let_go(self: Lookups, tracked: Any) -> None:
        tracked.ask = tracked.promise = None
        self._ahead.discard(tracked.name)

    return let_go


def loads_need_no_proof(real: Callable[..., Any]) -> Callable[..., Any]:
    def store(self: SchedulerSide, tracked: Any, computed: int) -> Any:
        tracked.unproven.clear()
        return real(self, tracked, computed)

    return store


def shared_blocks_are_trusted(real: Callable[..., None]) -> Callable[..., None]:
    return lambda self, tracked, paging, table: None


def pages_are_stored_before_they_are_computed(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, tracked, computed: real(self, tracked, computed + 4)


def one_token_too_many_is_promised(real: Callable[..., Any]) -> Callable[..., Any]:
    def promise(self: Lookups, tracked: Any, ask: Any, paging: Any) -> Any:
        found, later = real(self, tracked, ask, paging)
        if found and found + tracked.local_tokens < ask.resumable_tokens:
            found += 1
            tracked.promise = replace(tracked.promise, tokens=found)
        return found, later

    return promise


def a_preempted_request_keeps_its_table(real: Callable[..., None]) -> Callable[..., None]:
    def restart(self: SchedulerSide, tracked: Any) -> None:
        self._lookups.let_go(tracked)
        self._running.discard(tracked.name)
        tracked.preemptions = tracked.request.num_preemptions
        self._lookups.ask(tracked)

    return restart


def a_load_is_over_when_one_worker_says_so(real: Callable[..., None]) -> Callable[..., None]:
    return lambda self, load, workers, everybody: real(self, load, self.workers, everybody)


def a_load_is_never_over(real: Callable[..., None]) -> Callable[..., None]:
    return lambda self, load, workers, everybody: None


def a_reset_keeps_the_answers(real: Callable[..., bool]) -> Callable[..., bool]:
    def reset(self: SchedulerSide) -> bool:
        self._lookups.scopes.reset()
        return True

    return reset


def vllm_is_told_to_come_again_for_ever(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, tracked: LATER


BUGS: list[tuple[type, str, Callable[..., Any]]] = [
    (SchedulerSide, "_finish", blocks_are_given_back_at_once),
    (Lookups, "let_go", leases_are_forgotten),
    (SchedulerSide, "_store", loads_need_no_proof),
    (Flights, "admitted", shared_blocks_are_trusted),
    (SchedulerSide, "_store", pages_are_stored_before_they_are_computed),
    (Lookups, "_promise", one_token_too_many_is_promised),
    (SchedulerSide, "_restart", a_preempted_request_keeps_its_table),
    (Flights, "end", a_load_is_over_when_one_worker_says_so),
    (Flights, "end", a_load_is_never_over),
    (SchedulerSide, "_reset", a_reset_keeps_the_answers),
    (Lookups, "_come_again", vllm_is_told_to_come_again_for_ever),
]


@pytest.mark.parametrize(("kind", "method", "bug"), BUGS, ids=[bug.__name__ for _, _, bug in BUGS])
def test_a_planted_bug_breaks_a_law(
    kind: type, method: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, method, bug(getattr(kind, method)))
    with pytest.raises(AssertionError):  # noqa: PT012 - one of many runs finds it
        for seed in range(RUNS):
            World(seed, storm=seed % 2 == 1).run(25)

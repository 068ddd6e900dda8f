"""The connector's worker side against a client that does as it is told: nothing is lost, nothing is read too late."""

from tests import vllm_fakes  # noqa: F401 - stand-ins for vLLM's classes, before our modules import them

# isort: split
import errno
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hicache.protocol.messages import Scope
from hicache.spec.group import GroupSpec
from hicache.spec.model import ModelSpec
from hicache_client.connectors.vllm import stats
from hicache_client.connectors.vllm.metadata import LoadPlan, StepPlan, StorePlan
from hicache_client.connectors.vllm.options import VllmOptions
from hicache_client.connectors.vllm.worker import Place, WorkerSide
from hicache_client.leases import LeaseRef

P = 16
REF = LeaseRef(7, 3)
SHARDS = ((0, 0), (0, 1))


@dataclass
class Handle:
    """A transfer. `layers` are in place; `ends` is what happens when somebody waits."""

    layers: int = 0
    done: bool = False
    failed: bool = False
    settled: bool = False
    revoked: bool = False

    def wait_layer(self, layer: int, deadline: float | None = None) -> bool:
        return not self.failed and layer < self.layers

    def wait_done(self, deadline: float | None = None) -> bool:
        return self.done

    def wait_settled(self, deadline: float | None = None) -> bool:
        return self.settled

    def revoke(self) -> None:
        self.revoked = True


@dataclass
class FakeClient:
    """Hands out the handles it was given."""

    loads: list[Handle | None] = field(default_factory=list)
    stores: list[Handle | None] = field(default_factory=list)
    connected: bool = True
    log: list[tuple[Any, ...]] = field(default_factory=list)

    def connect(self, wait_s: float | None = None) -> bool:
        return self.connected

    def poll(self) -> None:
        self.log.append(("poll",))

    def renew(self, leases: Any = ()) -> int:
        return 0

    def adopt(self, ref: LeaseRef) -> int:
        self.log.append(("adopt", ref))
        return 11 if self.connected else 0

    def forget(self, leases: Any) -> None:
        self.log.append(("forget", *leases))

    def begin_load(self, lease: int, first_page: int, blocks: Any) -> Any:
        self.log.append(("load", lease, first_page, [np.frombuffer(each, np.int32).tolist() for each in blocks]))
        return self.loads.pop(0)

    def offer(self, tokens: Any, first_page: int, blocks: Any, scope: Scope = Scope()) -> Any:  # noqa: B008
        self.log.append(("store", len(tokens) // 4, first_page))
        return self.stores.pop(0)

    def reattach(self) -> None:
        self.log.append(("reattach",))

    def close(self) -> None:
        self.log.append(("close",))


@dataclass
class FakePool:
    """Severing settles every handle that it knows."""

    handles: list[Handle] = field(default_factory=list)
    severed: int = 0
    short: int = 0  # times that memory lacks

    def sever(self) -> None:
        if self.short:
            self.short -= 1
            raise OSError(errno.ENOMEM, "no room")
        self.severed += 1
        for handle in self.handles:
            handle.settled = handle.failed = True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def place(groups: int = 1, *, writes: bool = True) -> Place:
    specs = tuple(GroupSpec(f"g{i}", "full", (2 * i, 2 * i + 1), 2, 8, "float32", P) for i in range(groups))
    return Place(ModelSpec("m", "r", specs, P), (0, 1), {"a": 0, "b": 1}, writes)


class Rig:
    def __init__(self, *loads: Handle | None, stores: tuple[Handle | None, ...] = (), **more: Any) -> None:
        self.client = FakeClient(list(loads), list(stores))
        self.pool = FakePool([each for each in loads if each is not None])
        self.clock = Clock()
        self.side = WorkerSide(
            VllmOptions(load_timeout_s=10.0), place(**more), self.client, self.pool, now=self.clock
        )

    def did(self, what: str) -> list[tuple[Any, ...]]:
        return [each for each in self.client.log if each[0] == what]


def load(number: int = 1, *, sync: bool = True, leases: tuple[LeaseRef, ...] = (LeaseRef(7, 2), REF)) -> LoadPlan:
    starts = (np.array([4, 5], np.int32),)
    return LoadPlan(number, f"r{number}", leases, 0, starts, ((2, 3),), 31, sync)


def store(request: str = "r1", pages: int = 2) -> StorePlan:
    return StorePlan(request, bytes(4 * P * pages), 0, (np.arange(pages, dtype=np.int32),), Scope())


def step(*loads: LoadPlan, **more: Any) -> StepPlan:
    return StepPlan(loads=loads, shards=SHARDS, **more)


def test_a_load_is_waited_for_layer_by_layer() -> None:
    handle = Handle(layers=2, done=True, settled=True)
    rig = Rig(handle)
    plan = step(load())
    rig.side.start_load_kv(plan)
    assert rig.did("adopt") == [("adopt", REF)], "the lease of its own shard"
    assert rig.did("load") == [("load", 11, 0, [[4, 5]])]
    rig.side.wait_for_layer_load("a")
    rig.side.wait_for_layer_load("b")
    rig.side.wait_for_save(plan)
    report = rig.side.take_report()
    assert report is not None
    assert (report.ended, report.failed) == ({1: 1}, set())
    assert rig.side.block_ids_with_load_errors() == set()
    assert rig.did("forget") == [("forget", 11)]
    assert rig.side.take_report() is None


@pytest.mark.parametrize("at", ["a", "b", "save"])
def test_a_load_that_fails_is_reported_by_its_blocks_after_it_is_settled(at: str) -> None:
    handle = Handle(layers={"a": 0, "b": 1, "save": 2}[at], failed=at != "save", settled=True)
    rig = Rig(handle)
    plan = step(load())
    rig.side.start_load_kv(plan)
    for name in ("a", "b"):
        rig.side.wait_for_layer_load(name)
    rig.side.wait_for_save(plan)
    report = rig.side.take_report()
    assert report is not None
    assert (report.ended, report.failed) == ({1: 1}, {1})
    assert rig.side.block_ids_with_load_errors() == {2, 3}
    assert rig.side.block_ids_with_load_errors() == set(), "said once"
    assert rig.pool.severed == 0


def test_a_load_that_does_not_settle_loses_the_memory() -> None:
    handle = Handle(layers=0, settled=False)
    rig = Rig(handle)
    rig.side.start_load_kv(step(load()))
    rig.side.wait_for_layer_load("a")
    assert handle.revoked
    assert rig.pool.severed == 1
    assert rig.did("reattach")


def test_without_memory_to_sever_the_engine_waits_until_the_load_is_settled() -> None:
    handle = Handle(layers=0, settled=False)
    rig = Rig(handle)
    rig.pool.short = 3
    rig.side.start_load_kv(step(load()))
    rig.side.wait_for_layer_load("a")
    assert rig.pool.severed == 1, "tried until it went"


@pytest.mark.parametrize("why", ["away", "refused", "no lease"])
def test_a_load_that_cannot_begin_has_failed(why: str) -> None:
    rig = Rig(None)
    rig.client.connected = why != "away"
    plan = step(load(leases=() if why == "no lease" else (LeaseRef(7, 2), REF)))
    rig.side.start_load_kv(plan)
    rig.side.wait_for_layer_load("a")
    rig.side.wait_for_save(plan)
    assert rig.side.block_ids_with_load_errors() == {2, 3}


def test_a_load_between_steps_is_received_when_it_is_done() -> None:
    handle = Handle()
    rig = Rig(handle)
    plan = step(load(sync=False))
    rig.side.start_load_kv(plan)
    rig.side.wait_for_layer_load("a")
    rig.side.wait_for_save(plan)
    assert rig.side.transfer_results(plan) == (set(), set(), set())
    handle.done = handle.settled = True
    assert rig.side.transfer_results(step()) == (set(), {"r1"}, set())
    assert rig.side.block_ids_with_load_errors() == set()


@pytest.mark.parametrize("groups", [1, 2])
def test_a_load_between_steps_that_is_late_is_taken_back_and_received_as_failed(groups: int) -> None:
    handle = Handle()
    rig = Rig(handle, groups=groups)
    plan = step(load(sync=False))
    rig.side.start_load_kv(plan)
    rig.clock.now += 11
    assert rig.side.transfer_results(plan)[1] == set(), "its blocks may still be written"
    assert handle.revoked
    handle.settled = True
    sent, received, failed = rig.side.transfer_results(step())
    assert (sent, received) == (set(), {"r1"})
    if groups == 1:
        assert rig.side.block_ids_with_load_errors() == {2, 3}
    else:
        assert failed == {"r1"}, "blocks of several groups have no common names"


def test_a_load_between_steps_that_never_settles_loses_the_memory() -> None:
    rig = Rig(Handle())
    plan = step(load(sync=False))
    rig.side.start_load_kv(plan)
    for _ in range(2):
        rig.clock.now += 11
        rig.side.transfer_results(plan)
    assert rig.pool.severed == 1
    report = rig.side.take_report()
    assert report is not None
    assert report.failed == {1}


def test_a_held_request_is_free_when_its_stores_are_settled() -> None:
    first, second = Handle(done=True), Handle(done=True)
    rig = Rig(stores=(first, second))
    rig.side.wait_for_save(step(stores=(store(), store())))
    plan = step(held=frozenset({"r1"}))
    assert rig.side.transfer_results(plan)[0] == set()
    first.settled = True
    assert rig.side.transfer_results(plan)[0] == set(), "all of them"
    second.settled = True
    assert rig.side.transfer_results(plan)[0] == {"r1"}
    assert rig.side.transfer_results(plan)[0] == set(), "said once, though a plan still names it"


def test_a_held_request_is_free_at_the_latest_after_the_timeout_its_stores_revoked() -> None:
    handle = Handle()
    rig = Rig(stores=(handle,))
    rig.side.wait_for_save(step(stores=(store(),)))
    plan = step(held=frozenset({"r1"}))
    rig.side.transfer_results(plan)
    rig.clock.now += 10.5
    assert rig.side.transfer_results(plan)[0] == {"r1"}
    assert handle.revoked


def test_stores_of_preempted_requests_are_revoked_before_their_blocks_are_overwritten() -> None:
    ended, running, other = Handle(settled=True, done=True), Handle(), Handle()
    rig = Rig(stores=(ended, running, other))
    rig.side.wait_for_save(step(stores=(store(), store(), store("r2"))))
    rig.side.handle_preemptions(step(preempted=frozenset({"r1"})))
    assert (ended.revoked, running.revoked, other.revoked) == (False, True, False)


def test_a_store_that_was_not_taken_is_told() -> None:
    refused = Handle(settled=True, failed=True)
    rig = Rig(stores=(None, refused))
    rig.side.wait_for_save(step(stores=(store("r1"), store("r2"))))
    rig.side.transfer_results(step())
    report = rig.side.take_report()
    assert report is not None
    assert report.unstored == {"r1", "r2"}
    taken = rig.side.tally.take()
    assert taken is not None
    assert taken.counts[stats.STORES_FAILED] == 2


def test_a_rank_that_does_not_write_stores_nothing_and_holds_nothing() -> None:
    rig = Rig(writes=False)
    plan = step(stores=(store(),), held=frozenset({"r1"}))
    rig.side.wait_for_save(plan)
    assert not rig.did("store")
    assert rig.side.transfer_results(plan)[0] == {"r1"}


def test_giving_up_leaves_nothing_behind() -> None:
    loading, storing = Handle(), Handle()
    rig = Rig(loading, stores=(storing,))
    plan = step(load(sync=False), stores=(store("r2"),), held=frozenset({"r2"}))
    rig.side.start_load_kv(plan)
    rig.side.wait_for_save(plan)
    rig.side.transfer_results(plan)
    sent, received, _ = rig.side.give_up()
    assert (sent, received) == ({"r2"}, {"r1"})
    assert storing.revoked
    assert loading.settled, "or the memory is severed"
    assert rig.side.block_ids_with_load_errors() == {2, 3}


def test_results_that_are_asked_for_before_the_save_hold_the_steps_failed_loads() -> None:
    """So vLLM does with speculative decoding. Told a step later, the request's wrong tokens would be out."""
    rig = Rig(Handle(layers=0, failed=True, settled=True))
    plan = step(load())
    rig.side.start_load_kv(plan)
    rig.side.wait_for_layer_load("a")
    rig.side.transfer_results(plan)
    assert rig.side.block_ids_with_load_errors() == {2, 3}
    report = rig.side.take_report()
    assert report is not None
    assert report.failed == {1}
    rig.side.wait_for_save(plan)
    assert rig.side.take_report() is None, "a step ends once"


def test_results_that_are_asked_for_before_the_save_keep_blocks_that_are_about_to_be_stored() -> None:
    handle = Handle()
    rig = Rig(stores=(handle,))
    plan = step(stores=(store(),), held=frozenset({"r1"}))
    assert rig.side.transfer_results(plan)[0] == set(), "its last store reads them"
    rig.side.wait_for_save(plan)
    assert len(rig.did("store")) == 1
    handle.settled = handle.done = True
    assert rig.side.transfer_results(plan)[0] == {"r1"}

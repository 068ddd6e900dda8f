"""The connector's side in a vLLM worker: it begins loads, waits for them layer by layer, and offers what is stored.

    start_load_kv ─► Load ─► wait_for_layer_load(i) waits for layer i of the loads that this step reads
    wait_for_save ─► Store: sent and forgotten; its blocks stay with us until it is settled, or is revoked
    get_transfer_results ─► which requests' blocks nobody reads or writes any more

    a load     running ─► done ─────────────────────────────────► ended
                  └─► failed or late ─► settled ────────────────► ended, its blocks are reported
                                └─► not settled ─► pool severed ─┘

vLLM computes a failed load's tokens in the same blocks, so a load must be settled before it is reported. A daemon
that hangs in the middle of one is cut off: the pool's bytes move to fresh memory that it can't write to.

It runs on the worker's thread and never connects there: a keeper thread does, again and again.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hicache.protocol.messages import Scope
from hicache.protocol.wire import Buffer
from hicache.spec.model import ModelSpec
from hicache_client.leases import LeaseRef
from hicache_client.sync_handles import LoadHandle, StoreHandle

from . import stats
from .metadata import LoadPlan, StepPlan, StorePlan, WorkerReport
from .options import VllmOptions

SETTLE_S = 0.5  # a load that failed usually settles at once
PREEMPT_S = 0.02  # how long a preempted request's stores may still take before they are revoked
KEEP_UP_S = 1.0  # the keeper looks so often whether the session is up,
KEEP_AWAY_S = 0.1  # ... and so often while it is not
HEARTBEAT_S = 10.0

_log = logging.getLogger("hicache.vllm")


class Transfers(Protocol):
    """What is needed of the client."""

    @property
    def connected(self) -> bool: ...

    def connect(self, wait_s: float | None = None) -> bool: ...

    def poll(self) -> None: ...

    def renew(self, leases: Sequence[int] = ()) -> int: ...

    def adopt(self, ref: LeaseRef) -> int: ...

    def forget(self, leases: Sequence[int]) -> None: ...

    def begin_load(self, lease: int, first_page: int, blocks: Sequence[Buffer]) -> LoadHandle | None: ...

    def offer(
        self, tokens: Buffer, first_page: int, blocks: Sequence[Buffer], scope: Scope = ...
    ) -> StoreHandle | None: ...

    def reattach(self) -> None: ...

    def close(self) -> None: ...


class Severable(Protocol):
    """What is needed of the pool."""

    def sever(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """What a worker needs to know of its cache. `layers` as in spec.Registered."""

    model: ModelSpec
    shard: tuple[int, int]  # (pp_rank, tp_rank) of the shard
    layers: dict[str, int]
    writes: bool = True

    @property
    def page_bytes(self) -> int:
        """Of all groups of this shard."""
        page = self.model.prefix_granularity
        return sum(group.block_bytes() * page // group.block_tokens for group in self.model.groups)


@dataclass(slots=True, eq=False)
class _Load:
    plan: LoadPlan
    handle: LoadHandle | None
    lease: int
    begun_s: float
    deadline_s: float
    failed: bool = False


@dataclass(slots=True, eq=False)
class _Stores:
    """The stores of one request that are not settled. `late_s`: when those of a held request are revoked."""

    open: list[StoreHandle] = field(default_factory=list)
    late_s: float = 0.0


class WorkerSide:
    """See the module. All but the keeper runs on one thread."""

    def __init__(
        self,
        options: VllmOptions,
        place: Place,
        client: Transfers,
        pool: Severable,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._place, self._client, self._pool, self._now = options, place, client, pool, now
        self.tally = stats.Tally()
        self._groups = len(place.model.groups)
        self._sync: list[_Load] = []
        self._async: dict[int, _Load] = {}
        self._stores: dict[str, _Stores] = {}
        self._held: set[str] = set()
        self._told: set[str] = set()  # of the held: their blocks have been given back
        self._bad_blocks: set[int] = set()
        self._report = WorkerReport()
        self._received: set[str] = set()
        self._saved: StepPlan | None = None  # the step that has been ended
        self._not_received: set[str] = set()
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="hicache-keeper", daemon=True)

    def start(self) -> None:
        """Begin to keep the session up."""
        self._keeper.start()

    def shutdown(self) -> None:
        """Let go of the daemon. Idempotent."""
        self._stop.set()
        self._client.close()

    def _keep(self) -> None:
        beaten_s = self._now()
        while not self._stop.is_set():
            try:
                if not self._client.connected:
                    self._client.connect()
                elif self._now() - beaten_s >= HEARTBEAT_S:
                    beaten_s = self._now()
                    self._client.renew()
            except Exception:  # noqa: BLE001 - a keeper that dies would leave the engine uncached without a word
                _log.exception("hicache: keeping the session up failed; trying again")
                self._stop.wait(KEEP_UP_S)
            self._stop.wait(KEEP_UP_S if self._client.connected else KEEP_AWAY_S)

    # ---- loads ------------------------------------------------------------------------------------------

    def start_load_kv(self, plan: StepPlan) -> None:
        """Begin this step's loads."""
        for load in plan.loads:
            running = self._begin(load, plan)
            if load.sync:
                self._sync.append(running)
            else:
                self._async[load.load] = running

    def fail_loads(self, plan: StepPlan) -> None:
        """Something broke in `start_load_kv`: what did not begin has failed."""
        known = {each.plan.load for each in self._sync} | set(self._async)
        for load in plan.loads:
            if load.load not in known:
                lost = _Load(load, None, 0, self._now(), 0.0)
                if load.sync:
                    self._sync.append(lost)
                else:
                    self._async[load.load] = lost

    def _begin(self, load: LoadPlan, plan: StepPlan) -> _Load:
        now = self._now()
        lease, handle = 0, None
        if load.leases:
            lease = self._client.adopt(load.leases[plan.shards.index(self._place.shard)])
        if lease:
            handle = self._client.begin_load(lease, load.first_page, [each.data for each in load.starts])
        self.tally.count(stats.LOAD_BYTES, 0 if handle is None else len(load.starts[0]) * self._place.page_bytes)
        return _Load(load, handle, lease, now, now + self._options.load_timeout_s)

    def wait_for_layer_load(self, name: str) -> None:
        """The layer's part of every load that this step reads is in place, or the load has failed."""
        if not self._sync:
            return
        layer = self._place.layers.get(name)
        for load in self._sync:
            if load.failed:
                continue
            handle = load.handle
            if handle is None:
                self._fail(load)
            elif layer is None:  # not one of ours: it may read any of them
                if not handle.wait_done(load.deadline_s):
                    self._fail(load)
            elif not handle.wait_layer(layer, load.deadline_s):
                self._fail(load)

    def fail_sync(self) -> None:
        """Something broke while a layer was waited for: nothing that this step loads is to be trusted."""
        for load in self._sync:
            if not load.failed:
                self._fail(load)

    def end_sync(self) -> None:
        """Something broke at the end of a step: what is not known to have gone well has failed."""
        while self._sync:
            load = self._sync.pop()
            load.failed = True
            if load.handle is not None and not load.handle.settled:
                load.handle.revoke()
                self._sever()
            self._ended(load)

    def _finish_sync(self) -> None:
        while self._sync:
            load = self._sync[-1]
            if not load.failed and (load.handle is None or not load.handle.wait_done(load.deadline_s)):
                self._fail(load)
            self._sync.pop()
            self._ended(load)

    def _fail(self, load: _Load) -> None:
        """It will not be read, and from here on nobody writes its blocks but the engine."""
        load.failed = True
        handle = load.handle
        if handle is None:
            return
        if not handle.wait_settled(self._now() + SETTLE_S):
            handle.revoke()
            if not handle.wait_settled(self._now() + SETTLE_S):
                self._sever()

    def _sever(self) -> None:
        """The daemon may write at any time: take the memory away from it."""
        _log.warning("hicache: the daemon hangs in the middle of a load; moving the KV cache out of its reach")
        while True:
            try:
                self._pool.sever()
                break
            except OSError as error:  # not enough memory for a second copy: waiting is the only safe way left
                unsettled = [
                    each.handle
                    for each in (*self._sync, *self._async.values())
                    if each.failed and each.handle is not None and not each.handle.settled
                ]
                if not unsettled:
                    return
                _log.error("hicache: %s; the engine waits for the daemon to end its load, or to be ended", error)
                unsettled[0].wait_settled(self._now() + 10.0)
        self._client.reattach()

    def _ended(self, load: _Load) -> None:
        self._report.ended[load.plan.load] = 1
        if load.lease:
            self._client.forget([load.lease])
        if not load.failed:
            self.tally.time(stats.LOAD_S, self._now() - load.begun_s)
            return
        self._report.failed.add(load.plan.load)
        if self._groups == 1:
            self._bad_blocks.update(load.plan.blocks[0])
        else:
            self._not_received.add(load.plan.request)

    def _look_at_async(self) -> None:
        now = self._now()
        for number, load in list(self._async.items()):
            handle = load.handle
            if not load.failed and handle is not None:
                if handle.done:
                    self._receive(number, load)
                    continue
                if not handle.failed and now < load.deadline_s:
                    continue
                handle.revoke()
                load.failed, load.deadline_s = True, now + 2 * SETTLE_S
            load.failed = True
            if handle is not None and not handle.settled:
                if now < load.deadline_s:
                    continue
                self._sever()
            self._receive(number, load)

    def _receive(self, number: int, load: _Load) -> None:
        del self._async[number]
        self._ended(load)
        self._received.add(load.plan.request)

    # ---- stores -----------------------------------------------------------------------------------------

    def wait_for_save(self, plan: StepPlan) -> None:
        """Offer what this step completed. Waits for loads that no layer waited for, and for no store.

        With speculative decoding vLLM asks for the step's results before it calls this: whichever comes first ends
        the step. Else failed loads would be reported a step late, when their tokens are out, and blocks would be
        given back before their last store had begun to read them."""
        if plan is self._saved:
            return
        self._saved = plan
        self._finish_sync()
        for store in plan.stores:
            self._offer(store)

    def _offer(self, store: StorePlan) -> None:
        if not self._place.writes:
            return
        starts = [each.data for each in store.starts]
        handle = self._client.offer(store.tokens, store.first_page, starts, store.scope)
        if handle is None:
            self._report.unstored.add(store.request)
            self.tally.count(stats.STORES_FAILED)
            return
        self._stores.setdefault(store.request, _Stores()).open.append(handle)
        self.tally.count(stats.STORES)
        self.tally.count(stats.STORE_BYTES, len(store.starts[0]) * self._place.page_bytes)

    def handle_preemptions(self, plan: StepPlan) -> None:
        """These blocks are another's from now on: whoever still reads them must not publish what is read."""
        if not plan.preempted:
            return
        end = self._now() + PREEMPT_S
        for name in plan.preempted:
            stores = self._stores.pop(name, None)
            for handle in stores.open if stores is not None else ():
                if not handle.wait_settled(end):
                    self._revoke(handle)

    def revoke_all(self) -> None:
        """Something broke while blocks were given back: no store is to be trusted."""
        for stores in self._stores.values():
            for handle in stores.open:
                self._revoke(handle)
        self._stores.clear()

    def _revoke(self, handle: StoreHandle) -> None:
        handle.revoke()
        self.tally.count(stats.STORES_REVOKED)

    def _look_at_stores(self) -> None:
        for name, stores in list(self._stores.items()):
            for handle in stores.open[:]:
                if handle.settled:
                    stores.open.remove(handle)
                    if handle.failed and not handle.done:
                        self._report.unstored.add(name)
                        self.tally.count(stats.STORES_FAILED)
            if not stores.open:
                del self._stores[name]

    # ---- the end of a step ------------------------------------------------------------------------------

    def transfer_results(self, plan: StepPlan | None) -> tuple[set[str], set[str], set[str]]:
        """(held requests whose blocks are free, requests received, of those the ones whose load failed)."""
        if plan is not None:
            self.wait_for_save(plan)
        if self._stores or self._async:
            self._client.poll()
        self._look_at_async()
        self._look_at_stores()
        if plan is not None:
            self._held |= plan.held - self._told
            self._told &= plan.held
        sent = {name for name in self._held if self._is_free(name)}
        self._held -= sent
        self._told |= sent
        received, self._received = self._received, set()
        failed, self._not_received = self._not_received, set()
        return sent, received, failed

    def _is_free(self, name: str) -> bool:
        stores = self._stores.get(name)
        if stores is None:
            return True
        now = self._now()
        stores.late_s = stores.late_s or now + self._options.load_timeout_s
        if now < stores.late_s:
            return False
        for handle in stores.open:
            self._revoke(handle)
        del self._stores[name]
        return True

    def give_up(self) -> tuple[set[str], set[str], set[str]]:
        """Something broke while transfers were looked at: nothing is read, all that is loaded has failed, and vLLM
        gets every block back that it waits for."""
        self.revoke_all()
        self.end_sync()
        for number, load in list(self._async.items()):
            self._fail(load)
            self._receive(number, load)
        sent, self._held = self._held, set()
        self._told |= sent
        received, self._received = self._received, set()
        failed, self._not_received = self._not_received, set()
        return sent, received, failed

    def block_ids_with_load_errors(self) -> set[int]:
        """The engine's blocks of loads that failed since the last call (one cache group)."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport | None:
        """What happened since the last call."""
        if not (self._report.ended or self._report.unstored):
            return None
        report, self._report = self._report, WorkerReport()
        return report

"""The connector's side in vLLM's scheduler: what may be loaded, what is stored, which blocks are kept. STATES.md
draws its states against vLLM's.

It runs on the scheduler's thread and never waits for the daemon, except, when nothing else runs, for lookup_wait_ms.
Every hook goes through the guard: if ours breaks, the answer is a miss, or a load that fails.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import stats
from .flights import Flights
from .guard import Guard, RefusedError
from .lookups import MISS, Answer, AsksAhead, Lookups
from .metadata import StepPlan, StorePlan, WorkerReport, WorkerShard
from .options import VllmOptions
from .scope import NotYet, Uncacheable
from .scout import Scout
from .tracked import BlockTable, EngineRequest, Flight, Paging, Tracked

HOLD_S = 30.0  # beyond load_timeout_s: blocks of a finished request are kept so long for a load to be proven
PADDING = (-1).to_bytes(4, "little", signed=True)  # a token that no prompt has
NEVER = 1 << 60  # tokens

_log = logging.getLogger("hicache.vllm")


@dataclass(frozen=True, slots=True)
class Manner:
    """How this engine runs. `sync_loads`: a load may happen inside the step that needs it. Not with overlapping
    steps: vLLM has then scheduled the next one before it hears of a failure, and would deliver its tokens."""

    read: bool = True
    write: bool = True
    sync_loads: bool = True


def engine_group(engine_id: str) -> bytes:
    """The 16 bytes by which the sessions of one engine know each other."""
    return hashlib.blake2b(engine_id.encode(), digest_size=16).digest()


def scheduler_side(vllm_config: Any, options: VllmOptions) -> "SchedulerSide":
    """The scheduler side of the engine that `vllm_config` (VllmConfig) describes."""
    transfer = vllm_config.kv_transfer_config
    tally = stats.Tally()
    engine_id = str(transfer.engine_id)
    scout = Scout(options, engine_group(engine_id), f"vllm {engine_id[:12]}", observe=tally.time)
    manner = Manner(
        read=transfer.kv_role != "kv_producer",
        write=options.write and transfer.kv_role != "kv_consumer",
        sync_loads=getattr(vllm_config, "max_concurrent_batches", 2) == 1,
    )
    return SchedulerSide(options, scout, manner, tally)


class SchedulerSide:
    """See the module. Until `set_workers` has come, and if a worker was refused, every request is a miss."""

    def __init__(
        self,
        options: VllmOptions,
        scout: AsksAhead,
        manner: Manner,
        tally: stats.Tally,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._scout, self._tally, self._now = options, scout, tally, now
        self._write = manner.write
        self._guard = Guard("scheduler side", self._observe)
        self._lookups = Lookups(options, scout, tally, now, read=manner.read, sync_loads=manner.sync_loads)
        self._flights = Flights(tally, now, options.load_timeout_s)
        self._sync_loads = manner.sync_loads
        self._paging: Paging | None = None
        self._shards: tuple[tuple[int, int], ...] = ()
        self._requests: dict[str, Tracked] = {}
        self._running: set[str] = set()  # have blocks and compute
        self._held: dict[str, Tracked] = {}  # finished; vLLM keeps their blocks for us
        self._revoked: set[str] = set()  # gone without being held: whoever reads their blocks must stop

    def _observe(self, hook: str, seconds: float) -> None:
        waited = self._lookups.take_waited()
        if waited:
            self._tally.time(stats.WAIT_S, waited)
        self._tally.time(stats.HOOK_S, max(0.0, seconds - waited))

    # ---- start and end ----------------------------------------------------------------------------------

    def set_workers(self, shards: Mapping[tuple[int, int], WorkerShard]) -> None:
        """How every worker registered, by (pp_rank, tp_rank). Raises `RefusedError` if something does not fit and
        `on_error` says refuse."""
        refused = sorted({shard.refused for shard in shards.values() if shard.refused})
        fitting = [shard for shard in shards.values() if shard.model is not None and shard.layout is not None]
        pagings = {Paging(each.model.prefix_granularity, each.starts_per_block) for each in fitting if each.model}
        if refused or not fitting or len(fitting) < len(shards):
            self._cannot("; ".join(refused) or "no worker has registered its KV cache")
            return
        if len(pagings) > 1:
            self._cannot(f"expected all workers to page alike, got {sorted(map(str, pagings))}")
            return
        distinct = {(each.shard.pp_rank, each.shard.tp_rank): each for each in reversed(fitting)}
        self._shards = tuple(sorted(distinct))
        self._flights.workers = len(shards)
        self._paging = self._lookups.paging = pagings.pop()
        self._scout.start([distinct[rank] for rank in self._shards])
        if not self._scout.connected and self._options.on_error == "refuse":
            where = self._options.directory or "the default runtime directory"
            raise RefusedError(f"hicache: no daemon took this engine at {where}: start it with `hicache serve`")

    def _cannot(self, why: str) -> None:
        if self._options.on_error == "refuse":
            raise RefusedError(f"hicache: {why}")
        _log.warning("hicache: running uncached: %s", why)

    def shutdown(self) -> None:
        """End the lookups; what is still leased goes with the sessions. Idempotent."""
        self._guard.run("shutdown", self._scout.close, lambda: None)

    def take_stats(self) -> stats.HiCacheStats | None:
        """What was counted since the last call."""
        self._tally.count(stats.CAUGHT, sum(self._guard.caught.values()))
        self._guard.caught.clear()
        return self._tally.take()

    # ---- lookups ----------------------------------------------------------------------------------------

    def on_new_request(self, request: EngineRequest) -> None:
        """Ask at once, so that the answer is there when the request's turn comes."""
        self._guard.run("on_new_request", lambda: self._arrive(request), lambda: None)

    def _arrive(self, request: EngineRequest) -> None:
        if self._paging is None:
            return
        tracked = Tracked(request, preemptions=request.num_preemptions)
        self._requests[tracked.name] = tracked
        self._lookups.rescope(tracked)
        if not getattr(request, "abort_immediately", False):
            self._lookups.ask_ahead(tracked)

    def get_num_new_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> Answer:
        """Tokens beyond vLLM's own hit that can be loaded, and whether between steps. None: come again."""
        return self._guard.run(
            "get_num_new_matched_tokens", lambda: self._match(request, num_computed_tokens), lambda: MISS
        )

    def _match(self, request: EngineRequest, computed: int) -> Answer:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return MISS
        if tracked.preempted:
            self._restart(tracked)
        elif tracked.table:  # a load failed so early that vLLM took the blocks back
            tracked.lose_blocks()
        return self._lookups.match(tracked, computed, idle=not self._running)

    def _restart(self, tracked: Tracked) -> None:
        """Preempted: its blocks are gone, and it is looked up anew."""
        self._lookups.let_go(tracked)
        self._running.discard(tracked.name)
        tracked.lose_blocks()
        self._lookups.ask(tracked)

    # ---- loads ------------------------------------------------------------------------------------------

    def update_state_after_alloc(self, request: EngineRequest, blocks: Any, num_external_tokens: int) -> None:
        """vLLM has allocated blocks (KVCacheBlocks) and counts on `num_external_tokens` being loaded into them."""
        self._guard.run(
            "update_state_after_alloc",
            lambda: self._allocated(request, blocks.get_block_ids(), num_external_tokens),
            lambda: self._fail_load(request, blocks, num_external_tokens),
        )

    def _allocated(self, request: EngineRequest, table: BlockTable, external: int) -> None:
        tracked, paging = self._requests.get(request.request_id), self._paging
        if tracked is None or paging is None:
            if external:
                raise LookupError(f"{external} tokens are to be loaded for a request that was promised none")
            return
        if not tracked.table:
            self._flights.admitted(tracked, paging, table)
        tracked.table = [list(ids) for ids in table]
        ask = tracked.ask
        if ask is not None:
            self._tally.count(stats.TOKENS_ASKED, request.num_tokens)
            self._tally.count(stats.TOKENS_OWN, tracked.local_tokens)
            tracked.offered = ask.resumable_tokens // paging.page_tokens
        if external:
            flight = self._flights.begin(tracked, paging, external)
            host = _tokens_from_host(flight)
            self._tally.count(stats.TOKENS_L2, host)
            self._tally.count(stats.TOKENS_L3, external - host)
        self._lookups.let_go(tracked)

    def _fail_load(self, request: EngineRequest, blocks: Any, tokens: int) -> None:
        tracked = self._requests.setdefault(request.request_id, Tracked(request, preemptions=request.num_preemptions))
        sync = self._sync_loads if tracked.promise is None else tracked.promise.sync
        self._lookups.let_go(tracked)
        tracked.negative = True
        if tokens:
            tracked.table = [list(ids) for ids in blocks.get_block_ids()]
            self._flights.doom(request, tracked, tokens, sync)

    def get_external_cache_hit_sources(self, request: EngineRequest, num_external_tokens: int) -> dict[str, int]:
        """Which tier the tokens of the load just planned come from: "host" and "disk", the values of vLLM's
        CacheHitSource; what an L3 page's prefetch has brought to memory counts as disk."""

        def split() -> dict[str, int]:
            tracked = self._requests.get(request.request_id)
            if tracked is None or tracked.flight is None or tracked.flight.tokens != num_external_tokens:
                return {}
            host = _tokens_from_host(tracked.flight)
            return {tier: n for tier, n in (("host", host), ("disk", num_external_tokens - host)) if n}

        return self._guard.run("get_external_cache_hit_sources", split, dict)

    # ---- a step -----------------------------------------------------------------------------------------

    def build_connector_meta(self, output: Any) -> StepPlan:
        """The workers' plan for the step that `output` (SchedulerOutput) describes."""
        return self._guard.run("build_connector_meta", lambda: self._plan(output), lambda: self._bare_plan(output))

    def _plan(self, output: Any) -> StepPlan:
        self._lookups.begin_step()
        for name in output.preempted_req_ids or ():
            tracked = self._requests.get(name)
            if tracked is not None and tracked.preempted:
                self._restart(tracked)
        self._update_tables(output)
        for load in self._flights.overdue():
            self._flights.fail(load, self._everybody())
            self._flights.end(load, self._flights.workers, self._everybody())
        stores = []
        if self._write:
            for name, scheduled in output.num_scheduled_tokens.items():
                tracked = self._requests.get(name)
                if tracked is None or tracked.request.num_computed_tokens + scheduled < tracked.due:
                    continue
                plan = self._store(tracked, tracked.request.num_computed_tokens + scheduled)
                if plan is not None:
                    stores.append(plan)
        stores += self._last_stores()
        return self._plan_of(output, tuple(stores))

    def _bare_plan(self, output: Any) -> StepPlan:
        """What vLLM's outputs depend on, and nothing else: loads, and blocks that nobody may read any more."""
        for tracked in self._held.values():
            tracked.closed = True
        return self._plan_of(output, ())

    def _plan_of(self, output: Any, stores: tuple[StorePlan, ...]) -> StepPlan:
        gone = frozenset(output.preempted_req_ids or ()) | self._revoked
        self._revoked = set()
        held = frozenset(name for name, tracked in self._held.items() if tracked.closed)
        return StepPlan(self._flights.take(), stores, gone, held, self._shards)

    def _update_tables(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            self._take_table(new.req_id, new.block_ids, whole=True)
        cached = output.scheduled_cached_reqs
        for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if ids is not None:
                self._take_table(name, ids, whole=name in cached.resumed_req_ids)

    def _take_table(self, name: str, ids: BlockTable, *, whole: bool) -> None:
        tracked = self._requests.get(name)
        if tracked is None:
            return
        self._running.add(name)
        if whole:
            tracked.table = [list(group) for group in ids]
            return
        self._flights.grown(ids)
        if not tracked.table:  # its admission was missed: where its pages lie is unknown
            tracked.spoiled = True
            return
        for group, more in zip(tracked.table, ids, strict=True):
            group.extend(more)

    # ---- stores -----------------------------------------------------------------------------------------

    def _store(self, tracked: Tracked, computed: int) -> StorePlan | None:
        """Pages that are computed once this step is over and were not offered: of the prompt page by page, of the
        output when a block is full."""
        paging, request = self._paging, tracked.request
        self._flights.computed(tracked)
        if isinstance(tracked.scope, NotYet):
            self._lookups.rescope(tracked)
        if paging is None or isinstance(tracked.scope, Uncacheable) or tracked.spoiled:
            tracked.due = NEVER
            return None
        if tracked.unproven or tracked.usable_scope is None:
            return None
        end = min(computed, request.num_tokens)  # not what is only drafted, or still on its way from the worker
        page, block = paging.page_tokens, paging.block_pages
        pages = end // page
        if end < request.num_prompt_tokens:
            tracked.due = (pages + 1) * page
        else:
            tracked.due = (pages // block + 1) * block * page
            pages = max(pages // block * block, request.num_prompt_tokens // page)
        if tracked.flight is not None and tracked.flight.failed:
            tracked.due = 0  # look again: its blocks are in doubt until it has computed past them
        return self._offer(tracked, paging, pages)

    def _last_stores(self) -> Iterator[StorePlan]:
        """What is left of finished requests, once nothing of it is unproven. Afterwards their blocks may go."""
        limit = self._now() - self._options.load_timeout_s - HOLD_S
        for tracked in self._held.values():
            if tracked.closed or (tracked.unproven and tracked.finished_s > limit):
                continue
            tracked.closed = True
            if self._paging is not None and self._write and not (tracked.spoiled or tracked.unproven):
                plan = self._offer(tracked, self._paging, self._last_page(tracked, self._paging), first=0)
                if plan is not None:
                    yield plan

    def _last_page(self, tracked: Tracked, paging: Paging) -> int:
        """Pages of a finished request, with one that is not full if it holds enough to be loaded again."""
        pages, rest = divmod(tracked.end, paging.page_tokens)
        return pages + 1 if rest >= self._options.min_load_tokens else pages

    def _offer(self, tracked: Tracked, paging: Paging, pages: int, first: int | None = None) -> StorePlan | None:
        """Offer the pages before `pages`, from the first one that was not offered on. A request's first and last
        offers begin at page 0: pages that the daemon has are skipped, and gaps are filled."""
        scope = tracked.usable_scope
        pages = min(pages, paging.pages_within(tracked.table))
        if scope is None or pages <= tracked.offered:
            return None
        if first is None:
            first = tracked.offered if tracked.stored else 0
        tracked.offered, tracked.stored = pages, True
        end = pages * paging.page_tokens
        if 0 < tracked.end < end:  # the last page is not full: it is found by the tokens that it has, and no further
            tokens = tracked.tokens_to(tracked.end) + PADDING * (end - tracked.end)
        else:
            tokens = tracked.tokens_to(end)
        return StorePlan(tracked.name, tokens, first, paging.starts(tracked.table, first, pages), scope)

    # ---- what comes back --------------------------------------------------------------------------------

    def update_connector_output(self, output: Any) -> None:
        """The workers' reports of a step (KVConnectorOutput)."""
        self._guard.run("update_connector_output", lambda: self._reported(output), lambda: None)

    def _reported(self, output: Any) -> None:
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            for load in report.failed:
                self._flights.fail(load, self._everybody())
            for load, workers in report.ended.items():
                self._flights.end(load, workers, self._everybody())
            for name in report.unstored:
                if (tracked := self._requests.get(name)) is not None:
                    tracked.offer_again()
        for name in getattr(output, "failed_recving", None) or ():  # younger than the rest of it
            tracked = self._requests.get(name)
            if tracked is not None and tracked.flight is not None:
                self._flights.fail(tracked.flight.load, self._everybody())
        for name in output.finished_recving or ():
            if (tracked := self._requests.get(name)) is not None:
                tracked.receiving = False
        for name in output.finished_sending or ():
            self._held.pop(name, None)

    def _everybody(self) -> list[Tracked]:
        return [*self._requests.values(), *self._held.values()]

    # ---- the end of a request ---------------------------------------------------------------------------

    def request_finished_all_groups(self, request: EngineRequest, block_ids: BlockTable) -> tuple[bool, None]:
        """Whether its blocks stay until the workers report finished_sending."""
        return self._guard.run(
            "request_finished", lambda: (self._finish(request, block_ids), None), lambda: (self._drop(request), None)
        )

    def request_finished(self, request: EngineRequest, block_ids: list[int]) -> tuple[bool, None]:
        """The same, for one cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def _finish(self, request: EngineRequest, table: BlockTable) -> bool:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return False
        if tracked.preempted:
            tracked.lose_blocks()
        self._lookups.let_go(tracked)
        self._running.discard(tracked.name)
        if tracked.receiving or not any(table):  # vLLM itself keeps what is being received; or there is nothing
            del self._requests[tracked.name]
            return False
        tracked.table = [list(ids) for ids in table]
        tracked.end = min(request.num_computed_tokens, request.num_tokens)
        keep = tracked.stored or self._has_more(tracked)
        del self._requests[tracked.name]
        if keep:
            tracked.finished_s = self._now()
            self._held[tracked.name] = tracked
        return keep

    def _has_more(self, tracked: Tracked) -> bool:
        if self._paging is None or tracked.usable_scope is None or tracked.spoiled or not self._write:
            return False
        return self._last_page(tracked, self._paging) > tracked.offered

    def _drop(self, request: EngineRequest) -> bool:
        """Something broke: vLLM frees the blocks now, so the workers must stop reading them."""
        tracked = self._requests.pop(request.request_id, None)
        self._held.pop(request.request_id, None)
        self._running.discard(request.request_id)
        self._revoked.add(request.request_id)
        if tracked is not None:
            self._lookups.let_go(tracked)
        return False

    def has_pending_block_frees(self) -> bool:
        """Blocks come free without preempting anybody."""
        return bool(self._held)

    # ---- reset ------------------------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Nothing that was stored before is served to this engine from now on (its weights have changed, say).

        Pages that others may still want stay in the daemon; this engine looks under a new salt. Requests that have
        computed on the old state store no more. False if a load of old pages is under way: vLLM can't call it back.
        """
        return self._guard.run("reset_cache", self._reset, lambda: False)

    def _reset(self) -> bool:
        self._lookups.scopes.reset()
        self._tally.count(stats.RESETS)
        stale = Uncacheable("the cache was reset while it ran")
        for tracked in self._held.values():
            tracked.scope = stale
        for tracked in self._requests.values():
            if tracked.preempted:
                self._restart(tracked)
            if tracked.table:
                tracked.scope = stale
                continue
            self._lookups.let_go(tracked)
            self._lookups.rescope(tracked)
            self._lookups.ask_ahead(tracked)
        return not any(tracked.receiving for tracked in self._requests.values())


def _tokens_from_host(flight: Flight) -> int:
    return max(0, min(flight.tokens, flight.memory_tokens - flight.start))

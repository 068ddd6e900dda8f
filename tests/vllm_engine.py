"""A small model of vLLM: scheduler, block pool with prefix cache, workers, and a daemon that remembers contents.

It drives the real SchedulerSide through legal sequences of hooks, as vLLM 0.32 calls them, and checks the laws at
every step. Each token's KV is a number that says which tokens and which weights it was computed from, so that
nonsense that is stored, or served, is seen at once. A seed is a run.
"""

from tests import vllm_fakes  # noqa: F401 - stand-ins for vLLM's classes, before our modules import them

# isort: split
from random import Random
from typing import Any

import numpy as np

from hicache.spec.group import GroupSpec
from hicache.spec.layout import L1Layout
from hicache.spec.model import ModelSpec, ShardSpec
from hicache_client.connectors.vllm.metadata import WorkerReport, WorkerShard
from hicache_client.connectors.vllm.options import VllmOptions
from hicache_client.connectors.vllm.scheduler import Manner, SchedulerSide
from hicache_client.connectors.vllm.stats import Tally
from tests import vllm_laws
from tests.vllm_fakes import FakeBlocks, FakeNew, FakeReport, FakeStep
from tests.vllm_model import (
    FINISHED,
    JUNK,
    LONG_S,
    LOOKUP_TIMEOUT_S,
    PREEMPTED,
    PREFETCH_S,
    REMOTE,
    RUNNING,
    STEP_S,
    WAITING,
    Blocks,
    Daemon,
    P,
    Req,
    Step,
    Worker,
)

DRAIN_STEPS = 600


class World:
    """vLLM's engine core around one SchedulerSide."""

    def __init__(self, seed: int, *, storm: bool = False) -> None:
        """`storm`: one group, steps that do not overlap, and loads that often fail."""
        self.rng = rng = Random(seed)
        self.clock = 0.0
        self.ks = rng.choice([(1,), (2,), (2,), (4,), (2, 1), (2, 2)] if not storm else [(1,), (2,)])
        self.block = P * max(self.ks)
        self.workers = rng.choice([1, 1, 2])
        self.overlap = rng.random() < 0.3 and not storm
        self.drafts = 0 if self.overlap else rng.choice([0, 0, 2])
        self.caching = rng.random() < 0.7 or storm
        self.failures = rng.choice([0.0, 0.0, 0.2, 0.6]) if not storm else 0.5
        self.eagerness = rng.choice([0.2, 0.7, 1.0])
        self.budget = rng.choice([8, 16, 64])
        self.daemon = Daemon(self)
        self.ranks = [Worker(self, rank) for rank in range(self.workers)]
        self.pool = Blocks(self, rng.choice([10, 16, 40]))
        self.weights = {"": 0}  # salt's epoch → the weights of that time
        self.epoch = 0
        self.requests: dict[str, Req] = {}
        self.running: list[Req] = []
        self.waiting: list[Req] = []
        self.received: set[str] = set()
        self.failed_recv: set[str] = set()
        self.preempted_ids: set[str] = set()
        self.in_flight: list[Step] = []
        self.sched_seq = self.done_seq = self.steps = self.names = 0
        self.load_failed = False
        self.outputs = self.hits = 0
        options = VllmOptions(
            min_load_tokens=rng.choice([1, P, 2 * P]),
            lookup_timeout_s=LOOKUP_TIMEOUT_S,
            lookup_wait_ms=0,
            prefetch=rng.choice(["timeout", "best_effort", "timeout"]),
            prefetch_base_s=PREFETCH_S,
            prefetch_per_1024_tokens_s=0.0,
            load_timeout_s=1.0,
        )
        manner = Manner(sync_loads=not self.overlap)
        tally = Tally()
        self.tally = tally._stats
        self.side = SchedulerSide(options, self.daemon, manner, tally, now=lambda: self.clock)
        self.side.set_workers({(0, rank): self._shard(rank) for rank in range(self.workers)})

    def _shard(self, rank: int) -> WorkerShard:
        groups = tuple(GroupSpec(f"g{i}", "full", (i,), 1, 8, "float32", P) for i in range(len(self.ks)))
        model = ModelSpec("model", "r", groups, P)
        return WorkerShard(model, L1Layout(1, ()), ShardSpec(rank, self.workers), self.ks)

    # ---- contents ---------------------------------------------------------------------------------------

    def kv_of(self, tokens: bytes | list[int], salt: str = "") -> list[int]:
        """What the KV of each token must be under the weights of the salt's epoch."""
        ids = np.frombuffer(tokens, "<i4").tolist() if isinstance(tokens, bytes) else tokens
        at, out = self.weights.get(salt.rpartition("\0")[0], 0), []
        for token in ids:
            at = hash((at, token)) & 0xFFFFFFFFFFFF
            out.append(at)
        return out

    # ---- requests ---------------------------------------------------------------------------------------

    def add(self) -> None:
        rng = self.rng
        length = rng.choice([3, 8, 9, 16, 17, 24, 33])
        stem = rng.choice([1, 1, 2])
        cut = rng.choice([0, 0, 4, 8, 11, length])
        script = [stem] * max(0, length - cut) + [rng.randint(3, 5) for _ in range(min(cut, length))]
        script += [rng.choice([7, 8])] * rng.choice([1, 2, 9])
        self.names += 1
        request = Req(f"r{self.names}", script, length, cache_salt=rng.choice([None, None, None, "s"]))
        request.skip_reading_prefix_cache = rng.random() < 0.05
        request.kv = self.kv_of(script, self._epoch_salt())
        if -(-len(script) // self.block) * sum(max(self.ks) // k for k in self.ks) > self.pool.count:
            return  # would never fit
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.side.on_new_request(request)

    def _epoch_salt(self) -> str:
        return self.side._lookups.scopes._epoch

    def finish(self, request: Req, *, remote: bool = False) -> None:
        """_free_request."""
        kept = remote and request.request_id not in self.received
        self.received.discard(request.request_id)
        request.status = FINISHED
        self.running = [each for each in self.running if each is not request]
        self.waiting = [each for each in self.waiting if each is not request]
        table = tuple(
            ids[: -(-request.num_computed_tokens // (P * k))]
            for ids, k in zip(request.table or [[] for _ in self.ks], self.ks, strict=True)
        )
        hold, _ = self.side.request_finished_all_groups(request, table)
        assert not (hold and kept), "vLLM would free these blocks twice"
        if not hold and not kept:
            self.pool.release(request)
            del self.requests[request.request_id]

    def abort(self) -> None:
        alive = [each for each in self.requests.values() if each.status != FINISHED]
        if alive:
            request = self.rng.choice(alive)
            self.finish(request, remote=request.status == REMOTE)

    # ---- a step -----------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        output, work, budget = FakeStep(), [], self.budget
        for request in list(self.running):
            if request not in self.running or not budget:
                continue
            if request.placeholders and request.num_computed_tokens + 2 - request.placeholders >= len(request.script):
                continue
            drafts = (
                self.drafts if request.num_computed_tokens == request.known - 1 >= request.num_prompt_tokens else 0
            )
            drafts = min(drafts, len(request.script) - request.known - 1) if drafts else 0
            want = min(request.known + request.placeholders + drafts - request.num_computed_tokens, budget)
            want = min(want, self.rng.choice([want, want, max(1, want // 2)])) if not drafts else want
            if want <= 0 or (drafts and want <= drafts):
                continue
            fresh = self._make_room(request, request.num_computed_tokens + want)
            if fresh is None:
                if request in self.running:
                    break
                continue
            cached = output.scheduled_cached_reqs
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(fresh if any(fresh) else None)
            budget -= want
            self._scheduled(output, work, request, want, drafts)
        output.preempted_req_ids = self.preempted_ids
        self._drop_preempted(output, work)
        for request, first, tokens, drafts in work:
            self.pool.cache(request, first + tokens - drafts)
        if not self.preempted_ids:
            self._admit(output, work, budget)
        plan = self.side.build_connector_meta(output)
        vllm_laws.check_plan(self, plan, output)
        self.preempted_ids = set()
        if work:
            self.sched_seq += 1
        for request, _, tokens, _ in work:
            request.num_computed_tokens += tokens
            request.in_flight += tokens
            request.last_seq = self.sched_seq
            if self.overlap and request.num_computed_tokens >= request.known + request.placeholders:
                request.placeholders += 1
        return Step(output, plan, work, self.sched_seq)

    def _scheduled(self, output: FakeStep, work: list[Any], request: Req, tokens: int, drafts: int) -> None:
        output.num_scheduled_tokens[request.request_id] = tokens
        work.append((request, request.num_computed_tokens, tokens, drafts))

    def _make_room(self, request: Req, tokens: int) -> Any:
        while True:
            fresh = self.pool.allocate(request, tokens)
            if fresh is not None or self.side.has_pending_block_frees():
                return fresh
            victim = self.running[-1] if self.rng.random() < 0.7 else self.rng.choice(self.running)
            if self.overlap and victim.last_seq > self.done_seq:
                return None
            self.preempt(victim)
            if victim is request:
                return None

    def preempt(self, request: Req) -> None:
        self.running.remove(request)
        self.pool.release(request)
        request.status, request.num_computed_tokens = PREEMPTED, 0
        request.stale, request.placeholders = request.in_flight, 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)
        self.preempted_ids.add(request.request_id)

    def _drop_preempted(self, output: FakeStep, work: list[Any]) -> None:
        """Scheduled in this very step and then preempted for somebody else."""
        gone = [each for each in work if each[0].status == PREEMPTED]
        for each in gone:
            work.remove(each)
            name = each[0].request_id
            del output.num_scheduled_tokens[name]
            at = output.scheduled_cached_reqs.req_ids.index(name)
            del output.scheduled_cached_reqs.req_ids[at], output.scheduled_cached_reqs.new_block_ids[at]

    def _admit(self, output: FakeStep, work: list[Any], budget: int) -> None:
        for request in sorted(self.waiting, key=lambda each: not each.table):  # who holds blocks comes first
            if budget <= 0 or len(self.running) >= 6:
                break
            if request.status == REMOTE and not self._promote(request):
                continue
            if request.stale:
                continue
            resumed, sent_async, external, local = request.num_preemptions > 0, False, 0, request.num_computed_tokens
            hit: tuple[list[int], ...] | None = None
            if not request.num_computed_tokens:
                local, hit = self.pool.local_hit(request)
                found, sent_async = self.side.get_num_new_matched_tokens(request, local)
                if request.skip_reading_prefix_cache:
                    found, sent_async = 0, False
                vllm_laws.check_answer(self, request, local, found, sent_async)
                if found is None:
                    continue
                external = found
            computed = local + external
            want = 0 if sent_async else min(request.known - computed, budget)
            if sent_async and not self._room_for_async(request):
                break
            if self.pool.allocate(request, computed + want, hit) is None:
                break
            self.side.update_state_after_alloc(request, FakeBlocks(request.table), external)
            request.num_computed_tokens = computed
            if sent_async:
                request.status = REMOTE
                continue
            self.hits += external
            request.status = RUNNING
            self.waiting.remove(request)
            self.running.append(request)
            budget -= want
            if resumed and self.rng.random() < 0.5:  # the older model runner
                cached = output.scheduled_cached_reqs
                cached.req_ids.append(request.request_id)
                cached.new_block_ids.append(tuple(list(ids) for ids in request.table))
                cached.resumed_req_ids.add(request.request_id)
            else:
                output.scheduled_new_reqs.append(FakeNew(request.request_id, tuple(map(list, request.table))))
            self._scheduled(output, work, request, want, 0)
            self.pool.cache(request, computed + want)

    def _room_for_async(self, request: Req) -> bool:
        """vLLM reserves what those need that compute or load their prompts: else they could block each other."""
        started = [each for each in self.requests.values() if each.table and each.num_computed_tokens < each.known]
        need = sum(-(-each.known // (P * k)) for each in [*started, request] for k in self.ks)
        return need - sum(len(ids) for each in started for ids in each.table) <= len(self.pool.free)

    def _promote(self, request: Req) -> bool:
        """_update_waiting_for_remote_kv"""
        name = request.request_id
        if name not in self.received:
            return False
        self.received.remove(name)
        if name in self.failed_recv:
            self.failed_recv.remove(name)
            if not request.num_computed_tokens:
                self.pool.release(request)
        if request.num_computed_tokens:
            self.pool.cache(request, request.num_computed_tokens)
        request.status = PREEMPTED if request.num_preemptions else WAITING
        return True

    def execute(self, step: Step) -> FakeReport:
        """All workers, in lockstep: a rank's nonsense is everybody's."""
        reports = [(WorkerReport(), FakeReport()) for _ in self.ranks]
        for rank, (report, done) in zip(self.ranks, reports, strict=True):
            rank.begin(step.plan, report, done)
        for request, first, tokens, drafts in step.work:
            if request.table:
                self._forward(request, first, tokens, drafts)
        for rank, (report, done) in zip(self.ranks, reports, strict=True):
            rank.end(step.plan, report, done)
        return self._aggregate(reports)

    def _forward(self, request: Req, first: int, tokens: int, drafts: int) -> None:
        right = all(
            rank.read(request, group, i) == request.kv[i]
            for rank in self.ranks
            for group in range(len(self.ks))
            for i in range(first)
        )
        for rank in self.ranks:
            for group, k in enumerate(self.ks):
                for i in range(first, first + tokens):
                    value = request.kv[i] if right and i < first + tokens - drafts + self._accepted(request) else JUNK
                    rank.cell(group, request.table[group][i // (P * k)])[i % (P * k)] = value
        if not right:  # vLLM's own prefix cache may hold what a failed load left; without failures nothing may
            assert self.load_failed, f"{request.request_id} was served nonsense"

    def _accepted(self, request: Req) -> int:
        return hash((int(request.request_id[1:]), request.known)) % (self.drafts + 1)

    def _aggregate(self, reports: list[tuple[WorkerReport, FakeReport]]) -> FakeReport:
        total = FakeReport()
        meta = reports[0][0]
        for report, _ in reports[1:]:
            meta = meta.aggregate(report)
        total.kv_connector_worker_meta = meta
        for _, done in reports:
            total.invalid_block_ids |= done.invalid_block_ids
            self._failed_pending |= done.failed_recving
        for kind in ("finished_sending", "finished_recving"):
            counts = self._counts[kind]
            for _, done in reports:
                for name in sorted(getattr(done, kind)):
                    counts[name] = counts.get(name, 0) + 1
                    if counts[name] == self.workers:
                        del counts[name]
                        getattr(total, kind).add(name)
        total.failed_recving = self._failed_pending & total.finished_recving
        self._failed_pending -= total.failed_recving
        return total

    @property
    def _counts(self) -> dict[str, dict[str, int]]:
        return self.__dict__.setdefault("counts", {"finished_sending": {}, "finished_recving": {}})

    def update(self, step: Step, report: FakeReport) -> None:
        """update_from_output."""
        if step.work:
            self.done_seq += 1
            self.pool.drain()
        failed = self._handle_failures(step, report)
        for request, _first, tokens, drafts in step.work:
            stale = request.stale > 0
            request.in_flight -= tokens
            request.stale = max(0, request.stale - tokens)
            if request.request_id in failed or request.status == FINISHED:
                continue
            if drafts and not stale:
                request.num_computed_tokens -= drafts - min(self._accepted(request), drafts)
            self._sample(request, _first + tokens - drafts, min(self._accepted(request), drafts), stale)
        self.side.update_connector_output(report)
        for name in sorted(report.finished_recving):
            request = self.requests[name]
            if request.status == REMOTE:
                self.received.add(name)
            else:
                assert request.status == FINISHED
                self.pool.release(self.requests.pop(name))
        for name in sorted(report.finished_sending):
            assert self.requests[name].status == FINISHED
            self.pool.release(self.requests.pop(name))

    def _sample(self, request: Req, computed: int, accepted: int, stale: bool) -> None:
        if self.overlap:
            done = computed >= request.num_prompt_tokens and computed >= request.known
        else:
            done = computed == request.known
        if not done:
            return
        request.known = min(request.known + 1 + accepted, len(request.script))
        if self.overlap and not stale:
            request.placeholders -= 1
        self.outputs += 1
        if request.known == len(request.script):
            self.finish(request)

    def _handle_failures(self, step: Step, report: FakeReport) -> set[str]:
        affected: set[str] = set()
        for name in sorted(report.failed_recving):
            request = self.requests.get(name)
            if request is not None and request.status == REMOTE:
                request.num_computed_tokens = 0
                self.failed_recv.add(name)
        if len(self.ks) > 1 or not report.invalid_block_ids:
            return affected
        remote = [each for each in self.waiting if each.status == REMOTE]
        for requests in (remote, self.running):
            affected |= self._truncate(requests, report.invalid_block_ids, step.output.num_scheduled_tokens)
        return affected

    def _truncate(self, requests: list[Req], invalid: set[int], scheduled: dict[str, int]) -> set[str]:
        """_update_requests_with_invalid_blocks"""
        affected: set[str] = set()
        marked: set[int] = set()
        for request in requests:
            computed = request.num_computed_tokens - scheduled.get(request.request_id, 0)
            found = truncated = False
            for i, block in zip(range(-(-computed // self.block)), request.table[0], strict=False):
                if block not in invalid:
                    continue
                found = True
                if block in marked:
                    continue
                marked.add(block)
                if not truncated:
                    truncated, request.num_computed_tokens = True, i * self.block
            if found and not truncated:
                request.num_computed_tokens = computed
            if found and request.status == REMOTE:
                self.failed_recv.add(request.request_id)
            elif found:
                affected.add(request.request_id)
        return affected

    # ---- a run ------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """New weights: reset_prefix_cache(reset_running_requests=True, reset_connector=True)."""
        if any(each.status == REMOTE or each.in_flight for each in self.requests.values()):
            return
        if any(each.status == FINISHED for each in self.requests.values()):
            return  # vLLM refuses while blocks are held
        while self.running:
            self.preempt(self.running[-1])
        self.pool.forget()
        self.epoch += 1
        assert self.side.reset_cache()
        self.weights[self._epoch_salt().rstrip("\0")] = self.epoch
        for request in self.requests.values():
            request.kv = self.kv_of(request.script, self._epoch_salt())
            request.none_since = None

    def step(self) -> None:
        self.steps += 1
        self.clock += self.rng.choice(STEP_S)
        self.daemon.tick()
        step = self.schedule()
        self.in_flight.append(step)
        if not self.overlap or len(self.in_flight) > 1 or not step.work:
            first = self.in_flight.pop(0)
            report = self.execute(first)
            self.update(first, report)
        vllm_laws.check_leases(self)

    def event(self) -> None:
        roll = self.rng.random()
        if roll < 0.18:
            for _ in range(self.rng.choice([1, 1, 3])):
                self.add()
        elif roll < 0.23:
            self.abort()
        elif roll < 0.36:
            self.pool.evict()
        elif roll < 0.38:
            self.clock += LONG_S
        elif roll < 0.40:
            self.daemon.evict()
        elif roll < 0.41:
            self.daemon.restart()
        elif roll < 0.43:
            self.reset()
        else:
            self.step()

    def run(self, events: int) -> None:
        self._failed_pending: set[str] = set()
        for _ in range(events):
            self.event()
        for _ in range(DRAIN_STEPS):
            if not self.requests and not any(step.work for step in self.in_flight):
                break
            self.step()
        assert not self.requests, f"never done: {[(each.request_id, each.status) for each in self.requests.values()]}"
        for _ in range(6):
            self.step()
        vllm_laws.check_end(self)

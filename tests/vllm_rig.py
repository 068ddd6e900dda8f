"""A SchedulerSide whose hooks a test calls one at a time, and a scout that answers when the test says so."""

from tests import vllm_fakes  # noqa: F401 - stand-ins for vLLM's classes, before our modules import them

# isort: split
from collections.abc import Sequence
from typing import Any

from hicache.protocol.messages import Scope
from hicache.spec.group import GroupSpec
from hicache.spec.layout import L1Layout
from hicache.spec.model import ModelSpec, ShardSpec
from hicache_client.connectors.vllm import stats
from hicache_client.connectors.vllm.metadata import StepPlan, WorkerReport, WorkerShard
from hicache_client.connectors.vllm.options import VllmOptions
from hicache_client.connectors.vllm.scheduler import Manner, SchedulerSide
from hicache_client.connectors.vllm.scout import Ask
from hicache_client.leases import LeaseRef
from tests.vllm_fakes import FakeBlocks, FakeNew, FakeReport, FakeRequest, FakeStep

P = 4


def shard(rank: int = 0, ranks: int = 1, ks: tuple[int, ...] = (2,), **changes: Any) -> WorkerShard:
    groups = tuple(GroupSpec(f"g{i}", "full", (i,), 1, 8, "float32", P) for i in range(len(ks)))
    fields = {"model": ModelSpec("m", "r", groups, P), "layout": L1Layout(1, ()), "starts_per_block": ks} | changes
    return WorkerShard(shard=ShardSpec(rank, ranks), **fields)


class Scout:
    """Answers when the test says so."""

    def __init__(self, clock: list[float], ranks: int) -> None:
        self.clock, self.ranks = clock, ranks
        self.connected = True
        self.started: Sequence[WorkerShard] = ()
        self.asks: list[Ask] = []
        self.posted: list[Ask] = []
        self.alive = True
        self.closed = False

    def start(self, shards: Sequence[WorkerShard]) -> None:
        self.started = shards

    def ask(self, request: str, tokens: bytes, limit_tokens: int, scope: Scope) -> Ask:
        ask = Ask(self, request, tokens, limit_tokens, scope)  # type: ignore[arg-type]
        ask.asked_s = self.clock[0]
        self.asks.append(ask)
        return ask

    def close(self) -> None:
        self.closed = True

    def _post(self, ask: Ask) -> None:
        self.posted.append(ask)

    def same_sessions(self, sessions: tuple[int, ...]) -> bool:
        return self.alive

    def answer(self, tokens: int, *, whole: int | None = None, l3: int = 0, ask: Ask | None = None) -> Ask:
        ask = ask or self.asks[-1]
        if tokens:
            ask._refs = tuple(LeaseRef(1, 100 + len(self.asks)) for _ in range(self.ranks))
        ask.resumable_tokens, ask.whole_tokens = tokens, tokens // P * P if whole is None else whole
        ask.memory_tokens = ask.l2_tokens = tokens - l3
        ask.l3_tokens, ask.prefetching = l3, l3 > 0
        ask.done = True
        ask._answered.set()
        return ask


class Rig:
    """A SchedulerSide and the hooks as vLLM would call them, one at a time."""

    def __init__(self, ks: tuple[int, ...] = (2,), ranks: int = 1, **more: Any) -> None:
        manner = {name: more.pop(name) for name in ("read", "write", "sync_loads") if name in more}
        self.clock = [100.0]
        self.scout = Scout(self.clock, ranks)
        self.tally = stats.Tally()
        self.ks, self.ranks = ks, ranks
        options = VllmOptions(**({"min_load_tokens": 1, "lookup_wait_ms": 0} | more))
        self.side = SchedulerSide(options, self.scout, Manner(**manner), self.tally, now=lambda: self.clock[0])
        self.side.set_workers({(0, rank): shard(rank, ranks, ks) for rank in range(ranks)})
        self.blocks = iter(range(1, 10_000))

    def new(self, name: str = "r", prompt: int = 20, output: int = 20, **changes: Any) -> FakeRequest:
        request = FakeRequest(name, list(range(1, prompt + output + 1)), prompt, **changes)
        self.side.on_new_request(request)
        return request

    def table(self, tokens: int, shared: tuple[list[int], ...] = ()) -> tuple[list[int], ...]:
        shared = shared or tuple([] for _ in self.ks)
        return tuple(
            [*old, *(next(self.blocks) for _ in range(-(-tokens // (P * k)) - len(old)))]
            for k, old in zip(self.ks, shared, strict=True)
        )

    def match(self, request: FakeRequest, computed: int = 0) -> tuple[int | None, bool]:
        return self.side.get_num_new_matched_tokens(request, computed)

    def alloc(self, request: FakeRequest, table: tuple[list[int], ...], external: int) -> None:
        self.side.update_state_after_alloc(request, FakeBlocks(table), external)

    def plan(self, **scheduled: Any) -> StepPlan:
        """One step. `name=(request, tokens, table)` for an admission, `name=(request, tokens)` for a running one."""
        step = FakeStep()
        for name, (_, tokens, *table) in scheduled.items():
            step.num_scheduled_tokens[name] = tokens
            if table:
                step.scheduled_new_reqs.append(FakeNew(name, table[0]))
        plan = self.side.build_connector_meta(step)
        for request, tokens, *_ in scheduled.values():
            request.num_computed_tokens += tokens
        return plan

    def admit(self, request: FakeRequest, tokens: int | None = None) -> tuple[StepPlan, tuple[list[int], ...]]:
        """Admitted without a load and computed at once."""
        tokens = request.num_tokens if tokens is None else tokens
        table = self.table(request.num_tokens + 8)
        found, _ = self.match(request)
        assert found == 0
        self.alloc(request, table, 0)
        return self.plan(**{request.request_id: (request, tokens, table)}), table

    def load(self, request: FakeRequest, known: int) -> tuple[StepPlan, tuple[list[int], ...]]:
        """Admitted with a load inside the step."""
        self.scout.answer(known)
        found, later = self.match(request)
        assert found
        assert not later
        table = self.table(request.num_tokens)
        self.alloc(request, table, found)
        request.num_computed_tokens = found
        return self.plan(**{request.request_id: (request, request.num_tokens - found, table)}), table

    def report(self, ended: Any = (), failed: Any = (), unstored: Any = (), **more: Any) -> None:
        meta = WorkerReport(dict.fromkeys(ended, self.ranks), set(failed), set(unstored))
        self.side.update_connector_output(FakeReport(kv_connector_worker_meta=meta, **more))

    def finish(self, request: FakeRequest, table: tuple[list[int], ...]) -> bool:
        hold, params = self.side.request_finished_all_groups(request, table)
        assert params is None
        return hold

    def counted(self, name: str) -> int:
        return self.tally._stats.counts.get(name, 0)

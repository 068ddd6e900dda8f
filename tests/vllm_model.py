"""Around vllm_engine.py's model of vLLM: a daemon that remembers contents, workers with memory, the block pool."""

from tests import vllm_fakes  # noqa: F401 - stand-ins for vLLM's classes, before our modules import them

# isort: split
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_client.connectors.vllm.metadata import LoadPlan, StepPlan, StorePlan, WorkerReport
from hicache_client.connectors.vllm.scout import Ask
from hicache_client.leases import LeaseRef
from tests.vllm_fakes import FakeReport, FakeRequest, FakeStep

if TYPE_CHECKING:
    from tests.vllm_engine import World

P = 4
JUNK = -1
STEP_S = (0.0, 0.05, 0.2, 0.4)
LONG_S = 3.0
LOOKUP_TIMEOUT_S, PREFETCH_S = 0.5, 0.6

WAITING, REMOTE, RUNNING, PREEMPTED, FINISHED = "WAITING", "REMOTE", "RUNNING", "PREEMPTED", "FINISHED"


@dataclass(eq=False)
class Req(FakeRequest):
    """A request and what vLLM's scheduler keeps of it."""

    status: str = WAITING
    table: tuple[list[int], ...] = ()
    placeholders: int = 0
    in_flight: int = 0
    stale: int = 0
    last_seq: int = 0
    none_since: float | None = None
    none_step: int = -1
    none_last: float = 0.0
    none_gap_s: float = 0.0
    kv: list[int] = field(default_factory=list)  # what the KV of each position must be


@dataclass
class Step:
    """One scheduled step on its way through the workers."""

    output: FakeStep
    plan: StepPlan
    work: list[tuple[Req, int, int, int]]  # request, first position, tokens, of which drafts
    seq: int


class Daemon:
    """Pages with their contents, per worker; leases; the scout's answers."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.boot = 1
        self.pages: list[dict[tuple[str, bytes], tuple[tuple[int, ...], ...]]] = [{} for _ in range(world.workers)]
        self.held: dict[int, Ask] = {}
        self.leased: dict[int, list[tuple[str, bytes]]] = {}  # the pages of each lease
        self.waiting: list[Ask] = []
        self.fetching: list[Ask] = []
        self.leases = 0
        self.connected = True

    # what SchedulerSide needs of a scout
    def start(self, shards: Any) -> None:
        assert len(shards) == self.world.workers

    def ask(self, request: str, tokens: bytes, limit_tokens: int, scope: Any) -> Ask:
        ask = Ask(self, request, tokens, limit_tokens, scope)  # type: ignore[arg-type]
        ask.asked_s = self.world.clock
        assert len(tokens) == 4 * limit_tokens
        self.waiting.append(ask)
        if self.world.rng.random() < 0.3:
            self.answer(ask)
        return ask

    def close(self) -> None:
        pass

    # what Ask needs of one
    def _post(self, ask: Ask) -> None:
        self.held.pop(id(ask), None)

    def same_sessions(self, sessions: tuple[int, ...]) -> bool:
        return sessions == (self.boot,)

    def tick(self) -> None:
        rng = self.world.rng
        for ask in list(self.waiting):
            if rng.random() < self.world.eagerness:
                self.answer(ask)
        for ask in list(self.fetching):
            ask.memory_tokens = min(ask.resumable_tokens, ask.memory_tokens + rng.randint(0, 3 * P))
            if ask.memory_tokens >= ask.resumable_tokens or rng.random() < 0.1:
                ask.prefetched = ask.memory_tokens >= ask.resumable_tokens
                ask.prefetching = False
                self.fetching.remove(ask)

    def keys(self, salt: str, tokens: bytes) -> list[tuple[str, bytes]]:
        return [(salt, tokens[: 4 * end]) for end in range(P, len(tokens) // 4 + 1, P)]

    def answer(self, ask: Ask) -> None:
        self.waiting.remove(ask)
        keys = []
        for key in self.keys(ask.scope.salt, ask.tokens):
            if not all(key in pages for pages in self.pages):
                break
            keys.append(key)
        whole = len(keys) * P
        partial, tokens = self.parting(ask, whole)
        keys += [partial] if tokens else []
        if keys and not ask.released:
            self.leases += 1
            ask._refs = tuple(LeaseRef(self.boot, self.leases) for _ in range(self.world.workers))
            ask._sessions = (self.boot,)
            ask.whole_tokens = whole
            ask.resumable_tokens = ask.memory_tokens = ask.l2_tokens = whole + tokens
            if self.world.rng.random() < 0.3:
                ask.memory_tokens = ask.l2_tokens = self.world.rng.randint(0, whole + tokens)
            ask.l3_tokens = ask.resumable_tokens - ask.l2_tokens
            ask.prefetching = ask.l3_tokens > 0
            if ask.prefetching:
                self.fetching.append(ask)
            self.held[id(ask)] = ask
            self.leased[id(ask)] = keys
        ask.done = True
        ask._answered.set()

    def parting(self, ask: Ask, whole: int) -> tuple[tuple[str, bytes], int]:
        """A page that begins as the prompt goes on after `whole` tokens, and for how many tokens it does."""
        rest = ask.tokens[4 * whole :]
        best: tuple[tuple[str, bytes], int] = (("", b""), 0)
        for key in self.pages[0]:
            if (
                key[0] != ask.scope.salt
                or len(key[1]) != 4 * (whole + P)
                or key[1][: 4 * whole] != ask.tokens[: 4 * whole]
            ):
                continue
            tail = key[1][4 * whole :]
            same = next((i for i in range(P) if tail[4 * i : 4 * i + 4] != rest[4 * i : 4 * i + 4]), P)
            if same > best[1] and all(key in pages for pages in self.pages):
                best = (key, same)
        return best

    def load(self, worker: int, plan: LoadPlan) -> list[tuple[tuple[int, ...], ...]]:
        """The pages' contents, or none. The lease must be there: it is what was promised."""
        if not plan.leases or plan.leases[worker].boot_id != self.boot:
            return []
        [ask] = [ask for ask in self.held.values() if ask._refs == plan.leases] or [None]
        assert ask is not None, "a load on a lease that was given back"
        keys = self.leased[id(ask)][plan.first_page :][: plan.starts[0].size]
        assert len(keys) == plan.starts[0].size, "a load beyond what was leased"
        assert not plan.sync or 4 * ask.whole_tokens >= len(keys[-1][1]), (
            "a torn page in the step that computes on it"
        )
        return [self.pages[worker][key] for key in keys]

    def evict(self) -> None:
        kept = {key for ask in self.held for key in self.leased[ask]}
        for pages in self.pages:
            for key in [key for key in pages if key not in kept and self.world.rng.random() < 0.3]:
                del pages[key]

    def restart(self) -> None:
        """Killed and back: leases and loads are gone; what L3 had stays, or nothing does."""
        self.boot += 1
        self.held.clear()
        self.fetching.clear()
        for ask in list(self.waiting):
            self.waiting.remove(ask)
            ask.done = True
        if self.world.rng.random() < 0.5:
            for pages in self.pages:
                pages.clear()


class Worker:
    """One rank: its KV memory, loads and stores under way."""

    def __init__(self, world: "World", rank: int) -> None:
        self.world, self.rank = world, rank
        self.memory: dict[int, list[int]] = {}  # block → contents by offset
        self.loads: list[list[Any]] = []  # [plan, steps left]
        self.stores: list[list[Any]] = []  # [plan, steps left]
        self.late: list[int] = []  # loads that are over, which is said a step later
        self.held: set[str] = set()
        self.reported: set[str] = set()

    def cell(self, group: int, block: int) -> list[int]:
        return self.memory.setdefault(block, [JUNK] * self.world.block)

    def read(self, request: Req, group: int, position: int) -> int:
        size = P * self.world.ks[group]
        return self.cell(group, request.table[group][position // size])[position % size]

    def page(self, group: int, start: int) -> slice:
        return slice(start % self.world.ks[group] * P, start % self.world.ks[group] * P + P)

    def begin(self, plan: StepPlan, report: WorkerReport, done: FakeReport) -> None:
        """handle_preemptions and start_load_kv."""
        report.ended.update(dict.fromkeys(self.late, 1))
        self.late.clear()
        self.stores = [store for store in self.stores if store[0].request not in plan.preempted]
        for load in plan.loads:
            if load.sync:
                self.finish(load, report, done)
            else:
                self.loads.append([load, self.world.rng.randint(0, 4)])

    def finish(self, load: LoadPlan, report: WorkerReport, done: FakeReport) -> None:
        pages = self.world.daemon.load(self.rank, load)
        good = bool(pages) and self.world.rng.random() > self.world.failures
        for group, column in enumerate(load.starts):
            k = self.world.ks[group]
            for i, start in enumerate(column.tolist()):
                contents = pages[i][group] if good else (JUNK,) * P
                self.cell(group, start // k)[self.page(group, start)] = contents
        if self.world.rng.random() < 0.2:
            self.late.append(load.load)
        else:
            report.ended[load.load] = 1
        if not good:
            self.world.load_failed = True
            report.failed.add(load.load)
            done.invalid_block_ids.update(block for ids in load.blocks for block in ids)
            if len(self.world.ks) > 1:
                done.failed_recving.add(load.request)
        if not load.sync:
            done.finished_recving.add(load.request)

    def end(self, plan: StepPlan, report: WorkerReport, done: FakeReport) -> None:
        """wait_for_save and get_finished."""
        for entry in self.loads:
            entry[1] -= 1
            if entry[1] < 0:
                self.finish(entry[0], report, done)
        self.loads = [entry for entry in self.loads if entry[1] >= 0]
        for store in plan.stores:
            if self.world.rng.random() < 0.1:
                report.unstored.add(store.request)  # no credit, say
            else:
                self.stores.append([store, self.world.rng.randint(0, 3)])
        for entry in self.stores:
            entry[1] -= 1
            if entry[1] < 0:
                self.publish(entry[0])
        self.stores = [entry for entry in self.stores if entry[1] >= 0]
        self.held |= plan.held
        for name in sorted(self.held - self.reported):
            if not any(entry[0].request == name for entry in self.stores):
                done.finished_sending.add(name)
                self.reported.add(name)

    def publish(self, store: StorePlan) -> None:
        """The copy ends here: what the blocks hold now is what the cache holds."""
        world = self.world
        keys = world.daemon.keys(store.scope.salt, store.tokens)
        if any(key not in world.daemon.pages[self.rank] for key in keys[: store.first_page]):
            return  # refused: the pages before are unknown
        for i, key in enumerate(keys[store.first_page :]):
            if key in world.daemon.pages[self.rank]:
                continue
            contents = tuple(
                tuple(self.cell(group, int(column[i]) // world.ks[group])[self.page(group, int(column[i]))])
                for group, column in enumerate(store.starts)
            )
            end = (store.first_page + i + 1) * P
            right = tuple(world.kv_of(store.tokens, salt=store.scope.salt)[end - P : end])
            real = int(np.count_nonzero(np.frombuffer(store.tokens, "<i4") >= 0)) - (end - P)  # the rest is padding
            wrong = any(each[:real] != right[:real] for each in contents)
            assert not wrong, f"poison: {store.request} page {store.first_page + i}"
            world.daemon.pages[self.rank][key] = contents


class Blocks:
    """vLLM's block pool and its prefix cache, one pool for all cache groups."""

    def __init__(self, world: "World", count: int) -> None:
        self.world = world
        self.count = count
        self.free: OrderedDict[int, None] = OrderedDict((b, None) for b in range(1, count + 1))
        self.refs: dict[int, int] = {}
        self.cached: dict[tuple[int, int], int] = {}  # (group, KV of the block's last token) → block
        self.hash_of: dict[int, tuple[int, int]] = {}
        self.deferred: list[tuple[int, list[int]]] = []

    def forget(self) -> None:
        """reset_prefix_cache"""
        self.cached.clear()
        self.hash_of.clear()

    def evict(self) -> None:
        """Somebody else's traffic has used the free blocks: nothing of them is found any more."""
        for block in self.free:
            key = self.hash_of.pop(block, None)
            if key is not None and self.cached.get(key) == block:
                del self.cached[key]

    def drain(self) -> None:
        while self.deferred and self.deferred[0][0] <= self.world.done_seq:
            self.put(self.deferred.pop(0)[1])

    def take(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            key = self.hash_of.pop(block, None)
            if key is not None and self.cached.get(key) == block:
                del self.cached[key]
            self.refs[block] = 1  # it holds what its last owner left there
        return taken

    def put(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            assert self.refs[block] >= 0
            if not self.refs[block]:
                self.free[block] = None

    def release(self, request: Req) -> None:
        blocks = [block for ids in request.table for block in ids]
        request.table = ()
        if self.world.overlap and request.last_seq > self.world.done_seq:
            self.deferred.append((self.world.sched_seq, blocks))
        else:
            self.put(blocks)

    def cache(self, request: Req, upto: int) -> None:
        if not self.world.caching:
            return
        for group, ids in enumerate(request.table):
            size = P * self.world.ks[group]
            for i in range(min(upto, request.known) // size):
                key = (group, request.kv[(i + 1) * size - 1])
                if ids[i] not in self.hash_of:
                    self.hash_of[ids[i]] = key
                    self.cached.setdefault(key, ids[i])

    def local_hit(self, request: Req) -> tuple[int, tuple[list[int], ...]]:
        if not self.world.caching or request.skip_reading_prefix_cache:
            return 0, tuple([] for _ in self.world.ks)
        tokens = 0
        while tokens + self.world.block <= request.known - 1:
            end = tokens + self.world.block
            spans = [(g, range(tokens // (P * k), end // (P * k)), P * k) for g, k in enumerate(self.world.ks)]
            if not all((g, request.kv[(i + 1) * size - 1]) in self.cached for g, span, size in spans for i in span):
                break
            tokens = end
        table = tuple(
            [self.cached[g, request.kv[(i + 1) * P * k - 1]] for i in range(tokens // (P * k))]
            for g, k in enumerate(self.world.ks)
        )
        return tokens, table

    def allocate(self, request: Req, tokens: int, hit: tuple[list[int], ...] | None = None) -> Any:
        """Blocks for `tokens` in all; None if there are too few, else the new ones per group."""
        table = request.table if hit is None else hit
        shared = [block for ids in hit or () for block in ids]
        needs = [-(-tokens // (P * k)) - len(ids) for k, ids in zip(self.world.ks, table, strict=True)]
        idle = [block for block in shared if block in self.free]
        if sum(max(0, n) for n in needs) > len(self.free) - len(idle):
            return None
        for block in shared:
            self.free.pop(block, None)
            self.refs[block] = self.refs.get(block, 0) + 1
        fresh = tuple(self.take(max(0, n)) or [] for n in needs)
        request.table = tuple([*ids, *new] for ids, new in zip(table, fresh, strict=True))
        return fresh

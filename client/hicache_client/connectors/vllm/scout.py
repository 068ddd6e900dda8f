"""Asking ahead: one thread that looks prompts up while vLLM's scheduler goes on.

    scheduler's thread            │ the scout's thread: a loop with one client per shard
    ask() ──► Ask ────────────────┼──► lookup on every shard, at most LOOKUPS_AT_ONCE
      .done? never waits  ◄───────┼─── the minimum over shards; leases; L3 pages: prefetch, then probes until all
      .leases()                   │    are in memory
      .hand_over()  ──────────────┼──► renewed no more: a worker's load holds the pages now
      .release()  ────────────────┼──► given back, also if the answer comes only later; many at once
                                  │    keeper: connects; renewer: waiting leases, at a third of their life

Every wait is bounded, and every failure is an answer: done, nothing resumable. With the daemon away that is at once.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

from hicache.base.limits import Limits
from hicache.protocol.messages import ClientLimits, Match, Scope
from hicache_client.aio import AsyncClient
from hicache_client.leases import LeaseRef
from hicache_client.options import EMPTY, ClientOptions, ClientStats

from .metadata import WorkerShard
from .options import VllmOptions

LOOKUPS_AT_ONCE = 32  # half of a session's credits
FENCE_SLOTS = 1  # this side transfers nothing
RETRY_S, RETRY_MAX_S = 0.25, 2.0  # between attempts to connect
WATCH_S = 0.25  # how often the keeper looks whether the daemon is still there
PROBE_S, PROBE_MAX_S, PROBE_GROWTH = 0.004, 0.05, 1.5  # of a prefetch
PREFETCH_CAP_S = 60.0  # no prefetch is watched for longer
PREFETCH_STALL_S = 0.5  # nothing was ours to move and nothing comes
CLOSE_S = 3.0

_log = logging.getLogger("hicache.vllm")


class ScoutClient(Protocol):
    """What is needed of `AsyncClient`."""

    stats: ClientStats

    @property
    def connected(self) -> bool: ...

    @property
    def limits(self) -> ClientLimits | None: ...

    async def connect(self) -> bool: ...

    async def lookup(
        self, tokens: bytes, limit_tokens: int, scope: Scope, *, lease: bool = True, partial: bool = False
    ) -> Match: ...

    async def prefetch(self, tokens: bytes, scope: Scope) -> int: ...

    async def renew(self, leases: Sequence[int]) -> int: ...

    async def release(self, leases: Sequence[int]) -> None: ...

    def export(self, lease: int) -> LeaseRef | None: ...

    async def close(self) -> None: ...


class Ask:
    """One lookup on every shard. Fields are written by the scout's thread and read by the scheduler's; `done` comes
    last, and only `resumable_tokens`, `memory_tokens` and the two about prefetching change after it."""

    def __init__(self, scout: "Scout", request: str, tokens: bytes, limit_tokens: int, scope: Scope) -> None:
        self.request = request
        self.tokens = tokens  # little-endian int32
        self.limit_tokens = limit_tokens
        self.scope = scope
        self.asked_s = time.monotonic()
        self.done = False
        self.resumable_tokens = 0  # to the token; minimum over shards, as all that follow
        self.whole_tokens = 0  # … in pages that hold nothing but this prompt
        self.l2_tokens = 0  # of these, in memory when the answer came
        self.l3_tokens = 0  # … on disk
        self.memory_tokens = 0  # in memory as far as is known now
        self.known_tokens = 0
        self.prefetching = False
        self.prefetched = False
        self._scout = scout
        self._answered = threading.Event()
        self._fetched = threading.Event()
        self._held: tuple[int, ...] = ()  # the clients' lease numbers
        self._refs: tuple[LeaseRef, ...] = ()
        self._sessions: tuple[int, ...] = ()
        self._over = False
        self._handed = False

    @property
    def released(self) -> bool:
        """Whether its leases were given back, or will be as soon as they come."""
        return self._over

    def leases(self) -> tuple[LeaseRef, ...]:
        """One per shard; () before the answer, and when one is gone."""
        if self._over or not self._refs or not self._scout.same_sessions(self._sessions):
            return ()
        return self._refs

    def wait(self, seconds: float) -> bool:
        """Wait for the answer; whether it is there."""
        return self.done or self._answered.wait(seconds)

    def wait_prefetched(self, seconds: float) -> bool:
        """Wait for the end of the prefetch; whether it has ended, well or not."""
        return not self.prefetching or self._fetched.wait(seconds)

    def release(self) -> None:
        """Give the leases back, now or when they come. Idempotent."""
        if not self._over:
            self._over = True
            self._scout._post(self)

    def hand_over(self) -> None:
        """Renew no more: the workers load on the leases. `release` still gives them back."""
        self._handed = True


class Scout:
    """See the module. `ask`, and what an Ask offers, belong to one thread, the scheduler's."""

    def __init__(
        self,
        options: VllmOptions,
        group: bytes,
        engine: str,
        *,
        open_client: Callable[[WorkerShard], ScoutClient] | None = None,
        observe: Callable[[str, float], None] = lambda name, seconds: None,
    ) -> None:
        """`group`: the engine group's 16 bytes; `engine`: text for the daemon's status pages. `open_client` is for
        tests. `observe("lookup" | "prefetch", seconds)` is called on the scout's thread."""
        self._options = options
        self._group = group
        self._engine = engine
        self._open_client = open_client or self._client
        self._observe = observe
        self._clients: list[ScoutClient] = []
        self._pages: list[int] = []  # tokens per page, by shard
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tried = threading.Event()
        self._inbox: deque[Ask] = deque()
        self._waking = False
        self._holding: dict[int, Ask] = {}  # by id(): answered, leases not given back
        self._to_release: list[list[int]] = []  # by shard
        self._tasks: set[asyncio.Task[None]] = set()
        self._poke: asyncio.Event | None = None
        self._stop: asyncio.Event | None = None
        self._closed = False

    # ---- the scheduler's thread -------------------------------------------------------------------------

    def start(self, shards: Sequence[WorkerShard]) -> None:
        """Begin, with the distinct shards in the order of `StepPlan.shards`. Returns when the first attempt to
        connect is over, after at most connect_timeout_s."""
        if self._thread is not None or self._closed or not shards:
            return
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, args=(self._loop, tuple(shards)), name="hicache-scout", daemon=True
        )
        self._thread.start()
        self._tried.wait(self._options.connect_timeout_s)

    @property
    def connected(self) -> bool:
        """Whether every shard has a session now."""
        return bool(self._clients) and all(client.connected for client in self._clients)

    def ask(self, request: str, tokens: bytes, limit_tokens: int, scope: Scope) -> Ask:
        """Look a prompt up, without waiting. `tokens`: little-endian int32."""
        ask = Ask(self, request, tokens, limit_tokens, scope)
        if self._closed or not self.connected:
            self._finish(ask)
            self._wake()
        else:
            self._post(ask)
        return ask

    def same_sessions(self, sessions: tuple[int, ...]) -> bool:
        """Whether the sessions in which leases were taken (see `_sessions_now`) are still open."""
        return not self._closed and self.connected and sessions == self._sessions_now()

    def close(self) -> None:
        """End the thread; leases go with the sessions. Idempotent, at most CLOSE_S."""
        self._closed = True
        thread, loop = self._thread, self._loop
        if thread is None or loop is None:
            return
        if thread.is_alive():
            try:
                loop.call_soon_threadsafe(self._end)
            except RuntimeError as error:  # it has just ended by itself
                _log.debug("the scout has ended: %s", error)
            thread.join(CLOSE_S)

    def _post(self, ask: Ask) -> None:
        """Hand an Ask to the loop: to be answered, or its leases to be given back if it is over."""
        self._inbox.append(ask)
        self._wake()

    def _wake(self) -> None:
        loop = self._loop
        if self._waking or loop is None:
            return
        self._waking = True
        try:
            loop.call_soon_threadsafe(self._drain)
        except RuntimeError:  # closed: whoever waits must not wait on
            for ask in self._inbox:
                self._finish(ask)

    def _sessions_now(self) -> tuple[int, ...]:
        return tuple(client.stats.connects for client in self._clients)

    # ---- the loop ---------------------------------------------------------------------------------------

    def _client(self, shard: WorkerShard) -> ScoutClient:
        options, rank = self._options, shard.shard
        assert shard.model is not None
        assert shard.layout is not None
        client_options = ClientOptions(
            runtime_dir=options.directory,
            tenant=options.tenant,
            credential=options.credential,
            engine=f"{self._engine} scheduler tp{rank.tp_rank} pp{rank.pp_rank}",
            connect_timeout_s=options.connect_timeout_s,
            request_timeout_s=options.lookup_timeout_s,
            retry_max_s=RETRY_MAX_S,
            fence_slots=FENCE_SLOTS,
            group=self._group,
        )
        return AsyncClient(client_options, shard.model, shard.layout, rank, None)

    def _run(self, loop: asyncio.AbstractEventLoop, shards: tuple[WorkerShard, ...]) -> None:
        try:
            loop.run_until_complete(self._main(shards))
        except Exception:  # noqa: BLE001 - logged: a thread has nobody to raise to
            _log.exception("hicache's lookups have ended; vLLM goes on without them")
        finally:
            self._closed = True
            loop.close()
            self._tried.set()
            for ask in (*self._inbox, *self._holding.values()):
                self._finish(ask)

    async def _main(self, shards: tuple[WorkerShard, ...]) -> None:
        self._poke, self._stop = asyncio.Event(), asyncio.Event()
        self._slots = asyncio.Semaphore(LOOKUPS_AT_ONCE)
        clients = [self._open_client(shard) for shard in shards]
        self._pages = [shard.model.prefix_granularity if shard.model else 1 for shard in shards]
        self._to_release = [[] for _ in clients]
        if self._closed:
            self._stop.set()
        try:
            self._clients = clients
            self._spawn(self._keep())
            self._spawn(self._renew())
            self._drain()
            await self._stop.wait()
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in self._tasks:  # releases that those have begun: the sessions end with their leases
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.gather(*(client.close() for client in clients), return_exceptions=True)

    def _end(self) -> None:
        if self._stop is not None:
            self._stop.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a task of hicache's lookups failed: %s", task.exception(), exc_info=task.exception())

    def _drain(self) -> None:
        self._waking = False
        if not self._clients:
            if self._poke is not None:
                self._poke.set()
            return  # `_main` drains again when it has them
        if not self.connected and self._poke is not None:
            self._poke.set()
        while self._inbox:
            ask = self._inbox.popleft()
            if ask._over:
                self._give_back(ask)
                self._finish(ask)  # it may never have been sent
            else:
                self._spawn(self._answer(ask))

    async def _keep(self) -> None:
        """Connect whoever is away: at a slow pace, and sooner when somebody asks."""
        assert self._poke is not None
        pause = RETRY_S
        while True:
            away = [client for client in self._clients if not client.connected]
            if away:
                back = await asyncio.gather(*(client.connect() for client in away))
                pause = RETRY_S if all(back) else min(pause * 2, RETRY_MAX_S)
            self._tried.set()
            self._poke.clear()
            try:
                async with asyncio.timeout(pause if away else WATCH_S):
                    await self._poke.wait()
                await asyncio.sleep(min(pause, RETRY_S) if away else 0)
            except TimeoutError:
                continue

    async def _renew(self) -> None:
        """Keep the leases of those that wait."""
        while True:
            await asyncio.sleep(self._ttl_s() / 3)
            for index, client in enumerate(self._clients):
                waiting = [ask for ask in self._holding.values() if not ask._handed]
                if waiting and await client.renew([ask._held[index] for ask in waiting]) < len(waiting):
                    await self._find_lost(index, client, waiting)

    async def _find_lost(self, index: int, client: ScoutClient, waiting: list[Ask]) -> None:
        for ask in waiting:
            if not ask._over and not await client.renew([ask._held[index]]):
                ask._refs = ()

    def _ttl_s(self) -> float:
        limits = [client.limits for client in self._clients]
        return min((each.lease_ttl_s for each in limits if each is not None), default=Limits().lease_ttl_s)

    # ---- one Ask ----------------------------------------------------------------------------------------

    async def _answer(self, ask: Ask) -> None:
        try:
            async with self._slots:
                if not ask._over:
                    await self._look_up(ask)
        finally:
            self._finish(ask)
        if ask.prefetching:
            try:
                await self._prefetch(ask)
            finally:
                ask.prefetching = False
                ask._fetched.set()

    async def _look_up(self, ask: Ask) -> None:
        sessions = self._sessions_now()
        matches: list[Match] = [EMPTY] * len(self._clients)

        async def one(index: int, client: ScoutClient) -> None:
            if client.connected:
                matches[index] = await client.lookup(ask.tokens, ask.limit_tokens, ask.scope, partial=True)

        try:
            await asyncio.gather(*(one(index, client) for index, client in enumerate(self._clients)))
        finally:
            ask._held = tuple(match.lease for match in matches)
            self._holding[id(ask)] = ask
            if not self._accept(ask, matches, sessions):
                self._give_back(ask)
        self._observe("lookup", time.monotonic() - ask.asked_s)

    def _accept(self, ask: Ask, matches: list[Match], sessions: tuple[int, ...]) -> bool:
        """Fill in the answer. False: there is nothing to resume, or nobody who would."""
        resumable = min(map(_resumable, matches))
        refs = [
            client.export(match.lease) for client, match in zip(self._clients, matches, strict=True) if match.lease
        ]
        known = [ref for ref in refs if ref is not None]
        ask.known_tokens = min(match.known_tokens for match in matches)
        if ask._over or not resumable or len(known) < len(matches) or sessions != self._sessions_now():
            return False
        ask._refs, ask._sessions = tuple(known), sessions
        ask.whole_tokens = min(match.resumable_tokens for match in matches)
        ask.memory_tokens = ask.l2_tokens = min(_in_memory(match, resumable) for match in matches)
        ask.l3_tokens = resumable - ask.l2_tokens
        ask.resumable_tokens = resumable
        ask.prefetching = ask.l3_tokens > 0
        return True

    async def _prefetch(self, ask: Ask) -> None:
        """Have the rest brought to memory and watch it come. Ends when all is there, when nothing more comes, when
        nobody waits for it any more, or after PREFETCH_CAP_S."""
        begun = grown = time.monotonic()
        tokens = ask.tokens[: 4 * ask.resumable_tokens]
        moved = await asyncio.gather(*(client.prefetch(tokens, ask.scope) for client in self._clients))
        moving = [pages * size for pages, size in zip(moved, self._pages, strict=True) if pages]
        expected = min(ask.resumable_tokens, ask.l2_tokens + min(moving, default=0))
        pause = PROBE_S
        while True:
            limit = ask.resumable_tokens
            matches = await asyncio.gather(
                *(client.lookup(tokens, limit, ask.scope, lease=False, partial=True) for client in self._clients)
            )
            now = time.monotonic()
            if not any(match is EMPTY for match in matches):  # that one was not answered
                resumable = min(limit, *map(_resumable, matches))
                memory = min(_in_memory(match, resumable) for match in matches)
                grown = now if memory > ask.memory_tokens else grown
                ask.memory_tokens, ask.resumable_tokens = memory, resumable
                ask.prefetched = memory >= resumable
            stalled = now - grown > PREFETCH_STALL_S and ask.memory_tokens >= expected
            if ask.prefetched or stalled or now - begun > PREFETCH_CAP_S:
                break
            if ask._over or ask._handed or not self.same_sessions(ask._sessions):
                break
            await asyncio.sleep(pause)
            pause = min(pause * PROBE_GROWTH, PROBE_MAX_S)
        self._observe("prefetch", time.monotonic() - begun)

    @staticmethod
    def _finish(ask: Ask) -> None:
        ask.done = True
        ask._answered.set()

    def _give_back(self, ask: Ask) -> None:
        """Return its leases with the next batch; none are left after it. An Ask without an answer has none yet and
        comes here again."""
        held = self._holding.pop(id(ask), None)
        if held is None:
            return
        idle = not any(self._to_release)
        for leases, lease in zip(self._to_release, ask._held, strict=True):
            if lease:
                leases.append(lease)
        ask._held = ask._refs = ()
        if idle and any(self._to_release):
            self._spawn(self._release())

    async def _release(self) -> None:
        batch, self._to_release = self._to_release, [[] for _ in self._clients]
        for client, leases in zip(self._clients, batch, strict=True):
            if leases:
                await client.release(leases)


def _resumable(match: Match) -> int:
    return match.resumable_tokens + match.partial_tokens


def _in_memory(match: Match, resumable: int) -> int:
    """How many of the first `resumable` tokens need no disk. What is in memory comes first: leaves leave it first."""
    if match.l3_tokens:
        return min(match.l2_tokens, resumable)
    return min(match.resumable_tokens if match.partial_l3 else _resumable(match), resumable)

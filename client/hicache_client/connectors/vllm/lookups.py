"""From a request to what vLLM is told of it: how many tokens can be loaded, whether in the step, or come again.

    arrives ──► asked ──answer──► (prefetched) ──► promised ──► vLLM allocates: flights.py, or the lease goes back
                  └── lookup_timeout_s ──► computed without

Every "come again" is bounded: by lookup_timeout_s, and by the prefetch's limit.

A load runs inside the step only if all of it is in memory, the model has one cache group (vLLM maps failed blocks to
requests for one group only), and its last page holds this prompt alone: vLLM writes a layer's new KV before it lets
us wait for that layer's load, which could then put another sequence's tokens over it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from hicache.protocol.messages import Scope

from . import stats
from .metadata import WorkerShard
from .options import VllmOptions
from .scope import NotYet, Scopes, Uncacheable
from .scout import PREFETCH_CAP_S, Ask
from .tracked import Paging, Promise, Tracked

ASKS_AHEAD = 1024  # requests that hold a lease while they queue; later ones ask when they are looked at
ASK_AGAIN_S = 2.0  # an answer that left something to compute is asked anew when it is so old
SAID_MOST = 100  # different reasons in the log

Answer = tuple[int | None, bool]
MISS: Answer = (0, False)
LATER: Answer = (None, False)

_log = logging.getLogger("hicache.vllm")


class AsksAhead(Protocol):
    """What is needed of `Scout`."""

    @property
    def connected(self) -> bool: ...

    def start(self, shards: Sequence[WorkerShard]) -> None: ...

    def ask(self, request: str, tokens: bytes, limit_tokens: int, scope: Scope) -> Ask: ...

    def close(self) -> None: ...


class Lookups:
    """Belongs to the scheduler's thread. `paging` None: nothing is looked up yet."""

    def __init__(
        self,
        options: VllmOptions,
        scout: AsksAhead,
        tally: stats.Tally,
        now: Callable[[], float],
        *,
        read: bool,
        sync_loads: bool,
    ) -> None:
        self.paging: Paging | None = None
        self.scopes = Scopes()
        self._options, self._scout, self._tally, self._now = options, scout, tally, now
        self._read, self._sync_loads = read, sync_loads
        self._ahead: set[str] = set()
        self._said: set[str] = set()
        self._wait_left_s = 0.0
        self._waited_s = 0.0
        self.begin_step()

    def begin_step(self) -> None:
        """The scheduler may wait anew."""
        self._wait_left_s = self._options.lookup_wait_ms / 1e3

    def take_waited(self) -> float:
        """Seconds waited on purpose since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    # ---- asking -----------------------------------------------------------------------------------------

    def rescope(self, tracked: Tracked) -> None:
        """Find out what the request's KV depends on."""
        tracked.scope = self.scopes.of(tracked.request)
        if isinstance(tracked.scope, Uncacheable):
            self._tally.count(stats.UNCACHEABLE)
            text = tracked.scope.reason
            if text not in self._said and len(self._said) < SAID_MOST:
                self._said.add(text)
                _log.info("hicache: a request is not cached: %s", text)

    def ask_ahead(self, tracked: Tracked) -> None:
        """Ask before the request's turn, unless too many wait already."""
        if len(self._ahead) < ASKS_AHEAD:
            self.ask(tracked)

    def ask(self, tracked: Tracked) -> None:
        """Ask, if the request may be looked up and there is no better answer."""
        request, scope, paging = tracked.request, tracked.usable_scope, self.paging
        if paging is None or scope is None or not self._wanted(tracked):
            return
        before, limit = tracked.ask, request.num_tokens
        tracked.ask = self._scout.ask(tracked.name, tracked.tokens_to(limit), limit, scope)
        self._ahead.add(tracked.name)
        self._tally.count(stats.LOOKUPS)
        if before is not None:  # after the new one, so that its pages do not come loose in between
            before.release()

    def _wanted(self, tracked: Tracked) -> bool:
        request = tracked.request
        if not self._read or tracked.negative or tracked.gave_up or request.skip_reading_prefix_cache:
            return False
        return request.num_tokens > self._options.min_load_tokens

    def let_go(self, tracked: Tracked) -> None:
        """The answer is of no more use."""
        if tracked.ask is not None:
            tracked.ask.release()
        tracked.ask = tracked.promise = tracked.asked_at = tracked.prefetch_at = None
        self._ahead.discard(tracked.name)

    # ---- answering --------------------------------------------------------------------------------------

    def match(self, tracked: Tracked, computed: int, *, idle: bool) -> Answer:
        """What vLLM is told. `computed`: tokens that it has itself; `idle`: nothing would be held up by waiting."""
        tracked.local_tokens, tracked.promise = computed, None
        if self.paging is None:
            return MISS
        if isinstance(tracked.scope, NotYet):
            self.rescope(tracked)
        if isinstance(tracked.scope, NotYet) and self._wanted(tracked):
            return self._come_again(tracked)
        if tracked.ask is None or self._worth_asking_again(tracked.ask):
            self.ask(tracked)
        ask = tracked.ask
        if ask is None:
            return MISS
        if not ask.done and not (idle and self._wait_a_little(ask.wait)):
            return self._come_again(tracked)
        if ask.prefetching and self._wait_for_prefetch(tracked, ask, idle=idle):
            return LATER
        tracked.asked_at = tracked.prefetch_at = None
        return self._promise(tracked, ask, self.paging)

    def _worth_asking_again(self, ask: Ask) -> bool:
        """The answer is old and left something to compute, or its lease is gone with its session."""
        if not ask.done or ask.prefetching or self._now() - ask.asked_s < ASK_AGAIN_S:
            return False
        short = ask.resumable_tokens < ask.limit_tokens - 1
        lost = ask.resumable_tokens > 0 and not ask.leases()
        if short or lost:
            self._tally.count(stats.LOOKUPS_AGAIN)
        return short or lost

    def _wait_a_little(self, wait: Callable[[float], bool]) -> bool:
        if self._wait_left_s <= 0:
            return False
        begun = self._now()
        done = wait(self._wait_left_s)
        waited = self._now() - begun
        self._wait_left_s -= waited
        self._waited_s += waited
        return done

    def _come_again(self, tracked: Tracked) -> Answer:
        now = self._now()
        tracked.asked_at = now if tracked.asked_at is None else tracked.asked_at
        if now - tracked.asked_at < self._options.lookup_timeout_s:
            return LATER
        self.let_go(tracked)
        tracked.gave_up = True
        self._tally.count(stats.LOOKUPS_LATE)
        return MISS

    def _wait_for_prefetch(self, tracked: Tracked, ask: Ask, *, idle: bool) -> bool:
        options, now = self._options, self._now()
        if options.prefetch == "best_effort":
            return False
        if tracked.prefetch_at is None:
            tracked.prefetch_at = now
            self._tally.count(stats.PREFETCHES)
        limit = PREFETCH_CAP_S
        if options.prefetch == "timeout":
            limit = options.prefetch_base_s + options.prefetch_per_1024_tokens_s * ask.l3_tokens / 1024
        if now - tracked.prefetch_at < limit:
            return not (idle and self._wait_a_little(ask.wait_prefetched))
        self._tally.count(stats.PREFETCHES_LATE)
        return False

    def _promise(self, tracked: Tracked, ask: Ask, paging: Paging) -> Answer:
        page, memory, computed = paging.page_tokens, ask.memory_tokens, tracked.local_tokens
        usable = ask.resumable_tokens
        if usable > memory and self._options.prefetch == "timeout":
            usable = memory
        tokens = min(usable, tracked.request.num_tokens - 1) - computed
        leases = ask.leases()
        if tokens < self._options.min_load_tokens or computed % page or not leases:
            return MISS
        end = -(-(computed + tokens) // page) * page
        sync = self._sync_loads and len(paging.starts_per_block) == 1 and usable <= memory and end <= ask.whole_tokens
        tracked.promise = Promise(computed, tokens, sync, leases, ask.l2_tokens)
        return tokens, not sync

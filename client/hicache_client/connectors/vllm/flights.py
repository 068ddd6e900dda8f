"""Loads under way, and blocks whose contents are in doubt because of them.

    promised ──vLLM allocates──► planned ──every worker: ended──► over: the lease goes back
                                    └──a worker: failed──► its request is never looked up again; what was
                                                           computed on its blocks meanwhile is never stored

Belongs to the scheduler's thread.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import count

from . import stats
from .metadata import LoadPlan
from .tracked import BlockTable, EngineRequest, Flight, Paging, Tracked

OVERDUE_S = 60.0  # a worker has this long, beyond load_timeout_s, to say that a load is over


class Doubts:
    """Blocks that a load was to fill and that are not known to hold what vLLM's prefix cache says they hold.

    vLLM shares the blocks of a synchronous load with others in the very step that loads them. If the load fails,
    whoever computed on them has computed nonsense, and vLLM lets all of them compute again; what must not happen is
    that it is stored. Blocks of a failed load stay in doubt until their request has computed them again, or vLLM
    hands them out as new ones."""

    def __init__(self) -> None:
        self._loads: dict[tuple[int, int], Flight] = {}  # (group, block) → the load

    def __len__(self) -> int:
        return len(self._loads)

    def add(self, flight: Flight, blocks: Iterable[Sequence[int]]) -> None:
        """These blocks, per group, are being loaded."""
        for group, ids in enumerate(blocks):
            for block in ids:
                self._loads[group, block] = flight

    def renewed(self, table: Iterable[Sequence[int]]) -> None:
        """vLLM gave these out as new: they are computed before they are read."""
        if self._loads:
            for group, ids in enumerate(table):
                for block in ids:
                    self._loads.pop((group, block), None)

    def among(self, table: Iterable[Sequence[int]]) -> set[Flight]:
        """The loads on which blocks of this table depend."""
        loads = self._loads
        return {loads[group, block] for group, ids in enumerate(table) for block in ids if (group, block) in loads}

    def settle(self, flight: Flight) -> None:
        """The load went well, or its request has computed all of it again."""
        for key in [key for key, load in self._loads.items() if load is flight]:
            del self._loads[key]


class Flights:
    """All loads that are not over on every worker."""

    def __init__(self, tally: stats.Tally, now: Callable[[], float], timeout_s: float) -> None:
        self.workers = 0
        self._tally = tally
        self._now = now
        self._limit_s = timeout_s + OVERDUE_S
        self._open: dict[int, Flight] = {}
        self._doubts = Doubts()
        self._planned: list[LoadPlan] = []
        self._ids = count(1)

    def __len__(self) -> int:
        return len(self._open)

    def take(self) -> tuple[LoadPlan, ...]:
        """The plans since the last call."""
        planned, self._planned = tuple(self._planned), []
        return planned

    # ---- begin ------------------------------------------------------------------------------------------

    def begin(self, tracked: Tracked, paging: Paging, tokens: int) -> Flight:
        """Plan the load of `tokens` that vLLM takes of what it was promised; the Ask is the load's from now on.
        Raises `LookupError` if it was promised less."""
        promise, ask = tracked.promise, tracked.ask
        if promise is None or not 0 < tokens <= promise.tokens:
            raise LookupError(
                f"{tokens} tokens are to be loaded, but {promise.tokens if promise else 0} were promised"
            )
        page = paging.page_tokens
        first, last = promise.start // page, -(-(promise.start + tokens) // page)
        flight = Flight(
            load=next(self._ids),
            request=tracked.name,
            ask=ask,
            begun_s=self._now(),
            start=promise.start,
            end=last * page,
            tokens=tokens,
            memory_tokens=promise.memory_tokens,
            sync=promise.sync,
        )
        plan = LoadPlan(
            load=flight.load,
            request=flight.request,
            leases=promise.leases,
            first_page=first,
            starts=paging.starts(tracked.table, first, last),
            blocks=paging.blocks(tracked.table, first, last),
            tokens=tokens,
            sync=promise.sync,
        )
        tracked.promise = tracked.ask = None
        if ask is not None:
            ask.hand_over()
        self._add(tracked, flight, plan)
        return flight

    def doom(self, request: EngineRequest, tracked: Tracked, tokens: int, sync: bool) -> None:
        """vLLM counts on a load that could not be planned: one without leases, which the workers report as failed,
        for all blocks of the request."""
        flight = Flight(next(self._ids), tracked.name, None, self._now(), 0, request.num_tokens, tokens, 0, sync)
        blocks = tuple(tuple(ids) for ids in tracked.table)
        self._add(tracked, flight, LoadPlan(flight.load, flight.request, (), 0, (), blocks, tokens, sync))

    def _add(self, tracked: Tracked, flight: Flight, plan: LoadPlan) -> None:
        self._open[flight.load] = flight
        tracked.flight = flight
        tracked.receiving = not flight.sync
        tracked.unproven.add(flight.load)
        self._doubts.add(flight, plan.blocks)
        self._planned.append(plan)
        self._tally.count(stats.LOADS)

    # ---- what others computed on it ---------------------------------------------------------------------

    def admitted(self, tracked: Tracked, paging: Paging, table: BlockTable) -> None:
        """A request has got blocks: the first ones, as far as vLLM's own hit goes, it shares with others."""
        if not self._doubts:
            return
        shared = paging.blocks(table, 0, tracked.local_tokens // paging.page_tokens)
        self._doubts.renewed(tuple(ids[len(old) :] for ids, old in zip(table, shared, strict=True)))
        for flight in self._doubts.among(shared):
            tracked.spoiled |= flight.failed
            if flight.load in self._open:
                tracked.unproven.add(flight.load)

    def grown(self, blocks: BlockTable) -> None:
        """A running request has got these."""
        self._doubts.renewed(blocks)

    def computed(self, tracked: Tracked) -> None:
        """A request whose load failed may have computed past it."""
        flight = tracked.flight
        if flight is not None and flight.failed and tracked.request.num_computed_tokens >= flight.end:
            self._doubts.settle(flight)
            tracked.flight = None

    # ---- end --------------------------------------------------------------------------------------------

    def fail(self, load: int, everybody: Iterable[Tracked]) -> None:
        """A worker could not complete it. Idempotent."""
        flight = self._open.get(load)
        if flight is None or flight.failed:
            return
        flight.failed = True
        self._tally.count(stats.LOADS_FAILED)
        for tracked in everybody:
            if load not in tracked.unproven:
                continue
            if tracked.flight is flight and not tracked.finished_s:
                tracked.negative = True
                tracked.offer_again()
            else:
                tracked.spoiled = True

    def end(self, load: int, workers: int, everybody: Iterable[Tracked]) -> None:
        """So many workers more are through with it."""
        flight = self._open.get(load)
        if flight is None:
            return
        flight.ended += workers
        if flight.ended < self.workers:
            return
        del self._open[load]
        if flight.ask is not None:
            flight.ask.release()
        if not flight.failed:
            self._doubts.settle(flight)
        for tracked in everybody:
            tracked.unproven.discard(load)

    def overdue(self) -> list[int]:
        """Loads of which some worker has not said for too long that they are over."""
        if not self._open:
            return []
        limit = self._now() - self._limit_s
        return [load for load, flight in self._open.items() if flight.begun_s < limit]

"""The cache's state machine: one event in, its commands out. The only writer of everything it holds.

    SessionOpened, SessionClosed, Renew, Release, Tick ─► opening.py
    Lookup, Extend                                     ─► lookup.py    Match
    Store          ─► publish.py ─ CopyPages ─► CopyEnded ─► visible ─► disk.py ─ WriteRecords ─► StoreWritten
    Load, Prefetch ─► promote.py ─ ReadRecords ─► StoreRead ─ CopyPages ─► CopyEnded
    StoreRecovered, StoreModeChanged, StoreDeleted     ─► disk.py
    the end of every event                             ─► announce.py  Announce

Nothing that a client sends makes a handler raise: it is answered with a typed Error and changes nothing. An answer
to a ticket that is not open, because it came twice or too late, is counted and changes nothing.
"""

from collections.abc import Iterator
from typing import Any

from hicache.base.errors import HiCacheError
from hicache.base.limits import Limits
from hicache.core import announce, disk, evict, invariants, lookup, opening, promote, publish
from hicache.core.commands import Command, PagesStored, Reply
from hicache.core.events import (
    CopyEnded,
    Drain,
    Event,
    ExtendAsked,
    LoadAsked,
    LookupAsked,
    PrefetchAsked,
    ReleaseAsked,
    RenewAsked,
    SessionClosed,
    SessionOpened,
    StoreAsked,
    StoreDeleted,
    StoreModeChanged,
    StoreRead,
    StoreRecovered,
    StoreWritten,
    Tick,
)
from hicache.core.report import report
from hicache.core.transfers import COPYING, LoadTicket, StoreTicket
from hicache.core.world import CoreConfig, Disk, World
from hicache.pool.blocks import Pool
from hicache.protocol.messages import Error
from hicache.store.record import allocated_bytes

__all__ = ["CacheState", "CoreConfig"]

_Asked = LookupAsked | ExtendAsked | PrefetchAsked | LoadAsked | StoreAsked | RenewAsked | ReleaseAsked

_ASKED = (LookupAsked, ExtendAsked, PrefetchAsked, LoadAsked, StoreAsked, RenewAsked, ReleaseAsked)


class CacheState:
    """See the module. `secret` is the cluster secret that page keys are made with, 32 bytes."""

    def __init__(self, config: CoreConfig, limits: Limits, secret: bytes) -> None:
        if config.l3_mode not in ("off", "rw", "ro"):
            raise ValueError(f"l3_mode must be off, rw or ro, got {config.l3_mode!r}")
        if config.write_policy not in ("write_through", "write_back", "none"):
            raise ValueError(f"write_policy must be write_through, write_back or none, got {config.write_policy!r}")
        pool = Pool(config.arena_bytes)
        if config.parent_bytes is not None:
            pool.format(config.parent_bytes)
        tier = Disk(config.l3_mode, config.l3_capacity_bytes, bound_bytes=config.l3_capacity_bytes)
        self.world = World(config, limits, secret, pool, tier, config.write_policy)
        if config.announced is not None:
            self.world.residency.moved = []

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Take in one event at time `now_s` (monotonic seconds); return what must be done, in this order."""
        world = self.world
        world.now_s = now_s
        world.out = []
        world.story.begin()
        try:
            if isinstance(event, _ASKED):
                self._asked(event)
            else:
                self._happened(event)
            evict.demote_in_time(world)
        except HiCacheError as error:
            if not isinstance(event, _ASKED):
                raise
            self._reject(event, error)
        announce.settle(world)
        world.reap()
        disk.settle(world)
        return world.out

    def _asked(self, event: _Asked) -> None:
        world = self.world
        match event:
            case LookupAsked():
                lookup.lookup(world, event)
            case ExtendAsked():
                lookup.extend(world, event)
            case LoadAsked():
                promote.load(world, event)
            case StoreAsked():
                publish.store(world, event)
            case PrefetchAsked():
                promote.prefetch(world, event)
            case RenewAsked():
                opening.renew(world, event)
            case ReleaseAsked():
                opening.release(world, event)

    def _reject(self, event: _Asked, error: HiCacheError) -> None:
        self.world.counters.rejected_requests += 1
        message = Error(error.code.value, error.message, error.remedy)
        self.world.out.append(Reply(event.session, event.request, message))

    def _happened(self, event: Event) -> None:
        world = self.world
        match event:
            case SessionOpened():
                opening.opened(world, event)
            case SessionClosed():
                opening.closed(world, event)
            case CopyEnded():
                self._copy_ended(event)
            case StoreRead():
                promote.store_read(world, event)
            case StoreWritten():
                disk.store_written(world, event)
            case StoreDeleted():
                disk.store_deleted(world, event)
            case StoreRecovered():
                disk.store_recovered(world, event)
            case StoreModeChanged():
                disk.store_mode_changed(world, event)
            case Drain():
                self._drain()
            case Tick():
                opening.tick(world)

    def _copy_ended(self, event: CopyEnded) -> None:
        world = self.world
        ticket = world.tickets.get(event.ticket)
        if isinstance(ticket, StoreTicket):
            publish.store_copied(world, ticket, event)
        elif isinstance(ticket, LoadTicket) and ticket.phase == COPYING:
            promote.load_copied(world, ticket, event)
        else:
            world.counters.late_answers += 1
            return
        session = world.sessions.get(ticket.session)
        if session is not None:
            opening.drop_if_done(world, session)

    def _drain(self) -> None:
        """No new work from now on. Under write_back, what only L2 has is written while there is time."""
        world = self.world
        if not world.draining and world.write_policy == "write_back" and world.disk.mode == "rw":
            disk.write_all(world)
        world.draining = True

    def check(self) -> None:
        """Raise `LawBroken`, with the story of the row it is about, unless every law holds. O(rows)."""
        invariants.check(self.world)

    def snapshot(self) -> dict[str, Any]:
        """JSON-able figures for status pages and metrics. O(sessions + namespaces)."""
        return report(self.world)

    def reconfigure(
        self,
        *,
        limits: Limits | None = None,
        l3_capacity_bytes: int | None = None,
        write_policy: str | None = None,
    ) -> list[Command]:
        """Change what may change while running; returns the commands that follow, e.g. deletions for less L3."""
        world = self.world
        if write_policy not in (None, "write_through", "write_back", "none"):
            raise ValueError(f"write_policy must be write_through, write_back or none, got {write_policy!r}")
        world.out = []
        world.limits = limits or world.limits
        world.write_policy = write_policy or world.write_policy
        if l3_capacity_bytes is not None:
            world.disk.capacity_bytes = l3_capacity_bytes
            disk.shrink(world)
        announce.settle(world)
        world.reap()
        disk.settle(world)
        return world.out

    def survey(self, part_pages: int) -> Iterator[tuple[PagesStored, ...]]:
        """All pages that have been announced and are still there, in parts of about `part_pages`, for a router that
        comes late. Events may be handled between two parts: see announce.py."""
        return announce.survey(self.world, part_pages)

    def announced_pages(self) -> int:
        """How many pages routers know of, in any tier. O(rows)."""
        return announce.count(self.world)

    def idle(self) -> bool:
        """No ticket is open: nothing outside will answer any more."""
        return not len(self.world.tickets)

    @staticmethod
    def l3_allocated(payload_bytes: int) -> int:
        """Bytes that a payload takes on the medium, as the store allocates them."""
        return allocated_bytes(payload_bytes)

"""Events in, commands out: the only caller of `CacheState.handle`.

socket ─► front ─feed─┐                          ┌─► front.reply, front.drop
threads ─► inbox ─────┼─► CacheState.handle ─► commands ─► lanes
timer ─► tick ────────┘   (one at a time)        ├─► store threads
                                                 └─► routers
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hicache.base.clock import Clock
from hicache.base.errors import LawBroken
from hicache.core.commands import (
    Announce,
    CancelCopy,
    Command,
    CopyPages,
    DeleteRecords,
    DoneFence,
    DropSession,
    FailFence,
    ReadRecords,
    Reply,
    TouchRecords,
    WriteRecords,
)
from hicache.core.events import Event, StoreDeleted, StoreRead, StoreRecovered, StoreWritten
from hicache.core.state import CacheState
from hicache_daemon.front import Front
from hicache_daemon.kv_events import KvEvents
from hicache_daemon.lanes import CpuLane
from hicache_daemon.stores import Note, RecoveryEnded, StoreThreads


@dataclass(slots=True)
class CacheLoop:
    """One per daemon; all calls on the loop thread. `front` is set right after construction: each needs the
    other. `crash` ends the daemon; `post` queues an event behind those already waiting."""

    state: CacheState
    lanes: CpuLane
    stores: StoreThreads | None
    clock: Clock
    post: Callable[[Event], None]
    recovered: Callable[[RecoveryEnded], None]
    crash: Callable[[LawBroken], None]
    log: Any
    front: Front | None = None
    kv_events: KvEvents | None = None  # None: the state announces nothing
    counters: dict[str, int] = field(default_factory=lambda: {"events": 0, "internal_errors": 0})

    def feed(self, event: Event) -> None:
        """Let the state decide, then do. Raises `LawBroken`, or whatever a bug raises: see `on_note`."""
        self.counters["events"] += 1
        dropped: list[DropSession] = []
        for command in self._decide(event):
            if isinstance(command, DropSession):
                dropped.append(command)  # after the replies of the same event: a Goodbye is answered
            else:
                self._execute(command)
        if dropped:
            assert self.front is not None
            for drop in dropped:
                self.front.drop(drop.session, drop.reason)

    def _decide(self, event: Event) -> list[Command]:
        """The state's commands. A bug may leave half an event applied: then the laws say whether to go on."""
        try:
            return self.state.handle(event, self.clock.monotonic_s())
        except LawBroken:
            raise
        except Exception:  # raised again: `on_note` and the front report it
            self.state.check()
            raise

    def on_note(self, note: Note) -> None:
        """An event from a thread or a timer. Never raises: a bug is logged with its event and counted."""
        try:
            if isinstance(note, RecoveryEnded):
                self.recovered(note)
                return
            self.feed(note)
        except LawBroken as error:
            self.crash(error)
        except Exception:  # a bug met by one event: the story is logged, the laws were checked, the others go on
            self.counters["internal_errors"] += 1
            self.log.exception("event.failed", event_kind=type(note).__name__)
        finally:
            if isinstance(note, StoreRecovered) and self.stores is not None:
                self.stores.recovered_handled()

    def _execute(self, command: Command) -> None:
        match command:
            case Reply():
                assert self.front is not None
                self.front.reply(command)
            case CopyPages():
                self.lanes.submit(command)
            case CancelCopy():
                self.lanes.cancel(command.ticket)
            case FailFence():
                self.lanes.fail_fence(command)
            case DoneFence():
                self.lanes.done_fence(command)
            case ReadRecords() | WriteRecords() | DeleteRecords() | TouchRecords():
                if self.stores is not None:
                    self.stores.submit(command)
                else:
                    self._no_store(command)
            case Announce():
                if self.kv_events is not None:
                    self.kv_events.announce(command)
            case DropSession():
                raise AssertionError("handled by feed")

    def _no_store(self, command: ReadRecords | WriteRecords | DeleteRecords | TouchRecords) -> None:
        """Without a disk tier every record is missing; the state knows it is off and should not ask."""
        match command:
            case ReadRecords():
                nothing = np.zeros(len(command.records), np.bool_)
                self.post(StoreRead(command.ticket, nothing, nothing))
            case WriteRecords():
                nothing = np.zeros(len(command.records), np.bool_)
                self.post(StoreWritten(command.ticket, nothing, "l3 is off"))
            case DeleteRecords():
                self.post(StoreDeleted(command.ticket))
            case TouchRecords():
                pass

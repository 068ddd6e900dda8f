"""From the first socket to the last flush: phases, timers and signals. The phases are drawn in phase.py.

SIGTERM, SIGINT   drain: no new work, what is in flight ends, L3 is flushed, at most `server.drain`; exit 0
a second one      stop now: nothing is flushed (L3 is crash-safe); exit 0
SIGHUP            reload the configuration
LawBroken         stop now; exit 70: a supervisor starts a clean one, clients recompute meanwhile
"""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hicache.base.clock import Clock
from hicache.base.errors import LawBroken
from hicache.core.events import Drain, Tick
from hicache_daemon.front import Front
from hicache_daemon.lanes import CpuLane
from hicache_daemon.lifeline import Lifeline
from hicache_daemon.loop import CacheLoop
from hicache_daemon.notify import Notifier
from hicache_daemon.phase import Phase
from hicache_daemon.server import Server
from hicache_daemon.stores import RecoveryEnded, StoreThreads
from hicache_daemon.watchdog import LagGauge, Watchdog

EXIT_OK = 0
EXIT_CRASH = 70  # EX_SOFTWARE
TICK_S = 1.0
DRAIN_POLL_S = 0.02
STOP_NOW_S = 2.0  # for threads that are in the middle of a system call
CHECK_EVERY_TICKS = 60
IDLE_TICKS = 5  # without a message, before the laws are checked


@dataclass(slots=True)
class Parts:
    """Everything that lives as long as the daemon."""

    cache: CacheLoop
    front: Front
    server: Server
    lifeline: Lifeline
    lanes: CpuLane
    stores: StoreThreads | None
    gauge: LagGauge
    watchdog: Watchdog
    notifier: Notifier
    clock: Clock
    log: Any


@dataclass(slots=True)
class Life:
    """What others may look at: the phase and why the daemon is not ready."""

    drain_s: float
    phase: Phase = Phase.STARTING
    recovered_rows: int = 0
    recovery_error: str = ""
    exit_code: int = EXIT_OK
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Daemon:
    """Runs the parts. All calls on the loop thread."""

    def __init__(self, parts: Parts, life: Life, reload: Callable[[], None]) -> None:
        self._parts = parts
        self._life = life
        self._reload = reload
        self._ticks = 0
        self._quiet_ticks = 0
        self._seen_messages = 0
        self._timers: list[asyncio.TimerHandle] = []
        self._deadline_s = 0.0  # of the drain, once it has begun

    async def run(self) -> int:
        """Serve until told to stop; the process's exit code."""
        parts, life, loop = self._parts, self._life, asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            parts.server.open(loop)
            parts.lifeline.open(loop)
            if parts.cache.kv_events is not None:
                parts.cache.kv_events.open(loop)
            parts.gauge.start()
            parts.watchdog.start()
            life.phase = Phase.RECOVERING
            if parts.stores is not None:
                parts.stores.start()
            else:
                self.recovered(RecoveryEnded(0))
            self._timers = [loop.call_later(TICK_S, self._tick)]
            await life.over.wait()
        finally:
            await self._close(loop)
        return life.exit_code

    def recovered(self, note: RecoveryEnded) -> None:
        """All rows of the disk tier are known: open for sessions."""
        life, parts = self._life, self._parts
        life.recovered_rows, life.recovery_error = note.rows, note.error
        if note.error:
            parts.log.error("daemon.recovery_incomplete", rows=note.rows, error=note.error)
        if life.phase is Phase.RECOVERING:
            life.phase = Phase.READY
            parts.log.info("daemon.ready", pid=os.getpid(), l3_rows=note.rows)
            parts.notifier.send(f"READY=1\nMAINPID={os.getpid()}\nSTATUS=serving")

    def crash(self, error: LawBroken) -> None:
        """An invariant does not hold: nothing that the state says can be trusted any more."""
        self._parts.log.critical("daemon.law_broken", error=str(error), exc_info=error)
        self._life.exit_code = EXIT_CRASH
        self._stop_now()

    # ---- stopping -----------------------------------------------------------------------------------

    def _on_stop_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._life.phase in {Phase.STARTING, Phase.RECOVERING, Phase.READY}:
            self._parts.log.info("daemon.draining", signal=name, at_most_s=self._life.drain_s)
            self._parts.notifier.send("STOPPING=1")
            self._life.phase = Phase.DRAINING
            self._parts.cache.on_note(Drain())
            self._deadline_s = self._parts.clock.monotonic_s() + self._life.drain_s
            self._await_idle()
        else:
            self._parts.log.warning("daemon.stops_now", signal=name)
            self._stop_now()

    def _await_idle(self) -> None:
        parts, late = self._parts, self._parts.clock.monotonic_s() >= self._deadline_s
        idle = parts.cache.state.idle() and (parts.stores is None or parts.stores.idle())
        if idle or late:
            if late and not idle:
                parts.log.warning("daemon.drain_late", after_s=self._life.drain_s)
            self._life.over.set()
        elif not self._life.over.is_set():
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(DRAIN_POLL_S, self._await_idle))

    def _stop_now(self) -> None:
        self._life.phase = Phase.STOPPED
        self._life.over.set()

    async def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close from the outside in. With a drain behind us the store's queue is flushed first."""
        parts, flush = self._parts, self._life.phase is Phase.DRAINING
        for timer in self._timers:
            timer.cancel()
        parts.server.close()
        parts.lifeline.close()
        parts.gauge.stop()
        await loop.run_in_executor(None, parts.watchdog.stop)
        await loop.run_in_executor(None, parts.lanes.close)
        if parts.stores is not None:
            left_s = self._deadline_s - parts.clock.monotonic_s() if flush else 0.0
            timeout_s = max(STOP_NOW_S, left_s)
            await loop.run_in_executor(None, parts.stores.stop, flush, timeout_s)
        if parts.cache.kv_events is not None:
            parts.cache.kv_events.close()
        self._life.phase = Phase.STOPPED
        parts.log.info("daemon.stopped", exit_code=self._life.exit_code)

    # ---- timers -------------------------------------------------------------------------------------

    def _tick(self) -> None:
        parts = self._parts
        self._timers = [asyncio.get_running_loop().call_later(TICK_S, self._tick)]
        parts.cache.on_note(Tick())
        if parts.stores is not None:
            parts.stores.tend()
        self._ticks += 1
        messages = parts.front.counters["messages"]
        self._quiet_ticks = self._quiet_ticks + 1 if messages == self._seen_messages else 0
        self._seen_messages = messages
        if self._quiet_ticks >= IDLE_TICKS and self._ticks % CHECK_EVERY_TICKS == 0:
            try:
                parts.cache.state.check()
            except LawBroken as error:
                self.crash(error)

"""Is the loop alive? A gauge of its lag, and a thread that says where it hangs."""

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from hicache.base.clock import Clock

INTERVAL_S = 0.1
HANG_S = 5.0
WINDOW = 600  # samples kept: one minute


class LagGauge:
    """Measures how late a timer fires. `beat_s` is read by the watchdog thread: one float, written whole."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._samples = [0.0] * WINDOW
        self._next = 0
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.beat_s = clock.monotonic_s()

    def start(self) -> None:
        self._due_s = self._clock.monotonic_s() + INTERVAL_S
        self._timer = self._loop.call_later(INTERVAL_S, self._beat)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        now_s = self._clock.monotonic_s()
        self.beat_s = now_s
        self._samples[self._next] = max(0.0, now_s - self._due_s)
        self._next = (self._next + 1) % WINDOW
        self.start()

    def lag_ms(self) -> dict[str, float]:
        """`now`, `p99` and `max` of the last minute, in ms."""
        ordered = sorted(self._samples)
        return {
            "now": round(self._samples[self._next - 1] * 1e3, 3),
            "p99": round(ordered[int(WINDOW * 0.99)] * 1e3, 3),
            "max": round(ordered[-1] * 1e3, 3),
        }


class Watchdog:
    """A thread that reports, once per hang, the stack of a loop which did not turn for HANG_S.

    It cannot repair a hang; a supervisor (systemd's WatchdogSec, fed by `on_alive`) can."""

    def __init__(self, gauge: LagGauge, clock: Clock, log: Any, on_alive: Callable[[], object]) -> None:
        self._gauge = gauge
        self._clock = clock
        self._log = log
        self._on_alive = on_alive
        self._stop = threading.Event()
        self._loop_thread = threading.get_ident()  # constructed on the loop thread
        self._thread = threading.Thread(target=self._run, name="hicache-watchdog", daemon=True)
        self.hangs = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Idempotent, and allowed before `start`: another part may not have opened."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * HANG_S)

    def _run(self) -> None:
        reported = False
        while not self._stop.wait(1.0):
            silent_s = self._clock.monotonic_s() - self._gauge.beat_s
            if silent_s < HANG_S:
                reported = False
                self._on_alive()
            elif not reported:
                reported = True
                self.hangs += 1
                frame = sys._current_frames().get(self._loop_thread)
                stack = "".join(traceback.format_stack(frame)) if frame else "no such thread"
                self._log.error("loop.hangs", silent_s=round(silent_s, 1), stack=stack)

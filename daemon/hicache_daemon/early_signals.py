"""Signals that come before there is a loop to handle them: while the disk tier opens and the arena is touched.

Nothing is served then and nothing of a client's is held, so a stop needs no drain; and the default of SIGHUP, death,
would turn a reload that came too early into an outage. The loop's own handlers replace these.
"""

import os
import signal
from types import FrameType
from typing import Any


def handle_early_signals(log: Any) -> None:
    """Stop with exit code 0 on SIGTERM and SIGINT, ignore SIGHUP and say so. For the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        log.info("daemon.stopped", signal=signal.Signals(number).name, phase="starting")
        os._exit(0)  # not SystemExit: that would wait for the threads that touch the arena, minutes for a large one

    def ignore(number: int, frame: FrameType | None) -> None:
        log.warning("reload.ignored", reason="the daemon is still starting with the file as it was read")

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGHUP, ignore)

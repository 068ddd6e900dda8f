"""Events from threads, handed to the loop thread in order, with one wake-up for many."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

BATCH = 256  # events per turn of the loop: sockets get their turn in between

N = TypeVar("N")


class Inbox(Generic[N]):
    """`post` may be called from any thread; `handle` runs on the loop thread only.

    Waking a loop costs a write to its eventfd; a flush of hundreds of completions must cost one. `_awake` is
    cleared before the queue is read, so a post during the reading schedules a further turn: none is lost.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: Callable[[N], None]) -> None:
        self._loop = loop
        self._handle = handle
        self._queue: deque[N] = deque()  # bounded by the tickets that CacheState has open
        self._awake = False

    def __len__(self) -> int:
        return len(self._queue)

    def post(self, event: N) -> None:
        self._queue.append(event)
        if not self._awake:
            self._awake = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop is closed: the daemon has stopped and nobody waits for this
                self._queue.clear()

    def _drain(self) -> None:
        self._awake = False
        for _ in range(min(len(self._queue), BATCH)):
            self._handle(self._queue.popleft())
        if self._queue and not self._awake:
            self._awake = True
            self._loop.call_soon(self._drain)

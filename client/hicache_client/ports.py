"""How a client waits: on an event loop, or on a thread. The client's code is written once above these two.

Both have the same methods. `enter`/`leave` bracket a call: threads take turns, coroutines need none, as they
only switch at a wait. `enter_connect`/`leave_connect` bracket an attempt to connect: one at a time in both.
`alone(action)` runs an action when nobody is at the sockets, for a session that was dropped: now if it can, else
soon. It never waits, as the garbage collector calls it from any line of any thread.
"""

import asyncio
import select
import threading
import time
import weakref
from collections.abc import Callable

import zmq

from hicache_client.link import Link

SLICE_S = 0.05  # longest sleep on a socket: bounds what a lost edge could cost


class _Readers:
    """The descriptors that a loop watches for a port. Refers to the loop weakly and to the port not at all: both
    lead to tasks, and these to the session whose finalizer owns this."""

    def __init__(self) -> None:
        self._loop: weakref.ref[asyncio.AbstractEventLoop] | None = None
        self._thread = 0
        self._fds: list[int] = []

    def watch(self, fds: list[int], callback: Callable[[Link], None], link: Link) -> None:
        loop = asyncio.get_running_loop()
        self._loop, self._thread, self._fds = weakref.ref(loop), threading.get_ident(), fds
        for fd in fds:
            loop.add_reader(fd, callback, link)

    def clear(self) -> None:
        """On the loop's thread, or when it does not run."""
        loop = self._loop() if self._loop is not None else None
        if loop is not None and not loop.is_closed():
            for fd in self._fds:
                loop.remove_reader(fd)
        self._fds = []

    def alone(self, action: Callable[[], None]) -> None:
        def end() -> None:
            self.clear()  # before the descriptors are closed and their numbers are another's
            action()

        loop = self._loop() if self._loop is not None else None
        if loop is not None and loop.is_running() and self._thread != threading.get_ident():
            try:
                loop.call_soon_threadsafe(end)
            except RuntimeError:  # it was closed just now
                end()
        else:
            end()


class AsyncPort:
    """Waits on the running loop. libzmq's descriptor only says that something changed and may be reset by any
    call on the socket, so its callback drains at once and every wait begins with a drain."""

    def __init__(self) -> None:
        self._connecting = asyncio.Lock()
        self._waiters: set[asyncio.Future[None]] = set()
        self._readers = _Readers()
        self.alone = self._readers.alone

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def enter(self, deadline: float) -> bool:
        return True

    def leave(self) -> None:
        pass

    async def enter_connect(self, deadline: float) -> bool:
        try:
            async with asyncio.timeout(max(0.0, deadline - self.now())):
                await self._connecting.acquire()
        except TimeoutError:
            return False
        return True

    def leave_connect(self) -> None:
        self._connecting.release()

    def watch(self, link: Link) -> None:
        """From now on replies are taken as they come, also while nobody waits."""
        link.on_progress = self._wake
        self._readers.watch([link.socket.fileno(), link.lifeline.fd], self._fire, link)

    def unwatch(self, link: Link) -> None:
        self._readers.clear()
        link.on_progress = None
        self._wake()

    def drain(self, link: Link) -> None:
        link.drain()

    async def wait(self, link: Link, seconds: float) -> None:
        """Return when something may have changed on the link, or after `seconds`."""
        await self._future(min(seconds, SLICE_S))

    async def readable(self, fd: int, seconds: float) -> None:
        """Return when `fd` is readable or after `seconds`."""
        loop = asyncio.get_running_loop()
        loop.add_reader(fd, self._wake)
        try:
            await self._future(min(seconds, SLICE_S))
        finally:
            loop.remove_reader(fd)

    async def _future(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(future)
        timer = future.get_loop().call_later(seconds, self._resolve, future)
        try:
            await future
        finally:
            timer.cancel()
            self._waiters.discard(future)

    def _fire(self, link: Link) -> None:
        link.drain()
        if link.dead:  # its lifeline would stay readable for ever
            self.unwatch(link)

    def _wake(self) -> None:
        for future in self._waiters:
            self._resolve(future)

    @staticmethod
    def _resolve(future: "asyncio.Future[None]") -> None:
        if not future.done():
            future.set_result(None)


class SyncPort:
    """Waits on the calling thread. One thread at a time is inside a call; the others wait for their turn."""

    def __init__(self) -> None:
        self._gate = threading.RLock()

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def enter(self, deadline: float) -> bool:
        return self._gate.acquire(timeout=min(max(0.0, deadline - self.now()), threading.TIMEOUT_MAX))

    def leave(self) -> None:
        self._gate.release()

    def alone(self, action: Callable[[], None]) -> None:
        if self._gate.acquire(blocking=False):
            try:
                action()
            finally:
                self._gate.release()
        else:  # a handle's wait is draining; to wait for it here could be to wait for a lock that we hold
            threading.Thread(target=self._when_free, args=(action,), daemon=True).start()

    def _when_free(self, action: Callable[[], None]) -> None:
        with self._gate:
            action()

    def enter_connect(self, deadline: float) -> bool:
        return True

    def leave_connect(self) -> None:
        pass

    def watch(self, link: Link) -> None:
        pass

    def unwatch(self, link: Link) -> None:
        pass

    def drain(self, link: Link) -> None:
        """Take replies, unless another thread is inside a call and does so anyway."""
        if self._gate.acquire(blocking=False):
            try:
                link.drain()
            finally:
                self._gate.release()

    def wait(self, link: Link, seconds: float) -> None:
        """Return when something may have changed on the link, or after `seconds`."""
        poller = zmq.Poller()
        poller.register(link.socket, zmq.POLLIN | (zmq.POLLOUT if link.blocked else 0))
        poller.register(link.lifeline.fd, zmq.POLLIN)
        poller.poll(max(1, round(min(seconds, SLICE_S) * 1000)))

    def readable(self, fd: int, seconds: float) -> None:
        """Return when `fd` is readable or after `seconds`."""
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll(max(1, round(min(seconds, SLICE_S) * 1000)))

"""How a client waits: on an event loop, or on a thread. The client's code is written once above these two.

Both have the same methods. `enter`/`leave` bracket a call: threads take turns, coroutines need none, as they
only switch at a wait. `enter_connect`/`leave_connect` bracket an attempt to connect: one at a time in both.
"""

import asyncio
import select
import threading
import time

import zmq

from hicache_client.link import Link

SLICE_S = 0.05  # longest sleep on a socket: bounds what a lost edge could cost


class AsyncPort:
    """Waits on the running loop. libzmq's descriptor only says that something changed and may be reset by any
    call on the socket, so its callback drains at once and every wait begins with a drain."""

    def __init__(self) -> None:
        self._connecting = asyncio.Lock()
        self._waiters: set[asyncio.Future[None]] = set()
        self._watched: list[int] = []

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
        loop = asyncio.get_running_loop()
        link.on_progress = self._wake
        self._watched = [link.socket.fileno(), link.lifeline.fd]
        for fd in self._watched:
            loop.add_reader(fd, self._fire, link)

    def unwatch(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        for fd in self._watched:
            loop.remove_reader(fd)
        self._watched = []
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

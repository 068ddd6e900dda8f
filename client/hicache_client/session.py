"""Keeping one session open with a daemon that may come and go. `sync_session.py` is generated from this file.

    AWAY ──call, pause over──► ATTACHING ──Attached──► GREETING ──Welcome──► UP
     ▲      (an attempt goes on over several calls, each no longer than its own deadline)
     └── refused, connect_timeout_s, daemon gone, other boot id, unknown session, SILENT_LIMIT timeouts in a row

While AWAY is in a pause, calls return at once; so they do after a timeout, until the pause is over or any reply
comes. A lost session that had served is replaced at the next call without a pause, so a restarted daemon is
found by the very request that would have failed.
"""

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

import zmq

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.protocol.messages import (
    Attach,
    Attached,
    Busy,
    ClientMessage,
    Error,
    Goodbye,
    Hello,
    Refuse,
    Welcome,
)
from hicache.protocol.version import SUPPORTED
from hicache.protocol.wire import Buffer
from hicache.spec.layout import L1Layout
from hicache.spec.model import ModelSpec, ShardSpec
from hicache_client.buffers import error_of
from hicache_client.fences import Fence, FenceArea
from hicache_client.leases import LeaseBook
from hicache_client.lifeline import Lifeline
from hicache_client.link import Link, Pending, open_dealer
from hicache_client.options import ClientOptions, ClientStats
from hicache_client.paths import CONTROL_NAME, LIFELINE_NAME, runtime_dir
from hicache_client.pool import SharedPool
from hicache_client.ports import AsyncPort
from hicache_client.retry import Backoff
from hicache_client.sockets import Sockets, hang_up

SILENT_LIMIT = 3

_log = logging.getLogger("hicache.client")


@dataclass(frozen=True, slots=True)
class Registration:
    """What a client says of itself at every Hello."""

    model: ModelSpec
    layout: L1Layout
    shard: ShardSpec
    pool: SharedPool | None


@dataclass(slots=True)
class _Attempt:
    """A registration under way."""

    lifeline: Lifeline
    fences: FenceArea
    epoch: int
    expires: float
    token: bytes = b""  # what Attached brought and Hello repeats
    link: Link | None = None
    hello: Pending | None = None


class AsyncSession:
    """At most one link, opened when it is wanted. The caller brackets its use with `port.enter` and `leave`."""

    def __init__(self, options: ClientOptions, registration: Registration, stats: ClientStats) -> None:
        self.port = AsyncPort()
        self.link: Link | None = None
        self._stats = stats
        self._options = options
        self._registration = registration
        self._dir = runtime_dir(options.runtime_dir)
        self._backoff = Backoff(options.retry_initial_s, options.retry_max_s, Random().random)
        self._sockets = Sockets()
        self._hang_up = weakref.finalize(self, hang_up, self._sockets, self.port.alone)
        self._instance = os.urandom(16)
        self._epoch = 0
        self._renounced = 0  # sessions of this epoch and before are not used
        self._lease_numbers = count(1)
        self._attempt: _Attempt | None = None
        self._said = ""
        self.failure: HiCacheError | None = None  # why the last attempt to open a session came to nothing
        self.closed = False

    @property
    def memoryless(self) -> bool:
        """Whether it asks for others."""
        return self._registration.pool is None

    def try_now(self) -> None:
        """Forget the pause: the next call tries."""
        self._backoff.succeeded()

    def tries_needed(self) -> int:
        """2 if an attempt of an earlier call is under way: it may turn out to be with a daemon that is gone."""
        return 1 if self._attempt is None else 2

    async def close(self, deadline: float) -> None:
        """Say Goodbye and wait for its answer until `deadline`, then free the sockets. Idempotent.

        A session dropped without it hangs up and frees them too; a forked process leaves the parent's alone."""
        if self.closed:
            return
        self.closed = True
        if not self._sockets.ours:
            return
        self._drop_attempt()
        link = self.link
        if link is not None and self.alive(link):
            try:
                await self.ask(link, Goodbye(), (), deadline)
            except HiCacheError as error:
                _log.debug("goodbye was not answered: %s", str(error))
            self._lost(link, "closed")
        self._hang_up()

    async def ask(
        self,
        link: Link,
        message: ClientMessage,
        buffers: Sequence[Buffer],
        deadline: float,
        *,
        fence: Fence | None = None,
        sent: list[Pending] | None = None,
    ) -> Pending:
        """Send and wait for the first answer; the request as sent is put in `sent` too. Raises `HiCacheError`:
        the daemon's own, BUSY, TIMEOUT, TOO_LARGE, or UNKNOWN_SESSION when the session ended."""
        link.check_size(message, buffers)
        sent = [] if sent is None else sent

        def send() -> bool:
            pending = link.try_send(message, buffers, fence)
            if pending is not None:
                sent.append(pending)
            return pending is not None

        received = link.received
        if not await self.until(link, send, deadline):
            if link.dead:
                raise HiCacheError(ErrorCode.UNKNOWN_SESSION, link.dead)
            if link.received == received:
                link.silent += 1
                raise HiCacheError(ErrorCode.TIMEOUT, "no credit and no reply before the deadline")
            raise HiCacheError(ErrorCode.BUSY, "no credit came free before the deadline")
        pending = sent[0]
        try:
            await self.until(link, lambda: pending.reply is not None, deadline)
        finally:
            if pending.reply is None:  # deadline, end of session, or our caller was cancelled
                link.abandon(pending)
        match pending.reply:
            case None if link.dead:
                raise HiCacheError(ErrorCode.UNKNOWN_SESSION, link.dead)
            case None:
                link.silent += 1
                raise HiCacheError(ErrorCode.TIMEOUT, "no reply before the deadline")
            case Error() | Busy() | Refuse() as reply:
                raise error_of(reply)
        return pending

    async def until(self, link: Link, ready: Callable[[], bool], deadline: float) -> bool:
        """Pump the link until `ready`; False at the deadline or when the session has ended."""
        while True:
            if ready():
                return True
            link.drain()
            if ready():
                return True
            left = deadline - self.port.now()
            if link.dead or left <= 0:
                return False
            await self.port.wait(link, left)

    # ---- sessions ---------------------------------------------------------------------------------------

    def renounce(self, reason: str) -> None:
        """Nothing more is sent in the open session, and no attempt under way becomes one. Any thread, at once;
        whoever has the turn puts them away, or `put_away` does."""
        self._renounced = self._epoch
        attempt = self._attempt
        for link in (self.link, attempt.link if attempt is not None else None):
            if link is not None:
                link.dead = link.dead or reason

    async def put_away(self, deadline: float) -> None:
        """Hang up what was renounced, and forget the pause: the next call registers anew."""
        if not await self.port.enter_connect(deadline):
            return  # who connects sees it himself
        try:
            if self._attempt is not None and self._attempt.epoch <= self._renounced:
                self._drop_attempt()
            if self.link is not None:
                self.alive(self.link)
            self._backoff.succeeded()
        finally:
            self.port.leave_connect()

    def alive(self, link: Link) -> bool:
        """Drain; a link found dead is put away."""
        link.drain()
        if link.dead:
            self._lost(link, link.dead)
        return not link.dead

    def open_link(self) -> Link | None:
        """The session's link without opening one; None also in the pause after a timeout."""
        link = self.link
        if link is None or not self.alive(link):
            return None
        return None if link.silent and self._backoff.waiting(self.port.now()) else link

    async def connected(self, deadline: float) -> Link | None:
        """The session's link, opening one if it is time to; None: away, or not through by `deadline`."""
        if self.link is not None:
            link = self.open_link()
            if self.link is not None:
                return link
        if self.closed or self._backoff.waiting(self.port.now()):
            return None
        if not await self.port.enter_connect(deadline):
            return None
        try:
            if self.link is None and not self.closed and not self._backoff.waiting(self.port.now()):
                await self._connect(deadline)
            return self.link  # ours, or that of a coroutine which was faster
        finally:
            self.port.leave_connect()

    async def _connect(self, deadline: float) -> None:
        try:
            if self._attempt is not None and self._attempt.epoch <= self._renounced:
                self._drop_attempt()
            if self._attempt is None:
                self._attempt = self._attach()
            link = await self._advance(self._attempt, deadline)
        except (HiCacheError, OSError, zmq.ZMQError) as error:  # the last two: out of descriptors or memory
            self._drop_attempt()
            self.failure = error if isinstance(error, HiCacheError) else HiCacheError(ErrorCode.INTERNAL, str(error))
            code = self.failure.code
            self._backoff.failed(self.port.now())
            self._say(f"away {code}", logging.WARNING, "hicache is away, running uncached: %s", str(error))
            return
        if link is not None:
            self._attempt = None
            self.link = link
            self.failure = None
            self._stats.connects += 1
            if link.epoch <= self._renounced:
                link.dead = link.dead or "given up while it was opened"
            self._say("up", logging.INFO, "hicache session opened at %s", self._dir)

    def _attach(self) -> _Attempt:
        lifeline = self._sockets.lifeline = Lifeline(self._dir / LIFELINE_NAME)
        self._epoch += 1
        slots, pool = self._options.fence_slots, self._registration.pool
        try:
            # The backing before the descriptor: a pool that is severed in between is then seen to be.
            fences = FenceArea(slots, lifeline.over, None if pool is None else pool.backing)
        except BaseException:
            lifeline.close()
            raise
        attempt = _Attempt(lifeline, fences, self._epoch, self.port.now() + self._options.connect_timeout_s)
        self._attempt = attempt  # from here on it is dropped on failure
        if pool is None:
            lifeline.attach(Attach(self._instance, self._epoch, 0, 0), ())
        else:
            lifeline.attach(Attach(self._instance, self._epoch, pool.size_bytes, slots), (pool.fd, fences.fd))
        return attempt

    async def _advance(self, attempt: _Attempt, deadline: float) -> Link | None:
        """Carry an attempt on until `deadline`: its link when it is through, None if it needs more time.

        Raises `HiCacheError` when it has failed or is older than connect_timeout_s."""
        until = min(deadline, attempt.expires)
        while attempt.link is None:
            if attempt.epoch <= self._renounced:
                raise HiCacheError(ErrorCode.TIMEOUT, "the registration was given up")
            answer = attempt.lifeline.answer()
            if isinstance(answer, Attached):
                sock = open_dealer(self._sockets.context, self._dir / CONTROL_NAME)
                self._sockets.dealer = sock
                attempt.link = Link(sock, attempt.lifeline, attempt.fences, answer.boot, attempt.epoch)
                attempt.token = answer.token
                attempt.link.stats = self._stats
                attempt.link.leases = LeaseBook(self._lease_numbers)
                self.port.watch(attempt.link)
            elif isinstance(answer, Refuse):
                raise error_of(answer)
            elif self.port.now() >= until:
                self._check_age(attempt)
                return None
            else:
                await self.port.readable(attempt.lifeline.fd, until - self.port.now())
        link, hello = attempt.link, self._hello(attempt)

        def greeted() -> bool:
            if attempt.hello is None:
                attempt.hello = link.try_send(hello, ())
            return attempt.hello is not None and attempt.hello.reply is not None

        if not await self.until(link, greeted, until):
            if link.dead:
                raise HiCacheError(ErrorCode.TIMEOUT, link.dead)
            self._check_age(attempt)
            return None
        reply = attempt.hello.reply if attempt.hello else None
        if isinstance(reply, Welcome):
            link.limits = reply.limits
            return link
        if isinstance(reply, Error | Busy | Refuse):
            raise error_of(reply)
        raise HiCacheError(ErrorCode.MALFORMED, f"{type(reply).__name__} came as answer to Hello")

    def _hello(self, attempt: _Attempt) -> Hello:
        return Hello(
            versions=SUPPORTED,
            instance=self._instance,
            epoch=attempt.epoch,
            model=self._registration.model,
            layout=self._registration.layout,
            shard=self._registration.shard,
            tenant=self._options.tenant,
            credential=self._options.credential,
            engine=self._options.engine,
            group=self._options.group,
            token=attempt.token,
        )

    def _check_age(self, attempt: _Attempt) -> None:
        if self.port.now() >= attempt.expires:
            raise HiCacheError(ErrorCode.TIMEOUT, "the daemon did not finish the registration in time")

    def _drop_attempt(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        if attempt.link is not None:
            self.port.unwatch(attempt.link)
            attempt.link.close()
        attempt.lifeline.close()
        attempt.fences.close()

    def _lost(self, link: Link, reason: str) -> None:
        """Put a session away. Idempotent."""
        if self.link is not link:
            return
        self.link = None
        self._stats.losses += 1
        if not link.proven:  # lost again before it served: not at once once more
            self._backoff.failed(self.port.now())
        self.port.unwatch(link)
        link.close()
        level = logging.INFO if self.closed else logging.WARNING
        self._say("lost", level, "hicache session ended: %s", reason)

    def failed(self, link: Link, error: HiCacheError) -> None:
        """Count a request's failure; decide whether the session is still good."""
        if error.code == ErrorCode.TIMEOUT and not link.dead:
            self._stats.timeouts += 1
            self._backoff.failed(self.port.now())
            self._say("silent", logging.WARNING, "hicache does not answer, running uncached: %s", str(error))
            if link.silent >= SILENT_LIMIT:
                link.dead = f"{link.silent} requests in a row met their deadline"
        elif error.code == ErrorCode.BUSY:
            self._stats.busy += 1
        else:
            self._stats.errors += 1
            _log.debug("a request failed: %s", str(error))
        if link.dead:
            self._lost(link, link.dead)

    def succeeded(self) -> None:
        self._backoff.succeeded()
        self._say("up", logging.INFO, "hicache answers again")

    def _say(self, state: str, level: int, text: str, *args: object) -> None:
        """Log a change of state; the same state again is silent. Errors come as text: a handler that keeps its
        records would keep an exception's frames, and with them a dead session's descriptors."""
        if state != self._said:
            self._said = state
            _log.log(level, text, *args)

"""The client, written once: `sync.py` is generated from this file by tools/unasync.py.

Every call has a deadline, and every failure is a miss: the answer is then EMPTY, None, 0 or {}. It is counted
in `stats` and logged once per change of state. Only wrong arguments raise (`ValueError`).

The generated sync client may be used from several threads, which take turns; waits on a handle do not hold
the others up. The async one belongs to the loop it was first used on. Neither survives a fork: make the client
in the process that uses it.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hicache.base.errors import HiCacheError
from hicache.protocol.messages import (
    Accepted,
    ClientLimits,
    ClientMessage,
    DaemonMessage,
    Describe,
    Description,
    Done,
    Extend,
    Load,
    Lookup,
    Match,
    Prefetch,
    Renew,
    Scope,
    Store,
)
from hicache.protocol.wire import Buffer
from hicache.spec.layout import L1Layout
from hicache.spec.model import ModelSpec, ShardSpec
from hicache_client.buffers import int32s, int32s_per_group, natural
from hicache_client.fences import Fence
from hicache_client.handles import AsyncLoadHandle, AsyncStoreHandle
from hicache_client.leases import LeaseRef
from hicache_client.link import Link, Pending
from hicache_client.options import EMPTY, ClientOptions, ClientStats
from hicache_client.pool import SharedPool
from hicache_client.session import AsyncSession, Registration

CONNECT_PAUSE_S = 0.02

_log = logging.getLogger("hicache.client")
_NO_SCOPE = Scope()
_MakeTransfer = Callable[[Link, Fence], ClientMessage | None]


class AsyncClient:
    """An engine rank's connection to hicached. Making one does nothing yet; the first call connects."""

    def __init__(
        self, options: ClientOptions, model: ModelSpec, layout: L1Layout, shard: ShardSpec, pool: SharedPool | None
    ) -> None:
        """Without a pool it asks for other processes of its engine: `load`, `store` and the like are errors.

        Raises `ValueError` if the pool has another size than the layout says, `HiCacheError(BAD_SPEC)` never:
        the daemon checks the specs and refuses, which is logged."""
        if pool is not None and pool.size_bytes != layout.pool_bytes:
            raise ValueError(f"the pool has {pool.size_bytes} bytes, the layout says {layout.pool_bytes}")
        self.stats = ClientStats()
        self._options = options
        self._groups = len(model.groups)
        self._session = AsyncSession(options, Registration(model, layout, shard, pool), self.stats)
        self._port = self._session.port

    # ---- state ------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether a session is open, as far as known without asking."""
        link = self._session.link
        return link is not None and not link.gone()

    @property
    def boot_id(self) -> int:
        """The boot id of the daemon that holds our session, 0 if none does."""
        link = self._session.link
        return link.boot_id if link is not None else 0

    @property
    def limits(self) -> ClientLimits | None:
        """The daemon's bounds as its Welcome named them, None if no session is open."""
        link = self._session.link
        return link.limits if link is not None else None

    @property
    def failure(self) -> HiCacheError | None:
        """Why the last attempt to open a session came to nothing; None if it did not, or none was made."""
        return self._session.failure

    async def connect(self, wait_s: float | None = None) -> bool:
        """Open a session now, pause or not; whether one is open.

        Without `wait_s` this fails at once when nobody listens, and after connect_timeout_s when somebody does
        not answer. With it, it goes on trying for so long: for a daemon that is just being started. No other
        call needs this one first."""
        now = self._port.now()
        deadline = now + (self._options.connect_timeout_s if wait_s is None else wait_s)
        tries = self._session.tries_needed() if wait_s is None else sys.maxsize
        while tries > 0 and await self._port.enter(deadline):
            try:
                self._session.try_now()
                if await self._session.connected(deadline) is not None:
                    return True
            finally:
                self._port.leave()
            left = deadline - self._port.now()
            tries = 0 if left <= 0 or self._session.closed else tries - 1
            if tries:
                await self._port.sleep(min(left, CONNECT_PAUSE_S))
        return False

    async def poll(self) -> None:
        """Take the replies that have come: completions, credits, the end of the session. Does not wait."""
        if await self._port.enter(self._port.now()):
            try:
                if self._session.link is not None:
                    self._session.alive(self._session.link)
            finally:
                self._port.leave()

    async def reattach(self) -> None:
        """Drop the session at once, without a Goodbye; the next call registers anew, with the pool's memory as it
        is then: after `SharedPool.sever`. Of the old session nothing more is sent from here on. Its leases are
        gone, and its handles have failed and settle as after any hang-up."""
        self._session.renounce("the client registers anew")
        deadline = self._port.now() + self._options.connect_timeout_s
        if await self._port.enter(deadline):  # whoever has the turn is through soon: his session has ended too
            try:
                await self._session.put_away(deadline)
            finally:
                self._port.leave()

    async def close(self) -> None:
        """Say Goodbye, wait for its answer (at most request_timeout_s), free the sockets. Idempotent; the pool
        is the caller's. Calls after it are misses."""
        await self._port.enter(float("inf"))  # other threads' calls are bounded
        try:
            await self._session.close(self._port.now() + self._options.request_timeout_s)
        finally:
            self._port.leave()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # ---- leases of the engine's other processes ---------------------------------------------------------

    def export(self, lease: int) -> LeaseRef | None:
        """What a process of the same `ClientOptions.group` adopts; None if the lease is gone, as far as known.

        Any thread, without waiting for the turn; the same holds for `adopt` and `forget`."""
        link = self._session.link
        remote = None if link is None or link.gone() else link.leases.remote(lease)
        return None if link is None or remote is None else LeaseRef(link.boot_id, remote)

    def adopt(self, ref: LeaseRef) -> int:
        """A number for another process's lease, to load on, extend, renew or release; 0 if no session is open with
        the daemon that gave it. Whether the lease lives is seen when it is used. It stays its owner's: only
        `release` gives it back, a load that comes to nothing does not. Any thread."""
        link = self._session.link
        if link is None or link.gone() or link.boot_id != ref.boot_id:
            return 0
        return link.leases.number(ref.lease, adopted=True)

    def forget(self, leases: Sequence[int]) -> None:
        """Drop the numbers of adopted leases, which stay their owner's. Unknown ones are no error. Any thread."""
        link = self._session.link
        if link is not None:
            link.leases.forget(leases)

    # ---- verbs ------------------------------------------------------------------------------------------

    async def lookup(
        self,
        tokens: Buffer,
        limit_tokens: int,
        scope: Scope = _NO_SCOPE,
        *,
        lease: bool = True,
        partial: bool = False,
    ) -> Match:
        """How far is this prompt known? `tokens`: little-endian int32, any contiguous buffer.

        `Match.lease` is a number of this client's (valid until released, or the session ends). `partial`: also tell
        of a page of which only the first tokens are the prompt's. Failure: EMPTY.
        """
        view = int32s(tokens, "tokens")
        message = Lookup(view.nbytes // 4, natural(limit_tokens, "limit_tokens"), lease, scope, partial)
        answer = await self._request(lambda link: message, (view,), attempts=2)
        return self._matched(answer)

    async def extend(self, lease: int, tokens: Buffer, limit_tokens: int) -> Match:
        """Look further along a leased sequence: `tokens` follow those of the lease. Failure: EMPTY."""
        view = int32s(tokens, "tokens")
        limit = natural(limit_tokens, "limit_tokens")

        def make(link: Link) -> ClientMessage | None:
            remote = link.leases.remote(lease)
            return None if remote is None else Extend(remote, view.nbytes // 4, limit)

        return self._matched(await self._request(make, (view,)))

    async def prefetch(self, tokens: Buffer, scope: Scope = _NO_SCOPE) -> int:
        """Have what L3 holds of this prompt brought to L2. Pages that will move; failure: 0."""
        view = int32s(tokens, "tokens")
        answer = await self._request(lambda link: Prefetch(view.nbytes // 4, scope), (view,), attempts=2)
        return answer[1].pages if answer and isinstance(answer[1], Accepted | Done) else 0

    async def renew(self, leases: Sequence[int] = ()) -> int:
        """Keep these leases; none: a heartbeat. How many are still held; failure: 0."""

        def make(link: Link) -> ClientMessage | None:
            remote = (link.leases.remote(lease) for lease in leases)
            known = tuple(lease for lease in remote if lease is not None)
            return Renew(known) if known or not leases else None

        answer = await self._request(make, ())
        return answer[1].count if answer and isinstance(answer[1], Done) else 0

    async def release(self, leases: Sequence[int]) -> None:
        """Give leases back; does not wait for the answer. Unknown and released ones are no error."""
        if await self._port.enter(self._port.now() + self._options.request_timeout_s):
            try:
                if self._session.link is not None and self._session.alive(self._session.link):
                    self._give_back(self._session.link, leases)
            finally:
                self._port.leave()

    async def describe(self, what: str = "status") -> dict[str, Any]:
        """The daemon's state as plain data, `schema_version` first. Failure: {}."""
        message = msgspec.convert({"t": "describe", "what": what}, Describe)
        answer = await self._request(lambda link: message, (), attempts=2)
        if not answer or not isinstance(answer[1], Description):
            return {}
        try:
            return msgspec.msgpack.decode(answer[1].data, type=dict[str, Any])
        except msgspec.DecodeError as error:
            _log.debug("the description is not a map: %s", str(error))
            return {}

    async def load(self, lease: int, first_page: int, blocks: Sequence[Buffer]) -> AsyncLoadHandle | None:
        """Copy leased pages from `first_page` on into L1: per cache group the int32 starts they go to.

        None: nothing was or will be written, and the lease has been given back, unless it was adopted: that one
        stays its owner's. A handle that has `failed` but is not yet `settled` (the daemon did not answer in time,
        but may have begun): the target blocks may still be written; keep them from other sequences until it is.
        So do not cancel this call (or shield it).
        """
        views = self._columns(blocks)
        page = natural(first_page, "first_page")
        begun = await self._transfer(self._load_message(lease, page, views), views, lease)
        return None if begun is None else AsyncLoadHandle(self._port, *begun, self._transfer_end())

    async def store(
        self, tokens: Buffer, first_page: int, blocks: Sequence[Buffer], scope: Scope = _NO_SCOPE
    ) -> AsyncStoreHandle | None:
        """Offer pages `first_page …` for the cache. `tokens`: all from position 0 to the end of the last page.

        None: nothing is or will be read. Else, also when it `failed` (the daemon did not answer in time, but may
        have begun), the source blocks must stay untouched until the handle is `settled`. So do not cancel this
        call (or shield it): the handle would be lost while the daemon may read on.
        """
        view = int32s(tokens, "tokens")
        views = self._columns(blocks)
        page = natural(first_page, "first_page")
        begun = await self._transfer(self._store_message(view, page, views, scope), (view, *views), 0)
        return None if begun is None else AsyncStoreHandle(self._port, *begun, self._transfer_end())

    # ---- transfers that never wait ----------------------------------------------------------------------

    async def begin_load(self, lease: int, first_page: int, blocks: Sequence[Buffer]) -> AsyncLoadHandle | None:
        """As `load`, without waiting for the daemon's first answer, and without ever connecting.

        None at once: not sent, and nothing was or will be written. No session is open, the daemon is silent, no
        credit or fence slot is free, or another thread has the turn. The lease stays the caller's in every
        case. If the daemon refuses, the handle becomes `failed` and `settled` as soon as replies are taken."""
        views = self._columns(blocks)
        page = natural(first_page, "first_page")
        begun = await self._begin(self._load_message(lease, page, views), views)
        return None if begun is None else AsyncLoadHandle(self._port, *begun, self._transfer_end())

    async def offer(
        self, tokens: Buffer, first_page: int, blocks: Sequence[Buffer], scope: Scope = _NO_SCOPE
    ) -> AsyncStoreHandle | None:
        """As `store`, without waiting for the daemon's first answer, and without ever connecting.

        None at once: not sent, and nothing is or will be read; for the reasons of `begin_load`. Else the source
        blocks must stay untouched until the handle is `settled`."""
        view = int32s(tokens, "tokens")
        views = self._columns(blocks)
        page = natural(first_page, "first_page")
        begun = await self._begin(self._store_message(view, page, views, scope), (view, *views))
        return None if begun is None else AsyncStoreHandle(self._port, *begun, self._transfer_end())

    # ---- requests ---------------------------------------------------------------------------------------

    async def _request(
        self, make: Callable[[Link], ClientMessage | None], buffers: Sequence[Buffer], attempts: int = 1
    ) -> tuple[Link, DaemonMessage] | None:
        """Ask and return the first answer that is no Error and not Busy, else None.

        `make` builds the message for a session, None if that one cannot serve it. `attempts` 2: the request may
        be sent again on a new session when the first ends under it."""
        self.stats.requests += 1
        deadline = self._port.now() + self._options.request_timeout_s
        if not await self._port.enter(deadline):
            self.stats.busy += 1
            return None
        try:
            for _ in range(attempts):
                link = await self._session.connected(deadline)
                if link is None:
                    self.stats.bypassed += 1
                    return None
                message = make(link)
                if message is None:
                    self.stats.errors += 1
                    return None
                try:
                    pending = await self._session.ask(link, message, buffers, deadline)
                except HiCacheError as error:
                    self._session.failed(link, error)
                    if not link.dead:
                        return None
                else:
                    self._session.succeeded()
                    return None if pending.reply is None else (link, pending.reply)
            return None
        finally:
            self._port.leave()

    async def _transfer(
        self,
        make: _MakeTransfer,
        buffers: Sequence[Buffer],
        lease: int,
    ) -> tuple[Link, Pending, Fence] | None:
        """Begin a Load (on `lease`) or a Store (0). None: it did not and will not begin, and the lease is
        back, unless it is another process's; an unanswered request is returned with its `pending` abandoned."""
        self.stats.requests += 1
        deadline = self._port.now() + self._options.request_timeout_s
        if not await self._port.enter(deadline):
            self.stats.busy += 1
            return None
        try:
            link = await self._session.connected(deadline)
            if link is None:
                self.stats.bypassed += 1
                return None
            fence = link.fences.acquire()
            if fence is None:
                self.stats.busy += 1
                self._give_back(link, link.leases.own((lease,)))
                return None
            begun: Pending | None = None
            try:
                begun = await self._begin_transfer(link, fence, make(link, fence), buffers, deadline)
            finally:
                if begun is None or begun.abandoned:
                    self._give_back(link, link.leases.own((lease,)))
            return None if begun is None else (link, begun, fence)
        finally:
            self._port.leave()

    async def _begin_transfer(
        self,
        link: Link,
        fence: Fence,
        message: ClientMessage | None,
        buffers: Sequence[Buffer],
        deadline: float,
    ) -> Pending | None:
        sent: list[Pending] = []
        try:
            if message is None:  # a lease of another session
                self.stats.errors += 1
                return None
            pending = await self._session.ask(link, message, buffers, deadline, fence=fence, sent=sent)
        except HiCacheError as error:
            self._session.failed(link, error)
            return sent[0] if sent and sent[0].abandoned and not fence.settled else None
        finally:
            if not sent:  # the daemon has never heard of this slot
                fence.reject()
        self._session.succeeded()
        return pending

    async def _begin(self, make: _MakeTransfer, buffers: Sequence[Buffer]) -> tuple[Link, Pending, Fence] | None:
        """Send a Load or a Store in the open session, now or not at all."""
        self.stats.requests += 1
        if not await self._port.enter(self._port.now()):
            self.stats.busy += 1
            return None
        try:
            link = self._session.open_link()
            if link is None:
                self.stats.bypassed += 1
                return None
            fence = link.fences.acquire() if link.has_credit() else None
            if fence is None:
                self.stats.busy += 1
                return None
            pending: Pending | None = None
            try:
                pending = self._send_now(link, fence, make(link, fence), buffers)
            except HiCacheError as error:
                self._session.failed(link, error)
            finally:
                if pending is None:
                    fence.reject()
            return None if pending is None else (link, pending, fence)
        finally:
            self._port.leave()

    def _send_now(
        self, link: Link, fence: Fence, message: ClientMessage | None, buffers: Sequence[Buffer]
    ) -> Pending | None:
        if message is None:  # a lease of another session
            self.stats.errors += 1
            return None
        link.check_size(message, buffers)
        pending = link.try_send(message, buffers, fence)
        if pending is None:
            self.stats.busy += 1
        else:
            pending.unwatched = True
        return pending

    @staticmethod
    def _load_message(lease: int, page: int, views: Sequence[memoryview]) -> _MakeTransfer:
        counts = tuple(view.nbytes // 4 for view in views)

        def make(link: Link, fence: Fence) -> ClientMessage | None:
            remote = link.leases.remote(lease)
            return None if remote is None else Load(remote, page, counts, fence.slot, fence.generation)

        return make

    @staticmethod
    def _store_message(tokens: memoryview, page: int, views: Sequence[memoryview], scope: Scope) -> _MakeTransfer:
        counts = tuple(view.nbytes // 4 for view in views)

        def make(link: Link, fence: Fence) -> ClientMessage:
            return Store(tokens.nbytes // 4, page, counts, fence.slot, fence.generation, scope)

        return make

    def _columns(self, blocks: Sequence[Buffer]) -> tuple[memoryview, ...]:
        if self._session.memoryless:
            raise ValueError("this client has no pool: load and store in the process that has one")
        return int32s_per_group(blocks, self._groups)

    def _transfer_end(self) -> float:
        return self._port.now() + self._options.load_timeout_s

    def _matched(self, answer: tuple[Link, DaemonMessage] | None) -> Match:
        """The Match with its lease under a number of ours: the daemon's mean something in one session only,
        and an old number must never name another session's lease."""
        if answer is None:
            return EMPTY
        link, match = answer
        if not isinstance(match, Match):
            return EMPTY
        if not match.lease:
            return match
        return msgspec.structs.replace(match, lease=link.leases.number(match.lease))

    @staticmethod
    def _give_back(link: Link, leases: Sequence[int]) -> None:
        remote = link.leases.forget(leases)
        if remote and not link.dead:
            link.give_back(remote)

"""A session with a daemon as vLLM's lookups see it, without a daemon."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from hicache.protocol.messages import ClientLimits, Match, Scope
from hicache_client.leases import LeaseRef
from hicache_client.options import EMPTY, ClientStats
from hicache_client.testing import LIMITS
from tests.unit.client_world import MODEL

P = MODEL.prefix_granularity


class FakeClient:
    """A daemon's session: it counts its leases, and answers as `answer` says, after `delay()` seconds."""

    def __init__(self, answer: Callable[[], Match], delay: Callable[[], float] = lambda: 0.0) -> None:
        self.answer, self.delay = answer, delay
        self.stats = ClientStats()
        self.limits: ClientLimits | None = LIMITS
        self.up = True
        self.open = False
        self.held: set[int] = set()
        self.released = 0
        self.releases = 0
        self.renewed: list[tuple[int, ...]] = []
        self.prefetched: list[bytes] = []
        self.lookups = 0
        self.closed = False
        self._leases = 0

    @property
    def connected(self) -> bool:
        return self.open and self.up

    async def connect(self) -> bool:
        await asyncio.sleep(0)
        if self.up and not self.open:
            self.open = True
            self.stats.connects += 1
        return self.connected

    def lose(self) -> None:
        """The daemon is killed: its leases are gone with it."""
        self.up = self.open = False
        self.held.clear()

    async def lookup(
        self, tokens: bytes, limit_tokens: int, scope: Scope, *, lease: bool = True, partial: bool = False
    ) -> Match:
        self.lookups += 1
        session = self.stats.connects
        await asyncio.sleep(self.delay())
        match = self.answer()
        if not self.connected or session != self.stats.connects or match is EMPTY:
            return EMPTY
        if not lease or not match.resumable_tokens:
            return msgspec.structs.replace(match, lease=0)
        self._leases += 1
        self.held.add(self._leases)
        return msgspec.structs.replace(match, lease=self._leases)

    async def prefetch(self, tokens: bytes, scope: Scope) -> int:
        self.prefetched.append(tokens)
        return len(tokens) // 4 // P

    async def renew(self, leases: Sequence[int]) -> int:
        self.renewed.append(tuple(leases))
        return len(self.held.intersection(leases))

    async def release(self, leases: Sequence[int]) -> None:
        self.releases += 1
        self.released += len(leases)
        self.held.difference_update(leases)

    def export(self, lease: int) -> LeaseRef | None:
        return LeaseRef(7, lease) if lease in self.held else None

    async def close(self) -> None:
        self.closed = True
        self.held.clear()

"""A simulated engine: prompts that share prefixes, an L1 pool of its own, and bad manners."""

from dataclasses import dataclass, field
from random import Random

import numpy as np

from hicache.base.ids import LeaseId, RequestId, SessionId
from hicache.core.events import (
    Event,
    ExtendAsked,
    LoadAsked,
    LookupAsked,
    PrefetchAsked,
    ReleaseAsked,
    RenewAsked,
    SessionOpened,
    StoreAsked,
)
from hicache.protocol.messages import Done, Error, Match, Scope
from tests.sim.backend import Memory
from tests.sim.contents import L1_STARTS, SimFailure, SimModel, Truth, int32s, page_content

SCOPES = (Scope(), Scope(salt="x"), Scope(lora="y"))


@dataclass
class HeldLease:
    id: int
    tokens: bytes  # those of its resumable pages
    scope: Scope
    model: SimModel
    owner: SessionId


@dataclass
class Transfer:
    """A load or store whose end the client waits for. `places` must not be touched meanwhile."""

    kind: str
    generation: int
    starts: list[list[int]]
    tokens: bytes = b""
    scope: Scope = field(default_factory=Scope)
    first_page: int = 0


@dataclass
class Asked:
    """A request that has not been answered for good."""

    event: Event
    accepted: bool = False
    transfer: Transfer | None = None


@dataclass
class SimClient:
    """One incarnation of one engine, or of one of an engine's processes: those of a group have one list of leases.

    Without a pool it asks for the others, and can neither load nor store."""

    rng: Random
    memory: Memory
    truth: Truth
    model: SimModel
    tenant: str
    session: SessionId
    instance: bytes
    epoch: int
    prompts: list[bytes]
    leases: list[HeldLease] = field(default_factory=list)
    group: bytes = b""
    pool: bool = True
    open: bool = False
    next_request: int = 1
    requests: dict[int, Asked] = field(default_factory=dict)
    busy: dict[int, set[int]] = field(default_factory=dict)  # group -> L1 starts in transfers
    ended: set[int] = field(default_factory=set)  # generations of transfers that were accepted and answered

    # ---- what it says -------------------------------------------------------------------------------

    def hello(self) -> SessionOpened:
        event = SessionOpened(
            self.session,
            self._request(),
            self.instance,
            self.epoch,
            self.tenant,
            self.model.spec,
            self.model.layout,
            self.model.shard,
            self.group,
            self.pool,
        )
        self.requests[event.request] = Asked(event)
        return event

    def say_something(self) -> Event | None:
        kinds = ("lookup", "load", "store", "extend", "prefetch", "renew", "release")
        kind = self.rng.choices(kinds, (5, 6 * self.pool, 5 * self.pool, 2, 1, 1, 2))[0]
        event: Event | None = getattr(self, f"_{kind}")()
        return event

    def _request(self) -> RequestId:
        self.next_request += 1
        return RequestId(self.next_request - 1)

    def _ask(self, event: Event, transfer: Transfer | None = None) -> Event:
        self.requests[event.request] = Asked(event, transfer=transfer)  # type: ignore[union-attr]
        return event

    def _prompt(self) -> tuple[bytes, Scope]:
        prompt = self.rng.choice(self.prompts)
        cut = self.rng.randint(0, len(prompt) // 4)
        whole = self.rng.random() < 0.5
        return (prompt if whole else prompt[: cut * 4]), self.rng.choices(SCOPES, (12, 2, 1))[0]

    def _lookup(self) -> Event:
        tokens, scope = self._prompt()
        limit = self.rng.choice((1 << 30, len(tokens) // 4, self.rng.randint(-3, 40)))
        return self._ask(LookupAsked(self.session, self._request(), tokens, limit, self.rng.random() < 0.8, scope))

    def _usable(self) -> list[HeldLease]:
        """Those of its own shard; the engine's other shards have theirs."""
        return [lease for lease in self.leases if lease.model is self.model]

    def _extend(self) -> Event | None:
        usable = self._usable()
        if not usable:
            return None
        lease = self.rng.choice(usable)
        longer = [p for p in self.prompts if p.startswith(lease.tokens)]
        more = self.rng.choice(longer)[len(lease.tokens) :] if longer else b""
        return self._ask(ExtendAsked(self.session, self._request(), LeaseId(lease.id), more, 1 << 30))

    def _prefetch(self) -> Event:
        tokens, scope = self._prompt()
        return self._ask(PrefetchAsked(self.session, self._request(), tokens, scope))

    def _renew(self) -> Event:
        ids = tuple(LeaseId(lease.id) for lease in self.leases if self.rng.random() < 0.7)
        return self._ask(RenewAsked(self.session, self._request(), ids))

    def _release(self) -> Event | None:
        if not self.leases:
            return None
        lease = self.leases.pop(self.rng.randrange(len(self.leases)))
        ids = (LeaseId(lease.id),) * self.rng.choice((1, 1, 2))
        return self._ask(ReleaseAsked(self.session, self._request(), ids))

    def _load(self) -> Event | None:
        usable = self._usable()
        if not usable:
            return None
        lease = self.rng.choice(usable)
        pages = len(lease.tokens) // 4 // self.model.spec.prefix_granularity
        first = self.rng.choice((0, 0, self.rng.randint(0, pages)))
        count = self.rng.choice((pages - first, self.rng.randint(0, pages - first)))
        starts = self._take_starts(count)
        if starts is None:
            return None
        request = self._request()
        transfer = Transfer("load", int(request), starts, lease.tokens, lease.scope, first)
        blocks = tuple(int32s(each) for each in starts)
        return self._ask(
            LoadAsked(self.session, request, LeaseId(lease.id), first, blocks, 0, int(request)), transfer
        )

    def _store(self) -> Event | None:
        tokens, scope = self._prompt()
        size = self.model.spec.prefix_granularity * 4
        pages = len(tokens) // size
        tokens = tokens[: pages * size]
        first = self.rng.choice((0, 0, 0, self.rng.randint(0, pages)))
        starts = self._take_starts(pages - first)
        if starts is None:
            return None
        namespace = self.truth.namespace(self.model, self.tenant, scope)
        self.truth.learn(self.model, namespace, tokens)
        for page in range(first, pages):  # the prefill that computed these pages
            for g, group in enumerate(self.model.shape.groups):
                content = page_content(namespace, group.name, tokens[: (page + 1) * size], group.starts)
                for place, what in enumerate(content):
                    start = starts[g][(page - first) * group.starts + place]
                    self.memory.l1[(self.session, g, start)] = what
        request = self._request()
        transfer = Transfer("store", int(request), starts, tokens, scope, first)
        blocks = tuple(int32s(each) for each in starts)
        return self._ask(StoreAsked(self.session, request, tokens, first, blocks, 0, int(request), scope), transfer)

    def _take_starts(self, pages: int) -> list[list[int]] | None:
        taken = []
        for g, group in enumerate(self.model.shape.groups):
            free = [s for s in range(L1_STARTS) if s not in self.busy.get(g, ())]
            if len(free) < pages * group.starts:
                return None
            taken.append(self.rng.sample(free, pages * group.starts))
        for g, starts in enumerate(taken):
            self.busy.setdefault(g, set()).update(starts)
        return taken

    # ---- what it hears ------------------------------------------------------------------------------

    def hear(self, request: int, message: object) -> None:
        asked = self.requests.get(request)
        if asked is None:
            raise SimFailure(f"request {request} was answered twice or never asked: {message}")
        if type(message).__name__ == "Accepted":
            if asked.accepted or (asked.transfer is None and not isinstance(asked.event, PrefetchAsked)):
                raise SimFailure(f"Accepted out of turn for {asked.event}")
            asked.accepted = True
            return
        del self.requests[request]
        if isinstance(message, Match):
            self._matched(asked.event, message)
        if asked.transfer is not None:
            self._ended(asked, message)

    def _matched(self, event: Event, match: Match) -> None:
        size = self.model.spec.prefix_granularity
        if match.resumable_tokens % size or match.l2_tokens + match.l3_tokens != match.resumable_tokens:
            raise SimFailure(f"a match that does not add up: {match}")
        if isinstance(event, ExtendAsked):
            lease = next((each for each in self.leases if each.id == event.lease), None)
            if lease is not None:
                lease.tokens = (lease.tokens + event.tokens)[: match.resumable_tokens * 4]
                self._were_stored(lease.tokens, lease.scope)
            return
        assert isinstance(event, LookupAsked)
        if match.resumable_tokens > max(0, min(event.limit_tokens, len(event.tokens) // 4)):
            raise SimFailure(f"more than asked for: {match} for {event}")
        tokens = event.tokens[: match.resumable_tokens * 4]
        self._were_stored(tokens, event.scope)
        if (match.lease != 0) != (event.lease and match.resumable_tokens > 0):
            raise SimFailure(f"lease and match disagree: {match} for {event}")
        if match.lease and self.rng.random() < 0.9:  # some answers get lost: those leases must expire
            self.leases.append(HeldLease(match.lease, tokens, event.scope, self.model, self.session))

    def _were_stored(self, tokens: bytes, scope: Scope) -> None:
        namespace = self.truth.namespace(self.model, self.tenant, scope)
        for key in self.truth.learn(self.model, namespace, tokens):
            if key not in self.truth.stored:
                raise SimFailure("a match names a page that nobody ever stored in this namespace")

    def _ended(self, asked: Asked, message: object) -> None:
        transfer = asked.transfer
        assert transfer is not None
        if isinstance(message, Done) and not asked.accepted:
            raise SimFailure(f"Done without Accepted: {asked.event}")
        if isinstance(message, Done) and transfer.kind == "load":
            self._check_loaded(transfer)
        if isinstance(message, Error) and message.code == "unknown_lease":
            self.leases[:] = [lease for lease in self.leases if lease.id != asked.event.lease]  # type: ignore[union-attr]
        if asked.accepted:
            self.ended.add(transfer.generation)
        for g, starts in enumerate(transfer.starts):
            self.busy[g].difference_update(starts)
            for start in starts:  # the engine goes on to use these blocks at once
                self.memory.l1[(self.session, g, start)] = (b"", "reused", b"", self.rng.randrange(1 << 30))

    def _check_loaded(self, transfer: Transfer) -> None:
        namespace = self.truth.namespace(self.model, self.tenant, transfer.scope)
        size = self.model.spec.prefix_granularity * 4
        for g, group in enumerate(self.model.shape.groups):
            for at, start in enumerate(transfer.starts[g]):
                page = transfer.first_page + at // group.starts
                prefix = transfer.tokens[: (page + 1) * size]
                right = (namespace, group.name, prefix, at % group.starts)
                got = self.memory.l1.get((self.session, g, start))
                if got != right:
                    raise SimFailure(f"wrong KV: page {page} of group {group.name} holds {got}, not {right}")

    def malformed(self, others: "list[SimClient]") -> Event:
        """A request that must be refused and must change nothing."""
        kind = self.rng.randrange(8)
        if not self.pool and self.rng.random() < 0.5:
            return self._move_without_memory()
        request = self._request()
        groups = self.model.shape.groups
        bad = self.rng.choice((-1, L1_STARTS, 1 << 30, -(1 << 31)))
        one = [[0] * group.starts for group in groups]
        page = self.model.spec.prefix_granularity * 4
        foreign = [lease.id for other in others if other.leases is not self.leases for lease in other.leases]
        foreign += [lease.id for lease in self.leases if lease.model is not self.model]
        mine = self.leases[0].id if self.leases else 1 << 40
        lease = LeaseId(self.rng.choice(foreign[-4:]) if foreign else 1 << 40)
        session = self.session
        if kind == 0:  # a start outside of the layout
            one[self.rng.randrange(len(one))][0] = bad
        if kind in (0, 1):
            blocks = tuple(int32s(each) for each in one)
            few, many = blocks[:-1], (*blocks[:-1], np.append(blocks[-1], np.int32(0)))
            if self.rng.random() < 0.5:
                blocks = blocks if kind == 0 else self.rng.choice((few, many))
                return StoreAsked(session, request, self.prompts[0][:page], 0, blocks, 0, 1 << 40, Scope())
            return LoadAsked(session, request, LeaseId(mine), 0, blocks if kind == 0 else few, 0, 1 << 40)
        if kind == 2:
            return LoadAsked(session, request, lease, 0, tuple(int32s(each) for each in one), 0, 1 << 40)
        if kind == 3:
            return ExtendAsked(session, request, lease, b"", 1 << 30)
        if kind == 4:
            return LookupAsked(session, request, b"abc", 3, True, Scope())
        if kind == 5:
            return StoreAsked(session, request, b"\0" * page, self.rng.choice((-1, 5)), (), 0, 1 << 40, Scope())
        if kind == 6:
            return LookupAsked(SessionId(1 << 30), request, b"", 0, True, Scope())
        scope = Scope(multimodal=((1 << 70, b"x"),))
        return LookupAsked(session, request, b"\0" * page, 9, True, scope)

    def _move_without_memory(self) -> Event:
        request, size = self._request(), self.model.spec.prefix_granularity * 4
        blocks = tuple(int32s(range(group.starts)) for group in self.model.shape.groups)
        usable = [lease for lease in self._usable() if lease.tokens]
        if usable and self.rng.random() < 0.7:
            lease = LeaseId(self.rng.choice(usable).id)
            return LoadAsked(self.session, request, lease, 0, blocks, 0, 1 << 40)
        prompt = self.rng.choice(self.prompts)[:size]
        return StoreAsked(self.session, request, prompt, 0, blocks, 0, 1 << 40, Scope())

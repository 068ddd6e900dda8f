"""Sessions: one incarnation of one client, the shape of its model, and what it owns.

SessionOpened ─► ACTIVE ◄── any message ──► SUSPECT (silent for long)
                    └──────── SessionClosed, or a larger epoch ────────┐
                                                                       ▼
                 CLOSING (copies still touch its memory) ── last CopyEnded ──► gone: DropSession
"""

import hashlib
from dataclasses import dataclass, field

import msgspec

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.ids import DIGEST_BYTES, Fingerprint, LeaseId, NamespaceId, SessionId, TicketId
from hicache.core.events import SessionOpened
from hicache.keys.chain import KeyChain
from hicache.keys.namespace import namespace_id
from hicache.protocol.messages import Scope
from hicache.spec.layout import L1Layout
from hicache.spec.model import ModelSpec, ShardSpec

ACTIVE, SUSPECT, CLOSING = "ACTIVE", "SUSPECT", "CLOSING"
_SCOPES = 64  # namespace ids remembered per session


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One cache group of a page. `starts` engine blocks of `start_bytes` make up the page's L2 block."""

    name: str
    starts: int
    start_bytes: int
    l1_starts: int  # valid L1 starts are 0 … l1_starts - 1

    @property
    def block_bytes(self) -> int:
        return self.starts * self.start_bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """What the pages of a namespace look like. `fingerprint` covers model, layout and shard."""

    page_tokens: int
    groups: tuple[GroupShape, ...]
    fingerprint: bytes
    chain: KeyChain

    @property
    def page_bytes(self) -> int:
        """L2 bytes of one page, all groups."""
        return sum(group.block_bytes for group in self.groups)


def shape_of(model: ModelSpec, layout: L1Layout, shard: ShardSpec, secret: bytes) -> Shape:
    """Raises `HiCacheError(UNSUPPORTED)` for a group whose block is longer than a page."""
    groups = []
    for spec, place in zip(model.groups, layout.groups, strict=True):
        if model.prefix_granularity % spec.block_tokens:
            raise HiCacheError(
                ErrorCode.UNSUPPORTED,
                f"group {spec.name!r}: block_tokens {spec.block_tokens} must divide prefix_granularity "
                f"{model.prefix_granularity}",
                "raise prefix_granularity to a multiple of every group's block_tokens",
            )
        starts = model.prefix_granularity // spec.block_tokens
        groups.append(GroupShape(spec.name, starts, spec.block_bytes(), place.blocks))
    parts = (model.fingerprint(), layout.fingerprint(), msgspec.json.encode(shard, order="deterministic"))
    digest = hashlib.blake2b(b"".join(parts), digest_size=DIGEST_BYTES, person=b"hicache-record").digest()
    return Shape(model.prefix_granularity, tuple(groups), digest, KeyChain(secret, model.prefix_granularity))


@dataclass(slots=True)
class Session:
    """What one client is and owns. Closed by sessions' handlers in opening.py."""

    id: SessionId
    instance: bytes
    epoch: int
    tenant: str
    model: ModelSpec
    shard: ShardSpec
    shape: Shape
    layout_fingerprint: Fingerprint
    secret: bytes = field(repr=False)
    group: bytes = b""
    memory: bool = True
    heard_s: float = 0.0
    state: str = ACTIVE
    reason: str = ""
    leases: set[LeaseId] = field(default_factory=set)
    tickets: set[TicketId] = field(default_factory=set)
    _namespaces: dict[Scope, NamespaceId] = field(default_factory=dict)

    def same_engine(self, other: "Session") -> bool:
        """Whether the two may use each other's leases."""
        return self is other or (bool(self.group) and (self.group, self.tenant) == (other.group, other.tenant))

    def need_memory(self) -> None:
        """Raises `HiCacheError(BAD_SPEC)` if there is no L1 of this session to copy from or to."""
        if not self.memory:
            raise HiCacheError(
                ErrorCode.BAD_SPEC,
                "this session attached no memory: it cannot load or store",
                "load and store in the session of the process that has the pool",
            )

    def namespace_of(self, scope: Scope) -> NamespaceId:
        """Raises `HiCacheError(MALFORMED)` for a scope that cannot be encoded."""
        found = self._namespaces.get(scope)
        if found is None:
            try:
                found = namespace_id(
                    self.secret, self.tenant, self.model, self.layout_fingerprint, shard=self.shard, scope=scope
                )
            except (ValueError, OverflowError) as error:
                raise HiCacheError(ErrorCode.MALFORMED, f"scope: {error}") from error
            if len(self._namespaces) >= _SCOPES:
                self._namespaces.clear()
            self._namespaces[scope] = found
        return found


def open_session(event: SessionOpened, secret: bytes) -> Session:
    """Build a session from its Hello. Raises `HiCacheError` when model or layout do not add up."""
    return Session(
        id=event.session,
        instance=event.instance,
        epoch=event.epoch,
        tenant=event.tenant,
        model=event.model,
        shard=event.shard,
        shape=shape_of(event.model, event.layout, event.shard, secret),
        layout_fingerprint=event.layout.fingerprint(),
        secret=secret,
        group=event.group,
        memory=event.memory,
    )

"""Everything that `CacheState` owns, and the few acts that every handler needs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hicache.base.errors import ErrorCode, HiCacheError, LawBroken
from hicache.base.ids import LeaseId, PageKey, RequestId, SessionId
from hicache.base.limits import Limits
from hicache.core.commands import Command, Reply, TouchRecords
from hicache.core.counters import Counters
from hicache.core.leases import Lease, Leases
from hicache.core.leaves import Leaves
from hicache.core.namespaces import Namespace, Namespaces
from hicache.core.residency import READY, Int32s, Residency
from hicache.core.sessions import ACTIVE, CLOSING, Session, Shape
from hicache.core.story import Story
from hicache.core.transfers import Tickets
from hicache.policy.evict.base import Evictor
from hicache.policy.evict.lru import Lru
from hicache.pool.blocks import Pool
from hicache.pool.refs import BlockRefs
from hicache.pool.views import PoolView
from hicache.protocol.messages import Busy, Done, Error

BUSY_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Announced:
    """Whose pages routers are told of. `model` None: every model's."""

    tenants: frozenset[str]
    model: str | None = None


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """What the state machine is told at start. `parent_bytes` None: chosen when the first model registers."""

    arena_bytes: int
    parent_bytes: int | None = None
    l3_mode: str = "off"  # off | rw | ro
    l3_capacity_bytes: int = 0  # allocated bytes
    write_policy: str = "write_through"  # write_through | write_back | none
    features: tuple[str, ...] = ()
    announced: Announced | None = None  # None: nobody is told anything


@dataclass(slots=True)
class Disk:
    """What is known of L3 as a whole. `used_bytes` leaves out pages whose deletion has been ordered."""

    mode: str
    capacity_bytes: int
    reason: str = ""
    used_bytes: int = 0
    bound_bytes: int = 0  # used_bytes never exceeds this: the capacity, or what was found above it
    owed: list[tuple[PageKey, str]] = field(default_factory=list)  # records to delete once writes are taken again


@dataclass(slots=True)
class World:
    """The tables. Handlers are functions over it; each appends its commands to `out`."""

    config: CoreConfig
    limits: Limits
    secret: bytes = field(repr=False)
    pool: Pool
    disk: Disk
    write_policy: str
    residency: Residency = field(default_factory=Residency)
    namespaces: Namespaces = field(default_factory=Namespaces)
    sessions: dict[SessionId, Session] = field(default_factory=dict)
    leases: Leases = field(default_factory=Leases)
    tickets: Tickets = field(default_factory=Tickets)
    evict_l2: Evictor = field(default_factory=Lru)
    evict_l3: Evictor = field(default_factory=Lru)
    counters: Counters = field(default_factory=Counters)
    story: Story = field(default_factory=Story)
    draining: bool = False
    now_s: float = 0.0
    out: list[Command] = field(default_factory=list)
    maybe_dead: list[Int32s] = field(default_factory=list)  # rows that lost a tier or a pin in this event
    surveys: list[npt.NDArray[np.uint8]] = field(default_factory=list)  # of each that is read: told of since, by row
    withheld: dict[int, set[int]] = field(
        default_factory=dict
    )  # row -> rows below, told of once it is; see announce.py

    # ---- answers ------------------------------------------------------------------------------------

    def reply(self, session: SessionId, request: RequestId, message: Done | Error | Busy) -> None:
        """Answer unless the session is gone."""
        found = self.sessions.get(session)
        if found is not None and found.state != CLOSING:
            self.out.append(Reply(session, request, message))

    def fail(self, session: SessionId, request: RequestId, error: HiCacheError) -> None:
        self.reply(session, request, Error(error.code.value, error.message, error.remedy))

    def busy(self, session: SessionId, request: RequestId, reason: str) -> None:
        self.reply(session, request, Busy(BUSY_RETRY_S, reason))

    def client(self, id: SessionId) -> Session:
        """The open session `id`, heard from just now. Raises `HiCacheError(UNKNOWN_SESSION)`."""
        session = self.sessions.get(id)
        if session is None or session.state == CLOSING:
            raise HiCacheError(ErrorCode.UNKNOWN_SESSION, f"session {id} is not open", "say Hello again")
        session.heard_s = self.now_s
        session.state = ACTIVE
        return session

    def worker(self, id: SessionId) -> Session:
        """As `client`, for requests that begin new work. Raises `HiCacheError(DRAINING)` as well."""
        session = self.client(id)
        if self.draining:
            raise HiCacheError(ErrorCode.DRAINING, "the daemon is stopping", "run uncached and connect again later")
        return session

    def crowded(self, session: Session) -> bool:
        """Has this session as many transfers open as it may?"""
        return len(session.tickets) >= self.limits.requests_in_flight

    # ---- rows ---------------------------------------------------------------------------------------

    def pin(self, rows: Int32s) -> None:
        """Forbid eviction. Rows on their way out of L2 come back: their bytes are still whole."""
        residency = self.residency
        residency.pins[rows] += 1
        leaving = rows[residency.l2[rows] > READY]
        if leaving.size:
            residency.rescue(leaving)
            self.evict_l2.insert(leaving[::-1])
            self.story.note("rescued", leaving)

    def unpin(self, rows: Int32s) -> None:
        self.residency.pins[rows] -= 1
        self.maybe_dead.append(rows)

    def touch(self, path: Int32s) -> None:
        """These pages, a path from its first page on, were used."""
        leaf_first = path[::-1]
        self.evict_l2.touch(leaf_first)
        if self.disk.used_bytes:
            self.evict_l3.touch(leaf_first)

    def add_rows(self, namespace: Namespace, keys: Sequence[PageKey], parent: int) -> Int32s:
        rows = self.residency.add_run(keys, parent, namespace.index)
        self.namespaces.rows[namespace.index] += rows.size
        return rows

    def reap(self) -> None:
        """Free rows that nothing keeps any more, leaves first, and namespaces without rows."""
        while self.maybe_dead:
            rows = np.unique(self.residency.dead(np.concatenate(self.maybe_dead)))
            self.maybe_dead = []
            if not rows.size:
                return
            with Leaves(self.residency, self.residency.kids) as leaves:
                rows = rows[leaves.grant(rows)]
            if rows.size:
                self.maybe_dead = [self._forget(rows)]

    def _forget(self, rows: Int32s) -> Int32s:
        """Returns the rows that lost a child."""
        residency, namespaces = self.residency, self.namespaces
        where = residency.namespace[rows]
        self.story.note("row freed", rows)
        indices = np.unique(where).tolist()
        for index in indices:
            mine = rows[where == index]
            planted = mine[residency.in_tree[mine]]
            if planted.size:
                tree = namespaces[index].tree
                before = tree.tokens_held
                if tree.prune(planted).size != planted.size:  # else a row of the tree would be given to another page
                    story = self.story.of_row(residency, int(planted[0]))
                    raise LawBroken(f"law 6: {planted.size} pages to forget, some must stay in the tree\n{story}")
                namespaces.tokens_held += tree.tokens_held - before
            namespaces.rows[index] -= mine.size
        parents = residency.forget(rows)
        if self.withheld:
            for row in rows.tolist():
                self.withheld.pop(row, None)
        for index in indices:
            if not namespaces.rows[index]:
                namespaces.remove_empty(index)
        return parents

    # ---- blocks -------------------------------------------------------------------------------------

    def views(self, shape: Shape) -> list[PoolView]:
        return [self.pool.view(group.block_bytes) for group in shape.groups]

    def begin_fill(self, namespace: Namespace, rows: Int32s) -> list[BlockRefs]:
        """Blocks for ABSENT rows, which become FILLING. The caller made sure that they fit."""
        refs = []
        for view in self.views(namespace.shape):
            owned = view.allocate(rows.size)
            if owned is None:
                raise LawBroken("law 1: blocks that were found to fit could not be allocated")
            refs.append(owned)
        self.residency.begin_fill(rows)
        self.namespaces.l2_pages[namespace.index] += rows.size
        return refs

    def finish_fill(self, rows: Int32s, refs: list[BlockRefs]) -> None:
        """All rows of one fill are READY; the columns own the blocks now. `rows` are in path order."""
        self.residency.finish_fill(rows, [each.surrender() for each in refs])
        self.evict_l2.insert(rows[::-1])

    def abort_fill(self, namespace: int, rows: Int32s, refs: list[BlockRefs]) -> None:
        for each in refs:
            each.release()
        self.residency.abort_fill(rows)
        self.namespaces.l2_pages[namespace] -= rows.size
        self.maybe_dead.append(rows)

    def drop_l2(self, rows: Int32s) -> None:
        """Take READY or LEAVING rows out of L2 and give their blocks back. Any namespaces."""
        where = self.residency.namespace[rows]
        for index in np.unique(where).tolist():
            mine = rows[where == index]
            views = self.views(self.namespaces[index].shape)
            for view, blocks in zip(views, self.residency.drop_l2(mine, len(views)), strict=True):
                view.adopt(blocks).release()
            self.namespaces.l2_pages[index] -= mine.size
        self.maybe_dead.append(rows)

    # ---- leases -------------------------------------------------------------------------------------

    def lease_for(self, session: Session, id: LeaseId) -> Lease | None:
        """The lease if it exists and is that session's, or its engine's."""
        lease = self.leases.get(id)
        if lease is None:
            return None
        owner = self.sessions.get(lease.session)
        return lease if owner is not None and session.same_engine(owner) else None

    def end_lease(self, lease: Lease) -> None:
        """Unpin a lease's pages; they count as used until now. Transfers that it began own what they need."""
        self.leases.remove(lease)
        session = self.sessions.get(lease.session)
        if session is not None:
            session.leases.discard(lease.id)
        self.unpin(lease.rows)
        self.touch(lease.rows)
        stored = lease.rows[self.residency.l3[lease.rows] == READY]
        if stored.size and self.disk.mode == "rw":
            self.out.append(TouchRecords(tuple(self.record_keys(stored[::-1]))))

    def record_keys(self, rows: Int32s) -> list[tuple[PageKey, str]]:
        """(key, group) of every record that rows may have. Namespaces may be mixed."""
        residency, namespaces = self.residency, self.namespaces
        return [
            (residency.key[row], name)
            for row, index in zip(rows.tolist(), residency.namespace[rows].tolist(), strict=True)
            for name in namespaces[index].group_names
        ]

    def cut_leases(self, bad: Int32s) -> None:
        """These pages can't be had any more: leases end before the first of them."""
        for lease in self.leases.all():
            hit = np.flatnonzero(np.isin(lease.rows, bad))
            if hit.size:
                self.unpin(lease.rows[hit[0] :])
                lease.rows = lease.rows[: hit[0]]

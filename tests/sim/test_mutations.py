"""The simulator is itself tested: each planted bug must be found, from outside as well as by the laws.

`outside` bugs are run without the laws: what finds them is wrong bytes, a race, a lost or doubled answer.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import pytest

from hicache.base.errors import ErrorCode, HiCacheError, LawBroken
from hicache.base.ids import LeaseId, NamespaceId
from hicache.core import announce, disk, evict, lookup, opening, promote, publish
from hicache.core.commands import DeleteRecords, FailFence
from hicache.core.events import CopyEnded, StoreRead
from hicache.core.leases import Lease
from hicache.core.residency import Int32s, Residency
from hicache.core.sessions import Session, Shape
from hicache.core.transfers import LoadTicket, StoreTicket
from hicache.core.world import World
from hicache.pool.refs import BlockRefs
from hicache.protocol.messages import Scope
from tests.sim.contents import SimFailure
from tests.sim.run import simulate

Patch = pytest.MonkeyPatch
SEEDS = 60


def _found(*, laws: bool) -> bool:
    for seed in range(SEEDS):
        try:
            simulate(seed, 400, laws=laws)
        except (SimFailure, LawBroken):
            return True
        except Exception as error:  # noqa: BLE001  # a crash is a find as well
            return bool(error.__notes__)
    return False


def publish_before_the_copy_ended(patch: Patch) -> None:
    right = publish._begin

    def wrong(*args: Any) -> StoreTicket | None:
        ticket = right(*args)
        if ticket is not None:
            world: World = args[0]
            world.residency.l2[ticket.rows] = 2
            for group, owned in enumerate(ticket.refs):
                world.residency.block[group, ticket.rows] = owned.ids
        return ticket

    patch.setattr(publish, "_begin", wrong)
    patch.setattr(World, "finish_fill", lambda self, rows, refs: self.evict_l2.insert(rows[::-1]))


def failed_copy_becomes_visible(patch: Patch) -> None:
    right = publish.store_copied

    def wrong(world: World, ticket: StoreTicket, event: CopyEnded) -> None:
        right(world, ticket, CopyEnded(event.ticket, True))

    patch.setattr(publish, "store_copied", wrong)


def blocks_are_freed_under_a_copy(patch: Patch) -> None:
    """A closing session gives back at once what its running stores own."""
    right = opening.close

    def wrong(world: World, session: Session, reason: str) -> None:
        for ticket in [world.tickets.get(id) for id in session.tickets]:
            if isinstance(ticket, StoreTicket):
                for owned in ticket.refs:
                    owned.release()
                ticket.refs = []
        right(world, session, reason)

    patch.setattr(opening, "close", wrong)


def loads_do_not_pin(patch: Patch) -> None:
    patch.setattr(World, "pin", lambda self, rows: None)
    patch.setattr(World, "unpin", lambda self, rows: self.maybe_dead.append(rows))


def memory_is_dropped_at_once(patch: Patch) -> None:
    right = opening.drop_if_done

    def wrong(world: World, session: Session) -> None:
        if session.state == "CLOSING" and session.id in world.sessions:
            session.tickets.clear()
            right(world, session)

    patch.setattr(opening, "drop_if_done", wrong)


def salt_is_forgotten(patch: Patch) -> None:
    right = Session.namespace_of

    def wrong(self: Session, scope: Scope) -> NamespaceId:
        return right(self, Scope())

    patch.setattr(Session, "namespace_of", wrong)


def failed_reads_count_as_read(patch: Patch) -> None:
    right = promote.store_read

    def wrong(world: World, event: StoreRead) -> None:
        right(world, StoreRead(event.ticket, event.ok | True, event.corrupt & False))

    patch.setattr(promote, "store_read", wrong)


def pages_are_copied_in_another_order(patch: Patch) -> None:
    right = publish.group_copies

    def wrong(shape: Shape, refs: list[BlockRefs], blocks: tuple[Int32s, ...], which: Any) -> Any:
        return right(shape, refs, tuple(each[::-1] for each in blocks), which)

    patch.setattr(promote, "group_copies", wrong)


def first_page_is_ignored(patch: Patch) -> None:
    right = publish.group_copies

    def wrong(shape: Shape, refs: list[BlockRefs], blocks: tuple[Int32s, ...], which: Any) -> Any:
        return right(shape, refs, blocks, which - which.min())

    patch.setattr(publish, "group_copies", wrong)


def deletions_are_not_ordered(patch: Patch) -> None:
    right = disk.evict_l3

    def wrong(world: World, need_bytes: int) -> bool:
        done = right(world, need_bytes)
        for command in [each for each in world.out if isinstance(each, DeleteRecords)]:
            world.out[world.out.index(command)] = DeleteRecords(command.ticket, ())
        return done

    patch.setattr(disk, "evict_l3", wrong)


def fences_are_left_open(patch: Patch) -> None:
    right = promote._fail_load

    def wrong(world: World, ticket: LoadTicket) -> None:
        right(world, ticket)
        world.out[:] = [each for each in world.out if not isinstance(each, FailFence)]

    patch.setattr(promote, "_fail_load", wrong)


def late_answers_count(patch: Patch) -> None:
    """Done goes out when the copy begins."""
    right = publish._begin

    def wrong(*args: Any) -> StoreTicket | None:
        ticket = right(*args)
        if ticket is not None:
            args[0].reply(ticket.session, ticket.request, publish.Done(ticket=ticket.id))
        return ticket

    patch.setattr(publish, "_begin", wrong)


def leases_are_anybodys(patch: Patch) -> None:
    def wrong(self: World, session: Session, id: LeaseId) -> Lease | None:
        return self.leases.get(id)

    patch.setattr(World, "lease_for", wrong)


def groups_reach_over_tenants(patch: Patch) -> None:
    def wrong(self: Session, other: Session) -> bool:
        return self is other or (bool(self.group) and self.group == other.group)

    patch.setattr(Session, "same_engine", wrong)


def shards_are_not_compared(patch: Patch) -> None:
    def wrong(world: World, session: Session, id: LeaseId) -> Lease:
        lease = world.lease_for(session, id)
        if lease is None:
            raise HiCacheError(ErrorCode.UNKNOWN_LEASE, "not here")
        return lease

    patch.setattr(lookup, "lease_of", wrong)


def leases_outlive_their_owner(patch: Patch) -> None:
    right = opening.close

    def wrong(world: World, session: Session, reason: str) -> None:
        session.leases.clear()
        right(world, session, reason)

    patch.setattr(opening, "close", wrong)


def memory_is_not_asked_for(patch: Patch) -> None:
    patch.setattr(Session, "need_memory", lambda self: None)


def eviction_forgets_blocks(patch: Patch) -> None:
    patch.setattr(World, "drop_l2", lambda self, rows: self.residency.drop_l2(rows, 1) and None)


def parents_go_before_children(patch: Patch) -> None:
    """The order of eviction is upside down and nothing minds the children."""

    def wrong(residency: Any, kids: Any, evictor: Any, count: int) -> Int32s:
        rows: Int32s = evictor.victims(count, lambda rows: residency.pins[rows] >= 0)
        return rows

    patch.setattr(evict, "pick_victims", wrong)


def a_tier_is_left_in_silence(patch: Patch) -> None:
    right = Residency.drop_l2

    def wrong(self: Residency, rows: Int32s, groups: int) -> list[Int32s]:
        blocks = right(self, rows, groups)
        if self.moved:
            self.moved.pop()
        return blocks

    patch.setattr(Residency, "drop_l2", wrong)


def children_are_announced_before_parents(patch: Patch) -> None:
    right = announce._tell_run

    def wrong(world: World, *rest: Any) -> list[int]:
        world.residency.told |= announce.KNOWN
        return right(world, *rest)

    patch.setattr(announce, "_tell_run", wrong)


def withheld_pages_are_forgotten(patch: Patch) -> None:
    right = announce._tell_run

    def wrong(world: World, *rest: Any) -> list[int]:
        right(world, *rest)
        return []

    patch.setattr(announce, "_tell_run", wrong)


def secrets_are_announced(patch: Patch) -> None:
    patch.setattr(announce, "concerns", lambda world, session, namespace: True)


def a_survey_goes_without_parents(patch: Patch) -> None:
    right = announce._path_to
    patch.setattr(announce, "_path_to", lambda world, row, done: right(world, row, done)[-1:])


def a_survey_stops_early(patch: Patch) -> None:
    right = announce.survey
    patch.setattr(announce, "survey", lambda world, part_pages: islice(right(world, part_pages), 1))


OUTSIDE: Sequence[Callable[[Patch], None]] = (
    publish_before_the_copy_ended,
    failed_copy_becomes_visible,
    blocks_are_freed_under_a_copy,
    memory_is_dropped_at_once,
    salt_is_forgotten,
    failed_reads_count_as_read,
    pages_are_copied_in_another_order,
    first_page_is_ignored,
    deletions_are_not_ordered,
    fences_are_left_open,
    late_answers_count,
    leases_are_anybodys,
    groups_reach_over_tenants,
    shards_are_not_compared,
    memory_is_not_asked_for,
    a_tier_is_left_in_silence,
    children_are_announced_before_parents,
    withheld_pages_are_forgotten,
    secrets_are_announced,
    a_survey_goes_without_parents,
    a_survey_stops_early,
)
BY_LAW: Sequence[Callable[[Patch], None]] = (
    publish_before_the_copy_ended,
    blocks_are_freed_under_a_copy,
    loads_do_not_pin,
    memory_is_dropped_at_once,
    leases_are_anybodys,
    groups_reach_over_tenants,
    shards_are_not_compared,
    leases_outlive_their_owner,
    memory_is_not_asked_for,
    eviction_forgets_blocks,
    parents_go_before_children,
    a_tier_is_left_in_silence,
    withheld_pages_are_forgotten,
)


@pytest.mark.parametrize("plant", OUTSIDE, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_seen_from_outside(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    assert _found(laws=False)


@pytest.mark.parametrize("plant", BY_LAW, ids=lambda plant: plant.__name__)
def test_a_planted_bug_breaks_a_law(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    assert _found(laws=True)

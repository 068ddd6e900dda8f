"""Making room in L2: eviction under a reservation, and demotion in time for it."""

from collections.abc import Sequence

from hicache.core import disk
from hicache.core.leaves import pick_victims
from hicache.core.residency import ABSENT, READY
from hicache.core.transfers import WriteTicket
from hicache.core.world import World
from hicache.pool.views import PoolView

_LEAST_VICTIMS = 16  # at once, where what went did not make room: blocks of other views are in the way
_RESERVE_PART = 16  # write_back keeps 1/16 of the pool free or being freed


def room_for(world: World, views: Sequence[PoolView], pages: int) -> int:
    """How many of `pages` fit, one block in each of `views` per page, after evicting what may go.

    Rows that the caller needs must be pinned. Evicts no more than `pages` take, or all it can.
    """
    least = 1
    while not world.pool.fits([(view, pages) for view in views]):
        missing = pages - min(view.available() for view in views)
        if not evict_l2(world, max(missing, least)):
            return _largest_fit(world, views, pages)
        least = _LEAST_VICTIMS
    return pages


def _largest_fit(world: World, views: Sequence[PoolView], pages: int) -> int:
    low, high = 0, pages
    while low < high:
        middle = (low + high + 1) // 2
        if world.pool.fits([(view, middle) for view in views]):
            low = middle
        else:
            high = middle - 1
    return low


def evict_l2(world: World, count: int) -> int:
    """Drop up to `count` pages from L2, least useful first, leaves before parents; return how many went.

    A page that L3 has is a free drop. One that only L2 has is lost: space that is needed now can't wait for a
    disk. Under write_back `demote_in_time` has written most of them before."""
    residency = world.residency
    rows = pick_victims(residency, residency.kids_l2, world.evict_l2, count)
    if rows.size:
        world.story.note("evicted from L2", rows)
        world.counters.evicted_l2 += rows.size
        world.drop_l2(rows)
    return rows.size


def demote_in_time(world: World) -> None:
    """write_back: keep a reserve of L2 that is free or about to be, so that demand need not lose pages."""
    if world.write_policy != "write_back" or world.disk.mode != "rw" or world.draining:
        return
    pool, residency = world.pool, world.residency
    reserve = pool.parents * pool.parent_bytes // _RESERVE_PART
    spare = pool.free_parents * pool.parent_bytes
    if not pool.parents or spare >= reserve:
        return
    spare += sum(view.open_blocks * view.block_bytes for view in pool.views) + _leaving_bytes(world)
    if spare >= reserve:
        return
    page_bytes = max(1, pool.used_bytes() // max(1, len(world.evict_l2)))
    rows = pick_victims(residency, residency.kids_l2, world.evict_l2, -(-(reserve - spare) // page_bytes))
    clean = rows[residency.l3[rows] == READY]
    world.story.note("evicted from L2", clean)
    world.counters.evicted_l2 += clean.size
    world.drop_l2(clean)
    state = residency.l3[rows]
    world.evict_l2.insert(rows[(state != READY) & (state != ABSENT)])
    world.evict_l2.insert(disk.write(world, rows[state == ABSENT], demote=True))


def _leaving_bytes(world: World) -> int:
    return sum(
        ticket.rows.size * world.namespaces[ticket.namespace].shape.page_bytes
        for ticket in world.tickets
        if isinstance(ticket, WriteTicket) and ticket.demote
    )

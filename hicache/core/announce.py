"""What routers are told: which pages a tier has gained or lost, with their tokens, a parent before its children.

    a tier of a row changes, or a row enters the tree ─► residency.moved
    end of the event ─► settle: what lookups find now, against `residency.told` ─► Announce

Told is what lookups find: a page in the tree, since only the tree knows tokens, and READY (in L2 also LEAVING: it is
used again if somebody asks). Pages found at start are thus told of when a lookup plants them. A page whose parent
was never told of is withheld until it is: a router could not place it.

Pages that were padded with tokens which no sequence has (the end of one, see docs/internals/keys.md) are not
announced: routers route by tokens.

Only namespaces that `concerns` accepts are announced: of a tenant that the configuration names, without salt, LoRA or
multimodal content, and of one shard of each model, so that a page is announced once and not by every rank.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from hicache.core.commands import Announce, PagesRemoved, PagesStored
from hicache.core.namespaces import Namespace
from hicache.core.residency import NO_ROWS, READY, Int32s, Residency
from hicache.core.sessions import Session
from hicache.core.world import World
from hicache.index.node import Node
from hicache.protocol.messages import Scope

IN_L2, IN_L3, KNOWN = np.uint8(1), np.uint8(2), np.uint8(4)  # bits of `told`; KNOWN stays when the tiers have gone
TIERS = np.uint8(3)
_NAMES: tuple[tuple[np.uint8, Literal["l2", "l3"]], ...] = ((IN_L2, "l2"), (IN_L3, "l3"))
_SCAN_ROWS = 65536  # looked at together

_Bits = npt.NDArray[np.uint8]
_Places = npt.NDArray[np.intp]
_Change = PagesStored | PagesRemoved


def concerns(world: World, session: Session, namespace: Namespace) -> bool:
    """Are routers told of a namespace that `session` gives its shape to?"""
    announced, shard = world.config.announced, session.shard
    if announced is None or session.tenant not in announced.tenants:
        return False
    if announced.model is not None and session.model.name != announced.model:
        return False
    first = shard.tp_rank == shard.pp_rank == shard.cp_rank == 0
    return first and session.namespace_of(Scope()) == namespace.id


def found(residency: Residency, rows: Int32s) -> _Bits:
    """In which tiers lookups find `rows`, as bits, whether or not the tree knows them."""
    in_l2 = (residency.l2[rows] >= READY).astype(np.uint8)
    in_l3 = (residency.l3[rows] == READY).astype(np.uint8)
    bits: _Bits = in_l2 * IN_L2 | in_l3 * IN_L3
    return bits


def settle(world: World) -> None:
    """Announce what this event has changed. Must come before rows are freed: their keys are needed."""
    residency = world.residency
    if not residency.moved:
        return
    rows = _audible(world, np.unique(np.concatenate(residency.moved)))
    residency.moved.clear()
    changes: list[_Change] = []
    gone = residency.told[rows] & TIERS & ~found(residency, rows)
    residency.told[rows] ^= gone
    for bit, tier in _NAMES:
        lost = rows[gone & bit > 0]
        if lost.size:
            changes.append(PagesRemoved(tier, tuple(residency.key[row] for row in lost.tolist())))
    while rows.size:
        rows = _audible(world, _tell(world, rows, changes))
    if changes:
        world.out.append(Announce(tuple(changes)))


def _audible(world: World, rows: Int32s) -> Int32s:
    """Those of `rows` that routers may hear of."""
    residency = world.residency
    rows = rows[residency.in_tree[rows] & ~residency.padded[rows]]
    heard: Int32s = rows[world.namespaces.announced[residency.namespace[rows]]]
    return heard


def _tell(world: World, rows: Int32s, changes: list[_Change]) -> Int32s:
    """Add what is new of `rows`, those nearest to the root first; return rows that were withheld until now."""
    residency = world.residency
    rows = rows[(found(residency, rows) & ~residency.told[rows]) > 0]
    if not rows.size:
        return NO_ROWS
    marks = world.namespaces.owners.marks
    released: list[int] = []
    marks[rows] = True
    for node in _nodes(world, rows):
        for places in _runs(np.flatnonzero(marks[node.rows])):
            released += _tell_run(world, node, places, changes)
    marks[rows] = False
    return np.unique(np.array(released, np.int32))


def _nodes(world: World, rows: Int32s) -> list[Node]:
    """The tree nodes that hold `rows`, each after those above it."""
    owners = world.namespaces.owners
    nodes = [owners.nodes[id] for id in np.unique(owners.of(rows)).tolist()]
    return sorted((node for node in nodes if node is not None), key=lambda node: node.end)


def _runs(places: _Places) -> list[_Places]:
    """Cut increasing numbers where one is missing."""
    return np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if places.size else []


def _tell_run(world: World, node: Node, places: _Places, changes: list[_Change]) -> list[int]:
    """Consecutive pages of one node. Returns rows that waited for one of them to be told of."""
    residency, withheld = world.residency, world.withheld
    run = node.rows[places]
    above = int(residency.parent[run[0]])
    if above >= 0 and not residency.told[above] & KNOWN:
        for row in run.tolist():
            withheld.setdefault(above, set()).add(row)
            above = row
        return []
    new = found(residency, run) & ~residency.told[run]
    residency.told[run] |= new | KNOWN
    for since in world.surveys:
        inside = run < since.size
        since[run[inside]] |= new[inside]
    changes += _stored(world, node, places, new)
    return [below for row in run.tolist() for below in withheld.pop(row, ())] if withheld else []


def _stored(world: World, node: Node, places: _Places, bits: _Bits) -> Iterator[PagesStored]:
    """`bits[i]` says in which tiers page `places[i]` of a node is to be announced, in the order of the pages."""
    residency = world.residency
    if not bits.any():
        return
    tree = world.namespaces[int(residency.namespace[node.rows[0]])].tree
    size, first = tree.page_tokens, node.start // tree.page_tokens
    cuts = np.flatnonzero(np.diff(bits) | (np.diff(places) > 1)) + 1
    for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), places.size], strict=True):
        page, run = int(places[begin]), node.rows[places[begin:end]]
        above = int(residency.parent[run[0]])
        parent = residency.key[above] if above >= 0 else None
        keys = tuple(residency.key[row] for row in run.tolist())
        tokens = tree.tokens_of(node, (first + page) * size, (first + page + end - begin) * size)
        for bit, tier in _NAMES:
            if bits[begin] & bit:
                yield PagesStored(tier, parent, keys, tokens, size)


# ---- for those who come late ----------------------------------------------------------------------------


def count(world: World) -> int:
    """Pages that routers know of in some tier."""
    return int(np.count_nonzero(world.residency.told & TIERS))


def survey(world: World, part_pages: int) -> Iterator[tuple[PagesStored, ...]]:
    """All that routers know of, parents first, in parts of at least `part_pages`, the last excepted.

    The cache may change between two parts. Whoever applies all parts, and then all that was announced since the first
    was asked for, in order, knows what they would who heard everything, and hears of no page in a tier twice: routers
    count how often they do. A page that was announced since is left to that announcement.
    """
    since = np.zeros_like(world.residency.told)  # rows beyond are new
    world.surveys.append(since)
    try:
        yield from _parts(world, since, part_pages)
    finally:
        world.surveys[:] = [each for each in world.surveys if each is not since]


def _parts(world: World, since: _Bits, part_pages: int) -> Iterator[tuple[PagesStored, ...]]:
    residency, size = world.residency, since.size
    done = np.zeros(size, np.bool_)
    part: list[PagesStored] = []
    pages = 0
    for start in range(0, size, _SCAN_ROWS):
        scanned = slice(start, min(size, start + _SCAN_ROWS))
        for at in np.flatnonzero((residency.told[scanned] & TIERS > 0) & ~done[scanned]).tolist():
            if done[start + at] or not residency.told[start + at] & TIERS:
                continue
            for node in _path_to(world, start + at, done):
                places = np.flatnonzero(node.rows < size)
                places = places[~done[node.rows[places]]]
                rows = node.rows[places]
                done[rows] = True
                bits = residency.told[rows] & TIERS & ~since[rows]
                part += _stored(world, node, places, bits)
                pages += int(np.count_nonzero(bits))
            if pages >= part_pages:
                yield tuple(part)
                part, pages = [], 0
    if part:
        yield tuple(part)


def _path_to(world: World, row: int, done: npt.NDArray[np.bool_]) -> list[Node]:
    """The node of `row` and those above it that have not been done, from the root down."""
    owners = world.namespaces.owners
    node = owners.nodes[int(owners.owner[row])]
    path: list[Node] = []
    while node is not None and node.parent is not None:
        rows = node.rows
        if rows.size:
            if path and rows[-1] < done.size and done[rows[-1]]:
                break
            path.append(node)
        node = node.parent
    return path[::-1]

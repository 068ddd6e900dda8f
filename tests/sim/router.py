"""Routers that follow the cache by its announcements alone: one that hears all, others that come late.

The law: after every event, what a router was told is exactly what lookups can find, tier by tier, among the pages
whose parent it was told of.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from hicache.core.commands import Announce, Command, PagesRemoved, PagesStored
from hicache.core.residency import READY
from hicache.core.world import World
from hicache.protocol.messages import Scope
from tests.sim.contents import MODELS, SimFailure, Truth

TENANT = "t1"
Change = PagesStored | PagesRemoved


@dataclass
class Pages:
    """Page keys by tier."""

    l2: set[bytes] = field(default_factory=set)
    l3: set[bytes] = field(default_factory=set)

    def apply(self, change: Change) -> None:
        tier: set[bytes] = getattr(self, change.tier)
        if isinstance(change, PagesStored):
            if not tier.isdisjoint(change.keys):
                raise SimFailure("a router is told twice of a page in the same tier")
            tier.update(change.keys)
        else:
            tier.difference_update(change.keys)


@dataclass
class LateRouter:
    """Reads the survey part by part while the cache goes on, then applies what was announced meanwhile."""

    parts: Iterator[tuple[PagesStored, ...]]
    pages: Pages = field(default_factory=Pages)
    meanwhile: list[Change] = field(default_factory=list)
    known: set[bytes] = field(default_factory=set)  # by the parts

    def read(self, now: Pages) -> bool:
        """One more part. False at the end, when all that was announced meanwhile is applied as well."""
        part = next(self.parts, None)
        if part is not None:
            new = {key for change in self.meanwhile for key in change.keys}
            for change in part:
                old = change.parent in now.l2 | now.l3 and change.parent not in new
                if old and change.parent not in self.known:
                    raise SimFailure("a router that came late hears of a page before its parent")
                self.known.update(change.keys)
                self.pages.apply(change)
            return True
        for change in self.meanwhile:
            self.pages.apply(change)
        return False


class SimRouter:
    """Hears the commands of every event. `check` compares with the state."""

    def __init__(self, seed: int, truth: Truth) -> None:
        self._rng = Random(seed)  # its own, so that a run is the same without routers
        self._truth = truth
        self._roots = {truth.namespace(model, TENANT, Scope()): model for model in MODELS}
        self.pages = Pages()
        self.known: set[bytes] = set()  # told of since their row exists
        self.late: list[LateRouter] = []
        self.joined = 0

    def hear(self, world: World, commands: Sequence[Command]) -> None:
        told = [command for command in commands if isinstance(command, Announce)]
        if len(told) > 1:
            raise SimFailure("one event was announced in two pieces")
        for change in told[0].changes if told else ():
            if isinstance(change, PagesStored):
                self._learn(world, change)
            elif not set(change.keys) <= getattr(self.pages, change.tier):
                raise SimFailure(f"pages leave {change.tier} that were never announced there: {change}")
            self.pages.apply(change)
            for router in self.late:
                router.meanwhile.append(change)
        self.known &= world.residency.row_of.keys()

    def _learn(self, world: World, change: PagesStored) -> None:
        """The keys belong to the tokens, and the parent was told of before."""
        row = world.residency.row_of[change.keys[0]]
        namespace = world.namespaces[int(world.residency.namespace[row])]
        model = self._roots.get(namespace.id)
        if model is None:
            raise SimFailure("a page was announced that must stay in the house: other tenant, salt or adapter")
        if change.page_tokens != model.spec.prefix_granularity:
            raise SimFailure(f"pages of {change.page_tokens} tokens, the model has {model.spec.prefix_granularity}")
        right = model.shape.chain.keys(namespace.id if change.parent is None else change.parent, change.tokens)
        if list(change.keys) != right:
            raise SimFailure("announced tokens or parent are not those of the page")
        if change.parent is not None and change.parent not in self.known:
            raise SimFailure("a page was announced before its parent")
        self.known.update(change.keys)

    def check(self, world: World) -> None:
        """What lookups can find, read off the columns and not off what the state remembers of announcements."""
        right = Pages()
        residency = world.residency
        for key, row in residency.row_of.items():
            namespace = world.namespaces[int(residency.namespace[row])]
            above = int(residency.parent[row])
            if not residency.in_tree[row] or namespace.id not in self._roots:
                continue
            if above >= 0 and residency.key[above] not in self.known:
                continue
            if residency.l2[row] >= READY:
                right.l2.add(key)
            if residency.l3[row] == READY:
                right.l3.add(key)
        if right != self.pages:
            row = residency.row_of.get(next(iter((right.l2 ^ self.pages.l2) | (right.l3 ^ self.pages.l3))), -1)
            raise SimFailure(f"routers know other pages than lookups find\n{world.story.of_row(residency, row)}")

    def join(self, parts: Iterator[tuple[PagesStored, ...]]) -> None:
        """A router comes late. It counts from the moment at which it gets the first part."""
        router = LateRouter(parts)
        router.read(self.pages)
        self.late.append(router)

    def step(self) -> None:
        """Late routers read on, and must know the same as the first once they are through."""
        for router in list(self.late):
            if self._rng.random() < 0.5 and not router.read(self.pages):
                self.late.remove(router)
                self.joined += 1
                if router.pages != self.pages:
                    raise SimFailure("a router that came late knows other pages than one that heard all")

"""The pool as a state machine against a dict of owners per block."""

from collections import Counter
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from hicache.pool.blocks import Pool
from hicache.pool.refs import BlockRefs

SIZES = (64, 100, 256, 1000)
Block = tuple[int, int]  # view, block


class PoolMachine(RuleBasedStateMachine):
    owners: Bundle[BlockRefs] = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(6 * 1024)
        self.pool.format(1024)
        self.live: Counter[Block] = Counter()

    def _blocks(self, refs: BlockRefs) -> list[Block]:
        return [(refs.view.index, block) for block in refs.ids.tolist()]

    @rule(target=owners, size=st.sampled_from(SIZES), count=st.integers(0, 20))
    def allocate(self, size: int, count: int) -> object:
        view = self.pool.view(size)
        fits = self.pool.fits([(view, count)])
        refs = view.allocate(count)
        assert (refs is not None) == fits
        if refs is None:
            return multiple()
        blocks = self._blocks(refs)
        assert len(set(blocks)) == count
        assert not any(self.live[block] for block in blocks), "a block with an owner was given away"
        self.live.update(blocks)
        return refs

    @rule(target=owners, refs=owners)
    def share(self, refs: BlockRefs) -> object:
        if not refs.live:
            return multiple()
        other = refs.share()
        self.live.update(self._blocks(other))
        return other

    @rule(refs=consumes(owners))
    def release(self, refs: BlockRefs) -> None:
        if refs.live:
            self.live.subtract(self._blocks(refs))
            refs.release()

    @rule(target=owners, refs=consumes(owners), cut=st.integers(0, 20))
    def part(self, refs: BlockRefs, cut: int) -> object:
        """Columns take over a run and give it back in two parts."""
        if not refs.live:
            return multiple()
        view, ids = refs.view, refs.surrender()
        return multiple(view.adopt(ids[:cut]), view.adopt(ids[cut:]))

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        self.pool.check()
        used = +self.live
        for view in self.pool.views:
            mine = {block: count for (index, block), count in used.items() if index == view.index}
            assert mine == {block: int(view.count[block]) for block in view.count.nonzero()[0].tolist()}
        spans = sorted(
            (int(view.offset_bytes(view.count.nonzero()[0].astype("int32")[[i]])[0]), view.block_bytes)
            for view in self.pool.views
            for i in range(view.used_blocks)
        )
        assert all(a + size <= b for (a, size), (b, _) in pairwise(spans)), "blocks overlap"
        assert not spans or sum(spans[-1]) <= self.pool.arena_bytes


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""`python -m tests.sim.timing`: what one event costs for a prompt of 8,192 tokens (512 pages of 16), by kind."""

from collections import defaultdict
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from hicache.base.ids import LeaseId, RequestId, SessionId
from hicache.base.limits import Limits
from hicache.core.commands import CopyPages, ReadRecords, Reply, WriteRecords
from hicache.core.events import (
    CopyEnded,
    Event,
    LoadAsked,
    LookupAsked,
    ReleaseAsked,
    SessionOpened,
    StoreAsked,
    StoreRead,
    StoreWritten,
)
from hicache.core.state import CacheState, CoreConfig
from hicache.protocol.messages import Match, Scope
from hicache.spec.group import GroupSpec
from hicache.spec.layout import Axis, GroupLayout, L1Layout
from hicache.spec.model import ModelSpec, ShardSpec

PAGE_TOKENS, PAGES, ROUNDS, PROMPTS = 16, 512, 20, 24
SPEC = ModelSpec("m", "r", (GroupSpec("kv", "full", tuple(range(30)), 3, 64, "float32", PAGE_TOKENS),), PAGE_TOKENS)
RUN = PAGE_TOKENS * 64 * 4
LAYOUT = L1Layout(
    1 << 40, (GroupLayout("kv", tuple(i << 20 for i in range(30)), 4096, 6 * RUN, (Axis(6, RUN),), RUN),)
)


class Bench:
    """A daemon's state with room for `PROMPTS` / 2 prompts in L2, so that half of the stores evict."""

    def __init__(self) -> None:
        block = SPEC.groups[0].block_bytes()
        config = CoreConfig(PROMPTS // 2 * PAGES * block, None, "rw", 1 << 40)
        self.state = CacheState(config, Limits(), bytes(32))
        self.spent_us: dict[str, list[float]] = defaultdict(list)
        self.session = SessionId(1)
        self.state.handle(
            SessionOpened(self.session, RequestId(1), bytes(16), 1, "t", SPEC, LAYOUT, ShardSpec()), 0.0
        )
        self.blocks = (np.arange(PAGES, dtype=np.int32),)

    def feed(self, what: str, event: Event) -> list[Any]:
        began = perf_counter()
        out = self.state.handle(event, 1.0)
        self.spent_us[what].append((perf_counter() - began) * 1e6)
        return list(out)

    def store(self, tokens: bytes, evicts: str) -> None:
        out = self.feed(
            f"store{evicts}", StoreAsked(self.session, RequestId(2), tokens, 0, self.blocks, 0, 1, Scope())
        )
        copy = next(each for each in out if isinstance(each, CopyPages))
        for write in self.feed("store copied, writes ordered", CopyEnded(copy.ticket, True)):
            if isinstance(write, WriteRecords):
                self.feed("batch of 128 written", StoreWritten(write.ticket, np.ones(len(write.records), np.bool_)))

    def serve(self, tokens: bytes, where: str) -> None:
        count = len(tokens) // 4
        self.feed(f"probe{where}", LookupAsked(self.session, RequestId(3), tokens, count, False, Scope()))
        out = self.feed(
            f"lookup and lease{where}", LookupAsked(self.session, RequestId(3), tokens, count, True, Scope())
        )
        match = next(each.message for each in out if isinstance(each, Reply))
        assert isinstance(match, Match)
        assert match.resumable_tokens == count
        load = LoadAsked(self.session, RequestId(4), LeaseId(match.lease), 0, self.blocks, 0, 1)
        work = self.feed(f"load{where}", load)
        while work:
            command = work.pop(0)
            if isinstance(command, ReadRecords):
                ok = np.ones(len(command.records), np.bool_)
                work += self.feed("batch of 128 read", StoreRead(command.ticket, ok, ~ok))
            if isinstance(command, CopyPages):
                self.feed("load copied", CopyEnded(command.ticket, True))
        self.feed("release", ReleaseAsked(self.session, RequestId(5), (LeaseId(match.lease),)))


def main() -> None:
    bench, rng = Bench(), np.random.default_rng(0)
    prompts = [rng.integers(0, 50_000, PAGES * PAGE_TOKENS).astype("<i4").tobytes() for _ in range(PROMPTS)]
    chain = bench.state.world.sessions[bench.session].shape.chain
    for prompt in prompts:
        began = perf_counter()
        chain.keys(bytes(32), prompt)
        bench.spent_us["(hashing alone)"].append((perf_counter() - began) * 1e6)
    for at, prompt in enumerate(prompts):
        bench.store(prompt, ", evicting" if at >= PROMPTS // 2 else "")
    for _ in range(ROUNDS):
        bench.serve(prompts[-1], "")
    for prompt in prompts[: PROMPTS // 2]:
        bench.serve(prompt, " from L3")
    bench.state.check()
    print(f"{'event':36} {'min':>8} {'median':>8} {'max':>8} µs")
    for what, spent in bench.spent_us.items():
        print(f"{what:36} {min(spent):8.0f} {median(spent):8.0f} {max(spent):8.0f}")


if __name__ == "__main__":
    main()

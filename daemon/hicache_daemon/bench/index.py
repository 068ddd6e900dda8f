"""How fast a prompt is found: the radix tree and the key chain, beside neighbours that happen to be installed.

Workload: sequences of 128 pages of 16 tokens in groups of 100 that share their first 28 pages (1,000 sequences are
about 100,000 pages), in random order; then prompts of 32k and 128k tokens in the same tree. A figure is the median of
single calls. A match counts with the rows it returns. Limit of a match or an insert: `bytes.startswith` over the
same bytes in the same run, the least that any comparison costs; of a page key: one unkeyed hash over the bytes of
many pages at once.
"""

import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hicache.index.radix import RadixTree
from hicache.keys.chain import KeyChain
from hicache_daemon.bench import index_peers
from hicache_daemon.bench.report import Case, Progress

PAGE = 16
SEQUENCE_PAGES = 128
SHARED_PAGES = 28
GROUP = 100

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Workload:
    """Token sequences, int32; all ids of `unknown` are larger than any other."""

    short: list[Int32s]  # 2,048 tokens each
    unknown: list[Int32s]
    long: dict[str, list[Int32s]]  # by label, e.g. "32k"


class Subject(Protocol):
    """An index under test. `prepare` is not timed: it gives a sequence the form in which the index takes it."""

    def prepare(self, tokens: Int32s) -> Any: ...
    def insert(self, item: Any, /) -> object: ...
    def match(self, item: Any, /) -> object: ...
    def matched_tokens(self, item: Any) -> int:
        """Length of the match, for checking: a fast index that finds nothing is no yardstick."""
        ...


class Ours:
    """hicache's tree behind `Subject`."""

    def __init__(self) -> None:
        self._tree = RadixTree(PAGE)
        self._rows = 0

    def prepare(self, tokens: Int32s) -> tuple[bytes, Int32s]:
        """Rows are fresh for all pages; `insert` keeps those of pages that it knows."""
        return tokens.tobytes(), np.empty(tokens.size // PAGE, np.int32)

    def number(self, item: tuple[bytes, Int32s]) -> None:
        """Give known pages their rows and the others new ones, as the daemon's page table does before an insert."""
        known = self._tree.match(item[0]).rows
        item[1][: known.size] = known
        item[1][known.size :] = np.arange(self._rows, self._rows + item[1].size - known.size)
        self._rows += item[1].size - known.size

    def insert(self, item: tuple[bytes, Int32s], /) -> object:
        return self._tree.insert(*item)

    def match(self, item: tuple[bytes, Int32s], /) -> object:
        return self._tree.match(item[0]).rows

    def matched_tokens(self, item: tuple[bytes, Int32s]) -> int:
        return self._tree.match(item[0]).known_tokens


def make_workload(groups: int, long_count: int) -> Workload:
    """The same sequences in every run and on every machine."""
    rng = np.random.default_rng(2024)

    def draw(count: int, low: int = 1) -> Int32s:
        return rng.integers(low, low + 100_000, count, dtype=np.int32)

    short: list[Int32s] = []
    for _ in range(groups):
        shared = draw(SHARED_PAGES * PAGE)
        own = (SEQUENCE_PAGES - SHARED_PAGES) * PAGE
        short.extend(np.concatenate((shared, draw(own))) for _ in range(GROUP))
    short = [short[i] for i in rng.permutation(len(short))]
    unknown = [draw(SEQUENCE_PAGES * PAGE, low=200_000) for _ in range(GROUP)]
    long = {
        "32k": [draw(32768) for _ in range(long_count)],
        "128k": [draw(131072) for _ in range(long_count)],
    }
    return Workload(short, unknown, long)


def time_calls(call: Callable[[Any], object], items: Sequence[Any]) -> list[int]:
    """Nanoseconds of each single call."""
    clock, taken = time.perf_counter_ns, []
    for item in items:
        start = clock()
        call(item)
        taken.append(clock() - start)
    return taken


def _compare(pair: tuple[bytes, bytes]) -> bool:
    return pair[0].startswith(pair[1])


class Figures:
    """Single-call times by case name, over all passes."""

    def __init__(self) -> None:
        self._taken_ns: dict[str, list[int]] = {}

    def add(self, case: str, taken_ns: list[int]) -> None:
        self._taken_ns.setdefault(case, []).extend(taken_ns)

    def median_us(self, case: str) -> float:
        return statistics.median(self._taken_ns[case]) / 1000

    def case(self, name: str, limit: str | None) -> Case:
        value = self.median_us(name)
        if limit is None:
            return Case(name, value, "µs")
        return Case(name, value, "µs", self.median_us(limit), value / self.median_us(limit))


def _insert_all(subject: Subject, sequences: Sequence[Int32s]) -> tuple[list[Any], list[int]]:
    """Insert one by one; items as prepared, nanoseconds of each insert."""
    items, taken = [], []
    for tokens in sequences:
        item = subject.prepare(tokens)
        if isinstance(subject, Ours):
            subject.number(item)
        taken += time_calls(subject.insert, [item])
        items.append(item)
    return items, taken


def measure(make: Callable[[], Subject], work: Workload, passes: int, prefix: str, figures: Figures) -> None:
    """Build the index afresh in each pass and time every call on it. Raises `RuntimeError` on a wrong answer."""
    for _ in range(passes):
        subject = make()
        for label, sequences in (("2k", work.short), *work.long.items()):
            items, taken = _insert_all(subject, sequences)
            # Another copy of the tokens: a request's bytes are never those that the index holds.
            queries = items if not isinstance(subject, Ours) else [subject.prepare(tokens) for tokens in sequences]
            figures.add(f"{prefix}insert_{label}", taken)
            figures.add(f"{prefix}match_{label}", time_calls(subject.match, queries))
            for tokens, query in zip(sequences, queries, strict=True):
                if subject.matched_tokens(query) != tokens.size:
                    raise RuntimeError(f"{prefix}match_{label} did not find all of {tokens.size} tokens")
        missing = [subject.prepare(tokens) for tokens in work.unknown]
        figures.add(f"{prefix}miss_2k", time_calls(subject.match, missing))
        if subject.matched_tokens(missing[0]):
            raise RuntimeError(f"{prefix}miss_2k found tokens that were never inserted")


def _measure_limits(work: Workload, passes: int, figures: Figures) -> None:
    """As cold as in `measure`: both copies are new in each pass, all of the first made before all of the second."""
    for _ in range(passes):
        for label, sequences in (("2k", work.short), *work.long.items()):
            held = [tokens.tobytes() for tokens in sequences]
            asked = [tokens.tobytes() for tokens in sequences]
            figures.add(f"compare_{label}", time_calls(_compare, list(zip(asked, held, strict=True))))


def _hash_case(passes: int) -> Case:
    """Cost of one page key in a chain of 512, against hashing all their bytes in one call."""
    tokens = np.arange(512 * PAGE, dtype=np.int32).tobytes()
    chain = KeyChain(bytes(32), PAGE)
    plain = tokens + bytes(32 * 512)
    value = statistics.median(time_calls(lambda data: chain.keys(bytes(32), data), [tokens] * 20 * passes))
    limit = statistics.median(time_calls(lambda data: hashlib.blake2b(data).digest(), [plain] * 20 * passes))
    return Case("hash_page", value / 512_000, "µs", limit / 512_000, value / limit)


def run(quick: bool, progress: Progress) -> list[Case]:
    """Cases `match_*`, `insert_*`, `miss_2k`, `hash_page` in µs, and the same of installed neighbours."""
    work = make_workload(groups=2 if quick else 10, long_count=2 if quick else 6)
    passes = 1 if quick else 5
    figures = Figures()
    gc_was_on = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection in the middle of one call is not that call's cost
    try:
        progress(f"hicache: {len(work.short)} sequences, {passes} passes")
        measure(Ours, work, passes, "", figures)
        _measure_limits(work, passes, figures)
        hashing = _hash_case(passes)
        prefixes = [""]
        for name, make in index_peers.installed(PAGE, progress):
            progress(f"{name}: the same")
            measure(make, work, passes, f"{name}_", figures)
            prefixes.append(f"{name}_")
    finally:
        if gc_was_on:
            gc.enable()
    cases = [
        figures.case(f"{prefix}{what}_{label}", f"compare_{label}")
        for prefix in prefixes
        for what in ("match", "insert")
        for label in ("2k", "32k", "128k")
    ]
    return [*cases, *(figures.case(f"{prefix}miss_2k", None) for prefix in prefixes), hashing]

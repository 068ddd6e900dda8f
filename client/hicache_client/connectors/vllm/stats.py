"""What the connector counts, on its way to vLLM's log line and to Prometheus.

    hook, keeper, scout ──► Tally ─take─► HiCacheStats ──vLLM: summed over workers and steps──► log line, metrics

Times are kept as histograms of quarter octaves, so that sums of them still know their percentiles (to 19 %, rounded
up). `data` is plain: it crosses processes as MessagePack.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# counts of the scheduler side
LOOKUPS = "lookups"
LOOKUPS_LATE = "lookups_late"  # given up: the request was computed without an answer
LOOKUPS_AGAIN = "lookups_again"  # the answer had grown old, or its lease was lost
TOKENS_ASKED = "tokens_asked"  # of admitted requests that were looked up
TOKENS_L2 = "tokens_l2"  # loaded from the daemon's memory
TOKENS_L3 = "tokens_l3"  # loaded from disk, by way of its memory
TOKENS_OWN = "tokens_own"  # hits of vLLM's own prefix cache, which need no load
UNCACHEABLE = "uncacheable"  # requests that are neither looked up nor stored
LOADS = "loads"
LOADS_FAILED = "loads_failed"
PREFETCHES = "prefetches"
PREFETCHES_LATE = "prefetches_late"  # the request went on with what was in memory
RESETS = "resets"
# counts of the worker side, summed over workers
LOAD_BYTES = "load_bytes"
STORES = "stores"
STORES_FAILED = "stores_failed"
STORES_REVOKED = "stores_revoked"
STORE_BYTES = "store_bytes"
# of both
CAUGHT = "caught"  # exceptions that the guard kept from vLLM

# times
LOOKUP_S = "lookup"  # from asking to the answer
PREFETCH_S = "prefetch"
LOAD_S = "load"  # worker: from begin to the last layer
HOOK_S = "hook"  # scheduler: any one call of a hook, without
WAIT_S = "wait"  # ... what it waited for an answer on purpose, as nothing else ran

FIRST_BUCKET_S = 1e-6
BUCKETS_PER_OCTAVE = 4
PERIOD_S = 1.0  # how often times alone are worth sending

Histogram = dict[int, int]  # bucket → observations


def bucket_of(seconds: float) -> int:
    """The bucket of a duration: the smallest whose bound is not below it."""
    if seconds <= FIRST_BUCKET_S:
        return 0
    return math.ceil(BUCKETS_PER_OCTAVE * math.log2(seconds / FIRST_BUCKET_S) - 1e-9)


def bound_s(bucket: int) -> float:
    """Upper bound of a bucket in seconds."""
    return FIRST_BUCKET_S * math.pow(2.0, bucket / BUCKETS_PER_OCTAVE)


def quantile_s(histogram: Mapping[Any, int], q: float) -> float:
    """Upper bound of the bucket in which the quantile lies; 0.0 without observations."""
    rank = math.ceil(q * sum(histogram.values()))
    last = 0.0
    for bucket in sorted(histogram, key=int):
        last = bound_s(int(bucket))
        rank -= histogram[bucket]
        if rank <= 0:
            break
    return last


class HiCacheStats(KVConnectorStats):
    """One interval. `data` = {"counts": {name: n}, "times": {name: {bucket: n}}}."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data if data else {"counts": {}, "times": {}})

    @property
    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = self.data["counts"]
        return counts

    @property
    def times(self) -> dict[str, Histogram]:
        times: dict[str, Histogram] = self.data["times"]
        return times

    def reset(self) -> None:
        """Start a new interval."""
        self.data = {"counts": {}, "times": {}}

    def is_empty(self) -> bool:
        """Nothing happened."""
        return not self.counts and not self.times

    def aggregate(self, other: KVConnectorStats) -> "HiCacheStats":
        """Add another worker's, the scheduler's, or a later interval."""
        assert isinstance(other, HiCacheStats)
        for name, n in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + n
        for name, more in other.times.items():
            mine = self.times.setdefault(name, {})
            for bucket, n in more.items():
                mine[int(bucket)] = mine.get(int(bucket), 0) + n
        return self

    def reduce(self) -> dict[str, int | float | str]:
        """The log line, as vLLM writes it: `name=value`, joined by commas. What is 0 and need not be is left out."""
        counts = self.counts
        line: dict[str, int | float | str] = {
            "hicache hit tokens L2": counts.get(TOKENS_L2, 0),
            "L3": counts.get(TOKENS_L3, 0),
            "vLLM's own": counts.get(TOKENS_OWN, 0),
            "of": counts.get(TOKENS_ASKED, 0),
        }
        for label, name in _LOGGED:
            if counts.get(name):
                line[label] = counts[name]
        for label, name in (("loaded MB", LOAD_BYTES), ("stored MB", STORE_BYTES)):
            if counts.get(name):
                line[label] = round(counts[name] / 1e6, 1)
        for label, name, unit in (("lookup ms", LOOKUP_S, 1e3), ("load ms", LOAD_S, 1e3), ("hook us", HOOK_S, 1e6)):
            if self.times.get(name):
                p50, p99 = (quantile_s(self.times[name], q) * unit for q in (0.5, 0.99))
                line[f"{label} p50/p99"] = f"{p50:.3g}/{p99:.3g}"
        return line


_LOGGED = (
    ("lookups late", LOOKUPS_LATE),
    ("uncacheable requests", UNCACHEABLE),
    ("loads", LOADS),
    ("loads failed", LOADS_FAILED),
    ("stores", STORES),
    ("stores failed", STORES_FAILED),
    ("stores revoked", STORES_REVOKED),
    ("own errors", CAUGHT),
)


class Tally:
    """Counts and times of one side since the last `take`. Any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._stats = HiCacheStats()
        self._taken_s = now()

    def count(self, name: str, n: int = 1) -> None:
        """`n` more of `name`."""
        if n:
            with self._lock:
                counts = self._stats.counts
                counts[name] = counts.get(name, 0) + n

    def time(self, name: str, seconds: float) -> None:
        """One observation of `name`."""
        bucket = bucket_of(seconds)
        with self._lock:
            histogram = self._stats.times.setdefault(name, {})
            histogram[bucket] = histogram.get(bucket, 0) + 1

    def take(self) -> HiCacheStats | None:
        """What came since the last time; None if nothing did, or only times less than a period ago."""
        now = self._now()
        with self._lock:
            if self._stats.is_empty() or (not self._stats.counts and now - self._taken_s < PERIOD_S):
                return None
            taken, self._stats, self._taken_s = self._stats, HiCacheStats(), now
            return taken


_COUNTERS = (
    ("lookups", LOOKUPS, "Lookups sent to the hicache daemon."),
    ("lookups_late", LOOKUPS_LATE, "Requests computed because the daemon's answer did not come in time."),
    ("tokens_asked", TOKENS_ASKED, "Tokens of the admitted requests that were looked up."),
    ("own_hit_tokens", TOKENS_OWN, "Of those, hits of vLLM's own prefix cache."),
    ("uncacheable_requests", UNCACHEABLE, "Requests that hicache neither looks up nor stores."),
    ("loads", LOADS, "Loads from the daemon into the KV cache."),
    ("loads_failed", LOADS_FAILED, "Loads that failed or came late; their tokens were recomputed."),
    ("stores", STORES, "Stores offered to the daemon, all workers."),
    ("stores_failed", STORES_FAILED, "Stores that the daemon did not take."),
    ("stores_revoked", STORES_REVOKED, "Stores taken back because their blocks were needed."),
    ("load_bytes", LOAD_BYTES, "Bytes copied from the daemon, all workers."),
    ("store_bytes", STORE_BYTES, "Bytes offered to the daemon, all workers."),
    ("errors", CAUGHT, "Errors of the connector that were kept from vLLM."),
)
_TIMES = (
    ("lookup_seconds", LOOKUP_S, "From asking the daemon to its answer."),
    ("load_seconds", LOAD_S, "From the begin of a load to its last layer."),
    ("scheduler_hook_seconds", HOOK_S, "One call of a hook of the scheduler side, its wait left out."),
    ("scheduler_wait_seconds", WAIT_S, "What one call waited for the daemon because no request ran."),
)
_PROM_BUCKETS_S = [1e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 2.5, 5, 10]


class HiCachePromMetrics(KVConnectorPromMetrics):
    """`vllm:hicache_*`, with vLLM's own labels; `vllm:hicache_hit_tokens` has the tier as one more."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        hits = self._counter_cls(
            name="vllm:hicache_hit_tokens",
            documentation="Tokens that hicache loaded instead of computing them, by the tier they came from.",
            labelnames=[*labelnames, "tier"],
        )
        self._counters: list[tuple[str, dict[int, Any]]] = [
            (name, {engine: hits.labels(*values, tier) for engine, values in per_engine_labelvalues.items()})
            for tier, name in (("l2", TOKENS_L2), ("l3", TOKENS_L3))
        ]
        for suffix, name, text in _COUNTERS:
            counter = self._counter_cls(name=f"vllm:hicache_{suffix}", documentation=text, labelnames=labelnames)
            self._counters.append((name, self._per_engine(counter)))
        self._histograms: list[tuple[str, dict[int, Any]]] = []
        for suffix, name, text in _TIMES:
            histogram = self._histogram_cls(
                name=f"vllm:hicache_{suffix}", documentation=text, buckets=_PROM_BUCKETS_S, labelnames=labelnames
            )
            self._histograms.append((name, self._per_engine(histogram)))

    def _per_engine(self, metric: Any) -> dict[int, Any]:
        return {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval."""
        counts, times = transfer_stats_data["counts"], transfer_stats_data["times"]
        for name, counters in self._counters:
            if counts.get(name):
                counters[engine_idx].inc(counts[name])
        for name, histograms in self._histograms:
            for bucket, n in times.get(name, {}).items():
                for _ in range(n):
                    histograms[engine_idx].observe(bound_s(int(bucket)))

"""What the connector counts, on its way to the log line and to Prometheus."""

from tests import vllm_fakes  # noqa: F401 - stand-ins for vLLM's classes, before our modules import them

# isort: split
import random
from typing import Any

import msgspec
import pytest

from hicache_client.connectors.vllm import stats


class FakeMetric:
    def __init__(self, **spec: Any) -> None:
        self.spec = spec
        self.values: dict[tuple[Any, ...], list[float]] = {}

    def labels(self, *values: Any) -> Any:
        seen = self.values.setdefault(values, [])

        class Child:
            def inc(self, n: float) -> None:
                seen.append(n)

            observe = inc

        return Child()


class Counter(FakeMetric):
    pass


class Gauge(FakeMetric):
    pass


class Histogram(FakeMetric):
    pass


def test_a_bucket_bounds_its_durations_closely() -> None:
    rng = random.Random(1)
    for _ in range(500):
        seconds = 10 ** rng.uniform(-6, 2)
        bound = stats.bound_s(stats.bucket_of(seconds))
        assert seconds <= bound * (1 + 1e-9)
        assert bound <= seconds * 1.19 or seconds <= stats.FIRST_BUCKET_S
    assert stats.bucket_of(0.0) == 0
    assert stats.bound_s(stats.bucket_of(stats.FIRST_BUCKET_S * 2)) == pytest.approx(2e-6)


def test_percentiles_of_sums_are_those_of_all_observations() -> None:
    rng = random.Random(2)
    values = [10 ** rng.uniform(-5, -1) for _ in range(1000)]
    one, two = stats.Tally(), stats.Tally()
    for i, value in enumerate(values):
        (one if i % 3 else two).time("t", value)
    first, second = one.take(), two.take()
    if first is None or second is None:  # only times, and not a period ago
        first, second = one._stats, two._stats
    merged = first.aggregate(second).times["t"]
    for q in (0.5, 0.99):
        exact = sorted(values)[int(q * len(values)) - 1]
        assert exact <= stats.quantile_s(merged, q) * 1.001 <= exact * 1.2
    assert stats.quantile_s({}, 0.5) == 0.0


def test_counts_add_up_over_workers_and_steps() -> None:
    total = stats.HiCacheStats()
    assert total.is_empty()
    for _ in range(3):
        tally = stats.Tally()
        tally.count(stats.TOKENS_L2, 10)
        tally.count(stats.STORES)
        tally.count(stats.LOADS, 0)
        part = tally.take()
        assert part is not None
        total = total.aggregate(part)
    assert total.counts == {stats.TOKENS_L2: 30, stats.STORES: 3}


def test_what_was_taken_is_taken_once() -> None:
    tally = stats.Tally()
    tally.count("a")
    first = tally.take()
    assert first is not None
    assert first.counts == {"a": 1}
    assert tally.take() is None


def test_times_alone_are_sent_once_in_a_period() -> None:
    now = [0.0]
    tally = stats.Tally(now=lambda: now[0])
    tally.time(stats.HOOK_S, 1e-5)
    assert tally.take() is None
    now[0] += stats.PERIOD_S
    taken = tally.take()
    assert taken is not None
    assert sum(taken.times[stats.HOOK_S].values()) == 1
    tally.time(stats.HOOK_S, 1e-5)
    tally.count("a")
    assert tally.take() is not None, "counts go at once"


def test_it_survives_the_way_between_processes() -> None:
    tally = stats.Tally()
    tally.count(stats.LOADS, 2)
    tally.time(stats.LOOKUP_S, 0.003)
    sent = tally.take()
    assert sent is not None
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.to_dict()))
    again = stats.HiCacheStats(data)
    assert again.counts == sent.counts
    assert again.aggregate(stats.HiCacheStats()).times == sent.times
    assert stats.HiCacheStats(msgspec.json.decode(msgspec.json.encode(sent.to_dict()))).reduce() == sent.reduce()


def test_the_log_line_is_short_and_says_hits_by_tier() -> None:
    tally = stats.Tally()
    tally.count(stats.TOKENS_L2, 2047)
    tally.count(stats.TOKENS_L3, 96)
    tally.count(stats.TOKENS_OWN, 32)
    tally.count(stats.TOKENS_ASKED, 4096)
    tally.count(stats.LOAD_BYTES, 94_000_000)
    for _ in range(98):
        tally.time(stats.LOOKUP_S, 0.001)
    for _ in range(2):
        tally.time(stats.LOOKUP_S, 0.1)
    taken = tally.take()
    assert taken is not None
    line = ", ".join(f"{key}={value}" for key, value in taken.reduce().items())
    assert line.startswith("hicache hit tokens L2=2047, L3=96, vLLM's own=32, of=4096, loaded MB=94.0")
    assert "lookup ms p50/p99=1.02/" in line
    assert "failed" not in line, "what is 0 is left out"
    assert len(line) < 200


def test_an_interval_without_hits_still_says_so() -> None:
    line = stats.HiCacheStats().reduce()
    assert line == {"hicache hit tokens L2": 0, "L3": 0, "vLLM's own": 0, "of": 0}


def test_prometheus_sees_every_count_under_its_engine() -> None:
    made: list[FakeMetric] = []

    def making(kind: type[FakeMetric]) -> Any:
        def make(**spec: Any) -> FakeMetric:
            made.append(kind(**spec))
            return made[-1]

        return make

    kinds = {kind: making(kind) for kind in (Counter, Gauge, Histogram)}
    config = type("Config", (), {"kv_transfer_config": None})()
    metrics = stats.HiCachePromMetrics(config, _by_vllm(kinds), ["model", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    tally = stats.Tally()
    tally.count(stats.TOKENS_L2, 5)
    tally.count(stats.TOKENS_L3, 7)
    tally.count(stats.LOADS_FAILED, 2)
    tally.time(stats.LOOKUP_S, 0.002)
    tally.time(stats.LOOKUP_S, 0.002)
    taken = tally.take()
    assert taken is not None
    metrics.observe(taken.to_dict(), 1)
    by_name = {metric.spec["name"]: metric for metric in made}
    assert all(name.startswith("vllm:hicache_") for name in by_name)
    assert by_name["vllm:hicache_hit_tokens"].values["m", "1", "l2"] == [5]
    assert by_name["vllm:hicache_hit_tokens"].values["m", "1", "l3"] == [7]
    assert by_name["vllm:hicache_hit_tokens"].values["m", "0", "l2"] == []
    assert by_name["vllm:hicache_loads_failed"].values["m", "1"] == [2]
    assert len(by_name["vllm:hicache_lookup_seconds"].values["m", "1"]) == 2


def _by_vllm(kinds: dict[type, Any]) -> dict[Any, Any]:
    """vLLM's base class looks them up by prometheus_client's classes where that is installed."""
    try:
        import prometheus_client  # noqa: PLC0415
    except ImportError:
        return kinds
    return {getattr(prometheus_client, kind.__name__): made for kind, made in kinds.items()} | kinds

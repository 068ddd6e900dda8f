"""What the benchmark of vLLM makes of its measurements; the measuring needs vLLM: `make bench-engines`."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache_daemon.bench.report import report

ENGINES = Path(__file__).parents[1] / "engines"
MODULES = ("bench_vllm", "bench_contenders", "bench_table", "engine", "models", "nursery")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module; its neighbours' short names are gone afterwards."""
    monkeypatch.syspath_prepend(str(ENGINES))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("bench_vllm")
    for name in MODULES:
        sys.modules.pop(name, None)


def measured(bench: Any) -> Any:
    samples = bench.Samples()
    for engine, miss, hit in (("vllm", 4.0, 0.2), ("hicache", 4.1, 0.1), ("lmcache", 4.2, 0.125)):
        for spread in (1.0, 0.5, 3.0):
            answer = {"seconds": miss * spread, "tokens": [[7]], "cached": [0]}
            samples.add(("miss", engine, 2048, 32), answer)
            samples.add(("hit", engine, 2048, 32), answer | {"seconds": hit * spread, "cached": [2047]})
    samples.add(("l3_hit", "hicache", 2048, 32), {"seconds": 0.15, "tokens": [[7]], "cached": [2047]})
    for engine, seconds in (("vllm", 6.4), ("hicache", 8.0)):
        samples.add(("decode", engine, 4, 32), {"seconds": seconds, "tokens": [[7]], "cached": [0]})
    samples.times = [
        {"quantiles": {"hook": [1e-5, 1e-3]}},
        {"quantiles": {"hook": [2e-5, 5e-4], "lookup": [2e-3, 3e-3]}},
    ]
    return samples


def test_each_figure_has_its_yardstick(bench: Any) -> None:
    cases = {each.case: each for each in bench.cases_of(measured(bench))}

    def ratio(name: str) -> float:
        found: float = cases[name].ratio
        return found

    assert cases["vllm_miss_2048_block32"].value == pytest.approx(4000)
    assert cases["vllm_miss_2048_block32"].limit is None
    assert ratio("hicache_miss_2048_block32") == pytest.approx(1.025)
    assert ratio("hicache_l2_hit_2048_block32") == pytest.approx(0.5)
    assert ratio("hicache_l2_hit_2048_block32_vs_lmcache") == pytest.approx(0.8)
    assert ratio("hicache_l3_hit_2048_block32") == pytest.approx(1.5)
    assert cases["hicache_decode_4_block32"].value == pytest.approx(64)
    assert ratio("hicache_decode_4_block32") == pytest.approx(0.8)
    assert cases["scheduler_hook_p99"].value == pytest.approx(1.0)
    assert cases["lookup_p50"].value == pytest.approx(2.0)
    assert not any("mooncake" in name for name in cases)


def test_a_plan_bounds_what_takes_long(bench: Any, tmp_path: Path) -> None:
    plan = bench.Plan((32, 128), (512, 4096), 5, tmp_path, tmp_path, True)
    assert (plan.count(512), plan.count(4096)) == (5, 3)
    assert (plan.peer_count("lmcache", 4096), plan.peer_count("mooncake", 4096)) == (2, 0)
    assert (plan.peers(32), plan.peers(128)) == (["lmcache"], ["lmcache", "mooncake"])
    full = bench.Plan((32, 128), (512, 1024, 2048, 4096), 5, tmp_path, tmp_path, True)
    assert full.estimate_s() < 12 * 60


def test_tables_are_put_into_their_page(bench: Any, tmp_path: Path) -> None:
    text = bench.table(report("vllm", bench.cases_of(measured(bench))))
    assert "| 32 | 2,048 | 4,000 | 200 | 4,100 | 100 | 150 | 125 |" in text
    assert "| 32 | 2,048 | 1.025 | 0.500 | 0.800 | 1.500 |" in text
    assert "| `hicache_decode_4_block32` | 64 | tokens/s | 80 | 0.800 |" in text
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures -->\nold\n<!-- end of figures -->\nafter\n")
    bench.put_table(page, text)
    assert page.read_text() == f"before\n<!-- figures -->\n\n{text}\n\n<!-- end of figures -->\nafter\n"
    page.write_text("no place")
    with pytest.raises(ValueError, match="no place for figures"):
        bench.put_table(page, text)


def test_the_page_on_record_has_a_place_for_figures() -> None:
    page = (ENGINES.parents[1] / "docs/benchmarks/vllm.md").read_text()
    assert page.index("<!-- figures -->") < page.index("<!-- end of figures -->")

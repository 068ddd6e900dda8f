"""What `bench transfer` makes of its measurements, and of LMCache's report. The run itself is in integration."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hicache.base.errors import HiCacheError
from hicache_daemon.bench import transfer
from hicache_daemon.bench.transfer_peer import Peer, measure_peer, peer_of
from hicache_daemon.cli.app import app


def peer_report(**results: int) -> dict[str, Any]:
    counts = {"total_requests": 2, "checksum_ok": 2, "checksum_fail": 0} | results
    return {
        "metrics": {
            "results": counts,
            "cold_store": {"cold_store_p50": 250.0, "cold_store_min": 150.0},
            "warm_retrieve": {"warm_retrieve_p50": 50.0},
            "warm_lookup": {"warm_lookup_p50": 3.0},
            "cold_lookup": {"cold_lookup_p50": 4.0},
        }
    }


def test_the_peers_medians_are_read() -> None:
    assert peer_of("engine_driven", peer_report()) == Peer("engine_driven", 0.25, 0.05, 0.003)


@pytest.mark.parametrize("results", [{"checksum_fail": 1}, {"checksum_ok": 0}])
def test_a_peer_that_lost_bytes_has_no_figures(results: dict[str, int]) -> None:
    with pytest.raises(HiCacheError, match="LMCache"):
        peer_of("engine_driven", peer_report(**results))


def test_each_figure_stands_beside_each_yardstick() -> None:
    figures = transfer._Figures([0.02, 0.01, 0.04], [0.02] * 3, [0.001], {1: [0.02], 2: [0.01]})
    cases = {each.case: each for each in transfer._cases(figures, 10**8, [Peer("engine_driven", 0.1, 0.05, 0.004)])}
    assert list(cases) == [
        "store_vs_memcpy1",
        "store_vs_memcpy2",
        "store_vs_lmcache_engine_driven",
        "retrieve_vs_memcpy1",
        "retrieve_vs_memcpy2",
        "retrieve_vs_lmcache_engine_driven",
        "lookup",
        "lookup_vs_lmcache_engine_driven",
    ]
    beside = cases["store_vs_lmcache_engine_driven"]
    assert (beside.value, beside.limit, beside.ratio) == pytest.approx((5.0, 1.0, 5.0))
    assert cases["retrieve_vs_memcpy2"].ratio == pytest.approx(0.5)
    assert cases["lookup_vs_lmcache_engine_driven"].ratio == pytest.approx(0.25)


def test_a_prompt_is_as_large_as_it_is_said_to_be() -> None:
    model, layout = transfer._shape(transfer.LAYERS, transfer.BLOCKS)
    assert transfer.PAGES * model.groups[0].block_bytes() == 268_435_456
    assert layout.pool_bytes == 2 << 30


def test_a_folder_without_lmcache_is_told_before_measuring(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "transfer", "--beside-lmcache", str(tmp_path)])
    assert result.exit_code == 2
    assert "lmcache" in result.stderr
    with pytest.raises(HiCacheError, match="no program"):
        measure_peer(tmp_path, "", 2048, (1 << 30, 2), print)


def test_a_server_that_ends_is_told_with_its_words(tmp_path: Path) -> None:
    program = tmp_path / "lmcache"
    program.write_text("#!/bin/sh\necho no such library >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(HiCacheError, match="no such library"):
        measure_peer(tmp_path, "", 2048, (1 << 30, 2), print)

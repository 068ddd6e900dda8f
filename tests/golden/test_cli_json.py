"""The shapes of `--json` and of the configuration schema are a contract: a change shows here as a diff.

Renew on purpose with `UPDATE_GOLDEN=1 pytest tests/golden/test_cli_json.py`.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hicache_daemon.bench.report import Case, report
from hicache_daemon.cli.app import app
from tests.golden.shapes import check_golden


def run(*args: str) -> Any:
    env = {"HICACHE_RUNTIME_DIR": str(Path(tempfile.gettempdir()) / "hicache-of-test-golden")}
    return json.loads(CliRunner().invoke(app, [*args, "--json"], env=env).stdout)


def documents() -> dict[str, Any]:
    return {
        "config-check": run("config", "check"),
        "config-check-errors": run("config", "check", "--set", "l2.sise=1GiB"),
        "config-show": run("config", "show"),
        "error": run("status"),
        "bench": report("index", [Case("match_32k", 12.0, "µs", 24.0, 0.5)]),
    }


@pytest.mark.parametrize("name", ["config-check", "config-check-errors", "config-show", "error", "bench"])
def test_shape_of_json_output(name: str) -> None:
    check_golden(name, documents()[name])


def test_config_schema_is_the_released_one() -> None:
    """configs/schema.json is what editors use; `config schema --json` must print the same."""
    released = json.loads((Path(__file__).parents[2] / "configs/schema.json").read_text())
    assert run("config", "schema")["schema"] == released

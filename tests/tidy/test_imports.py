"""What must never import what: the contracts of pyproject.toml, and that they cover every package."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.tidy.sources import ROOT

# Packages that decide must stand in contract 1; these do not decide.
OUTSIDE = {"store", "copy", "codec", "reuse", "sparse", "longctx", "metrics"}


def contracts() -> dict[str, dict[str, Any]]:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {item["id"]: item for item in data["tool"]["importlinter"]["contracts"]}


def test_contracts_hold() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{len(contracts())} kept, 0 broken" in done.stdout


def test_every_package_of_the_library_is_covered() -> None:
    packages = {path.parent.name for path in (ROOT / "hicache").glob("*/__init__.py")}
    listed = {name.partition(".")[2] for name in contracts()["pure"]["source_modules"]}
    assert packages - OUTSIDE == listed
    assert contracts()["pure-inside"]["source_modules"] == contracts()["pure"]["source_modules"]


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("hicache_client", "torch pydantic transformers hicache_daemon yaml typer lmdb"),
        ("hicache_client.sync", "torch pydantic transformers hicache_daemon hicache.core hicache.store"),
        ("hicache_client.aio", "torch pydantic transformers hicache_daemon hicache.core hicache.store"),
        ("hicache_daemon.main", "torch transformers cupy hicache_client.connectors"),
        ("hicache.core.state", "torch pydantic zmq lmdb asyncio hicache_client hicache_daemon"),
    ],
)
def test_what_an_import_loads(module: str, never: str) -> None:
    """In a fresh interpreter, since the tests' own has long loaded everything."""
    code = f"import sys, {module}; print(*sorted(set({never.split()!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []

"""What must never import what: the contracts of pyproject.toml, and that they cover every package."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.tidy.sources import PRODUCT, ROOT

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


# One forbidden import for each contract, planted in a copy: a contract that cannot break guards nothing.
PLANTS = {
    "pure": ("hicache/base/units.py", "threading"),
    "pure-inside": ("hicache/keys/chain.py", "hicache.store.base"),
    "tokens-and-blocks": ("hicache/pool/blocks.py", "hicache.keys.chain"),
    "tokens-and-blocks-2": ("hicache/index/radix.py", "hicache.pool.refs"),
    "policy": ("hicache/policy/evict/lru.py", "hicache.keys.chain"),
    "store": ("hicache/store/record.py", "hicache.core.events"),
    "copy": ("hicache/copy/geometry.py", "hicache.store.base"),
    "bindings": ("daemon/hicache_daemon/front.py", "zmq"),
    "client": ("client/hicache_client/pool.py", "hicache.pool.blocks"),
    "connectors": ("daemon/hicache_daemon/loop.py", "hicache_client.connectors"),
    "connector-parts": ("client/hicache_client/connectors/vllm/lookups.py", "vllm"),
    "no-torch": ("daemon/hicache_daemon/arena.py", "torch"),
    "pydantic": ("daemon/hicache_daemon/lanes.py", "pydantic"),
}


def test_each_contract_can_break(tmp_path: Path) -> None:
    assert PLANTS.keys() == contracts().keys()
    for folder in PRODUCT:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, module in PLANTS.values():
        with (tmp_path / name).open("a") as file:
            file.write(f"\nimport {module}\n")
    path = os.pathsep.join(str(tmp_path / folder) for folder in (".", "daemon", "client"))
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [tool, "--no-cache"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    kept = [item["name"] for item in contracts().values() if f"{item['name']} KEPT" in done.stdout]
    assert kept == []
    assert f"0 kept, {len(PLANTS)} broken" in done.stdout


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

"""The wheel holds the three packages and the two commands, and its base install is the client's."""

import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.tidy.sources import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    builder = WheelBuilder(str(ROOT))
    (path,) = builder.build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(path)


def _member(wheel: zipfile.ZipFile, ending: str) -> str:
    (name,) = [name for name in wheel.namelist() if name.endswith(ending)]
    return wheel.read(name).decode()


def test_three_packages_with_their_types(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"hicache", "hicache_daemon", "hicache_client"}
    assert {f"{top}/py.typed" for top in tops} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]


def test_every_module_is_in_it(wheel: zipfile.ZipFile) -> None:
    roots = (ROOT, ROOT / "daemon", ROOT / "client")
    packages = ("hicache", "hicache_daemon", "hicache_client")
    here = {
        str(path.relative_to(root))
        for root, package in zip(roots, packages, strict=True)
        for path in Path(root / package).rglob("*.py")
    }
    assert here - set(wheel.namelist()) == set()


def test_commands_and_base_requirements(wheel: zipfile.ZipFile) -> None:
    scripts = _member(wheel, "entry_points.txt")
    assert "hicache = hicache_daemon.entry:main" in scripts
    assert "hicached = hicache_daemon.entry:serve_main" in scripts
    meta = Parser().parsestr(_member(wheel, "METADATA"))
    base = {line.split(">")[0] for line in meta.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert base == {"pyzmq", "msgspec"}
    assert meta["License-Expression"] == "Apache-2.0"
    assert set(meta.get_all("Provides-Extra", [])) >= {"daemon", "torch", "cuda12", "cuda13", "dev"}

"""The secret that keys identities: from a file, kept beside L3, or fresh."""

import re
import subprocess
from pathlib import Path

import pytest

from hicache.base.errors import HiCacheError
from hicache_daemon.secret import load_secret


def test_without_a_disk_tier_each_boot_draws_its_own() -> None:
    first, second = load_secret(None, None), load_secret(None, None)
    assert len(first) == len(second) == 32
    assert first != second


def test_beside_the_disk_tier_it_is_made_once_and_private(tmp_path: Path) -> None:
    first = load_secret(None, tmp_path / "l3")
    assert load_secret(None, tmp_path / "l3") == first
    assert (tmp_path / "l3" / "secret").stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in (tmp_path / "l3").iterdir()] == ["secret"]


def test_a_configured_file_wins(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text("ab" * 32 + "\n")
    path.chmod(0o600)
    assert load_secret(path, tmp_path / "l3") == bytes([0xAB]) * 32
    assert not (tmp_path / "l3").exists()


@pytest.mark.parametrize(
    "content", [bytes(range(32)), bytes(range(32)).hex().encode(), bytes(range(32)).hex().upper().encode() + b"\n"]
)
def test_raw_bytes_and_hex_digits_are_the_same_secret(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine"
    path.write_bytes(content)
    path.chmod(0o600)
    assert load_secret(path, None) == bytes(range(32))


def test_the_recipe_of_the_example_makes_a_secret(tmp_path: Path) -> None:
    """The comment of configs/multi-tenant.yaml, run by a shell with its path exchanged."""
    text = (Path(__file__).parents[2] / "configs/multi-tenant.yaml").read_text()
    (recipe,) = re.findall(r"`(\(umask [^`]*/etc/hicache/secret\))`", text)
    path = tmp_path / "secret"
    subprocess.run(["sh", "-c", recipe.replace("/etc/hicache/secret", str(path))], check=True, timeout=60)
    assert len(load_secret(path, None)) == 32


def test_the_remedy_for_a_bad_secret_is_a_recipe_that_works(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(bytes(33))
    path.chmod(0o600)
    with pytest.raises(HiCacheError) as caught:
        load_secret(path, None)
    subprocess.run(["sh", "-c", caught.value.remedy.partition(": ")[2]], check=True, timeout=60)
    assert load_secret(path, None) == path.read_bytes()


def test_a_folder_that_cannot_be_made_has_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HiCacheError, match="cannot create") as caught:
        load_secret(None, tmp_path / "file" / "l3")
    assert "l3.path" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "mode", "complaint"),
    [
        ("ab" * 31, 0o600, "64 hex digits"),
        ("zz" * 32, 0o600, "64 hex digits"),
        ("ab " * 21 + "a", 0o600, "64 hex digits"),
        ("ab" * 32, 0o644, "chmod 600"),
    ],
)
def test_a_file_that_is_short_no_hex_or_public_is_refused(
    tmp_path: Path, text: str, mode: int, complaint: str
) -> None:
    path = tmp_path / "mine"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(HiCacheError) as caught:
        load_secret(path, None)
    assert complaint in str(caught.value)


def test_a_secret_that_was_lost_is_not_quietly_replaced(tmp_path: Path) -> None:
    load_secret(None, tmp_path)
    (tmp_path / "records").mkdir()
    (tmp_path / "secret").unlink()
    with pytest.raises(HiCacheError, match="is gone"):
        load_secret(None, tmp_path)
    assert not (tmp_path / "secret").exists()

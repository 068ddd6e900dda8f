"""The connector's options: what fits, and what is said of what does not."""

import math
from pathlib import Path
from typing import Any

import pytest

from hicache_client.connectors.vllm.options import OptionsError, VllmOptions, parse_options


def complaint(extra: dict[str, Any], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(OptionsError) as caught:
        parse_options(extra, environ)
    return str(caught.value)


def test_nothing_is_the_defaults() -> None:
    options = parse_options({})
    assert options == VllmOptions()
    assert options.on_error == "uncached"
    assert options.directory is None


def test_values_are_taken_and_whole_numbers_may_stand_for_seconds() -> None:
    options = parse_options({"runtime_dir": "~/run", "lookup_timeout_s": 2, "write": False, "page_tokens": 32})
    assert options.directory == Path("~/run").expanduser()
    assert (options.lookup_timeout_s, options.write, options.page_tokens) == (2, False, 32)


@pytest.mark.parametrize(
    ("name", "near"),
    [("lookup_timeout", "lookup_timeout_s"), ("prefetch_base", "prefetch_base_s"), ("tennant", "tenant")],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, near: str) -> None:
    assert f"{name!r} is no option: did you mean {near!r}?" in complaint({name: 1})


def test_a_name_like_nothing_known_is_answered_with_all() -> None:
    text = complaint({"zzz": 1})
    assert "'zzz' is no option: remove it" in text
    assert all(name in text for name in VllmOptions.__struct_fields__)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lookup_timeout_s", "fast", "a number above 0 and at most 3600"),
        ("lookup_timeout_s", 0, "a number above 0 and at most 3600"),
        ("lookup_timeout_s", math.nan, "a number above 0 and at most 3600"),
        ("lookup_wait_ms", 101, "a number at least 0 and at most 100"),
        ("page_tokens", 1.5, "a whole number at least 0 and at most 65536"),
        ("page_tokens", True, "a whole number at least 0 and at most 65536"),
        ("min_load_tokens", 0, "a whole number at least 1"),
        ("write", "yes", "true or false"),
        ("prefetch", "never", "one of  and 'timeout' and 'wait_complete' and 'best_effort'"),
        ("on_error", None, "one of  and 'uncached' and 'refuse'"),
        ("tenant", 7, "a text"),
    ],
)
def test_a_wrong_value_names_field_expectation_value_and_remedy(name: str, value: Any, expected: str) -> None:
    text = complaint({name: value})
    assert f"{name}: expected" in text
    for allowed in expected.split(" and "):
        assert allowed in text
    assert f"got {value!r} ({type(value).__name__})" in text
    assert f"for the default {getattr(VllmOptions(), name)!r}" in text


def test_all_problems_stand_in_one_line() -> None:
    text = complaint({"tennant": "x", "write": 3, "lookup_wait_ms": -1, "credential": "env:ABSENT"}, {})
    assert "\n" not in text
    assert text.startswith("kv_connector_extra_config: ")
    assert text.count(";") == 3
    for part in ("'tennant'", "write: expected", "lookup_wait_ms: expected", "credential: expected"):
        assert part in text


def test_a_long_wrong_value_is_cut() -> None:
    assert len(complaint({"write": "x" * 10_000})) < 300
    assert len(complaint({"y" * 10_000: 1})) < 600


def test_a_credential_comes_from_the_environment_or_as_it_is() -> None:
    assert parse_options({"credential": "env:SECRET"}, {"SECRET": "s3cret"}).credential == "s3cret"
    assert parse_options({"credential": "a:b"}, {}).credential == "a:b"


@pytest.mark.parametrize("environ", [{}, {"SECRET": ""}])
def test_a_credential_that_is_not_there_is_said(environ: dict[str, str]) -> None:
    assert "environment variable 'SECRET'" in complaint({"credential": "env:SECRET"}, environ)


def test_a_credential_is_never_shown() -> None:
    options = parse_options({"credential": "env:SECRET"}, {"SECRET": "s3cret"})
    assert "s3cret" not in repr(options)
    assert "s3cret" not in f"{options}"
    assert "***" in repr(options)
    text = complaint({"credential": ["s3cret"]})
    assert "s3cret" not in text
    assert "got a list" in text

"""Sizes and durations: what is read, what is refused, and that writing and reading agree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.base.units import approx_size, format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1B", 1),
        ("64KiB", 65536),
        ("8GiB", 8 << 30),
        ("512MB", 512_000_000),
        ("1.5GiB", 3 << 29),
        ("0.1kB", 100),
        (" 2 TiB ", 2 << 40),
        ("9007199254740993B", 9007199254740993),  # beyond what a float holds exactly
    ],
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("8", "no unit"),
        ("8gib", "did you mean 8GiB"),
        ("8G", "ends in one of"),
        ("-1GiB", "not a size"),
        ("GiB", "not a size"),
        ("", "not a size"),
        ("1e9B", "not a size"),
        ("0.3B", "whole number of bytes"),
        ("1,5GiB", "not a size"),
        ("٣GiB", "not a size"),  # digits of another script
    ],
)
def test_parse_size_refuses(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30.0), ("5m", 300.0), ("250ms", 0.25), ("1.5h", 5400.0), ("1d", 86400.0), ("0", 0.0), ("10us", 1e-5)],
)
def test_parse_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "hint"), [("30", "no unit"), ("5M", "did you mean 5m"), ("5min", "ends in one of"), ("-5s", "not a dur")]
)
def test_parse_duration_refuses(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        parse_duration(text)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_size_survives_a_round_trip(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(min_value=0, max_value=10**12))
def test_duration_survives_a_round_trip(micros: int) -> None:
    assert round(parse_duration(format_duration(micros / 1e6)) * 1e6) == micros


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0B"), (8 << 30, "8GiB"), (3 << 29, "1536MiB"), (512_000_000, "500000KiB"), (1001, "1001B")],
)
def test_format_size(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (60, "1m"), (90, "90s"), (0.25, "250ms"), (86400, "1d")])
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_approx_size_is_for_people() -> None:
    assert [approx_size(x) for x in (100, 1536, 25e9)] == ["100 B", "1.5 KiB", "23.3 GiB"]

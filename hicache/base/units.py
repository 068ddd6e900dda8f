"""Sizes and durations as people write them: `8GiB`, `512MB`, `30s`, `5m`.

Binary prefixes are powers of 1024, decimal ones of 1000. A bare number is refused here, because `8` may be
meant as bytes, gigabytes or pages; zero needs no unit.
"""

import re

SIZE_UNITS: dict[str, int] = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
DURATION_UNITS: dict[str, float] = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def _split(text: str, what: str, units: list[str], example: str) -> tuple[str, str]:
    """Number and unit of `text`; raises ValueError that says what was expected."""
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a {what}; write a number and a unit, like {example}")
    number, unit = found.groups()
    if unit in units:
        return number, unit
    if not unit and float(number) == 0:
        return number, units[0]
    same = [known for known in units if known.lower() == unit.lower()]
    if same:
        raise ValueError(f"{text!r}: no unit {unit!r}; did you mean {number}{same[0]}?")
    if not unit:
        raise ValueError(f"{text!r} has no unit; a {what} is written like {example}")
    raise ValueError(f"{text!r}: no unit {unit!r}; a {what} ends in one of {', '.join(units)}")


def parse_size(text: str) -> int:
    """Bytes of `8GiB`, `512MB`, `1.5GiB`, `0`. Raises ValueError, also for a fraction of a byte."""
    number, unit = _split(text, "size", list(SIZE_UNITS), "8GiB or 512MB")
    factor = SIZE_UNITS[unit]
    if "." not in number:
        return int(number) * factor  # exact at any magnitude
    whole, _, fraction = number.partition(".")
    scale: int = 10 ** len(fraction)
    size, rest = divmod(int(whole + fraction) * factor, scale)
    if rest:
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return size


def parse_duration(text: str) -> float:
    """Seconds of `30s`, `5m`, `250ms`, `1.5h`, `0`. Raises ValueError."""
    number, unit = _split(text, "duration", list(DURATION_UNITS), "30s or 5m")
    return float(number) * DURATION_UNITS[unit]


def format_size(size: int) -> str:
    """The shortest exact form that `parse_size` reads back: `8GiB`, `1536MiB`, `100B`."""
    if size == 0:
        return "0B"
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size % SIZE_UNITS[unit] == 0:
            return f"{size // SIZE_UNITS[unit]}{unit}"
    for unit in ("TB", "GB", "MB"):
        if size % SIZE_UNITS[unit] == 0:
            return f"{size // SIZE_UNITS[unit]}{unit}"
    return f"{size}B"


def format_duration(seconds: float) -> str:
    """The largest unit that holds `seconds` in whole numbers: `5m`, `90s`, `250ms`; exact to the microsecond."""
    micros = round(seconds * 1e6)
    if micros == 0:
        return "0s"
    for unit in ("d", "h", "m", "s", "ms"):
        factor = round(DURATION_UNITS[unit] * 1e6)
        if micros % factor == 0:
            return f"{micros // factor}{unit}"
    return f"{micros}us"


def approx_size(size: float) -> str:
    """For people, rounded: `1.4 GiB`. Not meant to be read back."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size) >= SIZE_UNITS[unit]:
            return f"{size / SIZE_UNITS[unit]:.1f} {unit}"
    return f"{size:.0f} B"

"""Validation failures in the operator's words: which key, where it was written, what was expected."""

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hicache_daemon.config.catalog import nearest
from hicache_daemon.config.errors import ConfigError
from hicache_daemon.config.source import Origin

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "is_instance_of": "text",
    "list_type": "a list",
    "model_type": "a section of keys",
    "dict_type": "a section of keys",
}


def origin_of(path: tuple[str, ...], origins: Mapping[tuple[str, ...], Origin]) -> Origin:
    """Who wrote `path`, or something in it, or the nearest section above it."""
    if path in origins:
        return origins[path]
    inside = [origin for known, origin in origins.items() if known[: len(path)] == path]
    if inside and path:
        return inside[0]
    above = [path[:length] for length in range(len(path) - 1, -1, -1) if path[:length] in origins]
    return origins[above[0]] if above else Origin("default")


def _path_of(detail: Any, origins: Mapping[tuple[str, ...], Origin]) -> tuple[str, ...]:
    """The key behind a failure; pydantic appends names of union members, which no file ever held."""
    path = tuple(str(part) for part in detail["loc"])
    while path and not any(known[: len(path)] == path for known in origins):
        path = path[:-1]
    return path


def _describe(detail: Any, path: tuple[str, ...]) -> tuple[str, str]:
    """Message and remedy of one failure."""
    kind, given = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        near = nearest(path)
        return "unknown key", f"did you mean {near}?" if near else "see `hicache config schema`"
    if kind == "literal_error":
        choices = [str(word).strip("'") for word in detail["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        close = difflib.get_close_matches(str(given), choices, 1, 0.5)
        return f"must be one of {', '.join(choices)}, got {given!r}", f"did you mean {close[0]}?" if close else ""
    if kind in _EXPECTED:
        shown = "nothing" if given is None else repr(given)
        return f"must be {_EXPECTED[kind]}, got {shown}", ""
    if kind in {"greater_than_equal", "less_than_equal"}:
        word = "at least" if kind.startswith("greater") else "at most"
        return f"must be {word} {detail['ctx'].get('ge', detail['ctx'].get('le'))}, got {given}", ""
    return str(detail["msg"]).removeprefix("Value error, "), ""


def explain(error: ValidationError, origins: Mapping[tuple[str, ...], Origin]) -> list[ConfigError]:
    """One `ConfigError` for each key that failed, in the order of the file."""
    found: dict[tuple[str, ...], ConfigError] = {}
    for detail in error.errors(include_url=False):
        path = _path_of(detail, origins)
        message, remedy = _describe(detail, path)
        origin = origin_of(path, origins)
        found.setdefault(path, ConfigError(".".join(path), origin.line, message, remedy, origin.where))
    return sorted(found.values(), key=lambda item: item.line or 0)

"""Field kinds of the settings: sizes, durations and paths that are text outside and plain numbers inside.

In text (file, environment, `--set`) a size or duration carries its unit and a bare number is refused; in Python
code a number is taken as bytes or seconds.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, ValidationInfo, WithJsonSchema

from hicache.base.units import format_duration, format_size, parse_duration, parse_size

FROM_TEXT = {"from_text": True}  # the validation context of the loader

_NUMBER = r"[0-9]+(\.[0-9]+)?\s*"
_SIZE_PATTERN = rf"^({_NUMBER}(B|KiB|MiB|GiB|TiB|kB|KB|MB|GB|TB)|0)$"
_DURATION_PATTERN = rf"^({_NUMBER}(us|ms|s|m|h|d)|0)$"


def _read(value: Any, info: ValidationInfo, parse: Callable[[str], float], what: str) -> Any:
    """Text becomes a number. A bare number that comes from text goes to the parser too, which asks for a unit."""
    from_text = bool(info.context and info.context.get("from_text"))
    number = type(value) in {int, float}
    if isinstance(value, str) or (from_text and number):
        return parse(str(value))
    if not number:
        shown = "nothing" if value is None else repr(value)
        raise ValueError(f"must be a {what}, got {shown}")
    return value


def _size(value: Any, info: ValidationInfo) -> Any:
    return _read(value, info, parse_size, "size like 8GiB")


def _size_or_auto(value: Any, info: ValidationInfo) -> Any:
    return value if value == "auto" else _read(value, info, parse_size, "size like 2MiB, or auto")


def _duration(value: Any, info: ValidationInfo) -> Any:
    return _read(value, info, parse_duration, "duration like 30s")


def _show_size(value: int | str) -> str:
    return value if isinstance(value, str) else format_size(value)


def _path(value: Any) -> Any:
    """Absolute, against the working directory: the daemon may change its directory later."""
    if isinstance(value, str) and not value.strip():
        raise ValueError("must not be empty")
    return Path(value).expanduser().absolute() if isinstance(value, str | Path) else value


Size = Annotated[
    int,
    BeforeValidator(_size),
    PlainSerializer(_show_size, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": _SIZE_PATTERN, "x-kind": "size"}),
]
SizeOrAuto = Annotated[
    int | Literal["auto"],
    BeforeValidator(_size_or_auto),
    PlainSerializer(_show_size, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": f"^auto$|{_SIZE_PATTERN}", "x-kind": "auto or size"}),
]
Duration = Annotated[
    float,
    BeforeValidator(_duration),
    PlainSerializer(format_duration, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": _DURATION_PATTERN, "x-kind": "duration"}),
]
ConfigPath = Annotated[
    Path,
    BeforeValidator(_path),
    PlainSerializer(str, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "minLength": 1, "x-kind": "path"}),
]


def _bounds(low: float, high: float, show: Callable[[Any], str]) -> AfterValidator:
    def check(value: Any) -> Any:
        if not isinstance(value, str) and not low <= value <= high:
            raise ValueError(f"must be {show(low)} to {show(high)}, got {show(value)}")
        return value

    return AfterValidator(check)


def size_between(low: int, high: int) -> AfterValidator:
    """Inclusive bounds in bytes; `auto` passes."""
    return _bounds(low, high, format_size)


def duration_between(low: float, high: float) -> AfterValidator:
    """Inclusive bounds in seconds."""
    return _bounds(low, high, format_duration)

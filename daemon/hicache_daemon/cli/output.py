"""Where output goes: results to stdout, progress and complaints to stderr, and with `--json` nothing but JSON on
stdout, failures included.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import typer

from hicache.base.units import approx_size

SCHEMA_VERSION = 1
EXIT_FAILURE = 1
EXIT_USAGE = 2


def emit(data: Mapping[str, Any]) -> None:
    """Print one JSON document; `schema_version` comes first."""
    ordered = {"schema_version": data.get("schema_version", SCHEMA_VERSION)} | dict(data)
    sys.stdout.write(json.dumps(ordered, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def error_document(code: str, message: str, remedy: str) -> None:
    """Print a failure as JSON."""
    emit({"error": {"code": code, "message": message, "remedy": remedy}})


def fail(code: str, message: str, remedy: str = "", as_json: bool = False, exit_code: int = EXIT_FAILURE) -> NoReturn:
    """End the command with one clear line and what to do about it."""
    if as_json:
        error_document(code, message, remedy)
    else:
        line = f"hicache: {message}" + (f"; {remedy}" if remedy else "")
        typer.secho(line, fg=typer.colors.RED, err=True)
    raise typer.Exit(exit_code)


def progress_line(text: str) -> None:
    """One step of a long command, on stderr."""
    typer.secho(text, dim=True, err=True)


def print_table(
    title: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    *,
    lines: bool = True,
) -> None:
    """A table on stdout; columns in `right` are aligned to the right. Wide enough for its content in a pipe.

    `lines=False` leaves out the lines between columns: narrower."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    form = box.ROUNDED if lines else box.SIMPLE_HEAD
    table = Table(title=title, box=form, title_justify="left", title_style="bold", header_style="bold cyan")
    if not lines:
        table.collapse_padding, table.pad_edge, table.show_edge = True, False, False
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table) if console.is_terminal else Console(width=160).print(table)


_UNITS: dict[str, Callable[[float], str]] = {
    "_bytes": approx_size,
    "_us": lambda x: f"{x:,.1f} µs",
    "_ms": lambda x: f"{x:,.2f} ms",
    "_ratio": lambda x: f"{x:.1%}",
    "_s": lambda x: f"{x:,.1f} s",
}
IDENTIFIERS = {"pid", "session", "epoch"}  # numbers that name, not count: no thousands separators


def show_value(name: str, value: Any) -> tuple[str, str]:
    """Label and text of one fact; the unit moves from the name into the text."""
    if isinstance(value, bool):
        return name, "yes" if value else "no"
    if isinstance(value, int | float):
        for suffix, show in _UNITS.items():
            if name.endswith(suffix):
                return name.removesuffix(suffix), show(value)
        if name in IDENTIFIERS:
            return name, str(value)
        return name, f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"
    return name, "–" if value is None or value == "" else str(value)


def fact_rows(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested facts as (label, text) rows, dotted; lists of plain values are joined."""
    rows: list[tuple[str, str]] = []
    for name, value in data.items():
        if isinstance(value, Mapping):
            unit = next((suffix for suffix in _UNITS if name.endswith(suffix)), "")
            inner = {key + unit if isinstance(item, int | float) else key: item for key, item in value.items()}
            rows += fact_rows(inner, f"{prefix}{name.removesuffix(unit)}.")
        elif isinstance(value, list) and not any(isinstance(item, Mapping) for item in value):
            rows.append((prefix + name, ", ".join(map(str, value)) or "–"))
        elif not isinstance(value, list):
            label, text = show_value(name, value)
            rows.append(((prefix + label).replace("_", " "), text))
    return rows


def record_lists(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The lists of records anywhere in nested facts, with their dotted names."""
    found: list[tuple[str, list[Mapping[str, Any]]]] = []
    for name, value in data.items():
        if isinstance(value, Mapping):
            found += record_lists(value, f"{prefix}{name}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            found.append((prefix + name, [item for item in value if isinstance(item, Mapping)]))
    return found

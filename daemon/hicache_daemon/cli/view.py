"""What `status` and `inspect` show to a person. Facts that are missing are left out, so that this command line can
look at a daemon of another version.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from hicache_daemon.cli.output import fact_rows, print_table, record_lists, show_value

ENVELOPE = {"schema_version", "boot_id"}
BAR_CELLS = 20


def facts(title: str, data: Mapping[str, Any]) -> None:
    """Facts as one table, then each list of records as a table of its own."""
    inner = {name: value for name, value in data.items() if name not in ENVELOPE}
    if len(inner) == 1:
        (only,) = inner.values()
        if only == []:
            typer.echo(f"no {title}")
            return
        inner = dict(only) if isinstance(only, Mapping) else inner
    rows = fact_rows(inner)
    if rows:
        print_table(title, ("what", "value"), rows, right=(1,))
    for name, records in record_lists(inner):
        columns = list(dict.fromkeys(key for record in records for key in record))
        heads = [show_value(key, records[0].get(key))[0].replace("_", " ") for key in columns]
        print_table(name, heads, [[show_value(key, record.get(key))[1] for key in columns] for record in records])


def _get(data: Mapping[str, Any], *path: str) -> Any:
    """The value at a path, or None."""
    node: Any = data
    for name in path:
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _bar(used: Any, capacity: Any) -> str:
    if not isinstance(used, int) or not isinstance(capacity, int) or capacity <= 0:
        return ""
    cells = min(BAR_CELLS, round(used / capacity * BAR_CELLS))
    return f"{'█' * cells}{'░' * (BAR_CELLS - cells)} {used / capacity:.0%}"


def _bytes(value: Any) -> str:
    return show_value("x_bytes", value)[1]


def _tiers(cache: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    places = {
        "L2 memory": ("l2", _get(cache, "pool", "used_bytes"), _get(cache, "pool", "arena_bytes"), ""),
        "L3 disk": (
            "l3",
            _get(cache, "l3", "used_bytes"),
            _get(cache, "l3", "capacity_bytes"),
            _get(cache, "l3", "mode"),
        ),
    }
    for name, (tier, used, capacity, mode) in places.items():
        if mode == "off":
            rows.append((name, "off", "", "", "", ""))
            continue
        ready, filling = (_get(cache, "rows", tier, state) for state in ("ready", "filling"))
        pages = "–" if ready is None else f"{ready:,}"
        rows.append(
            (name, mode or "", _bar(used, capacity), _bytes(used), _bytes(capacity), f"{pages} (+{filling or 0})")
        )
    return rows


def _counted(groups: Sequence[Mapping[str, Any] | None]) -> list[tuple[str, str]]:
    """Counters that are not zero."""
    found = [(name, value) for group in groups for name, value in (group or {}).items()]
    return [(name.replace("_", " "), f"{value:,}") for name, value in found if isinstance(value, int) and value]


def status(data: Mapping[str, Any]) -> None:
    """A headline, the tiers, what was counted, and what is wrong."""
    state = str(data.get("state", "?"))
    colour = typer.colors.GREEN if data.get("ready") else typer.colors.YELLOW
    uptime = show_value("x_s", data.get("uptime_s"))[1]
    typer.secho(f"hicached {data.get('version', '')}: {state}", fg=colour, bold=True)
    pid, sessions, boot = (data.get(name, "–") for name in ("pid", "sessions", "boot_id"))
    typer.echo(f"pid {pid}, up {uptime}, {sessions} sessions, boot {boot}")
    for reason in data.get("reasons") or ():
        typer.secho(f"! {reason}", fg=typer.colors.YELLOW)
    cache = data.get("cache")
    if isinstance(cache, Mapping):
        print_table("tiers", ("tier", "mode", "use", "used", "of", "pages (filling)"), _tiers(cache), right=(3, 4, 5))
    lag = data.get("loop_lag_ms")
    if isinstance(lag, Mapping):
        shown = ", ".join(f"{name} {show_value('x_ms', value)[1]}" for name, value in lag.items())
        typer.echo(f"loop lag: {shown}")
    rows = _counted((_get(data, "cache", "counters"), data.get("front"), data.get("loop")))
    if rows:
        print_table("counted since the start, without zeros", ("what", "count"), rows, right=(1,))

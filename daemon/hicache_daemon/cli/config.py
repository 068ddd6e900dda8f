"""`hicache config check | show | schema`."""

from typing import Annotated, Any

import typer

from hicache_daemon.cli.options import ConfigOption, JsonOption, SetOption, error_items, load, tell_warnings
from hicache_daemon.cli.output import emit, print_table

app = typer.Typer(no_args_is_help=True, help="Check, show and describe the configuration.")


@app.command()
def check(config: ConfigOption = None, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Try a configuration as the daemon would, on this machine. Exit 2 lists everything that is wrong."""
    loaded = load(config, overrides, as_json)
    source = str(loaded.source) if loaded.source else None
    if as_json:
        emit({"valid": True, "source": source, "errors": [], "warnings": error_items(loaded.warnings)})
        return
    tell_warnings(loaded)
    typer.secho(f"{source or 'the defaults'}: valid", fg=typer.colors.GREEN)


@app.command()
def show(
    config: ConfigOption = None,
    overrides: SetOption = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only keys that differ from their default.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Every effective value and where it comes from."""
    from hicache_daemon.config.settings import flatten, hot_keys

    loaded = load(config, overrides, as_json)
    hot = hot_keys()
    values: dict[str, dict[str, Any]] = {}
    for key, value in flatten(loaded.settings).items():
        origin = loaded.origins[key]
        if not changed or origin.kind != "default":
            values[key] = {
                "value": value,
                "origin": origin.kind,
                "where": origin.where or None,
                "reload": key in hot,
            }
    if as_json:
        emit({"source": str(loaded.source) if loaded.source else None, "values": values})
        return
    tell_warnings(loaded)
    rows = [(key, _text(item["value"]), item["where"] or item["origin"]) for key, item in values.items()]
    print_table("effective configuration", ("key", "value", "origin"), rows)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "not set" if value is None else str(value)


@app.command()
def schema(as_json: JsonOption = False) -> None:
    """Every key with its kind, default and meaning. With --json, a JSON schema for editors."""
    from hicache_daemon.config.catalog import keys
    from hicache_daemon.config.schema import json_schema

    if as_json:
        emit({"schema": json_schema()})
        return
    rows = [
        (key.name, key.kind, key.default or "not set", "yes" if key.hot else "restart", key.text) for key in keys()
    ]
    print_table("configuration keys", ("key", "kind", "default", "reload", "meaning"), rows)

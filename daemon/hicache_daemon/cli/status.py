"""`hicache status` and `hicache inspect l2 | l3 | sessions`: questions to a running daemon."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hicache_daemon.cli.options import JsonOption
from hicache_daemon.cli.output import emit, fact_rows, fail, print_table, show_value

What = Literal["status", "l2", "l3", "sessions"]

inspect_app = typer.Typer(no_args_is_help=True, help="Look into a tier or at the sessions of a running daemon.")

RuntimeDirOption = Annotated[
    Path | None,
    typer.Option(
        "--runtime-dir",
        envvar="HICACHE__SERVER__RUNTIME_DIR",
        help="Folder of the daemon's sockets; without it the default one.",
    ),
]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.1, max=600.0, help="Seconds to wait for an answer.")]


def ask(what: What, runtime_dir: Path | None, timeout_s: float, as_json: bool) -> dict[str, Any]:
    """One description from the daemon, or exit 1 with one line that says what to do."""
    from hicache.base.errors import HiCacheError
    from hicache_daemon.cli.link import describe, runtime_dir_or_default

    folder = runtime_dir_or_default(runtime_dir)
    try:
        return describe(folder, what, timeout_s)
    except HiCacheError as error:
        fail(error.code.value, error.message, error.remedy, as_json)


def _tables(title: str, data: Mapping[str, Any]) -> None:
    """Facts as one table, then each list of records as a table of its own."""
    rows = fact_rows({name: value for name, value in data.items() if name != "schema_version"})
    if rows:
        print_table(title, ("what", "value"), rows, right=(1,))
    for name, value in data.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            columns = list(dict.fromkeys(key for item in value for key in item))
            heads = [show_value(key, value[0].get(key))[0].replace("_", " ") for key in columns]
            print_table(name, heads, [[show_value(key, item.get(key))[1] for key in columns] for item in value])
        elif value == []:
            typer.echo(f"no {name}")


@inspect_app.command()
def l2(runtime_dir: RuntimeDirOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """The host arena: size, use, parents, what is pinned."""
    data = ask("l2", runtime_dir, timeout, as_json)
    emit(data) if as_json else _tables("L2", data)


@inspect_app.command()
def l3(runtime_dir: RuntimeDirOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """The disk tier: mode, records, bytes, failures."""
    data = ask("l3", runtime_dir, timeout, as_json)
    emit(data) if as_json else _tables("L3", data)


@inspect_app.command()
def sessions(runtime_dir: RuntimeDirOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """Connected engines with their leases and transfers."""
    data = ask("sessions", runtime_dir, timeout, as_json)
    emit(data) if as_json else _tables("sessions", data)


def status(runtime_dir: RuntimeDirOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """Is a daemon there, and how is it? Exit 1 if none answers."""
    data = ask("status", runtime_dir, timeout, as_json)
    emit(data) if as_json else _tables("hicached", data)

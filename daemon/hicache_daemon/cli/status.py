"""`hicache status` and `hicache inspect l2 | l3 | sessions`: questions to a running daemon."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hicache_daemon.cli import view
from hicache_daemon.cli.options import JsonOption
from hicache_daemon.cli.output import EXIT_FAILURE, emit, fail

What = Literal["status", "l2", "l3", "sessions"]

inspect_app = typer.Typer(no_args_is_help=True, help="Look into a tier or at the sessions of a running daemon.")

RuntimeDirOption = Annotated[
    Path | None,
    typer.Option(
        "--runtime-dir",
        metavar="DIR",
        envvar="HICACHE__SERVER__RUNTIME_DIR",
        help="Folder of the daemon's sockets; without it the default one.",
    ),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0.1, max=600.0, help="How long to wait for an answer.")
]


def ask(what: What, directory: Path | None, timeout_s: float, as_json: bool) -> dict[str, Any]:
    """One description from the daemon, or exit 1 with one line that says what to do."""
    from hicache.base.errors import HiCacheError
    from hicache_client.paths import CONTROL_NAME, runtime_dir
    from hicache_client.probe import describe

    try:
        folder = runtime_dir(directory)
        if not (folder / CONTROL_NAME).exists():  # no need to wait for an answer that cannot come
            fail(
                "unavailable",
                f"no daemon runs at {folder}",
                "start one with `hicache serve`, or name its folder with --runtime-dir",
                as_json,
            )
        return describe(what, folder, timeout_s)
    except HiCacheError as error:
        fail(error.code.value, error.message, error.remedy, as_json)


@inspect_app.command()
def l2(runtime_dir: RuntimeDirOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """The host arena: size, use, parents, what is pinned."""
    data = ask("l2", runtime_dir, timeout, as_json)
    emit(data) if as_json else view.facts("L2", data)


@inspect_app.command()
def l3(runtime_dir: RuntimeDirOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """The disk tier: mode, records, bytes, failures."""
    data = ask("l3", runtime_dir, timeout, as_json)
    emit(data) if as_json else view.facts("L3", data)


@inspect_app.command()
def sessions(runtime_dir: RuntimeDirOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """Connected engines with their leases and transfers."""
    data = ask("sessions", runtime_dir, timeout, as_json)
    emit(data) if as_json else view.facts("sessions", data)


def status(
    runtime_dir: RuntimeDirOption = None,
    timeout: TimeoutOption = 5.0,
    ready: Annotated[
        bool, typer.Option("--ready", help="Exit 1 unless it accepts sessions: a health check.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Is a daemon there, and how is it? Exit 1 if none answers."""
    data = ask("status", runtime_dir, timeout, as_json)
    emit(data) if as_json else view.status(data)
    if ready and not data.get("ready"):
        raise typer.Exit(EXIT_FAILURE)

"""`hicache bench index | copy | control | transfer`: figures of this machine, each beside what the machine allows."""

import importlib
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from hicache_daemon.cli.options import JsonOption
from hicache_daemon.cli.output import EXIT_FAILURE, EXIT_USAGE, emit, fail, print_table, progress_line

app = typer.Typer(no_args_is_help=True, help="Measure. Progress goes to stderr, the figures to stdout.")

QuickOption = Annotated[bool, typer.Option("--quick", help="A short run: a smoke test, not a figure to quote.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the JSON report to this file, too.")
]

BesideOption = Annotated[
    Path | None,
    typer.Option(
        "--beside-lmcache",
        metavar="FOLDER",
        help="Measure LMCache's server, too, with its own benchmark; FOLDER holds its program `lmcache`.",
    ),
]


def _run(name: str, quick: bool, out: Path | None, as_json: bool, **more: object) -> None:
    """`more`: what else the benchmark's `run` takes."""
    import json

    from hicache_daemon.bench.report import report

    _check_out(out, as_json)
    module = importlib.import_module(f"hicache_daemon.bench.{name}")
    data = report(name, module.run(quick, progress_line, **more))
    if as_json:
        emit(data)
    else:
        _table(data)
    if out is None:
        return
    try:
        out.write_text(json.dumps(data, indent=2) + "\n")
    except OSError as error:  # the figures are on stdout already; a disk may fill while they are measured
        typer.secho(f"hicache: cannot write {out}: {error.strerror}", fg=typer.colors.RED, err=True)
        raise typer.Exit(EXIT_FAILURE) from None


def _check_out(out: Path | None, as_json: bool) -> None:
    """A report that could not be written is told before minutes are spent on it."""
    if out is None:
        return
    where = out if out.exists() else out.parent
    if out.is_dir():
        reason = "it is a folder"
    elif not where.exists():
        reason = f"there is no folder {where}"
    elif not os.access(where, os.W_OK):
        reason = f"{where} may not be written"
    else:
        return
    fail("usage", f"--out {out}: {reason}", "name a file in a folder that exists", as_json, EXIT_USAGE)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _table(data: dict[str, Any]) -> None:
    rows = [
        (case["case"], _number(case["value"]), case["unit"], _number(case["limit"]), _number(case["ratio"]))
        for case in data["cases"]
    ]
    print_table(f"bench {data['name']}", ("case", "value", "unit", "limit", "ratio"), rows, right=(1, 3, 4))
    machine = data["machine"]
    typer.secho(f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}", dim=True)


@app.command()
def index(quick: QuickOption = False, out: OutOption = None, as_json: JsonOption = False) -> None:
    """The prefix index: insert, match and miss, at 2k to 128k tokens."""
    _run("index", quick, out, as_json)


@app.command()
def copy(quick: QuickOption = False, out: OutOption = None, as_json: JsonOption = False) -> None:
    """Pages between an engine's pool and the arena, against a plain copy of the same bytes."""
    _run("copy", quick, out, as_json)


@app.command()
def control(quick: QuickOption = False, out: OutOption = None, as_json: JsonOption = False) -> None:
    """Lookup round trips to a real daemon, idle and while it copies."""
    _run("control", quick, out, as_json)


@app.command()
def transfer(
    quick: QuickOption = False,
    out: OutOption = None,
    beside_lmcache: BesideOption = None,
    as_json: JsonOption = False,
) -> None:
    """A prompt of 2,048 tokens (268 MB) to a real daemon and back, against a plain copy of the same bytes."""
    if beside_lmcache is not None and not (beside_lmcache / "lmcache").exists():
        text = f"--beside-lmcache {beside_lmcache}: there is no program 'lmcache' in it"
        fail("usage", text, "name the bin folder of an environment with LMCache", as_json, EXIT_USAGE)
    _run("transfer", quick, out, as_json, beside_lmcache=beside_lmcache)

"""`hicache` and `hicached`.

Exit codes: 0 done, 1 failed, 2 the configuration or the command line is wrong (all errors are listed).
"""

import sys
from typing import Annotated, NoReturn

import typer

from hicache_daemon.cli import bench, config, demo, serve, status
from hicache_daemon.cli.options import ConfigOption, SetOption
from hicache_daemon.cli.output import EXIT_FAILURE, error_document
from hicache_daemon.cli.serve import LogJsonOption

# Every usage error. Typer's versions differ in where its class is defined; this is its direct base in all of them.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="hicache",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP_OPTIONS,
    help="Hierarchical KV-cache daemon for LLM inference: serve it, look into it, measure it.",
)
app.command()(serve.serve)
app.command()(status.status)
app.add_typer(config.app, name="config")
app.add_typer(status.inspect_app, name="inspect")
app.add_typer(bench.app, name="bench")
app.command()(demo.demo)

serve_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"hicache {version('hicache')}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and exit.")
]


@app.callback()
def root(version: VersionOption = False) -> None:
    """Hierarchical KV-cache daemon for LLM inference: serve it, look into it, measure it."""


@serve_app.command(name="hicached", context_settings=HELP_OPTIONS)
def hicached(
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: LogJsonOption = False,
    version: VersionOption = False,
) -> None:
    """Run the daemon in the foreground until SIGTERM; SIGHUP reloads the configuration."""
    serve.serve(config, overrides, as_json)


def _run(commands: typer.Typer, name: str) -> NoReturn:
    """Run the command line and exit. With `--json` a usage error is a document, too."""
    if "--json" not in sys.argv[1:]:
        commands(prog_name=name)
        raise SystemExit(EXIT_FAILURE)  # not reached: in this mode the call exits by itself
    try:
        code = commands(prog_name=name, standalone_mode=False)
    except USAGE_ERROR as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        error_document("usage", message, f"see `{name} --help`")
        code = getattr(error, "exit_code", EXIT_FAILURE)
    except typer.Abort:
        error_document("interrupted", "interrupted", "")
        code = EXIT_FAILURE
    raise SystemExit(code or 0)


def main() -> None:
    """Entry point of `hicache`."""
    _run(app, "hicache")


def serve_main() -> None:
    """Entry point of `hicached`, the same as `hicache serve`."""
    _run(serve_app, "hicached")

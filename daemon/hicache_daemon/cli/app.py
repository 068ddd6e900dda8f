"""`hicache` and `hicached`.

Exit codes: 0 done, 1 failed, 2 the configuration or the command line is wrong (all errors are listed).
"""

from typing import Annotated

import typer

from hicache_daemon.cli import bench, config, demo, serve, status

app = typer.Typer(
    name="hicache",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Hierarchical KV-cache daemon for LLM inference: serve it, look into it, measure it.",
)
app.command()(serve.serve)
app.command()(status.status)
app.add_typer(config.app, name="config")
app.add_typer(status.inspect_app, name="inspect")
app.add_typer(bench.app, name="bench")
app.command()(demo.demo)

serve_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
serve_app.command(name="hicached")(serve.serve)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"hicache {version('hicache')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Hierarchical KV-cache daemon for LLM inference: serve it, look into it, measure it."""


def main() -> None:
    """Entry point of `hicache`."""
    app()


def serve_main() -> None:
    """Entry point of `hicached`, the same as `hicache serve`."""
    serve_app(prog_name="hicached")

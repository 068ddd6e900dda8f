"""`hicache serve`, which is also `hicached`."""

from typing import Annotated

import typer

from hicache_daemon.cli.options import ConfigOption, SetOption, load, tell_warnings

LogJsonOption = Annotated[
    bool, typer.Option("--json", help="Logs as JSON lines on stderr; configuration errors as JSON on stdout.")
]


def serve(config: ConfigOption = None, overrides: SetOption = None, as_json: LogJsonOption = False) -> None:
    """Run the daemon in the foreground until SIGTERM; SIGHUP reloads the configuration."""
    wanted = [*(overrides or ()), *(["server.log_format=json"] if as_json else ())]
    loaded = load(config, wanted, as_json)
    tell_warnings(loaded)
    from hicache_daemon.config.settings import load_settings
    from hicache_daemon.main import run

    raise typer.Exit(run(loaded.settings, lambda: load_settings(config, wanted)))

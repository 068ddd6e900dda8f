"""`hicache serve`, which is also `hicached`."""

import typer

from hicache_daemon.cli.options import ConfigOption, SetOption, load, tell_warnings


def serve(config: ConfigOption = None, overrides: SetOption = None) -> None:
    """Run the daemon in the foreground until SIGTERM; SIGHUP reloads the configuration."""
    loaded = load(config, overrides, as_json=False)
    tell_warnings(loaded)
    from hicache_daemon.main import run

    raise typer.Exit(run(loaded.settings))

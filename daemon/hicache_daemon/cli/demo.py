"""`hicache demo`: a real model with and without the cache."""

import typer

from hicache_daemon.cli.options import JsonOption


def demo(as_json: JsonOption = False) -> None:
    """Run a small model cold, warm, across an engine's death and a daemon's restart, and compare every token.

    Works in a checkout after `make install`; files go to .demo below the working directory. Exit 1 if an output
    differs or warm is not fast, 2 if the model or the configuration is not there.
    """
    from hicache_daemon.demo import run

    raise typer.Exit(run(as_json))

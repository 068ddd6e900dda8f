"""`hicache demo`: a real model with and without the cache."""

from hicache_daemon.cli.options import JsonOption


def demo(as_json: JsonOption = False) -> None:
    """Run a small model cold, warm, across an engine's death and a daemon's restart, and compare every token."""
    raise NotImplementedError(as_json)

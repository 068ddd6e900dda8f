"""`hicache demo`: a real model, cold and warm, across an engine's death and a daemon's restart."""

from hicache_daemon.demo.run import run

__all__ = ["run"]

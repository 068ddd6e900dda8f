"""Where `hicache` and `hicached` enter: a base install, which is the client's, is told what it lacks.

Imports nothing but the standard library before that can be said.
"""

import json
import sys
from collections.abc import Callable

# The modules of the extra `daemon`. Any other module that is missing is a bug and keeps its traceback.
_DAEMON = frozenset(["lmdb", "numpy", "psutil", "pydantic", "rich", "structlog", "typer", "uvloop", "xxhash", "yaml"])


def main() -> None:
    """Entry point of `hicache`."""

    def command() -> None:
        from hicache_daemon.cli.app import main as run  # noqa: PLC0415 - may lack what it imports

        run()

    _run(command)


def serve_main() -> None:
    """Entry point of `hicached`."""

    def command() -> None:
        from hicache_daemon.cli.app import serve_main as run  # noqa: PLC0415 - may lack what it imports

        run()

    _run(command)


def _run(command: Callable[[], None]) -> None:
    try:
        command()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _DAEMON:
            raise
        message = f"this install has the client alone: {error.name} is missing"
        remedy = "install hicache[daemon], for example with: pip install 'hicache[daemon]'"
        if "--json" in sys.argv[1:]:
            document = {"code": "unsupported", "message": message, "remedy": remedy}
            print(json.dumps({"schema_version": 1, "error": document}, indent=2))
        else:
            print(f"hicache: {message}; {remedy}", file=sys.stderr)
        raise SystemExit(1) from None

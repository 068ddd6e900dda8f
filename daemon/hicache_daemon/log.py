"""Structured logs on stderr: for people (`console`) or one JSON object per line (`json`)."""

import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

_RANKS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "exception": 40, "critical": 50}


class LevelGate:
    """Drops what is below `level`; a reload may move it. Made per daemon: structlog's own switch is global."""

    def __init__(self, level: str) -> None:
        self.level = level

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if _RANKS.get(method, 50) < _RANKS[self.level]:
            raise structlog.DropEvent
        return event


def make_log(gate: LevelGate, log_format: str, stream: TextIO | None = None) -> Any:
    """A bound logger: `log.info("session.opened", session=3)`. Thread-safe."""
    stream = sys.stderr if stream is None else stream
    processors: list[Any] = [
        gate,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if log_format == "json":
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # Plain tracebacks: the default ones print local variables, credentials and tokens among them.
        plain = structlog.dev.plain_traceback
        processors.append(structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain))
    return structlog.wrap_logger(
        structlog.PrintLogger(stream), processors=processors, wrapper_class=structlog.stdlib.BoundLogger
    )

"""The one shape of every figure: a case has a value, a unit, and what it is measured against.

`limit` is what the machine allows in the same run (for example the bandwidth of a plain copy of the same bytes)
and `ratio` is value divided by limit, so a figure can be compared across machines. Both are None where no
such yardstick exists.
"""

import datetime
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

SCHEMA_VERSION = 1

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """One figure. `case` is a stable name, so that it can be followed over time; `unit` is ms, µs, GB/s …"""

    case: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None


class Bench(Protocol):
    """What a module of this package offers. `quick` shortens the run; `progress` gets a line per step."""

    def run(self, quick: bool, progress: Progress) -> list[Case]: ...


def _cpu_name() -> str:
    """Model name of the first processor, or its architecture where the kernel does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def machine() -> dict[str, Any]:
    """The facts without which a figure means nothing."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def report(name: str, cases: Sequence[Case]) -> dict[str, Any]:
    """The JSON form of one benchmark's run; `schema_version` comes first."""
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "machine": machine(),
        "cases": [asdict(case) for case in cases],
    }


def to_stderr(text: str) -> None:
    """A `Progress` that keeps stdout free for the report."""
    print(text, file=sys.stderr, flush=True)

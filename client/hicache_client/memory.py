"""How much memory this process may still take: asked before a pool or an arena is touched.

Whoever takes more is killed by the kernel without a word, and with an engine dies what it was doing.
"""

from dataclasses import dataclass
from pathlib import Path

from hicache.base.errors import ErrorCode, HiCacheError


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """The tightest bound on this process's memory, and what sets it."""

    bytes: int
    what: str


def read_int(path: Path) -> int | None:
    """The number in a one-line file; None when there is no file, or no number ("max") in it."""
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None


def memory_bound(root: Path = Path("/")) -> MemoryBound:
    """What this process may still take: the machine's available memory, or what its cgroups leave of theirs.

    `root` is where /proc and /sys are looked for. Shared memory counts for the cgroup of whoever touches it
    first: this process.
    """
    bounds = [MemoryBound(_available(root / "proc/meminfo"), "the machine's memory (MemAvailable)")]
    for directory, limit_name, usage_name in _cgroups(root):
        limit = read_int(directory / limit_name)
        if limit is not None:
            used = (read_int(directory / usage_name) or 0) - _reclaimable(directory / "memory.stat")
            bounds.append(MemoryBound(max(0, limit - max(0, used)), f"the cgroup limit {directory / limit_name}"))
    return min(bounds, key=lambda bound: bound.bytes)


def _available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise HiCacheError(ErrorCode.INTERNAL, f"{meminfo} has no MemAvailable", "hicache needs Linux 3.14 or later")


def _reclaimable(stat: Path) -> int:
    """Page cache that a cgroup counts as used but gives back on demand, bytes."""
    try:
        fields = dict(line.split(None, 1) for line in stat.read_text().splitlines())
    except OSError:
        return 0
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))


def _cgroups(root: Path) -> list[tuple[Path, str, str]]:
    """Directories of this process's memory cgroups, itself and all above it: (path, limit file, usage file)."""
    found: list[tuple[Path, str, str]] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        directory = base / path.lstrip("/")
        while True:
            found.append((directory, *names))
            if directory == base or base not in directory.parents:
                break
            directory = directory.parent
    return found

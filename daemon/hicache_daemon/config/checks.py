"""Checks across keys and against the machine. Fatal findings stop a start; the others are told and passed."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hicache.base.errors import HiCacheError
from hicache.base.ids import TOKEN_BYTES
from hicache.base.units import approx_size, format_duration, format_size
from hicache.store.medium import filesystem_of, why_unsafe
from hicache_daemon.admission import read_credential
from hicache_daemon.config.endpoints import fault_of, is_local
from hicache_daemon.config.model import Settings
from hicache_daemon.folders import nearest_existing, why_unusable
from hicache_daemon.runtime_dir import check_usable
from hicache_daemon.secret import find_secret

HUGEPAGE_BYTES = {"2MiB": 2 << 20, "1GiB": 1 << 30}
TENANT_NAME_CHARS = 128
MEMORY_FILESYSTEMS = {"tmpfs", "ramfs"}


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the machine allows, in bytes. `memory_limit` is the smaller of physical memory and the cgroup's;
    `filesystem` tells the type of the file system below a path, "" if it is not known."""

    memory_limit: int
    memory_available: int
    cores: int
    filesystem: Callable[[Path], str] = filesystem_of


@dataclass(frozen=True, slots=True)
class Finding:
    """`keys[0]` is the key to blame; the others take part in it."""

    fatal: bool
    keys: tuple[str, ...]
    message: str
    remedy: str


def _meminfo() -> dict[str, int]:
    facts = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2:
            facts[name] = int(words[0]) * 1024
    return facts


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such controller, or "max"
        return None


def _cgroup() -> tuple[int | None, int | None]:
    """Limit and use in bytes of this process's memory cgroup, v2 or v1, the tightest up the tree."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None, None
    best: tuple[int | None, int | None] = (None, None)
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers not in {"", "memory"} and "memory" not in controllers.split(","):
            continue
        base = root if controllers == "" else root / "memory"
        names = (
            ("memory.max", "memory.current")
            if controllers == ""
            else (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        )
        folder = base / name.lstrip("/")
        while True:
            limit = _read_int(folder / names[0])
            if limit is not None and (best[0] is None or limit < best[0]):
                best = (limit, _read_int(folder / names[1]))
            if folder in {base, folder.parent}:
                break
            folder = folder.parent
    return best


def read_host() -> HostFacts:
    """Facts of this machine and this container."""
    memory = _meminfo()
    total = memory["MemTotal"]
    available = memory.get("MemAvailable", total)
    limit, used = _cgroup()
    if limit is not None and limit < total:
        available = min(available, limit - (used or 0))
        total = limit
    return HostFacts(total, available, len(os.sched_getaffinity(0)))


def _refusal(key: str, act: Callable[[], object]) -> Iterator[Finding]:
    """What a start would refuse, in its own words; they begin with the key, which a finding names by itself."""
    try:
        act()
    except HiCacheError as error:
        message = error.message.removeprefix(key).removeprefix(":").lstrip()
        yield Finding(True, (key,), message, error.remedy)


def _check_server(settings: Settings) -> Iterator[Finding]:
    yield from _refusal("server.runtime_dir", lambda: check_usable(settings.server.runtime_dir))


def _check_l2(settings: Settings, host: HostFacts) -> Iterator[Finding]:
    l2 = settings.l2
    if l2.size > host.memory_limit:
        yield Finding(
            True,
            ("l2.size",),
            f"{format_size(l2.size)} is more than the {approx_size(host.memory_limit)} this machine or container has",
            "lower l2.size or raise the memory limit",
        )
    elif l2.hugepages == "off" and l2.size > host.memory_available:
        yield Finding(
            False,
            ("l2.size",),
            f"{format_size(l2.size)} is more than the {approx_size(host.memory_available)} available now",
            "lower l2.size, or the daemon may be killed for memory while it starts",
        )
    if l2.parent != "auto":
        if l2.parent % 4096:
            yield Finding(True, ("l2.parent",), f"{format_size(l2.parent)} is not a multiple of 4KiB", "round it up")
        if l2.parent > l2.size:
            yield Finding(
                True,
                ("l2.parent", "l2.size"),
                f"{format_size(l2.parent)} is more than l2.size ({format_size(l2.size)})",
                "raise l2.size or lower l2.parent",
            )
    yield from _check_hugepages(settings)
    if l2.copy_threads > 4 * host.cores:
        yield Finding(
            False,
            ("l2.copy_threads",),
            f"{l2.copy_threads} threads on {host.cores} cores slow each other down",
            f"use at most {host.cores}",
        )


def _check_hugepages(settings: Settings) -> Iterator[Finding]:
    l2 = settings.l2
    if l2.hugepages == "off":
        return
    page = HUGEPAGE_BYTES[l2.hugepages]
    if l2.size % page:
        yield Finding(
            True,
            ("l2.size", "l2.hugepages"),
            f"{format_size(l2.size)} is not a multiple of l2.hugepages ({l2.hugepages})",
            f"round l2.size to {format_size((l2.size // page + 1) * page)}",
        )
    free = _read_int(Path(f"/sys/kernel/mm/hugepages/hugepages-{page // 1024}kB/free_hugepages"))
    needed = -(-l2.size // page)
    if (free or 0) < needed:
        yield Finding(
            True,
            ("l2.hugepages", "l2.size"),
            f"{needed} free huge pages of {l2.hugepages} are needed, {free or 0} are there",
            f"reserve them (`sysctl vm.nr_hugepages={needed}` for 2MiB) or set l2.hugepages to off",
        )


def _check_l3(settings: Settings, host: HostFacts) -> Iterator[Finding]:
    l3 = settings.l3
    if l3.enabled and l3.path is None:
        yield Finding(True, ("l3.enabled", "l3.path"), "the disk tier needs a folder", "set l3.path")
    if not l3.enabled and l3.path is not None:
        yield Finding(
            False, ("l3.path", "l3.enabled"), "is set, but the disk tier is off", "set l3.enabled to true to use it"
        )
    if l3.enabled and l3.path is not None:
        yield from _check_l3_folder(settings, l3.path, host)


def _check_l3_folder(settings: Settings, path: Path, host: HostFacts) -> Iterator[Finding]:
    l3 = settings.l3
    reason = why_unusable(path)
    if reason:
        remedy = "set l3.path to a folder on a local disk that the daemon's user may write"
        yield Finding(True, ("l3.path",), reason, remedy)
        return
    kind = host.filesystem(path)
    unsafe = why_unsafe(kind)
    if unsafe:
        remedy = "set l3.path to a folder on a local disk (ext4, xfs)"
        yield Finding(not l3.allow_unsafe_fs, ("l3.path",), f"{path} is on {kind}: {unsafe}", remedy)
    elif kind in MEMORY_FILESYSTEMS:
        yield Finding(
            False,
            ("l3.path",),
            f"{path} is on {kind}, which is memory: it is not in l2.size, and gone after a reboot",
            "set l3.path to a folder on a local disk (ext4, xfs), or turn the tier off and raise l2.size",
        )
    if settings.identity.secret_file is None:
        yield from _refusal("l3.path", lambda: find_secret(None, path))
    total = shutil.disk_usage(nearest_existing(path)).total
    if l3.size + l3.min_free > total:
        yield Finding(
            False,
            ("l3.size", "l3.min_free", "l3.path"),
            f"{format_size(l3.size)} and {format_size(l3.min_free)} to spare do not fit the "
            f"{approx_size(total)} file system of {l3.path}",
            "lower l3.size; otherwise the tier turns read-only before it is full",
        )


def _check_limits(settings: Settings) -> Iterator[Finding]:
    lim = settings.limits
    if lim.tokens_per_request * TOKEN_BYTES > lim.buffer_size:
        yield Finding(
            True,
            ("limits.buffer_size", "limits.tokens_per_request"),
            f"{format_size(lim.buffer_size)} cannot hold limits.tokens_per_request ({lim.tokens_per_request}) tokens",
            f"raise it to at least {format_size(lim.tokens_per_request * TOKEN_BYTES)}, or allow fewer tokens",
        )
    if lim.lease_ttl < lim.session_silence:
        yield Finding(
            False,
            ("limits.lease_ttl", "limits.session_silence"),
            f"{format_duration(lim.lease_ttl)} is less than limits.session_silence "
            f"({format_duration(lim.session_silence)}): matches lapse while their engine still counts as alive",
            "raise limits.lease_ttl",
        )


def _check_kv_events(settings: Settings) -> Iterator[Finding]:
    told = settings.kv_events
    named = {"kv_events.endpoint": told.endpoint, "kv_events.replay_endpoint": told.replay_endpoint}
    for key, endpoint in named.items():
        if endpoint is None:
            continue
        fault = fault_of(endpoint)
        if fault is not None:
            yield Finding(True, (key,), *fault)
        elif not is_local(endpoint) and not told.allow_remote:
            yield Finding(
                True,
                (key, "kv_events.allow_remote"),
                f"{endpoint} can be reached from other machines, and whoever reaches it reads the prompts' token ids",
                "use tcp://127.0.0.1:… or ipc://, or set kv_events.allow_remote to true on a network that you trust",
            )
        elif told.enabled and endpoint.startswith("tcp://"):
            who = "every user of this machine" if is_local(endpoint) else "whoever reaches this port"
            yield Finding(
                False,
                (key,),
                f"{who} can read the prompts' token ids",
                "use ipc:// where the router runs on this machine as the same user",
            )
    if told.endpoint is not None and told.endpoint == told.replay_endpoint:
        yield Finding(
            True,
            ("kv_events.replay_endpoint", "kv_events.endpoint"),
            "is the same as kv_events.endpoint",
            "choose another port or path",
        )
    if told.enabled and not told.tenants:
        yield Finding(True, ("kv_events.tenants",), "names nobody, so that nothing is announced", "name a tenant")
    strangers = sorted(set(told.tenants) - settings.tenants.keys()) if settings.tenants else []
    if told.enabled and strangers:
        yield Finding(
            False,
            ("kv_events.tenants", "tenants"),
            f"{', '.join(strangers)} may not connect: the tenants section does not list it",
            "name tenants of that section",
        )


def _check_secret(key: str, path: Path | None, read: Callable[[Path], object]) -> Iterator[Finding]:
    """A file that only the daemon may read, and whose content `read` accepts."""
    if path is None:
        return
    if not path.is_file() or not os.access(path, os.R_OK):
        yield Finding(True, (key,), f"{path} is not a readable file", "create it, readable by the daemon alone")
    elif path.stat().st_mode & 0o077:
        yield Finding(True, (key,), f"{path} can be read by others", f"chmod 600 {path}")
    else:
        yield from _refusal(key, lambda: read(path))


def check(settings: Settings, host: HostFacts) -> list[Finding]:
    """All findings, in the order of the sections."""
    found = [
        *_check_server(settings),
        *_check_l2(settings, host),
        *_check_l3(settings, host),
        *_check_limits(settings),
        *_check_kv_events(settings),
    ]
    found += _check_secret(
        "identity.secret_file", settings.identity.secret_file, lambda path: find_secret(path, None)
    )
    for name, tenant in settings.tenants.items():
        if not 0 < len(name) <= TENANT_NAME_CHARS or "." in name:
            found.append(
                Finding(
                    True,
                    (f"tenants.{name}",),
                    f"a name has 1 to {TENANT_NAME_CHARS} characters and no dot",
                    "rename the tenant",
                )
            )
        read = partial(read_credential, name)
        found += _check_secret(f"tenants.{name}.credential_file", tenant.credential_file, read)
    return found

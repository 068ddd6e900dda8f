"""Load the settings: defaults < file < environment < `--set`, everything wrong at once, every origin known."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hicache.base.errors import HiCacheError
from hicache_daemon.config.catalog import hot_keys
from hicache_daemon.config.checks import HostFacts, check, read_host
from hicache_daemon.config.errors import ConfigError, ConfigErrors
from hicache_daemon.config.explain import explain, origin_of
from hicache_daemon.config.kinds import FROM_TEXT
from hicache_daemon.config.model import (
    IdentitySettings,
    L2Settings,
    L3Settings,
    LimitsSettings,
    ServerSettings,
    Settings,
    TenantSettings,
    default_runtime_dir,
)
from hicache_daemon.config.source import Origin, from_env, from_file, from_options, merge

__all__ = [
    "ConfigError",
    "ConfigErrors",
    "IdentitySettings",
    "L2Settings",
    "L3Settings",
    "LimitsSettings",
    "Loaded",
    "Origin",
    "ServerSettings",
    "Settings",
    "TenantSettings",
    "changed_keys",
    "default_runtime_dir",
    "flatten",
    "hot_keys",
    "load_settings",
]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Valid settings, who set each key, the file they came from, and what is odd but allowed."""

    settings: Settings
    origins: dict[str, Origin]
    source: Path | None
    warnings: tuple[ConfigError, ...] = ()


def flatten(settings: Settings) -> dict[str, Any]:
    """Dotted key to value as it is written in a file."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, node: Any) -> None:
        for name, value in node.items():
            if isinstance(value, dict):
                walk(f"{prefix}{name}.", value)
            else:
                flat[prefix + name] = value

    walk("", settings.model_dump(mode="json"))
    return flat


def changed_keys(old: Settings, new: Settings) -> tuple[list[str], list[str]]:
    """Keys that differ: those that a reload applies at once, and those that need a restart."""
    before, after = flatten(old), flatten(new)
    gone = object()  # not None, which is a value: a tenant may come without a credential
    differ = sorted(key for key in before.keys() | after.keys() if before.get(key, gone) != after.get(key, gone))
    hot = hot_keys()
    return [key for key in differ if key in hot], [key for key in differ if key not in hot]


def _fill(tree: dict[str, Any], env: Mapping[str, str], origins: dict[tuple[str, ...], Origin]) -> list[ConfigError]:
    """Empty sections count as given without keys; the runtime folder follows the environment."""
    tenants = tree.get("tenants")
    for node in (tree, tenants if isinstance(tenants, dict) else {}):
        for name, value in node.items():
            if value is None:
                node[name] = {}
    server = tree.setdefault("server", {})
    if not isinstance(server, dict) or "runtime_dir" in server:
        return []
    for name in ("HICACHE_RUNTIME_DIR", "XDG_RUNTIME_DIR"):
        if env.get(name):
            origins["server", "runtime_dir"] = Origin("environment", name)
            break
    try:
        server["runtime_dir"] = str(default_runtime_dir(env))
    except HiCacheError as error:
        server["runtime_dir"] = "."  # never used: the error below stops the load
        return [ConfigError("server.runtime_dir", None, error.message, error.remedy)]
    return []


def _without(tree: dict[str, Any], bad: Sequence[str]) -> dict[str, Any]:
    """A copy of `tree` that lacks the keys found bad, so that the rest can still be checked."""

    def keep(prefix: str, node: dict[str, Any]) -> dict[str, Any]:
        return {
            name: keep(f"{prefix}{name}.", value) if isinstance(value, dict) else value
            for name, value in node.items()
            if prefix + name not in bad
        }

    return keep("", tree)


def _in_order(errors: Sequence[ConfigError]) -> list[ConfigError]:
    """The file's findings first, by line; then those of variables and options, as they came."""
    return sorted(errors, key=lambda error: (error.line is None, error.line or 0))


def load_settings(
    path: Path | None,
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    host: HostFacts | None = None,
) -> Loaded:
    """Read, merge, validate and cross-check. Raises `ConfigErrors` with every finding.

    `env` and `host` default to this process's environment and this machine.
    """
    env = os.environ if env is None else env
    entries, errors = from_file(path) if path is not None else ([], [])
    for more_entries, more_errors in (from_env(env), from_options(overrides)):
        entries += more_entries
        errors += more_errors
    tree, origins = merge(entries)
    errors += _fill(tree, env, origins)
    bad: list[str] = []
    try:
        settings = Settings.model_validate(tree, context=FROM_TEXT)
    except ValidationError as error:
        found = explain(error, origins)
        errors += found
        bad = [item.key for item in found]
        try:
            settings = Settings.model_validate(_without(tree, bad), context=FROM_TEXT)
        except ValidationError as rest:
            raise ConfigErrors(_in_order(errors + explain(rest, origins))) from None
    warnings: list[ConfigError] = []
    for finding in check(settings, read_host() if host is None else host):
        if any(key in bad for key in finding.keys):
            continue
        origin = origin_of(tuple(finding.keys[0].split(".")), origins)
        item = ConfigError(finding.keys[0], origin.line, finding.message, finding.remedy, origin.where)
        (errors if finding.fatal else warnings).append(item)
    if errors:
        raise ConfigErrors(_in_order(errors))
    # A section that was opened without a key leaves the key at its default, so only exact paths count here.
    named = {key: origins.get(tuple(key.split(".")), Origin("default")) for key in flatten(settings)}
    return Loaded(settings, named, path, tuple(warnings))

"""Every key with its kind, default and meaning, read off the models: for messages, the schema and the docs."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from hicache_daemon.config.model import Settings

SCHEMA_ID = "https://hicache.dev/schema/config-1.json"
ANY = "<name>"  # stands for a name that the operator chooses


@dataclass(frozen=True, slots=True)
class Key:
    """One settable key. `default` is written as in the file; None means not set."""

    name: str
    kind: str
    default: str | None
    hot: bool
    text: str
    choices: tuple[str, ...] = ()

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.name.split("."))


def _kind(schema: dict[str, Any]) -> str:
    inner = next((part for part in schema.get("anyOf", []) if part.get("type") != "null"), schema)
    if "enum" in inner:
        return " | ".join(inner["enum"])
    kind: str = inner.get("x-kind", inner.get("type", ""))
    low, high = inner.get("minimum"), inner.get("maximum")
    return f"{kind} {low}..{high}" if low is not None and high is not None else kind


def _shown(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    return (str(value).lower() if isinstance(value, bool) else str(value)) or '""'


def _keys_of(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    schema = model.model_json_schema()["properties"]
    defaults = model().model_dump(mode="json")
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        hot = isinstance(extra, dict) and bool(extra.get("hot"))
        text = " ".join((field.description or "").split())
        default = None if field.default_factory else _shown(defaults[name])
        yield Key(f"{prefix}.{name}", _kind(schema[name]), default, hot, text, tuple(schema[name].get("enum", ())))


def sections() -> dict[str, type[BaseModel]]:
    """Section prefix to model, in order; a tenant's is `tenants.<name>`."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in Settings.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found[name] = kind
        else:
            found[f"{name}.{ANY}"] = kind.__args__[1]  # type: ignore[union-attr]
    return found


def keys() -> list[Key]:
    """All keys, section by section, in the order of the models."""
    return [key for prefix, model in sections().items() for key in _keys_of(model, prefix)]


def hot_keys() -> frozenset[str]:
    """Keys that a reload applies to a running daemon; any other change needs a restart."""
    return frozenset(key.name for key in keys() if key.hot)


def nearest(path: tuple[str, ...]) -> str | None:
    """The valid key that a mistyped one most likely means: first among its neighbours, then anywhere."""
    prefixes = sections()
    parent = ".".join(path[:-1])
    here = path[:-1] if path[:1] != ("tenants",) or len(path) < 3 else ("tenants", ANY)
    neighbours = [key.path[-1] for key in keys() if key.path[:-1] == here]
    if len(path) == 1:
        neighbours = [prefix.partition(".")[0] for prefix in prefixes]
    close = difflib.get_close_matches(path[-1].lower(), neighbours, 1, 0.6)
    if close:
        return f"{parent}.{close[0]}" if parent else close[0]
    everywhere = {key.name: key.name for key in keys()}
    for key in keys():
        everywhere.setdefault(key.path[-1], key.name)
    close = difflib.get_close_matches(path[-1].lower(), list(everywhere), 1, 0.75) or difflib.get_close_matches(
        ".".join(path).lower(), list(everywhere), 1, 0.75
    )
    return everywhere[close[0]] if close else None

"""Where settings come from: a YAML file, `HICACHE__SECTION__KEY` variables, `--set section.key=value`.

Each source becomes entries (path, value, origin); later entries win. The YAML read here is strict: no duplicate
keys, no aliases, and only `true` and `false` are booleans, so that `off` and `1:30` stay what was typed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from hicache_daemon.config.errors import ConfigError

ENV_PREFIX = "HICACHE__"
MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Origin:
    """Who set a value: `where` is `file.yaml:12`, a variable's name or the option as typed."""

    kind: Literal["default", "file", "environment", "option"]
    where: str = ""
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One value at a path of keys. An empty mapping is an entry of its own."""

    path: tuple[str, ...]
    value: Any
    origin: Origin


class StrictLoader(yaml.SafeLoader):
    """YAML 1.2's core scalars; aliases and tags are refused."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not used here", mark)
        if getattr(event, "tag", None) is not None:
            raise yaml.composer.ComposerError(None, None, "tags are not used here", mark)
        return super().compose_node(parent, index)


StrictLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|false", "tf"),
    ("null", r"null|~|", ["n", "~", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?", "-+0123456789"),
):
    StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), list(_first))


class _Reader:
    """Turns a node tree into entries and collects what is wrong with it."""

    def __init__(self, name: str, kind: Literal["file", "environment", "option"]) -> None:
        self.name = name
        self.kind = kind
        self.errors: list[ConfigError] = []

    def origin(self, node: yaml.Node) -> Origin:
        if self.kind != "file":
            return Origin(self.kind, self.name)
        line = node.start_mark.line + 1
        return Origin("file", f"{self.name}:{line}", line)

    def fail(self, path: tuple[str, ...], node: yaml.Node, message: str, remedy: str = "") -> None:
        origin = self.origin(node)
        self.errors.append(ConfigError(".".join(path), origin.line, message, remedy, origin.where))

    def fail_yaml(self, path: tuple[str, ...], error: yaml.YAMLError) -> None:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None and self.kind == "file" else None
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        where = f"{self.name}:{line}" if line else self.name
        self.errors.append(ConfigError(".".join(path), line, f"not valid YAML: {problem}", where=where))

    def entries(self, loader: StrictLoader, node: yaml.Node, path: tuple[str, ...]) -> Iterator[Entry]:
        if not isinstance(node, yaml.MappingNode):
            if not path:
                self.fail(path, node, "must be a mapping of sections")
                return
            try:
                value = loader.construct_object(node, deep=True)
            except ValueError:  # Python reads no number of more than some thousand digits
                self.fail(path, node, "not a number that can be read")
                return
            yield Entry(path, value, self.origin(node))
            return
        if len(path) >= MAX_DEPTH:
            self.fail(path, node, f"nested deeper than {MAX_DEPTH} levels")
            return
        seen: dict[str, int] = {}
        yield Entry(path, {}, self.origin(node))
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.fail(path, key_node, "a key must be a plain word")
                continue
            key = key_node.value
            if key in seen:
                self.fail((*path, key), key_node, f"given twice, first on line {seen[key]}", "keep one of them")
                continue
            seen[key] = key_node.start_mark.line + 1
            for entry in self.entries(loader, value_node, (*path, key)):
                # The line of the key is what a reader looks for, also when the value starts below it.
                yield (
                    Entry(entry.path, entry.value, self.origin(key_node))
                    if len(entry.path) == len(path) + 1
                    else entry
                )


def _read_node(text: str, reader: _Reader, path: tuple[str, ...]) -> list[Entry]:
    try:
        loader = StrictLoader(text)
        node = loader.get_single_node()
        if node is None:
            return [] if not path else [Entry(path, None, Origin(reader.kind, reader.name))]
        return list(reader.entries(loader, node, path))
    except yaml.YAMLError as error:
        reader.fail_yaml(path, error)
    except RecursionError:
        reader.errors.append(ConfigError(".".join(path), None, "nested too deeply", where=reader.name))
    return []


def from_file(path: Path) -> tuple[list[Entry], list[ConfigError]]:
    """Entries of a YAML file. An empty file is no entry at all."""
    reader = _Reader(str(path), "file")
    try:
        data = path.read_bytes()
    except OSError as error:
        problem = error.strerror or str(error)
        return [], [ConfigError("", None, f"cannot read: {problem}", "give --config an existing file", str(path))]
    if len(data) > MAX_FILE_BYTES:
        return [], [ConfigError("", None, f"{len(data)} bytes, at most {MAX_FILE_BYTES}", where=str(path))]
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        return [], [ConfigError("", line, "not UTF-8 text", where=f"{path}:{line}")]
    return _read_node(text, reader, ()), reader.errors


def from_env(env: Mapping[str, str]) -> tuple[list[Entry], list[ConfigError]]:
    """Entries of all `HICACHE__…` variables, in order of name. Names are folded to lower case."""
    entries: list[Entry] = []
    errors: list[ConfigError] = []
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX):
            continue
        path = tuple(part.lower() for part in name.removeprefix(ENV_PREFIX).split("__"))
        if not all(path):
            errors.append(
                ConfigError("", None, "names no key", "write HICACHE__SECTION__KEY, as in HICACHE__L2__SIZE", name)
            )
            continue
        reader = _Reader(name, "environment")
        entries += _read_node(env[name], reader, path)
        errors += reader.errors
    return entries, errors


def from_options(overrides: Sequence[str]) -> tuple[list[Entry], list[ConfigError]]:
    """Entries of `section.key=value` options, in the order given."""
    entries: list[Entry] = []
    errors: list[ConfigError] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        where = f"--set {text}"
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            errors.append(ConfigError("", None, "is not section.key=value", "as in --set l2.size=8GiB", where))
            continue
        reader = _Reader(where, "option")
        entries += _read_node(value, reader, path)
        errors += reader.errors
    return entries, errors


def merge(entries: Sequence[Entry]) -> tuple[dict[str, Any], dict[tuple[str, ...], Origin]]:
    """One nested mapping, later entries over earlier ones, and who wrote each path."""
    tree: dict[str, Any] = {}
    origins: dict[tuple[str, ...], Origin] = {}
    for entry in entries:
        if not entry.path:
            continue  # the document itself
        node: Any = tree
        for part in entry.path[:-1]:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            continue  # something above is not a section; that is the error that will be told
        last = entry.path[-1]
        if not (entry.value == {} and isinstance(node.get(last), dict)):
            node[last] = entry.value
        origins[entry.path] = entry.origin
    return tree, origins

"""Where the house rules look: our own Python files, parsed once."""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("hicache", "daemon", "client")
ALL = (*PRODUCT, "tests", "tools")


@dataclass(frozen=True, slots=True)
class Source:
    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))


@functools.cache
def sources(folders: tuple[str, ...] = PRODUCT) -> tuple[Source, ...]:
    """Every Python file below `folders`."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            found.append(Source(path, text, ast.parse(text, str(path))))
    return tuple(found)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: Source) -> list[tuple[str, Function]]:
    """(location, function) of every function and method, nested ones included."""
    return [
        (f"{source.name}:{node.lineno} {node.name}", node)
        for node in ast.walk(source.tree)
        if isinstance(node, Function)
    ]

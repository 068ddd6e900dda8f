"""House rules that no linter of ours checks: lengths, parameters, swallowed errors, words, and what a module owns."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.tidy.sources import ALL, PRODUCT, ROOT, Function, functions, sources

MODULE_LINES = 500
FUNCTION_LINES = 70
POSITIONAL = 5
LOG_LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}

# Words that tell where a text was written, or that nobody finished it.
BANNED = {
    "path of a machine": re.compile(r"(?<![\w.])/(?:work|root|home/\w+)/|/tmp/bash"),
    "number of an issue": re.compile(r"\bissue #?\d+|\bCEO\b", re.IGNORECASE),
    "unfinished": re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b"),
}


def _tracked() -> list[Path]:
    """Files of the repository; in an unpacked archive without git, all text files of the known folders."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = done.stdout.splitlines() if done.returncode == 0 else []
    found = [ROOT / name for name in names] or [p for folder in ALL for p in (ROOT / folder).rglob("*.*")]
    return [path for path in found if path.is_file() and path.suffix in {".py", ".md", ".yaml", ".toml", ".sh", ""}]


def _body_lines(function: Function) -> int:
    """Lines without the docstring, which may be as long as it needs."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    doc = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - doc


def test_modules_are_short() -> None:
    written = [s for s in sources(ALL) if not s.text.startswith("# Generated from")]
    long = [f"{s.name}: {n}" for s in written if (n := s.text.count("\n")) > MODULE_LINES]
    assert not long, f"over {MODULE_LINES} lines"


def test_functions_are_short() -> None:
    long = [f"{at}: {n}" for s in sources() for at, f in functions(s) if (n := _body_lines(f)) > FUNCTION_LINES]
    assert not long, f"over {FUNCTION_LINES} lines"


def test_few_positional_parameters() -> None:
    many = []
    for source in sources():
        for at, function in functions(source):
            names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
            count = len([name for name in names if name not in {"self", "cls"}])
            if count > POSITIONAL and "cli" not in source.path.parts:  # a command's parameters are its options
                many.append(f"{at}: {count}")
    assert not many, f"over {POSITIONAL} positional parameters"


def test_no_keyword_bags_in_public_functions() -> None:
    """A caller must be able to read what a function takes. Overrides of an engine's methods have no choice, and the
    fields of a log line are open by nature."""
    bags = [
        at
        for s in sources()
        if "connectors" not in s.path.parts
        for at, f in functions(s)
        if f.args.kwarg is not None and not f.name.startswith("_") and f.name not in LOG_LEVELS
    ]
    assert not bags


def _swallows(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    wide = any(kind is None or (isinstance(kind, ast.Name) and kind.id in WIDE) for kind in kinds)
    kept = (node for node in ast.walk(handler) if isinstance(node, ast.Raise) or _logs_it(node))
    return wide and next(kept, None) is None


def _logs_it(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "exception"


WIDE = {"Exception", "BaseException"}


def test_no_error_is_swallowed() -> None:
    """A wide `except` raises again, logs the whole error, or says on its line what happens to it instead."""
    silent = []
    for source in sources():
        lines = source.text.splitlines()
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ExceptHandler) and _swallows(node):
                comment = lines[node.lineno - 1].partition("#")[2].removeprefix(" noqa: BLE001").strip(" -—:")
                if len(comment) < 10:
                    silent.append(f"{source.name}:{node.lineno}")
    assert not silent


def test_modules_say_what_they_are() -> None:
    bare = [s.name for s in sources(ALL) if s.text.strip() and ast.get_docstring(s.tree) is None]
    assert not bare


def test_no_state_at_module_level() -> None:
    """Lists, dicts and sets at module level are constants: in capitals or private, and never written to."""
    loose = []
    for source in sources():
        for node in source.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            mutable = isinstance(getattr(node, "value", None), ast.List | ast.Dict | ast.Set)
            for target in targets:
                if (
                    mutable
                    and isinstance(target, ast.Name)
                    and not re.fullmatch(r"_?[A-Z][A-Z0-9_]*|__all__", target.id)
                ):
                    loose.append(f"{source.name}:{node.lineno} {target.id}")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Global):
                loose.append(f"{source.name}:{node.lineno} global {', '.join(node.names)}")
    assert not loose


def test_the_pool_and_the_movers_hold_no_word_token() -> None:
    """They move blocks and bytes; one conversion, in plan, knows how many tokens a block covers."""
    pattern = re.compile(r"\btokens?\b")
    found = [
        f"{s.name}:{i}"
        for s in sources()
        if s.name.startswith("hicache/pool/")
        for i, line in enumerate(s.text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found


@pytest.mark.parametrize("what", BANNED)
def test_no_banned_words(what: str) -> None:
    pattern = BANNED[what]
    here = Path(__file__)
    found = []
    for path in _tracked():
        if path == here or path.name in {"Makefile", "LICENSE"}:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not found


def test_no_test_is_skipped_without_a_reason_or_cannot_fail() -> None:
    odd = []
    for source in sources(("tests",)):
        if source.path == Path(__file__):
            continue
        for number, line in enumerate(source.text.splitlines(), 1):
            if re.search(r"assert True\b|pytest\.mark\.xfail|pytest\.skip\(\)|mark\.skip\b", line):
                odd.append(f"{source.name}:{number}")
    every = {source.name: _by_name(source.tree) for source in sources(("tests",))}
    for source in sources(("tests",)):
        own = every[source.name]
        helpers = dict(own)
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("tests."):
                helpers |= every.get(f"{node.module.replace('.', '/')}.py", {})
        for name, node in own.items():
            if name.startswith("test_") and not _can_fail(node, helpers, set()):
                odd.append(f"{source.name}:{node.lineno} {name} asserts nothing")
    assert not odd


def _by_name(tree: ast.AST) -> dict[str, Function]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}


def _can_fail(function: Function, own: dict[str, Function], seen: set[str]) -> bool:
    """An assert or a raise, here or in the helpers that it calls, or a call that is named like a check."""
    seen.add(function.name)
    for node in ast.walk(function):
        if isinstance(node, ast.Assert | ast.Raise):
            return True
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if re.match(r"raises|check|assert|expect|verify|run_state_machine|fail", name):
                return True
            if name in own and name not in seen and _can_fail(own[name], own, seen):
                return True
    return False


def test_product_folders_are_the_packages_of_the_wheel() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'packages = ["hicache", "daemon/hicache_daemon", "client/hicache_client"]' in text
    assert all((ROOT / folder).is_dir() for folder in PRODUCT)

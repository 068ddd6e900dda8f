"""The documents say what the code does: links resolve, generated pages are fresh, examples load."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hicache_daemon.cli.reference import commands
from hicache_daemon.config.catalog import keys
from hicache_daemon.config.settings import ConfigErrors, Settings, load_settings
from tests.tidy.sources import ROOT, sources

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def _anchor(heading: str) -> str:
    words = re.sub(r"[`*]", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def _headings(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {_anchor(line.lstrip("#")) for line in text.splitlines() if line.startswith("#")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in LINK.findall(page.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        if not other.exists() or (anchor and anchor not in _headings(other)):
            broken.append(target)
    assert not broken


def test_every_page_is_reachable_from_the_index() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "docs/index.md"]
    while todo:
        page = todo.pop()
        if page in seen or not page.is_file():
            continue
        seen.add(page)
        links = (target.partition("#")[0] for target in LINK.findall(page.read_text()))
        todo += [(page.parent / link).resolve() for link in links if link.endswith(".md") and "://" not in link]
    pages = {page for page in (ROOT / "docs").rglob("*.md") if page.name != "template.md"}
    assert not pages - seen


def test_generated_files_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "tools/generate_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"run `make docs`: {done.stdout}{done.stderr}"


def test_every_command_and_key_is_documented() -> None:
    cli = (ROOT / "docs/operate/cli.md").read_text()
    assert [name for name, _ in commands() if f"## `{name}`" not in cli] == []
    config = (ROOT / "docs/operate/configuration.md").read_text()
    assert [key.name for key in keys() if f"| `{key.path[-1]}` |" not in config or len(key.text) < 10] == []


def test_commands_and_options_named_in_the_documents_exist() -> None:
    known = dict(commands())
    groups = {" ".join(name.split()[:2]) for name in known}
    wrong = []
    for page in PAGES:
        for text in re.findall(r"(?:`|^\$ ?|^)(hicache [a-z][^`\n|]*)", page.read_text(), flags=re.MULTILINE):
            words = text.split()
            name = max((n for n in known if words[: len(n.split())] == n.split()), key=len, default="")
            if not name and " ".join(words[:2]) not in groups:
                wrong.append(f"{page.name}: {text}")
                continue
            options = {opt for param in known[name].params for opt in param.opts} if name else set()
            wrong += [f"{page.name}: {text}" for w in words if w.startswith("--") and name and w not in options]
    assert not wrong


def test_yaml_examples_in_the_documents_load(tmp_path: Path) -> None:
    count = 0
    for page in PAGES:
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), flags=re.DOTALL):
            data = yaml.safe_load(block)
            if not isinstance(data, dict) or not set(data) <= set(Settings.model_fields):
                continue
            count += 1
            path = tmp_path / "example.yaml"
            path.write_text(block)
            try:
                load_settings(path, env={})
            except ConfigErrors as error:
                # Files and memory of this machine do not matter to an example; its keys and values do.
                host = ("is not a readable file", "this machine", "huge pages", "may not write in", "is on overlay")
                rest = [str(item) for item in error.errors if not any(word in item.message for word in host)]
                assert not rest, f"{page.name}: {rest}"
    assert count >= 1


def test_paths_named_in_the_architecture_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    names = re.findall(r"`((?:hicache|daemon|client|tests|docs|configs|tools)/[\w./-]+)`", text)
    assert len(names) > 20
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_glossary_words_have_one_meaning_each() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/glossary.md").read_text(), flags=re.MULTILINE)
    words = [word.strip().lower() for row in rows for word in row.split(",")]
    assert len(words) == len(set(words))
    assert len(words) > 20


def test_gates_of_the_tests_are_described() -> None:
    table = (ROOT / "tests/README.md").read_text()
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert [folder for folder in folders if f"`{folder}`" not in table] == []


def test_internals_named_in_code_exist() -> None:
    missing = []
    for source in sources():
        for name in re.findall(r"docs/[\w./-]+\.md", source.text):
            if not (ROOT / name).is_file():
                missing.append(f"{source.name}: {name}")
    assert not missing

"""Generate the client's sync modules from its async ones.

    python tools/unasync.py            write them
    python tools/unasync.py --check    exit 1 if one is out of date

The async source is the only one to edit. `async` and `await` go, and names change by the table below; then
ruff formats. A test runs the check, so the two cannot drift apart.
"""

import argparse
import io
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "client" / "hicache_client"
MODULES = {"aio.py": "sync.py", "session.py": "sync_session.py", "handles.py": "sync_handles.py"}
NAMES = {
    "AsyncClient": "Client",
    "AsyncLoadHandle": "LoadHandle",
    "AsyncStoreHandle": "StoreHandle",
    "_AsyncTransfer": "_Transfer",
    "AsyncSession": "Session",
    "AsyncPort": "SyncPort",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "handles": "sync_handles",
    "session": "sync_session",
}
QUOTED = {  # string annotations
    "AsyncClient": '"Client"',
    "AsyncSession": '"Session"',
}


def generate(source: str, origin: str) -> str:
    """The sync text of an async module, formatted."""
    lines = source.splitlines(keepends=True)
    out: list[str] = []
    row, column = 1, 0

    def copy_until(end: tuple[int, int]) -> None:
        nonlocal row, column
        while row < end[0]:
            out.append(lines[row - 1][column:])
            row, column = row + 1, 0
        if row <= len(lines):
            out.append(lines[row - 1][column : end[1]])
        column = end[1]

    swallow = False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.ENDMARKER:
            break
        if swallow:
            row, column = token.start  # the space after the keyword goes too
            swallow = False
        copy_until(token.start)
        if token.type == tokenize.NAME and token.string in ("async", "await"):
            swallow = True
        elif token.type == tokenize.NAME:
            out.append(NAMES.get(token.string, token.string))
        elif token.type == tokenize.STRING and token.string.strip("\"'") in QUOTED:
            out.append(QUOTED[token.string.strip("\"'")])
        else:
            out.append(token.string)
        row, column = token.end
    text = f"# Generated from {origin} by tools/unasync.py; edit that one.\n" + "".join(out)
    text = _ruff(["check", "--select", "I", "--fix", "--quiet"], text)
    return _ruff(["format"], text)


def _ruff(arguments: list[str], text: str) -> str:
    where = ["--config", str(ROOT / "pyproject.toml"), "--stdin-filename", str(CLIENT / "sync.py"), "-"]
    command = [sys.executable, "-m", "ruff", *arguments, *where]
    return subprocess.run(command, input=text, text=True, capture_output=True, check=True, cwd=ROOT).stdout


def stale() -> list[str]:
    """Sync modules that differ from what their source generates."""
    return [
        target
        for origin, target in MODULES.items()
        if not (CLIENT / target).exists()
        or (CLIENT / target).read_text() != generate((CLIENT / origin).read_text(), origin)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if a module is out of date")
    if parser.parse_args().check:
        old = stale()
        for name in old:
            print(f"{name} is out of date: run python tools/unasync.py", file=sys.stderr)
        return 1 if old else 0
    for origin, target in MODULES.items():
        (CLIENT / target).write_text(generate((CLIENT / origin).read_text(), origin))
    return 0


if __name__ == "__main__":
    sys.exit(main())

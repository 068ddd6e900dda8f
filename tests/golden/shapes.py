"""Compare the shape of a JSON document with the one on file. `UPDATE_GOLDEN=1` renews the file on purpose."""

import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "cli"


def shape(value: Any) -> Any:
    """Types instead of values; a list shows the shape of its first item."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if type(value) in {int, float} else type(value).__name__


def check_golden(name: str, document: Any) -> None:
    """Fail unless `document` has the shape on file, with its keys in the same order: schema_version is first."""
    path = FOLDER / f"{name}.json"
    got = shape(document)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(json.dumps(got, indent=2) + "\n")
    want = json.loads(path.read_text())
    assert got == want
    assert list(got) == list(want)
    assert next(iter(got)) == "schema_version"

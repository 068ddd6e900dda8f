"""May a folder be made or written? Asked without making it."""

import os
from pathlib import Path


def nearest_existing(path: Path) -> Path:
    """`path` itself, or the closest folder above it that is there. Links count as what they are."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def why_unusable(path: Path) -> str:
    """What keeps this process from creating `path` or from writing in it; "" if nothing does."""
    here = nearest_existing(path)
    if not here.is_dir():
        return f"{here} is not a folder"
    if not os.access(here, os.W_OK | os.X_OK):
        return f"uid {os.geteuid()} may not write in {here}"
    return ""

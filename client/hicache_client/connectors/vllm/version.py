"""Which versions of vLLM this connector is tested with."""

import re

WINDOW = ((0, 31), (0, 32))  # first and last (major, minor), both tested


def outside(version: str) -> str:
    """Why this version is outside of the window, "" if it is inside. Unreadable counts as outside."""
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found else None
    first, last = (".".join(map(str, each)) for each in WINDOW)
    if number is not None and WINDOW[0] <= number <= WINDOW[1]:
        return ""
    if number is not None and number < WINDOW[0]:
        return f"vLLM {version} is older than {first}, which is the first to let a connector place the KV cache"
    return f"vLLM {version} was not tested, {first} to {last} were"

"""Protocol versions and how two sides agree on one.

A version is `major << 8 | minor`. Within a major only additions happen: a side that speaks 1.3 speaks 1.0 to
1.2 as well. So an offer names one version per major, the largest, and the agreed one is the smaller minor of
the largest common major. docs/internals/wire.md says what may change in a minor.
"""

from collections.abc import Sequence

from hicache.base.errors import ErrorCode, HiCacheError

MAJOR = 2
MINOR = 0


def number(major: int, minor: int) -> int:
    return major << 8 | minor


def text(version: int) -> str:
    """`1.0` of 256."""
    return f"{version >> 8}.{version & 0xFF}"


VERSION = number(MAJOR, MINOR)
SUPPORTED = (VERSION,)  # the largest minor of each major that this build speaks


def choose(offered: Sequence[int], supported: Sequence[int] = SUPPORTED) -> int:
    """The version to speak with a peer that offers these.

    Raises `HiCacheError(VERSION)` naming both sides' versions when no major is common.
    """
    ours = {version >> 8: version & 0xFF for version in sorted(supported)}
    theirs = {version >> 8: version & 0xFF for version in sorted(offered)}
    common = ours.keys() & theirs.keys()
    if not common:
        raise HiCacheError(
            ErrorCode.VERSION,
            f"no common protocol version: this side speaks {_list(supported)}, the peer {_list(offered)}",
            "install the same hicache release in the engine and for the daemon",
        )
    major = max(common)
    return number(major, min(ours[major], theirs[major]))


def _list(versions: Sequence[int]) -> str:
    return ", ".join(text(version) for version in list(versions)[:8]) or "none"

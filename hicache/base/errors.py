"""Errors that cross a boundary carry a stable code, what was expected, and what to do about it."""

from enum import StrEnum


class ErrorCode(StrEnum):
    """Stable codes on the wire and in logs; a code is never reused for another meaning."""

    MALFORMED = "malformed"  # bytes that are not a message
    VERSION = "version"  # a protocol version that this side does not speak
    TOO_LARGE = "too_large"  # over a limit that Welcome named
    UNKNOWN_SESSION = "unknown_session"  # say Hello (again)
    UNKNOWN_LEASE = "unknown_lease"  # never existed, expired, or belongs to another session
    UNKNOWN_TICKET = "unknown_ticket"
    OUT_OF_RANGE = "out_of_range"  # block, slot or token index outside of what was declared
    BAD_SPEC = "bad_spec"  # model, group, layout or shard that does not add up
    UNSUPPORTED = "unsupported"  # well-formed, but not carried by this daemon
    DENIED = "denied"  # credential or tenant
    BUSY = "busy"  # over credits or queue bounds; retry later
    DRAINING = "draining"  # the daemon is stopping
    NO_SPACE = "no_space"  # a tier is full of pinned blocks
    TRANSFER_FAILED = "transfer_failed"
    TIMEOUT = "timeout"
    CONFIG = "config"
    STORE = "store"  # the disk tier refused or failed
    INTERNAL = "internal"


class HiCacheError(Exception):
    """A failure with a code and a remedy.

    `message` says what was wrong and what was expected and names the field; `remedy` says what to do.
    """

    def __init__(self, code: ErrorCode, message: str, remedy: str = "") -> None:
        super().__init__(f"{code.value}: {message}" + (f" ({remedy})" if remedy else ""))
        self.code = code
        self.message = message
        self.remedy = remedy


class LawBroken(AssertionError):
    """An invariant of the cache state does not hold: a bug, never a client's doing. The story is attached."""

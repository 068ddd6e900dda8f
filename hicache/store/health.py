"""A store's mode and counters.

rw ─ENOSPC, EIO, read-only, index full─► ro ─a write or a freeing delete succeeds─► rw
any ─index unusable, or closed─► off
"""

import errno
import threading
from collections import Counter

from hicache.store.base import Log

CLOSED = "closed"


class Health:
    """Thread-safe: readers and the writer both count."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._for_space = False
        self.mode, self.reason = "rw", ""

    @property
    def off(self) -> bool:
        return self.mode == "off"

    @property
    def lacks_space(self) -> bool:
        """Read-only, for want of space: freeing some is a cure."""
        return self.mode == "ro" and self._for_space

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def trouble(self, counter: str, error: Exception, space: bool = False) -> None:
        """A change failed: no writes until one succeeds. `space`: the index is full."""
        self.count(counter)
        if self.off:
            return
        self._for_space = space or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if self.mode == "rw":
            self._log.warning("l3_mode", mode="ro", reason=str(error))
        self.mode, self.reason = "ro", str(error)

    def recovered(self) -> None:
        if self.mode == "ro":
            self.mode, self.reason = "rw", ""
            self._log.info("l3_mode", mode="rw", reason="a commit succeeded")

    def turn_off(self, reason: str) -> None:
        if not self.off:
            self.mode, self.reason = "off", reason
            self._log.warning("l3_mode", mode="off", reason=reason)

    def close(self) -> bool:
        """False if it was closed already."""
        if self.off and self.reason == CLOSED:
            return False
        self.mode, self.reason = "off", CLOSED
        return True

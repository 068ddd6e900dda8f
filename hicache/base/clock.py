"""Time is passed in. The state machine takes `now_s` with every event; outer code holds a `Clock`."""

from typing import Protocol


class Clock(Protocol):
    def monotonic_s(self) -> float:
        """Seconds on a clock that never runs back; the origin is arbitrary."""
        ...

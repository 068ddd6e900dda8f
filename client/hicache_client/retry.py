"""When to try again: exponential pauses with jitter. Pure; time and randomness are passed in."""

from collections.abc import Callable


class Backoff:
    """`failed` sets the next pause, `succeeded` forgets the past, `waiting` says whether a pause is on.

    Each pause is drawn from [½, 1] of its nominal length, so that the ranks of one engine that lost the
    daemon together do not come back together.
    """

    def __init__(self, initial_s: float, max_s: float, random: Callable[[], float]) -> None:
        """`random` gives floats in [0, 1)."""
        self._initial_s = initial_s
        self._max_s = max_s
        self._random = random
        self._nominal_s = 0.0
        self._until_s = 0.0

    def failed(self, now_s: float) -> float:
        """Start the next pause; returns its length."""
        self._nominal_s = min(self._max_s, self._nominal_s * 2 or self._initial_s)
        pause = self._nominal_s * (1 + self._random()) / 2
        self._until_s = now_s + pause
        return pause

    def succeeded(self) -> None:
        self._nominal_s = 0.0
        self._until_s = 0.0

    def waiting(self, now_s: float) -> bool:
        return now_s < self._until_s

"""Between vLLM's hooks and ours: whatever breaks on our side, the engine loop sees a harmless answer.

    vLLM ──hook──► Guard.run(hook, call, fallback) ──► call()      its answer
                                       └─ it raised ──► fallback()  said once per kind, counted

What is harmless differs from hook to hook, so each call brings its own fallback. It is a function, for it may have
to repair: a load that was promised to vLLM must be reported as failed, not be forgotten.
"""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

_log = logging.getLogger("hicache.vllm")


class RefusedError(RuntimeError):
    """Something does not fit, and `on_error` says refuse: vLLM's start ends with this. The guard lets it pass."""


class Guard:
    """The guard of one side. `observe(hook, seconds)` is told how long each call took, fallback included."""

    def __init__(self, side: str, observe: Callable[[str, float], None] | None = None) -> None:
        self.side = side
        self.caught: dict[str, int] = {}  # exceptions so far, per hook
        self._observe = observe
        self._said: set[tuple[str, str]] = set()

    def run(self, hook: str, call: Callable[[], _T], fallback: Callable[[], _T]) -> _T:
        """The answer of `call`, or that of `fallback` if it raised. `fallback` must not raise."""
        begun = time.perf_counter()
        try:
            return call()
        except RefusedError:
            raise
        except Exception as error:  # noqa: BLE001 - `caught` says it: no bug of ours may end somebody's engine
            self.caught_one(hook, error)
            return fallback()
        finally:
            if self._observe is not None:
                self._observe(hook, time.perf_counter() - begun)

    def caught_one(self, hook: str, error: Exception) -> None:
        """Count an exception; the first of its kind in this hook is logged with its traceback."""
        self.caught[hook] = self.caught.get(hook, 0) + 1
        kind = (hook, type(error).__name__)
        if kind in self._said:
            _log.debug("hicache %s: %s failed again: %s", self.side, hook, error)
            return
        self._said.add(kind)
        _log.error(
            "hicache %s: %s failed, vLLM goes on without it (said once): %s", self.side, hook, error, exc_info=error
        )

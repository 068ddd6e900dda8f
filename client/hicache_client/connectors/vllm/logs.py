"""What hicache says goes where vLLM's log goes."""

import logging
import time

REPEAT_S = 10.0


class _Once(logging.Filter):
    """The two sides may live in one process and see the same: a line that was just said is not said again."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to let it through."""
        now, line = time.monotonic(), record.getMessage()
        if now - self._said.get(line, -REPEAT_S) < REPEAT_S:
            return False
        self._said = {each: at for each, at in self._said.items() if now - at < REPEAT_S}
        self._said[line] = now
        return True


def adopt_handlers(*, quiet: bool) -> None:
    """Give hicache's logger vLLM's handlers, unless somebody configured it. `quiet`: another process of this engine
    tells of the daemon's coming and going. Idempotent."""
    ours, theirs = logging.getLogger("hicache"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False
        once = _Once()
        for name in ("hicache.client", "hicache.vllm"):
            logging.getLogger(name).addFilter(once)
    if quiet:
        logging.getLogger("hicache.client").setLevel(logging.ERROR)

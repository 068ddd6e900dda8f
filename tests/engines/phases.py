"""Points in a request's life at which an engine's own process sends the daemon a signal, once.

They are set into the connector of a running engine, which is why they are here and not in a test.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PHASES = ("lookup", "answer", "promise", "load", "layer", "decode", "store", "hold")
DEAD_S = 10.0


class Blow:
    """Sends `number` to process `pid` at `phase` and waits until it has happened. `struck`: how often."""

    def __init__(self, scheduler: Any, worker: Any, phase: str, pid: int, number: int) -> None:
        """`scheduler`, `worker`: the connector's two sides."""
        self.pid, self.number, self.struck = pid, number, 0
        self._undo: list[Callable[[], None]] = []
        getattr(self, f"_at_{phase}")(scheduler, worker)

    def strike(self) -> None:
        """Once."""
        if self.struck:
            return
        self.struck += 1
        os.kill(self.pid, self.number)
        deadline = time.monotonic() + DEAD_S
        while time.monotonic() < deadline and not self._over():
            time.sleep(0.001)

    def _over(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        return state in ("Z", "X") or (self.number == signal.SIGSTOP and state == "T")

    def lift(self) -> None:
        """Take the point out again."""
        while self._undo:
            self._undo.pop()()

    def _before(self, owner: Any, name: str, when: Callable[..., bool] = lambda *_, **__: True) -> None:
        self._wrap(owner, name, when, after=False)

    def _after(self, owner: Any, name: str, when: Callable[..., bool] = lambda *_, **__: True) -> None:
        self._wrap(owner, name, when, after=True)

    def _wrap(self, owner: Any, name: str, when: Callable[..., bool], *, after: bool) -> None:
        inner = getattr(owner, name)

        def struck(*args: Any, **kwargs: Any) -> Any:
            if not after and when(*args, **kwargs):
                self.strike()
            answer = inner(*args, **kwargs)
            if after and when(*args, **kwargs):
                self.strike()
            return answer

        setattr(owner, name, struck)
        self._undo.append(lambda: delattr(owner, name))

    # ---- the points -------------------------------------------------------------------------------------

    def _at_lookup(self, scheduler: Any, worker: Any) -> None:
        """Before a request is looked up."""
        self._before(scheduler, "on_new_request")

    def _at_answer(self, scheduler: Any, worker: Any) -> None:
        """The question is on its way, nobody has looked for the answer."""
        self._before(scheduler, "get_num_new_matched_tokens")

    def _at_promise(self, scheduler: Any, worker: Any) -> None:
        """vLLM was told of a hit and has allocated blocks for it; no load has begun."""
        self._after(scheduler, "update_state_after_alloc", lambda request, blocks, external: external > 0)

    def _at_load(self, scheduler: Any, worker: Any) -> None:
        """A load has just begun."""
        self._after(worker, "start_load_kv", lambda plan: bool(plan.loads))

    def _at_layer(self, scheduler: Any, worker: Any) -> None:
        """The model is between two layers of a step with loads."""
        self._before(
            worker,
            "wait_for_layer_load",
            lambda name: bool(worker._sync or worker._async) and worker._place.layers.get(name) == 2,
        )

    def _at_decode(self, scheduler: Any, worker: Any) -> None:
        """A request has said some tokens and goes on."""
        self._before(
            scheduler,
            "build_connector_meta",
            lambda output: any(each.request.num_output_tokens > 3 for each in scheduler._requests.values()),
        )

    def _at_store(self, scheduler: Any, worker: Any) -> None:
        """A store has just been offered."""
        self._after(worker, "wait_for_save", lambda plan: bool(plan.stores))

    def _at_hold(self, scheduler: Any, worker: Any) -> None:
        """A request has ended and its blocks are kept for its last store."""
        self._before(worker, "wait_for_save", lambda plan: bool(plan.held))

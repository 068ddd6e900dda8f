# Generated from handles.py by tools/unasync.py; edit that one.
"""Transfers under way, as their owner sees them. `sync_handles.py` is generated from this file.

Waiting reads shared memory: a short spin, then sleeps that grow to 1 ms. It takes no part in the client's turns
between threads and notices a dead daemon by the lifeline, within one sleep. Before each sleep it takes the replies
that have come, unless another thread's call does: a transfer that was begun without waiting for its answer is
seen to be refused at once.

How an engine goes on when it cannot wait any longer for a transfer that has not `settled`:

    load    the daemon may still write to the target blocks, even if it was stopped long ago and wakes up later. Keep
            them from every sequence until `settled`. To use them before: `revoke()` (a daemon that runs then stops
            soon: `wait_settled` with a short deadline), and if that has not settled it, `SharedPool.sever()` and
            `client.reattach()`: what the daemon writes from then on goes to memory that the engine does not see.
            Severing fails and settles every other transfer of that pool too.
    store   the daemon may still read the source blocks. `revoke()`, and they may be overwritten at once: pages that
            were read after that are never published. `settled` keeps its meaning, and needs not be waited for.
"""

from collections.abc import Callable

from hicache.protocol.fence import STATE_DONE, STATE_FAILED
from hicache.protocol.messages import Accepted, Done
from hicache_client.fences import Fence
from hicache_client.link import Link, Pending
from hicache_client.ports import SyncPort

SPIN_S = 50e-6
FIRST_SLEEP_S = 20e-6
MAX_SLEEP_S = 1e-3
GROWTH = 1.6


class _Transfer:
    """What loads and stores have in common. `deadline` on the monotonic clock, seconds."""

    def __init__(self, port: SyncPort, link: Link, pending: Pending, fence: Fence, deadline: float) -> None:
        self.fence = fence
        self.deadline = deadline
        self._port = port
        self._link = link
        self._pending = pending

    @property
    def pages(self) -> int:
        """Pages that the daemon said it moves."""
        reply = self._pending.reply
        return reply.pages if isinstance(reply, Accepted | Done) else 0

    @property
    def settled(self) -> bool:
        """The daemon touches the L1 blocks no more: the copy ended, or was refused, the daemon is gone, or the pool
        was severed from it.

        A session that this side ended (a daemon too long silent, `close`) settles when the daemon, which then
        cancels its copies, has written so. `revoke` does not settle anything by itself either."""
        return self.fence.settled

    def revoke(self) -> None:
        """Take the transfer back. A store that has not ended yet publishes nothing, so its source may be overwritten
        from the return of this call on, by any means; a load is stopped soon, if the daemon runs. No message is
        sent, nothing is waited for. Idempotent, from any thread. What has ended already stays as it is."""
        self.fence.revoke()

    @property
    def failed(self) -> bool:
        """It will not complete (or its caller gave up before the daemon answered, or revoked it). Not answered yet
        is not failed; a refusal is known once replies have been taken (`poll`, every call and every wait do)."""
        if self.fence.state == STATE_DONE:
            return False
        last = self._pending.last
        refused = last is not None and not isinstance(last, Done)
        return refused or self.fence.state == STATE_FAILED or self._given_up()

    def _given_up(self) -> bool:
        return self._pending.abandoned or self.fence.revoked or self._link.gone()

    def wait_settled(self, deadline: float | None = None) -> bool:
        """Wait until `settled`; False at the deadline."""
        return self._wait(lambda: True if self.settled else None, deadline)

    def _wait(self, ready: Callable[[], bool | None], deadline: float | None) -> bool:
        """Poll `ready` until it is True or False (None: not yet); False at the deadline."""
        now = self._port.now()
        end = self.deadline if deadline is None else deadline
        spin_end, pause = now + SPIN_S, FIRST_SLEEP_S
        while True:
            verdict = ready()
            if verdict is not None:
                return verdict
            now = self._port.now()
            if now >= end:
                return False
            if now >= spin_end:
                if self._pending.last is None:
                    self._port.drain(self._link)
                self._port.sleep(min(pause, end - now))
                pause = min(pause * GROWTH, MAX_SLEEP_S)


class LoadHandle(_Transfer):
    """L2 → L1, layer by layer."""

    @property
    def layers_done(self) -> int:
        return self.fence.layers_done

    @property
    def done(self) -> bool:
        """All layers are in place."""
        return self.fence.state == STATE_DONE

    def wait_layer(self, layer: int, deadline: float | None = None) -> bool:
        """Wait until layer `layer` (0 …, in the model's order) is in place.

        False: the load failed, the daemon went away, or `deadline` (monotonic seconds; default: the load's own)
        passed. The layer's contents are then undefined: recompute."""
        return self._wait(lambda: self._ready(layer), deadline)

    def wait_done(self, deadline: float | None = None) -> bool:
        """Wait until every layer is in place; False as for `wait_layer`."""
        return self._wait(lambda: True if self.done else (False if self.failed else None), deadline)

    def _ready(self, layer: int) -> bool | None:
        if self.fence.layers_done > layer or self.fence.state == STATE_DONE:
            return True
        return False if self.failed else None


class StoreHandle(_Transfer):
    """L1 → L2. `settled` or revoked: the source blocks may be reused. `done`: the pages are visible to lookups."""

    @property
    def done(self) -> bool:
        """The daemon said Done, as far as replies have been taken (`wait_done` and every call take them)."""
        return isinstance(self._pending.last, Done)

    @property
    def failed(self) -> bool:
        """The pages will not become visible by this store, as far as is known."""
        last = self._pending.last
        if last is not None:
            return not isinstance(last, Done)
        return self.fence.state == STATE_FAILED or self._given_up()

    def wait_done(self, deadline: float | None = None) -> bool:
        """Wait until the pages are visible; False: failed, the daemon went away, or the deadline passed."""
        return self._wait(self._ready, deadline)

    def _ready(self) -> bool | None:
        self._port.drain(self._link)
        if self.done:
            return True
        return False if self.failed else None

"""Events from threads arrive in order, all of them, with few wake-ups."""

import asyncio
import threading

from hicache.base.ids import TicketId
from hicache.core.events import CopyEnded, Event
from hicache_daemon.inbox import BATCH, Inbox


def test_many_threads_lose_nothing_and_each_keeps_its_order() -> None:
    threads_count, each = 4, 3 * BATCH
    got: list[int] = []

    async def scenario() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def handle(event: Event) -> None:
            assert isinstance(event, CopyEnded)
            got.append(event.ticket)
            if len(got) == threads_count * each:
                done.set()

        inbox = Inbox[Event](loop, handle)

        def post(first: int) -> None:
            for ticket in range(first, first + each):
                inbox.post(CopyEnded(TicketId(ticket), True))

        threads = [threading.Thread(target=post, args=(n * each,)) for n in range(threads_count)]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(done.wait(), 20)
        for thread in threads:
            thread.join()
        assert len(inbox) == 0

    asyncio.run(scenario())
    for n in range(threads_count):
        mine = [ticket for ticket in got if n * each <= ticket < (n + 1) * each]
        assert mine == list(range(n * each, (n + 1) * each))


def test_one_wake_up_serves_all_that_were_posted_before_it() -> None:
    wakes: list[object] = []

    class Loop(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *args: object, **kwargs: object) -> asyncio.Handle:  # type: ignore[override]
            wakes.append(args)
            return super().call_soon_threadsafe(*args, **kwargs)  # type: ignore[arg-type]

    loop, got = Loop(), list[Event]()
    inbox = Inbox[Event](loop, got.append)
    for ticket in range(100):
        inbox.post(CopyEnded(TicketId(ticket), True))
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert len(got) == 100
    assert len(wakes) == 1
    loop.close()
    inbox.post(CopyEnded(TicketId(1), True))  # after the daemon: dropped without an error
    assert len(inbox) == 0

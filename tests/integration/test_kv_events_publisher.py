"""The publisher by itself: numbers, replays, snapshots, subscribers that are slow or go away, bounds."""

import asyncio
import hashlib
import stat
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
import zmq

from hicache.base.errors import ErrorCode, HiCacheError
from hicache.base.ids import PageKey
from hicache.core.commands import Announce, PagesRemoved, PagesStored
from hicache_daemon import kv_events
from hicache_daemon.kv_events import RESERVED, Buffer, KvEvents, Numbers, Options
from hicache_daemon.log import LevelGate, make_log
from hicache_daemon.main import MonotonicClock
from tests.kv_router import END, KvRouter

SAFETY_S = 30.0
LOG = make_log(LevelGate("critical"), "json")
PAGE = 4


def chain(count: int, name: int = 0) -> PagesStored:
    """A sequence of pages, as the cache state would announce it."""
    keys = tuple(PageKey(hashlib.blake2b(b"%d-%d" % (name, page), digest_size=32).digest()) for page in range(count))
    return PagesStored("l2", None, keys, np.arange(count * PAGE, dtype="<i4").tobytes(), PAGE)


class Cache:
    """What the cache state remembers of its announcements, as far as the publisher asks."""

    def __init__(self) -> None:
        self.stored: list[PagesStored] = []

    def survey(self, part_pages: int) -> Iterator[tuple[PagesStored, ...]]:
        assert part_pages == kv_events.BATCH_PAGES
        for change in list(self.stored):
            yield (change,)

    def announced_pages(self) -> int:
        return sum(len(change.keys) for change in self.stored)


class Bench:
    """A publisher in its loop; routers run in threads."""

    def __init__(self, root: Path, first: int = 0, **options: Any) -> None:
        self.options = Options(f"ipc://{root}/events", f"ipc://{root}/replay", "", 1 << 20)
        self.options = replace(self.options, **options)
        self.cache = Cache()
        if first:
            (root / "next").write_text(str(first))
        numbers = Numbers(root / "next", LOG)
        self.kv = KvEvents(self.options, self.cache, numbers, clock=MonotonicClock(), log=LOG)

    def store(self, change: PagesStored) -> None:
        self.cache.stored.append(change)
        self.kv.announce(Announce((change,)))

    def remove(self, change: PagesStored) -> None:
        self.cache.stored.remove(change)
        self.kv.announce(Announce((PagesRemoved("l2", change.keys),)))

    def router(self, **options: Any) -> KvRouter:
        return KvRouter(self.options.endpoint, self.options.replay_endpoint, **options)

    def run(self, script: Callable[["Bench"], Awaitable[None]], factory: Any = uvloop.new_event_loop) -> None:
        async def body() -> None:
            try:
                self.kv.open(asyncio.get_running_loop())
                await asyncio.wait_for(script(self), 2 * SAFETY_S)
            finally:
                self.kv.close()

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(body())


async def until(condition: Callable[[], object]) -> None:
    for _ in range(int(SAFETY_S / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


async def followed(router: KvRouter, condition: Callable[[KvRouter], object]) -> None:
    await asyncio.to_thread(router.follow, condition)


@pytest.mark.parametrize("factory", [uvloop.new_event_loop, asyncio.SelectorEventLoop])
def test_a_turn_of_the_loop_is_one_batch_and_the_first_voids_what_was(tmp_path: Path, factory: Any) -> None:
    async def script(bench: Bench) -> None:
        with bench.router() as router:
            first, second = chain(3), chain(2, name=1)
            await asyncio.sleep(0.1)  # the subscription travels
            bench.store(first)
            bench.store(second)
            await followed(router, lambda it: it.held()["CPU"] == 5)
            bench.remove(second)
            await followed(router, lambda it: it.held()["CPU"] == 3)
            assert [event.number for event in router.log] == [0, 1, 2]
            assert router.log[0].names == ["AllBlocksCleared"]
            assert router.log[1].names == ["BlockStored", "BlockStored"]
            assert router.prefix("CPU", list(range(12))) == 12
        assert bench.kv.status()["sequence"] == 2
        assert bench.kv.counters["stored"] == 5

    Bench(tmp_path).run(script, factory)


def test_batches_keep_their_distance_unless_they_are_large(tmp_path: Path) -> None:
    async def script(bench: Bench) -> None:
        began = asyncio.get_running_loop().time()
        for number in range(20):
            bench.store(chain(1, number))
            await asyncio.sleep(0.005)
        took_s = asyncio.get_running_loop().time() - began
        assert bench.kv.status()["sequence"] <= took_s / kv_events.SPACING_S + 1
        before = bench.kv.status()["sequence"]
        bench.store(chain(kv_events.BATCH_PAGES, 99))
        assert bench.kv.status()["sequence"] == before + 1

    Bench(tmp_path).run(script)


def test_who_comes_late_gets_the_buffered_batches(tmp_path: Path) -> None:
    async def script(bench: Bench) -> None:
        for number in range(5):
            bench.store(chain(2, number))
            bench.kv._flush()
        with bench.router() as router:
            await asyncio.to_thread(router.ask, 0)
            assert (router.held()["CPU"], router.number) == (10, 5)
            await asyncio.to_thread(router.ask, 6)  # nothing is there yet: an end without batches
            bench.store(chain(1, 9))
            await followed(router, lambda it: it.held()["CPU"] == 11)
        assert (bench.kv.counters["replays"], bench.kv.counters["snapshots"]) == (2, 0)

    Bench(tmp_path).run(script)


def test_who_missed_more_than_the_buffer_holds_gets_all_that_is_there(tmp_path: Path) -> None:
    async def script(bench: Bench) -> None:
        for number in range(200):
            bench.store(chain(2, number))
            bench.kv._flush()
            if number % 2:
                bench.remove(bench.cache.stored[0])
                bench.kv._flush()
        assert bench.kv.status()["buffered_bytes"] <= 4096
        with bench.router() as router:
            await asyncio.to_thread(router.ask, 0)  # and every number from 0 to the last was in it
            assert router.held()["CPU"] == bench.cache.announced_pages()
            assert router.number == bench.kv.status()["sequence"]
            bench.store(chain(1, 999))
            await followed(router, lambda it: it.held()["CPU"] == bench.cache.announced_pages())
        assert bench.kv.counters["snapshots"] == 1

    Bench(tmp_path, buffer_bytes=4096).run(script)


def test_a_snapshot_finds_room_between_the_number_asked_for_and_the_last(tmp_path: Path) -> None:
    """Fewer numbers have gone by than the snapshot has parts."""

    async def script(bench: Bench) -> None:
        bench.cache.stored = [chain(kv_events.BATCH_PAGES, name) for name in range(7)]
        bench.kv._append([])
        bench.kv._append([])
        with bench.router() as router:
            await asyncio.to_thread(router.ask, 1)
            assert router.held()["CPU"] == bench.cache.announced_pages()
            assert router.number == bench.kv.status()["sequence"]

    Bench(tmp_path, buffer_bytes=1).run(script)


@pytest.mark.parametrize("asked", [0, 5, 999, 5_000])
def test_where_too_many_numbers_are_missing_the_last_is_reached_in_one_jump(tmp_path: Path, asked: int) -> None:
    """`asked`: nothing yet, numbers of an earlier daemon, and one that is still to come."""

    async def script(bench: Bench) -> None:
        bench.store(chain(3))
        bench.kv._flush()
        with bench.router(counting=False) as router:
            await asyncio.to_thread(router.ask, asked)
            assert (router.held()["CPU"], router.number) == (3, 1001)
            numbers = [event.number for event in router.log]
            assert numbers == sorted(numbers)
            assert len(numbers) <= 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_events, "PADDING", 1)
        Bench(tmp_path, first=1000).run(script)


def test_what_happens_during_a_snapshot_comes_after_it(tmp_path: Path) -> None:
    async def script(bench: Bench) -> None:
        bench.cache.stored = [chain(50, name) for name in range(200)]
        with bench.router(counting=False) as router:
            await asyncio.sleep(0.1)
            asking = asyncio.create_task(asyncio.to_thread(router.ask, 5_000))
            await until(lambda: bench.kv.counters["snapshots"])
            bench.store(chain(7, 999))
            bench.kv._flush()
            await asking
            assert router.held()["CPU"] == 50 * 200
            await followed(router, lambda it: it.held()["CPU"] == bench.cache.announced_pages())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_events, "TURN_S", 0.0)
        Bench(tmp_path).run(script)


def test_a_slow_subscriber_loses_batches_and_finds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "BEAT_S", 0.05)  # the last batches may be among the lost

    async def script(bench: Bench) -> None:
        with bench.router(receive_depth=1) as slow, bench.router() as quick:
            await asyncio.sleep(0.1)
            loop = asyncio.get_running_loop()
            for number in range(3000):
                if number >= 10:
                    bench.remove(bench.cache.stored[0])
                bench.store(chain(60, number))
                began = loop.time()
                bench.kv._flush()
                assert loop.time() - began < SAFETY_S / 10  # it waits for nobody
                if number % 50 == 0:
                    await followed(quick, lambda it: it.number == bench.kv.status()["sequence"])
            assert bench.kv.counters["dropped"] > 0
            await followed(quick, lambda it: it.number == bench.kv.status()["sequence"])
            assert quick.replays <= 1  # for the batch before it subscribed
            await followed(slow, lambda it: it.number == bench.kv.status()["sequence"])
            assert slow.replays >= 1
            assert slow.pages == quick.pages == pages_of(bench)

    Bench(tmp_path).run(script)


def pages_of(bench: Bench) -> dict[str, Any]:
    """What a router must know, read off the cache."""
    router = KvRouter("", "")
    for change in bench.cache.stored:
        router._on_BlockStored(
            {
                "parent_block_hash": None,
                "block_size": PAGE,
                "medium": "CPU",
                "block_hashes": [int.from_bytes(key[:8], "big") for key in change.keys],
                "token_ids": np.frombuffer(change.tokens, "<i4").tolist(),
            }
        )
    return router.pages


def test_who_comes_when_nothing_happens_is_told_by_the_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "BEAT_S", 0.05)

    async def script(bench: Bench) -> None:
        bench.store(chain(3))
        bench.kv._flush()
        with bench.router() as router:
            await followed(router, lambda it: it.held()["CPU"] == 3)
            assert router.replays == 1
            await asyncio.sleep(0.2)
            assert bench.kv.status()["sequence"] == 1  # a beat is no batch

    Bench(tmp_path).run(script)


def test_requests_that_are_none_are_counted_and_do_not_stop_the_others(tmp_path: Path) -> None:
    async def script(bench: Bench) -> None:
        with bench.router() as router:
            for frames in ([b""], [b"x", bytes(8)], [b"", b"seven.."], [b"", bytes(8), b"more"] * 50):
                router._dealer.send_multipart(frames)
            await asyncio.to_thread(router.ask, 0)
            assert router.number == 0
        assert bench.kv.counters["malformed"] == 4

    Bench(tmp_path).run(script)


def test_many_askers_are_served_and_one_gets_its_answers_in_turn(tmp_path: Path) -> None:
    async def script(bench: Bench) -> None:
        for number in range(300):
            bench.store(chain(2, number))
            bench.kv._flush()
        askers = 3 * kv_events.REPLAYS

        def ask() -> int:
            with bench.router() as router:
                router.ask(0)
                return router.held()["CPU"]

        assert await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(askers))) == [600] * askers

        def ask_twice() -> list[int]:
            with bench.router() as router:
                for _ in range(2):
                    router._dealer.send_multipart([b"", bytes(8)])
                numbers = []
                while numbers.count(END) < 2:
                    assert router._dealer.poll(int(SAFETY_S * 1000))
                    numbers.append(int.from_bytes(router._dealer.recv_multipart()[2], "big"))
                return numbers

        assert await asyncio.to_thread(ask_twice) == [*range(301), END] * 2
        assert bench.kv.status()["open_replays"] == 0

    Bench(tmp_path).run(script)


def test_askers_that_leave_or_do_not_read_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "STALL_S", 0.3)

    async def script(bench: Bench) -> None:
        bench.cache.stored = [chain(1000, name) for name in range(300)]
        context = zmq.Context()
        gone, deaf = (context.socket(zmq.DEALER) for _ in range(2))
        for sock in (gone, deaf):
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.RCVHWM, 1)
            sock.connect(bench.options.replay_endpoint)
            sock.send_multipart([b"", (5_000).to_bytes(8, "big")])
        await until(lambda: bench.kv.counters["snapshots"] == 2)
        gone.close()
        await until(lambda: bench.kv.counters["failed_replays"] == 2)
        assert bench.kv.status()["open_replays"] == 0
        with bench.router() as router:
            await asyncio.to_thread(router.ask, 0)
        deaf.close()
        context.term()

    Bench(tmp_path).run(script)


def test_the_sockets_are_ours_alone_and_go_with_the_publisher(tmp_path: Path) -> None:
    paths = [tmp_path / "events", tmp_path / "replay"]

    async def script(bench: Bench) -> None:
        for path in paths:
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600

    Bench(tmp_path).run(script)
    assert not any(path.exists() for path in paths)


def test_an_orderly_end_voids_what_routers_know(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    told: list[dict[str, int]] = []

    async def script(_: Bench) -> None:
        with bench.router() as router:
            await asyncio.sleep(0.1)
            bench.store(chain(3))
            await followed(router, lambda it: it.held()["CPU"] == 3)
            ending = asyncio.create_task(asyncio.to_thread(router.follow, lambda it: it.held()["CPU"] == 0))
            bench.kv.close()
            await ending
            told.append(router.held())
            bench.kv.announce(Announce((chain(1),)))  # nobody is there to hear it

    bench.run(script)
    assert told == [{"CPU": 0, "DISK": 0}]


def test_a_port_that_is_taken_is_named_with_its_key(tmp_path: Path) -> None:
    with zmq.Context() as context:
        sock = context.socket(zmq.PUB)
        port = sock.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(HiCacheError, match=r"kv_events\.replay_endpoint: .* cannot be bound: Address") as caught:
            Bench(tmp_path, replay_endpoint=f"tcp://127.0.0.1:{port}").run(lambda bench: asyncio.sleep(0))
        assert caught.value.code is ErrorCode.CONFIG
        sock.close()


def test_tcp_works_as_well(tmp_path: Path) -> None:
    with zmq.Context() as context:
        probes = [context.socket(zmq.PUB) for _ in range(2)]
        ports = [probe.bind_to_random_port("tcp://127.0.0.1") for probe in probes]
        for probe in probes:
            probe.close()

    async def script(bench: Bench) -> None:
        with bench.router(topic=b"kv@") as router:
            bench.store(chain(3))
            bench.kv._flush()
            await asyncio.to_thread(router.ask, 0)
            assert router.held()["CPU"] == 3

    Bench(
        tmp_path,
        endpoint=f"tcp://127.0.0.1:{ports[0]}",
        replay_endpoint=f"tcp://127.0.0.1:{ports[1]}",
        topic="kv@",
    ).run(script)


def test_numbers_go_on_after_an_end_of_either_kind(tmp_path: Path) -> None:
    path = tmp_path / "next"
    first = Numbers(path, LOG)
    assert [first.take() for _ in range(3)] == [0, 1, 2]
    killed = Numbers(path, LOG)
    assert killed.next == RESERVED  # more than were used, never fewer
    assert [killed.take() for _ in range(RESERVED + 1)][-1] == 2 * RESERVED
    assert Numbers(path, LOG).next == 3 * RESERVED
    killed.close()
    assert Numbers(path, LOG).take() == 2 * RESERVED + 1


@pytest.mark.parametrize("content", [b"", b"-1", b"1e3", b"9" * 400, b"\xff\xfe", "٣".encode()])
def test_a_file_of_numbers_that_makes_no_sense_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "next").write_bytes(content)
    assert Numbers(tmp_path / "next", LOG).take() == 0


def test_numbers_that_can_not_be_kept_are_given_all_the_same(tmp_path: Path) -> None:
    numbers = Numbers(tmp_path / "missing" / "next", LOG)
    assert [numbers.take() for _ in range(RESERVED + 2)] == list(range(RESERVED + 2))
    numbers.close()


@pytest.mark.parametrize("killed", [True, False])
def test_routers_follow_from_one_publisher_to_the_next(tmp_path: Path, killed: bool) -> None:
    """What the first one told is void, whether or not a router heard its last word."""
    first, second = Bench(tmp_path), Bench(tmp_path)

    async def begin(bench: Bench) -> None:
        bench.store(chain(3))
        await followed(router, lambda it: it.held()["CPU"] == 3)
        if killed:
            bench.kv._numbers.close = lambda: None  # type: ignore[method-assign]
            bench.kv._append = lambda events: None  # type: ignore[method-assign]

    async def go_on(bench: Bench) -> None:
        bench.store(chain(2, name=1))
        bench.kv._flush()
        await followed(router, lambda it: it.pages == pages_of(bench))
        assert bench.kv.counters["snapshots"] == int(killed)

    with first.router() as router:
        first.run(begin)
        second.kv._numbers = Numbers(tmp_path / "next", LOG)
        second.run(go_on)


def test_the_buffer_is_bounded_in_bytes_and_knows_its_gaps() -> None:
    buffer = Buffer(3 * (100 + Buffer.OVERHEAD))
    assert buffer.since(0) is None
    for number in range(10, 15):
        buffer.add(number, bytes(100))
    assert [number for number, _ in buffer.since(12) or ()] == [12, 13, 14]
    assert [number for number, _ in buffer.since(14) or ()] == [14]
    assert buffer.since(15) == []
    assert buffer.since(11) is None
    assert buffer.since(16) is None
    assert (len(buffer), buffer.held_bytes) == (3, 3 * (100 + Buffer.OVERHEAD))
    buffer.add(15, bytes(5000))
    assert (len(buffer), [number for number, _ in buffer.since(15) or ()]) == (1, [15])

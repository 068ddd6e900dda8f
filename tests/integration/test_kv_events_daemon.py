"""A real daemon and routers that follow it: what they were told is what lookups find, also after kill -9."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from hicache.protocol.messages import Error, Lookup, Match, Scope, Store
from tests.daemon_harness import PAGE_TOKENS, DaemonProcess, RawClient, int32, model, tokens
from tests.kv_router import KvRouter

ON = "kv_events.enabled=true"
SMALL_L2 = "l2.size=1MiB"  # 170 pages


def router_of(daemon: DaemonProcess, **options: Any) -> KvRouter:
    return KvRouter(f"ipc://{daemon.runtime_dir}/events.sock", f"ipc://{daemon.runtime_dir}/replay.sock", **options)


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def holds(medium: str, data: bytes) -> Callable[[KvRouter], bool]:
    return lambda router: router.prefix(medium, ids(data)) == len(data) // 4


def test_routers_follow_stores_evictions_and_both_tiers(tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path, [ON, SMALL_L2], l3=True) as daemon,
        router_of(daemon) as router,
        RawClient(daemon).open() as client,
    ):
        prompts = [tokens(16 * PAGE_TOKENS, seed) for seed in range(12)]
        client.store(prompts[0], range(16))
        router.follow(holds("DISK", prompts[0]))
        assert holds("CPU", prompts[0])(router)
        for prompt in prompts[1:]:
            client.store(prompt, range(16))
            router.follow(holds("DISK", prompt))
        router.follow(lambda it: not holds("CPU", prompts[0])(it))
        status = daemon.describe()
        rows = status["cache"]["rows"]
        router.follow(lambda it: it.number == daemon.describe()["kv_events"]["sequence"])
        assert router.held() == {"CPU": rows["l2"]["ready"], "DISK": rows["l3"]["ready"]}
        for prompt in prompts:
            match = client.lookup(prompt)
            assert match.l2_tokens == router.prefix("CPU", ids(prompt))
            client.release(match.lease)
        told = status["kv_events"]
        assert told["pages"] == len(prompts) * 16
        assert told["counters"]["stored"] - told["counters"]["removed"] == sum(router.held().values())
        assert told["counters"]["dropped"] == 0


def test_who_comes_late_knows_as_much(tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path, [ON, SMALL_L2, "kv_events.replay_buffer=8KiB"], l3=True) as daemon,
        RawClient(daemon).open() as client,
        router_of(daemon) as first,
    ):
        for seed in range(12):
            client.store(tokens(16 * PAGE_TOKENS, seed), range(16))
            first.follow(holds("DISK", tokens(16 * PAGE_TOKENS, seed)))
        with router_of(daemon) as late:
            late.ask(0)
            assert late.pages == first.pages
            assert daemon.describe()["kv_events"]["counters"]["snapshots"] == 1
            client.store(tokens(PAGE_TOKENS, 99), range(1))
            for router in (first, late):
                router.follow(holds("DISK", tokens(PAGE_TOKENS, 99)))
            assert late.pages == first.pages


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_restart_voids_what_routers_knew_and_lookups_bring_it_back(tmp_path: Path, end: int) -> None:
    prompt, other = tokens(8 * PAGE_TOKENS, 1), tokens(4 * PAGE_TOKENS, 2)
    with DaemonProcess(tmp_path, [ON], l3=True) as daemon, router_of(daemon) as router:
        with RawClient(daemon).open() as client:
            client.store(prompt, range(8))
            router.follow(holds("DISK", prompt))
        daemon.signal(end)
        daemon.wait()
        if end == signal.SIGTERM:
            router.follow(lambda it: it.held() == {"CPU": 0, "DISK": 0})
        daemon.restart()
        with RawClient(daemon).open() as client:
            router.follow(lambda it: it.held() == {"CPU": 0, "DISK": 0})  # its tokens are known to nobody yet
            client.store(other, range(4))
            router.follow(holds("DISK", other))
            assert client.lookup(prompt).l3_tokens == len(prompt) // 4
            router.follow(holds("DISK", prompt))
            assert router.held() == {"CPU": 4, "DISK": 12}


def test_what_was_salted_or_is_anothers_is_never_told(tmp_path: Path) -> None:
    mine, salted, foreign, odd = (tokens(2 * PAGE_TOKENS, seed) for seed in range(4))
    with DaemonProcess(tmp_path, [ON, "kv_events.model=tiny"]) as daemon, router_of(daemon) as router:
        with RawClient(daemon) as client, RawClient(daemon) as stranger, RawClient(daemon) as second:
            client.open()
            stranger.attach()
            stranger.hello(tenant="acme")
            second.attach()
            second.hello(model("huge"))
            for each, prompt in ((stranger, foreign), (second, odd)):
                each.store(prompt, range(2))
            slot, generation = client.new_fence()
            message = Store(2 * PAGE_TOKENS, 0, (2,), slot, generation, Scope(salt="pepper"))
            request = client.send(message, (salted, int32(range(2))))
            assert not any(isinstance(client.receive(request), Error) for _ in range(2))
            match = client.ask(Lookup(2 * PAGE_TOKENS, 2 * PAGE_TOKENS, True, Scope(salt="pepper")), (salted,))
            assert isinstance(match, Match)
            assert match.resumable_tokens == 2 * PAGE_TOKENS  # it is there
            client.store(mine, range(2))
            router.follow(holds("CPU", mine))
        assert router.held() == {"CPU": 2, "DISK": 0}
        assert daemon.describe()["kv_events"]["counters"]["stored"] == 2


def test_without_the_key_there_is_no_socket_and_no_word(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as daemon:
        assert daemon.describe()["kv_events"] == {"enabled": False}
        assert not (daemon.runtime_dir / "events.sock").exists()
        assert not (daemon.runtime_dir / "replay.sock").exists()


@pytest.mark.parametrize("l3", [False, True])
def test_an_endpoint_that_is_taken_stops_the_start_and_is_named(tmp_path: Path, l3: bool) -> None:
    with zmq.Context() as context:
        sock = context.socket(zmq.PUB)
        port = sock.bind_to_random_port("tcp://127.0.0.1")
        daemon = DaemonProcess(tmp_path, [ON, f"kv_events.endpoint=tcp://127.0.0.1:{port}"], l3=l3, wait=False)
        with daemon:
            assert daemon.wait() == 1
            (line,) = daemon.events("daemon.cannot_start")
            assert "kv_events.endpoint" in line["reason"]
        sock.close()

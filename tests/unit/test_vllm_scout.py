"""Lookups ahead of vLLM's scheduler: minimum over shards, leases that never leak, waits that always end."""

from tests import vllm_fakes  # noqa: F401 - stand-ins for vLLM's classes, before our modules import them

# isort: split
import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from hicache.protocol.messages import Lookup, Match, Scope
from hicache.spec.model import ShardSpec
from hicache_client.connectors.vllm import scout as scouting
from hicache_client.connectors.vllm.metadata import WorkerShard
from hicache_client.connectors.vllm.options import VllmOptions
from hicache_client.connectors.vllm.scout import Ask, Scout
from hicache_client.leases import LeaseRef
from hicache_client.options import EMPTY
from hicache_client.testing import LIMITS, FakeDaemon
from tests.unit.client_world import LAYOUT, MODEL, eventually, leasing
from tests.vllm_sessions import FakeClient

GROUP = b"g" * 16
TOKENS = bytes(4 * 64)
P = MODEL.prefix_granularity


def shard(rank: int = 0, ranks: int = 1) -> WorkerShard:
    return WorkerShard(MODEL, LAYOUT, ShardSpec(rank, ranks), (1,))


def known(tokens: int, l3: int = 0, partial: int = 0) -> Callable[[], Match]:
    return lambda: Match(0, tokens + partial, tokens, tokens - l3, l3, 0, partial)


@contextmanager
def scout_of(*clients: Any, **options: Any) -> Iterator[Scout]:
    waiting = iter(clients)
    scout = Scout(VllmOptions(**options), GROUP, "test", open_client=lambda _: next(waiting))
    scout.start([shard(rank, len(clients)) for rank in range(len(clients))])
    try:
        yield scout
    finally:
        scout.close()


def ask(scout: Scout, name: str = "r") -> Ask:
    return scout.ask(name, TOKENS, 64, Scope())


def answered(asked: Ask) -> Ask:
    assert asked.wait(20)
    return asked


def settled(scout: Scout) -> None:
    """All that was posted has been done."""
    eventually(
        lambda: not scout._inbox and not any(scout._to_release) and not scout._tasks_of_asks, "the loop is idle"
    )


@pytest.fixture(autouse=True)
def _count_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    def tasks(self: Scout) -> int:
        return sum(1 for task in list(self._tasks) if "_keep" not in repr(task) and "_renew" not in repr(task))

    monkeypatch.setattr(Scout, "_tasks_of_asks", property(tasks), raising=False)


# ---- answers --------------------------------------------------------------------------------------------


def test_an_answer_has_the_tokens_the_tiers_and_a_lease() -> None:
    client = FakeClient(known(32))
    with scout_of(client) as scout:
        found = answered(ask(scout))
        assert (found.resumable_tokens, found.whole_tokens, found.l2_tokens, found.l3_tokens) == (32, 32, 32, 0)
        assert found.memory_tokens == 32
        assert not found.prefetching
        assert found.leases() == (LeaseRef(7, 1),)
        found.release()
        settled(scout)
        assert client.held == set()
        assert found.leases() == ()


def test_of_several_shards_the_least_counts_and_all_are_leased() -> None:
    clients = [FakeClient(known(32)), FakeClient(known(48)), FakeClient(known(16, partial=3))]
    with scout_of(*clients) as scout:
        found = answered(ask(scout))
        assert (found.resumable_tokens, found.whole_tokens) == (19, 16)
        assert len(found.leases()) == 3
        found.release()
        settled(scout)
        assert all(client.held == set() for client in clients)


def test_one_shard_without_the_prompt_is_a_miss_and_the_others_leases_go_at_once() -> None:
    clients = [FakeClient(known(32)), FakeClient(known(0))]
    with scout_of(*clients) as scout:
        found = answered(ask(scout))
        assert (found.resumable_tokens, found.leases()) == (0, ())
        settled(scout)
        assert all(client.held == set() for client in clients)


def test_a_part_of_a_page_is_resumable_to_the_token() -> None:
    with scout_of(FakeClient(known(32, partial=3))) as scout:
        found = answered(ask(scout))
        assert (found.resumable_tokens, found.whole_tokens, found.memory_tokens) == (35, 32, 35)


def test_only_a_partial_page_is_also_a_hit() -> None:
    client = FakeClient(lambda: Match(0, 3, 0, 0, 0, 0, 3))

    async def lookup(*args: Any, **more: Any) -> Match:
        client.held.add(1)
        return Match(1, 3, 0, 0, 0, 0, 3)

    client.lookup = lookup  # type: ignore[method-assign]
    with scout_of(client) as scout:
        found = answered(ask(scout))
        assert (found.resumable_tokens, found.whole_tokens) == (3, 0)
        assert found.leases()


def test_without_a_daemon_the_answer_is_there_at_once() -> None:
    client = FakeClient(known(32))
    client.up = False
    with scout_of(client) as scout:
        found = ask(scout)
        assert found.done
        assert (found.resumable_tokens, found.leases()) == (0, ())
        assert client.lookups == 0


def test_a_daemon_that_comes_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scouting, "RETRY_S", 0.01)
    client = FakeClient(known(32))
    client.up = False
    with scout_of(client) as scout:
        assert ask(scout).resumable_tokens == 0
        client.up = True
        eventually(lambda: scout.connected, "the scout finds the daemon")
        assert answered(ask(scout)).resumable_tokens == 32


def test_a_lost_session_takes_its_leases_along() -> None:
    client = FakeClient(known(32))
    with scout_of(client) as scout:
        found = answered(ask(scout))
        assert found.leases()
        client.lose()
        assert found.leases() == ()
        client.up = True
        eventually(lambda: scout.connected, "the scout connects again")
        assert found.leases() == (), "another session's leases have other numbers"
        found.release()
        settled(scout)


def test_a_session_that_changes_under_a_lookup_is_a_miss() -> None:
    client = FakeClient(known(32), lambda: 0.02)
    with scout_of(client) as scout:
        found = ask(scout)
        time.sleep(0.005)
        client.lose()
        client.up = True
        assert answered(found).resumable_tokens == 0


def test_a_lookup_that_breaks_is_a_miss() -> None:
    client = FakeClient(known(32))

    async def lookup(*args: Any, **more: Any) -> Match:
        raise ValueError("a bug")

    client.lookup = lookup  # type: ignore[method-assign]
    with scout_of(client) as scout:
        assert answered(ask(scout)).resumable_tokens == 0


def test_a_scout_that_can_not_begin_answers_at_once() -> None:
    def broken(_: WorkerShard) -> Any:
        raise OSError("no sockets left")

    scout = Scout(VllmOptions(), GROUP, "test", open_client=broken)
    scout.start([shard()])
    assert ask(scout).done
    scout.close()


# ---- leases ---------------------------------------------------------------------------------------------


def test_released_before_the_answer_it_gives_back_what_comes_later() -> None:
    client = FakeClient(known(32), lambda: 0.02)
    with scout_of(client) as scout:
        found = ask(scout)
        time.sleep(0.005)
        found.release()
        found.release()
        answered(found)
        settled(scout)
        assert (client.held, found.leases()) == (set(), ())


def test_an_ask_released_before_its_turn_is_never_sent() -> None:
    client = FakeClient(known(32), lambda: 0.01)
    with scout_of(client) as scout:
        first = [ask(scout) for _ in range(scouting.LOOKUPS_AT_ONCE)]
        late = ask(scout)
        late.release()
        assert late.wait(20)
        for each in first:
            answered(each).release()
        settled(scout)
        assert client.lookups == scouting.LOOKUPS_AT_ONCE
        assert client.held == set()


def test_many_releases_go_in_few_messages() -> None:
    client = FakeClient(known(32))
    with scout_of(client) as scout:
        asked = [answered(ask(scout)) for _ in range(50)]
        assert len(client.held) == 50
        for each in asked:
            each.release()
        settled(scout)
        assert client.held == set()
        assert client.released == 50
        assert client.releases < 50


def test_waiting_leases_are_renewed_and_handed_over_ones_are_not() -> None:
    client = FakeClient(known(32))
    client.limits = msgspec.structs.replace(LIMITS, lease_ttl_s=0.03)
    with scout_of(client) as scout:
        kept, loading = answered(ask(scout)), answered(ask(scout))
        loading.hand_over()
        client.renewed.clear()
        eventually(lambda: len(client.renewed) > 2, "leases are renewed")
        assert all(leases == (1,) for leases in client.renewed[1:])
        assert kept.leases()
        assert loading.leases(), "the workers load on it"
        loading.release()
        settled(scout)
        assert client.held == {1}


def test_a_lease_that_the_daemon_ended_is_no_lease() -> None:
    client = FakeClient(known(32))
    client.limits = msgspec.structs.replace(LIMITS, lease_ttl_s=0.03)
    with scout_of(client) as scout:
        gone, kept = answered(ask(scout)), answered(ask(scout))
        client.held.discard(1)
        eventually(lambda: not gone.leases(), "the renewal finds out")
        assert kept.leases()


@pytest.mark.parametrize("chunk", range(6))
def test_whatever_happens_in_whatever_order_no_lease_is_left(chunk: int) -> None:
    """Asks released before, during and after their answers, handed over, sessions lost, the scout closed early."""
    for seed in range(chunk * 25, chunk * 25 + 25):
        rng = Random(seed)
        clients = [
            FakeClient(
                rng.choice([known(32), known(32, l3=16), known(16, partial=2), known(0), lambda: EMPTY]),
                lambda rng=rng: rng.choice([0, 0, 0.001, 0.003]),
            )
            for _ in range(rng.choice([1, 1, 2]))
        ]
        with scout_of(*clients) as scout:
            asked: list[Ask] = []
            for _ in range(rng.randint(5, 30)):
                roll = rng.random()
                if roll < 0.45 or not asked:
                    asked.append(ask(scout))
                elif roll < 0.75:
                    rng.choice(asked).release()
                elif roll < 0.85:
                    rng.choice(asked).hand_over()
                elif roll < 0.9:
                    time.sleep(0.001)
                elif roll < 0.95:
                    rng.choice(asked).wait(0.002)
                elif roll < 0.97:
                    client = rng.choice(clients)
                    client.lose()
                    client.up = True
            if rng.random() < 0.7:
                held = {lease for each in asked if not each.released for lease in each._held if lease}
                for each in asked:
                    assert each.wait(20), "an Ask that is never done"
                    each.release()
                settled(scout)
                assert all(client.held == set() for client in clients), (seed, held)
                assert not scout._holding
        assert all(client.closed for client in clients)
        assert all(each.wait(5) for each in asked), "an Ask outlives the scout"
        assert all(not each.leases() for each in asked)


# ---- prefetch -------------------------------------------------------------------------------------------


def test_what_is_on_disk_is_prefetched_at_once_and_watched() -> None:
    on_disk = [32]
    client = FakeClient(lambda: Match(0, 48, 48, 48 - on_disk[0], on_disk[0]))
    with scout_of(client) as scout:
        found = answered(ask(scout))
        assert found.prefetching
        assert (found.l2_tokens, found.l3_tokens, found.memory_tokens) == (16, 32, 16)
        eventually(lambda: bool(client.prefetched), "the prefetch is sent")
        assert client.prefetched == [TOKENS[: 4 * 48]]
        on_disk[0] = 16
        eventually(lambda: found.memory_tokens == 32, "what came is seen")
        assert found.prefetching
        on_disk[0] = 0
        eventually(lambda: not found.prefetching, "the prefetch ends")
        assert found.prefetched
        assert (found.memory_tokens, found.l2_tokens, found.l3_tokens) == (48, 16, 32)
        assert client.held == {1}, "probes take no leases"


def test_pages_that_could_not_be_read_are_resumable_no_more() -> None:
    answer = [Match(0, 48, 48, 16, 32)]
    client = FakeClient(lambda: answer[0])
    with scout_of(client) as scout:
        found = answered(ask(scout))
        answer[0] = Match(0, 48, 32, 32, 0)
        eventually(lambda: not found.prefetching, "the prefetch ends")
        assert (found.resumable_tokens, found.memory_tokens) == (32, 32)


def test_a_prefetch_that_moves_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scouting, "PREFETCH_STALL_S", 0.02)
    client = FakeClient(known(48, l3=32))

    async def prefetch(tokens: bytes, scope: Scope) -> int:
        return 0  # no room

    client.prefetch = prefetch  # type: ignore[method-assign]
    with scout_of(client) as scout:
        found = answered(ask(scout))
        eventually(lambda: not found.prefetching, "nothing more is waited for")
        assert not found.prefetched
        assert (found.resumable_tokens, found.memory_tokens) == (48, 16)


def test_a_prefetch_is_not_watched_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scouting, "PREFETCH_CAP_S", 0.05)
    with scout_of(FakeClient(known(48, l3=32))) as scout:
        found = answered(ask(scout))
        eventually(lambda: not found.prefetching, "the cap is reached")


@pytest.mark.parametrize("end", ["release", "hand_over", "lose"])
def test_nobody_watches_a_prefetch_that_nobody_waits_for(end: str) -> None:
    client = FakeClient(known(48, l3=32))
    with scout_of(client) as scout:
        found = answered(ask(scout))
        eventually(lambda: bool(client.prefetched), "the prefetch is sent")
        if end == "lose":
            client.lose()
        else:
            getattr(found, end)()
        eventually(lambda: not found.prefetching, "the watch ends")


# ---- start and end --------------------------------------------------------------------------------------


def test_closing_ends_the_thread_and_everything_after_is_a_miss() -> None:
    client = FakeClient(known(32), lambda: 30.0)
    with scout_of(client) as scout:
        pending = ask(scout)
        scout.close()
        scout.close()
        assert pending.wait(5)
        assert pending.resumable_tokens == 0
        assert client.closed
        assert ask(scout).done
        assert not [
            thread for thread in threading.enumerate() if thread.name == "hicache-scout" and thread.is_alive()
        ]


def test_closing_before_the_start_is_no_error() -> None:
    scout = Scout(VllmOptions(), GROUP, "test")
    assert ask(scout).done
    scout.close()


def test_the_start_waits_for_the_first_attempt_and_no_longer() -> None:
    client = FakeClient(known(32))

    async def connect() -> bool:
        await asyncio.sleep(30)
        return False

    client.connect = connect  # type: ignore[method-assign]
    begun = time.monotonic()
    with scout_of(client, connect_timeout_s=0.05) as scout:
        assert time.monotonic() - begun < 10
        assert ask(scout).done


def test_lookups_are_timed() -> None:
    seen: list[str] = []
    client = FakeClient(known(32, l3=16))
    scout = Scout(
        VllmOptions(), GROUP, "test", open_client=lambda _: client, observe=lambda name, seconds: seen.append(name)
    )
    scout.start([shard()])
    found = answered(ask(scout))
    found.hand_over()
    eventually(lambda: "prefetch" in seen, "the prefetch ended")
    assert seen[0] == "lookup"
    scout.close()


# ---- with the real client -------------------------------------------------------------------------------


def test_the_real_client_says_hello_with_its_group_and_no_memory(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path, leasing) as daemon:
        scout = Scout(VllmOptions(runtime_dir=str(tmp_path), tenant="t"), GROUP, "vllm x")
        scout.start([shard()])
        try:
            found = answered(scout.ask("r", TOKENS, 64, Scope(salt="s")))
            assert found.resumable_tokens == 8
            assert found.leases()[0].lease > 40
            hellos = [each.message for each in daemon.requests if type(each.message).__name__ == "Hello"]
            assert (hellos[0].group, hellos[0].tenant) == (GROUP, "t")
            assert "scheduler" in hellos[0].engine
            lookup = next(each.message for each in daemon.requests if isinstance(each.message, Lookup))
            assert lookup.partial
            assert lookup.scope.salt == "s"
            found.release()
            eventually(
                lambda: any(type(each.message).__name__ == "Release" for each in daemon.requests),
                "the lease goes back",
            )
        finally:
            scout.close()


def test_a_daemon_that_does_not_answer_is_a_miss_in_time(tmp_path: Path) -> None:
    def deaf(request: Any) -> Any:
        return [] if isinstance(request.message, Lookup) else None

    with FakeDaemon(tmp_path, deaf):
        scout = Scout(VllmOptions(runtime_dir=str(tmp_path), lookup_timeout_s=0.05), GROUP, "vllm x")
        scout.start([shard()])
        try:
            begun = time.monotonic()
            found = scout.ask("r", TOKENS, 64, Scope())
            assert found.wait(10)
            assert found.resumable_tokens == 0
            assert time.monotonic() - begun < 5
        finally:
            scout.close()

"""Phases and signals of the daemon, over parts that do nothing but tell when they are idle."""

import asyncio
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.base.errors import LawBroken
from hicache.core.events import Drain, Tick
from hicache_daemon.lifecycle import EXIT_CRASH, Daemon, Life, Parts
from hicache_daemon.log import LevelGate, make_log
from hicache_daemon.phase import Phase
from hicache_daemon.stores import RecoveryEnded

SAFETY_S = 20.0


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s


class Part:
    """Accepts the calls of the life cycle and remembers them."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name = name
        self._calls = calls

    def __getattr__(self, verb: str) -> Callable[..., None]:
        return lambda *arguments: self._calls.append(f"{self._name}.{verb}")


class Bench:
    def __init__(self, law: str = "") -> None:
        self.calls: list[str] = []
        self.events: list[object] = []
        self.flushed: list[bool] = []
        self.busy = True
        self.law = law
        self.clock = Clock()
        self.life = Life(drain_s=10.0)
        make = lambda name: Part(name, self.calls)  # noqa: E731
        stores = SimpleNamespace(start=lambda: None, tend=lambda: None, idle=lambda: True, stop=self._stop)
        state = SimpleNamespace(idle=lambda: not self.busy, check=self._check)
        cache = SimpleNamespace(state=state, on_note=self.events.append, kv_events=make("kv_events"))
        parts: Any = Parts(
            cache=cache,  # type: ignore[arg-type]
            front=SimpleNamespace(counters={"messages": 0}),  # type: ignore[arg-type]
            server=make("server"),  # type: ignore[arg-type]
            lifeline=make("lifeline"),  # type: ignore[arg-type]
            lanes=make("lanes"),  # type: ignore[arg-type]
            stores=stores,  # type: ignore[arg-type]
            gauge=make("gauge"),  # type: ignore[arg-type]
            watchdog=make("watchdog"),  # type: ignore[arg-type]
            notifier=make("notifier"),  # type: ignore[arg-type]
            clock=self.clock,
            log=make_log(LevelGate("critical"), "json"),
        )
        self.daemon = Daemon(parts, self.life, lambda: self.calls.append("reload"))

    def _stop(self, flush: bool, timeout_s: float) -> bool:
        self.flushed.append(flush)
        return True

    def _check(self) -> None:
        if self.law:
            raise LawBroken(self.law)

    def run(self, script: Callable[["Bench"], Any]) -> int:
        async def body() -> int:
            task = asyncio.create_task(self.daemon.run())
            await asyncio.sleep(0)
            await asyncio.wait_for(script(self), SAFETY_S)
            return await asyncio.wait_for(task, SAFETY_S)

        return asyncio.run(body())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what is awaited happens in the code under test
        await asyncio.sleep(0.001)


def test_it_is_ready_only_after_recovery_and_drains_until_idle() -> None:
    async def script(bench: Bench) -> None:
        assert bench.life.phase is Phase.RECOVERING
        bench.daemon.recovered(RecoveryEnded(5))
        assert bench.life.phase is Phase.READY
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: bench.life.phase is Phase.DRAINING)
        assert any(isinstance(event, Drain) for event in bench.events)
        await asyncio.sleep(0.1)
        assert not bench.life.over.is_set()  # a ticket is open
        bench.busy = False

    bench = Bench()
    assert bench.run(script) == 0
    assert bench.flushed == [True]
    assert bench.calls.index("server.close") < bench.calls.index("lanes.close")
    assert bench.calls.index("lanes.close") < bench.calls.index("kv_events.close")  # what ends is still told
    assert bench.life.phase is Phase.STOPPED


def test_a_drain_that_never_gets_idle_ends_at_its_bound() -> None:
    async def script(bench: Bench) -> None:
        bench.daemon.recovered(RecoveryEnded(0))
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: bench.life.phase is Phase.DRAINING)
        bench.clock.now_s = 9.9
        await asyncio.sleep(0.1)
        assert not bench.life.over.is_set()
        bench.clock.now_s = 10.1

    bench = Bench()
    assert bench.run(script) == 0
    assert bench.flushed == [True]


@pytest.mark.parametrize("ready", [True, False])
def test_a_second_signal_stops_now_and_flushes_nothing(ready: bool) -> None:
    async def script(bench: Bench) -> None:
        if ready:
            bench.daemon.recovered(RecoveryEnded(0))
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: bench.life.phase is Phase.DRAINING)
        os.kill(os.getpid(), signal.SIGINT)

    bench = Bench()
    assert bench.run(script) == 0
    assert bench.flushed == [False]


def test_recovery_that_ends_during_a_drain_does_not_open_the_doors() -> None:
    async def script(bench: Bench) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: bench.life.phase is Phase.DRAINING)
        bench.daemon.recovered(RecoveryEnded(5))
        assert bench.life.phase is Phase.DRAINING
        bench.busy = False

    assert Bench().run(script) == 0


def test_sighup_reloads() -> None:
    async def script(bench: Bench) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: "reload" in bench.calls)
        bench.busy = False
        os.kill(os.getpid(), signal.SIGTERM)

    assert Bench().run(script) == 0


def test_a_broken_law_ends_the_daemon_with_70_and_without_a_flush() -> None:
    async def script(bench: Bench) -> None:
        bench.daemon.recovered(RecoveryEnded(0))
        bench.daemon.crash(LawBroken("free + owned != capacity"))

    bench = Bench()
    assert bench.run(script) == EXIT_CRASH == 70
    assert bench.flushed == [False]


def test_the_laws_are_checked_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_daemon.lifecycle.TICK_S", 0.001)

    async def script(bench: Bench) -> None:
        bench.daemon.recovered(RecoveryEnded(0))
        await until(bench.life.over.is_set)

    bench = Bench(law="rows leak")
    assert bench.run(script) == EXIT_CRASH
    assert sum(isinstance(event, Tick) for event in bench.events) >= 5

"""The loop around the state: a bug in one event costs that event, unless it left a law broken."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from hicache.base.errors import LawBroken
from hicache.core.commands import Command
from hicache.core.events import Event, Tick
from hicache_daemon.loop import CacheLoop


class Clock:
    def monotonic_s(self) -> float:
        return 1.0


@dataclass
class BuggyState:
    """Fails in the middle of every event; `sound` says whether the laws hold afterwards."""

    sound: bool
    checks: int = 0

    def handle(self, event: Event, now_s: float) -> list[Command]:
        raise ValueError("a bug")

    def check(self) -> None:
        self.checks += 1
        if not self.sound:
            raise LawBroken("law 2: planted")


@dataclass
class Log:
    told: list[str] = field(default_factory=list)

    def exception(self, event: str, **fields: Any) -> None:
        self.told.append(event)


def looped(sound: bool) -> tuple[CacheLoop, BuggyState, Log, list[LawBroken]]:
    state, log, crashes = BuggyState(sound), Log(), []
    nothing = lambda *_: None  # noqa: E731
    loop = CacheLoop(state, None, None, Clock(), nothing, nothing, crashes.append, log)  # type: ignore[arg-type]
    return loop, state, log, crashes


def test_a_bug_that_broke_no_law_is_logged_and_counted() -> None:
    loop, state, log, crashes = looped(sound=True)
    loop.on_note(Tick())
    assert (state.checks, log.told, crashes) == (1, ["event.failed"], [])
    assert loop.counters["internal_errors"] == 1


def test_a_bug_that_left_a_law_broken_ends_the_daemon() -> None:
    loop, _, log, crashes = looped(sound=False)
    loop.on_note(Tick())
    assert [str(crash) for crash in crashes] == ["law 2: planted"]
    assert log.told == []


def test_a_request_that_broke_a_law_raises_it_to_the_front() -> None:
    loop, *_ = looped(sound=False)
    with pytest.raises(LawBroken, match="planted"):
        loop.feed(Tick())

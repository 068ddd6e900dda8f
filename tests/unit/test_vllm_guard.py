"""What the guard lets through to vLLM: answers, and nothing that we raise."""

import logging

import pytest

from hicache_client.connectors.vllm.guard import Guard, RefusedError


def boom(error: BaseException) -> int:
    raise error


def test_an_answer_passes() -> None:
    assert Guard("side").run("hook", lambda: 5, lambda: 0) == 5


def test_an_exception_becomes_the_fallback_and_is_counted() -> None:
    guard = Guard("side")
    assert guard.run("hook", lambda: boom(ValueError("x")), lambda: 7) == 7
    assert guard.run("hook", lambda: boom(KeyError("x")), lambda: 8) == 8
    assert guard.run("other", lambda: boom(AssertionError()), lambda: 9) == 9
    assert guard.caught == {"hook": 2, "other": 1}


def test_each_kind_is_said_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard("scheduler side")
    with caplog.at_level(logging.INFO, "hicache.vllm"):
        for _ in range(3):
            guard.run("hook", lambda: boom(ValueError("first kind")), lambda: 0)
        guard.run("hook", lambda: boom(TypeError("second kind")), lambda: 0)
        guard.run("another", lambda: boom(ValueError("first kind")), lambda: 0)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert all("scheduler side" in text for text in said)
    assert all(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), RefusedError("on purpose")])
def test_what_is_meant_to_end_the_process_passes(error: BaseException) -> None:
    guard = Guard("side")
    with pytest.raises(type(error)):
        guard.run("hook", lambda: boom(error), lambda: 0)
    assert not guard.caught


def test_every_call_is_timed_also_one_that_fails() -> None:
    seen: list[tuple[str, float]] = []
    guard = Guard("side", lambda hook, seconds: seen.append((hook, seconds)))
    guard.run("good", lambda: 1, lambda: 0)
    guard.run("bad", lambda: boom(ValueError()), lambda: 0)
    assert [hook for hook, _ in seen] == ["good", "bad"]
    assert all(0 <= seconds < 5 for _, seconds in seen)

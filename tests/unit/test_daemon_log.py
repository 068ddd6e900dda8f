"""Logs: levels that move, JSON lines, and no local variables in tracebacks."""

import io
import json

from hicache_daemon.log import LevelGate, make_log


def fail() -> None:
    credential = "sesame" + "-open"
    raise RuntimeError(f"nothing about the {len(credential)} letters")


def test_the_level_can_be_moved_while_running() -> None:
    out, gate = io.StringIO(), LevelGate("warning")
    log = make_log(gate, "json", out)
    log.info("quiet")
    gate.level = "debug"
    log.debug("loud", pages=3)
    entry = json.loads(out.getvalue())
    assert (entry["event"], entry["level"], entry["pages"]) == ("loud", "debug", 3)
    assert entry["timestamp"].endswith("Z")


def test_a_traceback_shows_the_code_and_never_the_values() -> None:
    for kind in ("json", "console"):
        out = io.StringIO()
        log = make_log(LevelGate("info"), kind, out)
        try:
            fail()
        except RuntimeError:
            log.exception("it.failed")
        assert "RuntimeError" in out.getvalue()
        assert "sesame-open" not in out.getvalue()

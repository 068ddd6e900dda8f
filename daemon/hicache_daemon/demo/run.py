"""The demo from start to table: daemon and engines are started, killed and restarted, every token compared."""

import contextlib
import fcntl
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hicache_daemon.demo.model import DemoImpossible, find_gguf
from hicache_daemon.demo.processes import Child, Daemon, DemoFailed, EngineProcess, convert_model
from hicache_daemon.demo.prompts import MIN_SYSTEM_TOKENS, PRIMER, QUESTIONS
from hicache_daemon.demo.report import TITLES, Case, case_of, complaints, print_report, to_json, with_ratios

FOLDER = Path(".demo")  # below the working directory; the configuration's paths lie in it too
NEW_TOKENS = 24
KILL_AFTER_S = 1.0  # into a cold request, which takes several times as long

EXIT_OK, EXIT_FAILED, EXIT_IMPOSSIBLE = 0, 1, 2


class Demo:
    """One run. Engines are asked one question at a time."""

    def __init__(self, folder: Path, config: Path, runtime_dir: Path) -> None:
        self.folder, self.config, self.runtime_dir = folder, config, runtime_dir
        self.model = folder / "model"
        self.facts: dict[str, Any] = {"new_tokens": NEW_TOKENS, "questions": len(QUESTIONS)}
        self._children: list[Child] = []
        self._start = time.monotonic()

    def say(self, text: str) -> None:
        """One step, on stderr."""
        print(f"[{time.monotonic() - self._start:5.1f} s] {text}", file=sys.stderr, flush=True)

    def run(self) -> list[Case]:
        """All cases. Raises `DemoImpossible` or `DemoFailed`; whatever happens, no process is left behind."""
        gguf = find_gguf()
        with _alone(self.folder):
            return self._run(gguf)

    def _run(self, gguf: Path) -> list[Case]:
        self._clear()
        if not (self.model / "config.json").exists():
            self.say("reading SmolLM2-135M-Instruct from its package (once, half a minute)")
            convert_model(gguf, self.model, self.folder / "log" / "convert.log")
        try:
            return with_ratios(self._cases())
        finally:
            for child in self._children:
                child.end()

    def _clear(self) -> None:
        """Cold must be cold: forget what an earlier run left, but keep the converted model."""
        for name in ("run", "l3", "log"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def _daemon(self, log: str) -> Daemon:
        daemon = Daemon(self.config, self.runtime_dir, self.folder / "log" / log)
        self._children.append(daemon)
        daemon.wait_ready()
        return daemon

    def _engine(self, name: str) -> EngineProcess:
        engine = EngineProcess(name, self.model, self.runtime_dir, self.folder / "log" / f"{name}.log")
        self._children.append(engine)
        return engine

    def _ask(self, engine: EngineProcess, case: str, salts: Sequence[str] = ()) -> dict[str, list[dict[str, Any]]]:
        return self._ask_in_turns(engine, {case: ("hicache", salts)})

    def _ask_in_turns(
        self, engine: EngineProcess, turns: Mapping[str, tuple[str, Sequence[str]]]
    ) -> dict[str, list[dict[str, Any]]]:
        """Per case (mode, salts) the answers to all questions; each question goes through every case before the
        next comes."""
        answers: dict[str, list[dict[str, Any]]] = {case: [] for case in turns}
        for index, question in enumerate(QUESTIONS):
            for case, (mode, salts) in turns.items():
                answers[case].append(engine.ask(_request(question, mode, salts[index] if salts else "")))
            times = ", ".join(f"{case} {got[-1]['ttft_ms']:,.0f} ms" for case, got in answers.items())
            self.say(f"  question {index + 1}, to the first token: {times}")
        return answers

    def _cases(self) -> list[Case]:
        self.say(f"starting hicached with {self.config}")
        daemon = self._daemon("hicached-1.log")
        first = self._engine("engine-1")
        self.say("starting an engine: SmolLM2-135M-Instruct, float32, on the CPU")
        first.wait_ready()
        self.facts |= {"system_tokens": first.ready["system_tokens"]}
        if first.ready["system_tokens"] < MIN_SYSTEM_TOKENS:
            raise DemoFailed(f"the system prompt has {first.ready['system_tokens']} tokens, too few to show anything")
        if not first.ready["connected"]:
            raise first.failed("found no daemon")
        self.say(f"the questions share a system prompt of {first.ready['system_tokens']:,} tokens")

        # What is compared is asked in turns, so that a machine that is busy for a while is so for all of them.
        self.say("the system prompt is computed once by transformers and once through hicache")
        first.ask(_request(PRIMER, "own", ""))
        first.ask(_request(PRIMER, "hicache", ""))
        self.say(
            "(a) cold: each question in a namespace of its own; (f) cache switched off; transformers' own reuse, a"
        )
        self.say(
            "    DynamicCache of the system prompt; (b) warm from L2: the system prompt is known, the question new"
        )
        salts = [f"cold-{index}" for index in range(len(QUESTIONS))]
        # cold first: while it is `off`'s turn, the daemon brings to disk what cold stored
        turns = {"cold": ("hicache", salts), "off": ("off", ()), "own": ("own", ()), "l2": ("hicache", ())}
        answers = self._ask_in_turns(first, turns)
        for question, answer in zip(QUESTIONS, answers["off"], strict=True):
            self.say(f"  {question!r} → {answer['text']!r}")

        self.say("(c) a second engine process")
        second = self._engine("engine-2")
        second.wait_ready()
        answers |= self._ask(second, "second_engine")

        self.say("(d) kill -9 of both engines, one in the middle of a request; a new one comes")
        third = self._engine("engine-3")
        third.wait_ready()
        second.send(_request(PRIMER, "hicache", "cut short"))
        time.sleep(KILL_AFTER_S)
        second.kill()
        first.kill()
        answers |= self._ask(third, "engine_restart")

        self.say("(e) the daemon stops and comes back; L2 is empty, L3 is not")
        daemon.stop()
        self._daemon("hicached-2.log")
        answers |= self._ask(third, "daemon_restart", salts)

        self.say("done")
        return [case_of(name, answers[name], answers["off"]) for name in TITLES]


def _request(question: str, mode: str, salt: str) -> dict[str, Any]:
    return {"op": "ask", "question": question, "mode": mode, "salt": salt, "new_tokens": NEW_TOKENS}


def _config_file() -> Path:
    """configs/demo.yaml of the working directory, else of the source tree. Raises `DemoImpossible`."""
    for base in (Path(), Path(__file__).parents[3]):
        path = base / "configs" / "demo.yaml"
        if path.exists():
            return path
    raise DemoImpossible("configs/demo.yaml was not found: run the demo in a checkout of hicache")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: a second demo would wipe what the first is working with."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DemoImpossible(f"another demo is running in {folder}; wait for it or use another folder") from error
        yield


@contextlib.contextmanager
def _explained(as_json: bool) -> Iterator[None]:
    try:
        yield
    except (DemoImpossible, DemoFailed) as error:
        kind = "impossible" if isinstance(error, DemoImpossible) else "failed"
        if as_json:
            print(json.dumps({"schema_version": 1, "name": "demo", "error": {"code": kind, "message": str(error)}}))
        print(f"hicache demo: {error}", file=sys.stderr)
        raise SystemExit(EXIT_IMPOSSIBLE if kind == "impossible" else EXIT_FAILED) from error


def run(as_json: bool = False) -> int:
    """Run the demo in the working directory; files go to .demo/. Progress on stderr, the result on stdout.

    0: all outputs are identical and warm is fast · 1: not so, or something broke · 2: it can't run here.
    """
    from hicache_daemon.config.settings import load_settings

    with _explained(as_json):
        config = _config_file()
        settings = load_settings(config).settings
        demo = Demo(FOLDER, config, settings.server.runtime_dir)
        cases = demo.run()
    if as_json:
        print(json.dumps(to_json(cases, demo.facts), indent=2))
    else:
        print_report(cases)
    failures = complaints(cases)
    for failure in failures:
        print(f"hicache demo: {failure}", file=sys.stderr)
    return EXIT_FAILED if failures else EXIT_OK

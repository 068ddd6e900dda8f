"""The demo from start to table: daemon and engines are started, killed and restarted, every token compared."""

import contextlib
import fcntl
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hicache_daemon.demo.model import DemoImpossible, find_gguf
from hicache_daemon.demo.processes import Child, Daemon, DemoFailed, EngineProcess, convert_model
from hicache_daemon.demo.prompts import MIN_SYSTEM_TOKENS, PRIMER, QUESTIONS
from hicache_daemon.demo.report import Case, case_of, complaints, print_report, to_json, with_ratios

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

    def _ask(self, engine: EngineProcess, mode: str, salts: Sequence[str] = ()) -> list[dict[str, Any]]:
        answers = []
        for index, question in enumerate(QUESTIONS):
            salt = salts[index] if salts else ""
            answers.append(engine.ask(_request(question, mode, salt)))
            self.say(f"  question {index + 1}: {answers[-1]['ttft_ms']:7.0f} ms to the first token")
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

        self.say("(f) cache switched off")
        off = self._ask(first, "off")
        for question, answer in zip(QUESTIONS, off, strict=True):
            self.say(f"  {question!r} → {answer['text']!r}")
        self.say("transformers' own reuse: a DynamicCache of the system prompt, kept in the process")
        first.ask(_request(PRIMER, "own", ""))
        own = self._ask(first, "own")
        self.say("(a) cold: each question in a namespace of its own")
        salts = [f"cold-{index}" for index in range(len(QUESTIONS))]
        cold = self._ask(first, "hicache", salts)
        self.say("(b) warm from L2: the system prompt is known, the questions are new")
        first.ask(_request(PRIMER, "hicache", ""))
        warm = self._ask(first, "hicache")

        self.say("(c) a second engine process")
        second = self._engine("engine-2")
        second.wait_ready()
        second_engine = self._ask(second, "hicache")

        self.say("(d) kill -9 of both engines, one in the middle of a request; a new one comes")
        third = self._engine("engine-3")
        third.wait_ready()
        second.send(_request(PRIMER, "hicache", "cut short"))
        time.sleep(KILL_AFTER_S)
        second.kill()
        first.kill()
        engine_restart = self._ask(third, "hicache")

        self.say("(e) the daemon stops and comes back; L2 is empty, L3 is not")
        daemon.stop()
        self._daemon("hicached-2.log")
        daemon_restart = self._ask(third, "hicache", salts)

        by_case = {
            "cold": cold,
            "l2": warm,
            "second_engine": second_engine,
            "engine_restart": engine_restart,
            "daemon_restart": daemon_restart,
            "off": off,
            "own": own,
        }
        self.say("done")
        return [case_of(name, answers, off) for name, answers in by_case.items()]


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

"""`make bench-engines`: the time to the first token under vLLM alone, with hicache, and with its neighbours.

All engines of one block size are up at the same time and take turns, prompt by prompt, in another order each time:
one computes while the others wait for their standard input. So what is compared has met the same machine.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from bench_contenders import (  # noqa: E402
    Contender,
    ContenderError,
    PeerAbsentError,
    Setting,
    alone,
    hicache,
    lmcache,
    mooncake,
    peer,
)
from bench_table import put_table, table  # noqa: E402
from models import path_of  # noqa: E402

from hicache_daemon.bench.report import Case, report  # noqa: E402
from tests.daemon_harness import DaemonProcess  # noqa: E402

BUILD = Path(__file__).parents[2] / "build" / "bench"
HITS = 3  # of each prompt
PEER_PROMPTS = 3  # of each length, for the neighbours
LONG, LONG_PROMPTS, LONG_PEER_PROMPTS = 4096, 3, 2  # of the longest there are fewer
MOONCAKE_BLOCK = 128  # and it gets no long ones: it is far from the others, and time is short
DECODE_BLOCK, DECODE_TOKENS, DECODE_PROMPT, DECODE_ROUNDS = 32, 128, 64, 3
DECODE_SEQUENCES = (1, 4)
OURS = ("vllm", "hicache")
SESSIONS = 2  # of one engine: its scheduler and its worker
WAIT_S = 30.0
# for the estimate: seconds of a miss by tokens, of a start, of decoding
MISS_S = {512: 0.9, 1024: 1.8, 2048: 4.2, 4096: 10.0}
ENGINE_S, DECODE_S, DAEMON_S = 14.0, 17.0, 15.0


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    blocks: tuple[int, ...]
    lengths: tuple[int, ...]
    prompts: int
    lmcache: Path | None
    mooncake: Path | None
    decode: bool

    def count(self, length: int) -> int:
        """Prompts of a length."""
        return min(self.prompts, LONG_PROMPTS) if length >= LONG else self.prompts

    def peer_count(self, name: str, length: int) -> int:
        """Prompts of a length for a neighbour."""
        if length >= LONG:
            return 0 if name == "mooncake" else min(self.count(length), LONG_PEER_PROMPTS)
        return min(self.count(length), PEER_PROMPTS)

    def peers(self, block: int) -> list[str]:
        """Neighbours that are asked for."""
        found = ["lmcache"] if self.lmcache is not None else []
        return found + (["mooncake"] if self.mooncake is not None and block == MOONCAKE_BLOCK else [])

    def estimate_s(self) -> float:
        """About how long it takes on the machine of the figures on record."""
        once = {n: MISS_S.get(n, n / 400) for n in self.lengths}
        hits = 0.3 * HITS  # with the pauses between them
        total = 2 * DECODE_ROUNDS * DECODE_S if self.decode and DECODE_BLOCK in self.blocks else 0.0
        for block in self.blocks:
            total += 2 * ENGINE_S + DAEMON_S + sum(2 * self.count(n) * (s + hits) for n, s in once.items())
            for name in self.peers(block):
                total += ENGINE_S + sum(self.peer_count(name, n) * (s + hits) for n, s in once.items())
        return total


class Samples:
    """Everything measured, by what it is: ("miss", engine, tokens, block) and the like; and what engines said."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[Any, ...], list[float]] = defaultdict(list)
        self.cached: dict[tuple[Any, ...], int] = {}
        self.unequal = 0
        self.times: list[dict[str, Any]] = []
        self.version = ""

    def add(self, what: tuple[Any, ...], answer: dict[str, Any]) -> list[list[int]]:
        """Count one answer; its tokens. Of the hits the shortest is kept."""
        self.seconds[what].append(answer["seconds"])
        cached = min(answer["cached"])
        self.cached[what] = min(cached, self.cached.get(what, cached))
        tokens: list[list[int]] = answer["tokens"]
        return tokens


class Round:
    """All engines of one block size, and the daemon."""

    def __init__(self, plan: Plan, block: int, samples: Samples, daemon: DaemonProcess) -> None:
        self.plan, self.block, self.samples, self.daemon = plan, block, samples, daemon
        self.rng = random.Random(block)
        self.engines: list[Contender] = []
        self.prompts: list[tuple[list[int], list[list[int]]]] = []  # with what vLLM alone said to it
        self.turn = 0

    def words(self, count: int) -> list[int]:
        """A prompt that nobody has seen."""
        return [self.rng.randrange(1000, 40_000) for _ in range(count)]

    def in_turn(self) -> list[Contender]:
        """The engines, another one first each time."""
        self.turn += 1
        first = self.turn % len(self.engines)
        return self.engines[first:] + self.engines[:first]

    def engine(self, name: str) -> Contender:
        """The one of this name."""
        return next(each for each in self.engines if each.name == name)

    def await_ready(self) -> None:
        """They start at the same time. A neighbour that does not come up is left out."""
        for engine in list(self.engines):
            try:
                engine.await_ready()
            except ContenderError as error:
                if engine.name in OURS:
                    raise
                say(f"without {engine.name}: {str(error)[-1500:]}")
                self.engines.remove(engine)

    def warm_up(self) -> None:
        """One miss and one hit of each, which do not count: kernels, buffers, connections, the KV cache's memory."""
        prompt = self.words(512)
        for engine in self.engines:
            engine.ask("touch")
            for _ in range(2):
                engine.generate(prompt)
                engine.forget()

    def measure_prompts(self) -> None:
        """Misses, and hits of vLLM's own cache or of what stands behind it."""
        for number in range(self.plan.prompts):
            for length in self.plan.lengths:
                if number < self.plan.count(length):
                    self.measure_prompt(number, length)

    def measure_prompt(self, number: int, length: int) -> None:
        """One prompt on every engine."""
        prompt, said = self.words(length), {}
        for engine in self.in_turn():
            if engine.name not in OURS and number >= self.plan.peer_count(engine.name, length):
                continue
            key = (engine.name, length, self.block)
            said[engine.name] = [self.samples.add(("miss", *key), engine.generate(prompt))]
            for _ in range(HITS):
                if engine.name != "vllm":
                    engine.forget()
                    self.await_disk(engine)
                said[engine.name].append(self.samples.add(("hit", *key), engine.generate(prompt)))
            engine.forget()
        expected = said["vllm"][0]
        self.samples.unequal += sum(each != expected for answers in said.values() for each in answers)
        self.prompts.append((prompt, expected))
        say(f"block {self.block}, {length} tokens, ms: {self.last(length, list(said))}")
        if self.samples.cached[("hit", "hicache", length, self.block)] != length - 1:
            raise ContenderError(f"hicache did not hit: {self.samples.cached}")

    def last(self, length: int, names: list[str]) -> str:
        """The newest miss and hits of these engines."""
        parts = []
        for name in sorted(names):
            miss, hits = (self.samples.seconds[(what, name, length, self.block)] for what in ("miss", "hit"))
            shown = " ".join(f"{each * 1e3:.0f}" for each in hits[-HITS:])
            parts.append(f"{name} {miss[-1] * 1e3:.0f} → {shown}")
        return "; ".join(parts)

    def await_disk(self, engine: Contender) -> None:
        """What was stored is on disk, so that its writing does not run beside what is measured next."""
        if engine.name == "hicache":
            await_true(lambda: not self.daemon.describe("l3")["writing_records"], "the disk tier to be idle")

    def measure_disk(self) -> None:
        """Restart the daemon, so that only the disk has what was stored; each prompt is read from there once."""
        self.daemon.stop()
        self.daemon.restart()
        await_true(lambda: len(self.daemon.describe("sessions")["sessions"]) == SESSIONS, "the engine to come back")
        engine = self.engine("hicache")
        for prompt, expected in self.prompts:
            engine.forget()
            drop_from_page_cache(self.daemon.config.parent / "l3")
            answer = engine.generate(prompt)
            key = ("l3_hit", "hicache", len(prompt), self.block)
            self.samples.unequal += self.samples.add(key, answer) != expected
            if answer["cached"][0] != len(prompt) - 1:
                raise ContenderError(f"of {len(prompt)} tokens on disk only {answer['cached'][0]} were used")
        say(f"block {self.block}: {len(self.prompts)} prompts from disk")

    def measure_decode(self) -> None:
        """Tokens per second of vLLM alone and with hicache, which stores each block that fills."""
        for number in range(DECODE_ROUNDS):
            for sequences in DECODE_SEQUENCES:
                prompts, said = [self.words(DECODE_PROMPT) for _ in range(sequences)], []
                for engine in [each for each in self.in_turn() if each.name in OURS]:
                    key = ("decode", engine.name, sequences, self.block)
                    said.append(self.samples.add(key, engine.generate(*prompts, max_tokens=DECODE_TOKENS)))
                    engine.forget()
                self.samples.unequal += said[0] != said[1]
            say(f"block {self.block}: decoding {number + 1} of {DECODE_ROUNDS}")


def measure(plan: Plan) -> Samples:
    """Everything. Raises `ContenderError` if one of our engines does not do what it must."""
    model, samples = path_of("smollm2"), Samples()
    for block in plan.blocks:
        root = Path(tempfile.mkdtemp(prefix="vllm-", dir=BUILD))  # a disk, unlike /tmp on many machines
        try:
            measure_block(plan, block, model, samples, root)
        finally:
            shutil.rmtree(root, ignore_errors=True)
    return samples


def measure_block(plan: Plan, block: int, model: Path, samples: Samples, root: Path) -> None:
    """One block size."""
    overrides = ["l2.size=2GiB", "l3.size=6GiB", "server.log_level=warning"]
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess(root, overrides, l3=True))
        one = Round(plan, block, samples, daemon)
        for setting in (alone(), hicache(daemon.runtime_dir)):
            one.engines.append(stack.enter_context(Contender(setting, model, block)))
        for name in plan.peers(block):
            make = make_peer(plan, name, root)
            try:
                one.engines.append(stack.enter_context(peer(make, model, block)))
            except PeerAbsentError as error:
                say(f"without {name}, which did not come up: {str(error)[-1500:]}")
        one.await_ready()
        samples.version = one.engines[0].version
        say(f"block {block}: {', '.join(each.name for each in one.engines)} are up")
        one.warm_up()
        one.measure_prompts()
        for each in one.engines[2:]:  # their memory and threads are not needed any more
            each.ask("reset", wait_s=0.0)
        if plan.decode and block == DECODE_BLOCK:
            one.measure_decode()
        one.measure_disk()
        samples.times.append(one.engine("hicache").ask("times"))


def make_peer(plan: Plan, name: str, root: Path) -> contextlib.AbstractContextManager[Setting]:
    """A neighbour's server and how to start an engine with it."""
    if name == "lmcache":
        assert plan.lmcache is not None
        return lmcache(plan.lmcache)
    assert plan.mooncake is not None
    return mooncake(plan.mooncake, root)


def cases_of(samples: Samples) -> list[Case]:
    """Medians. `limit` is vLLM's own figure, or the neighbour's that the name says."""
    cases: list[Case] = []

    def middle(what: str, name: str, length: int, block: int) -> float | None:
        found = samples.seconds.get((what, name, length, block))
        return statistics.median(found) * 1e3 if found else None

    def put(case: str, value: float | None, limit: float | None = None, needs_limit: bool = False) -> None:
        if value is not None and (limit is not None or not needs_limit):
            cases.append(Case(case, value, "ms", limit, value / limit if limit else None))

    for _, name, length, block in [key for key in samples.seconds if key[:2] == ("miss", "vllm")]:
        where = f"{length}_block{block}"
        own, miss = middle("hit", name, length, block), middle("miss", name, length, block)
        l2, l3 = middle("hit", "hicache", length, block), middle("l3_hit", "hicache", length, block)
        put(f"vllm_miss_{where}", miss)
        put(f"vllm_own_hit_{where}", own)
        put(f"hicache_miss_{where}", middle("miss", "hicache", length, block), miss)
        put(f"hicache_l2_hit_{where}", l2, own)
        put(f"hicache_l3_hit_{where}", l3, l2)
        for other in ("lmcache", "mooncake"):
            hit = middle("hit", other, length, block)
            put(f"hicache_l2_hit_{where}_vs_{other}", l2, hit, needs_limit=True)
            put(f"{other}_miss_{where}", middle("miss", other, length, block), miss)
            put(f"{other}_hit_{where}", hit, own)
    return cases + decode_cases(samples) + hook_cases(samples) + [Case("outputs_unequal", samples.unequal, "answers")]


def decode_cases(samples: Samples) -> list[Case]:
    """Tokens per second beside vLLM alone."""
    cases = []
    for _, _, sequences, block in [key for key in samples.seconds if key[:2] == ("decode", "hicache")]:
        ours, theirs = (
            sequences * DECODE_TOKENS / statistics.median(samples.seconds[("decode", name, sequences, block)])
            for name in ("hicache", "vllm")
        )
        cases.append(Case(f"hicache_decode_{sequences}_block{block}", ours, "tokens/s", theirs, ours / theirs))
    return cases


def hook_cases(samples: Samples) -> list[Case]:
    """Of the scheduler side; the larger of the block sizes' figures."""
    cases = []
    for name, said in (("hook", "scheduler_hook"), ("lookup", "lookup")):
        found = [times["quantiles"][name] for times in samples.times if name in times["quantiles"]]
        for at, percent in enumerate((50, 99)):
            if found:
                cases.append(Case(f"{said}_p{percent}", max(each[at] for each in found) * 1e3, "ms"))
    return cases


def drop_from_page_cache(folder: Path) -> None:
    """Have the files below read from the disk the next time."""
    os.sync()
    for path in (each for each in folder.rglob("*") if each.is_file()):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def await_true(condition: Any, what: str) -> None:
    """Wait for it. Raises `ContenderError`."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise ContenderError(f"waited {WAIT_S:.0f} s for {what}")
        time.sleep(0.02)


def say(text: str) -> None:
    """Progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    folder = {"type": Path, "metavar": "FOLDER"}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=BUILD / "vllm.json", help="the report")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the tables of such a report")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="with --table: put them into this page")
    parser.add_argument("--lengths", default="512,1024,2048,4096", help="tokens of the prompts")
    parser.add_argument("--blocks", default="32,128", help="vLLM's block sizes")
    parser.add_argument("--prompts", type=int, default=5, help="of each length")
    parser.add_argument("--no-decode", action="store_true", help="leave the decoding out")
    for name, what in (("lmcache", "LMCache"), ("mooncake", "Mooncake")):
        variable = f"HICACHE_BENCH_{name.upper()}"
        default = os.environ.get(variable)
        text = f"bin folder of an environment with vLLM and {what} (default: {variable})"
        parser.add_argument(f"--{name}", default=Path(default) if default else None, help=text, **folder)  # type: ignore[arg-type]
    return parser.parse_args()


def main() -> int:
    """0: measured, and all answers were equal."""
    told = arguments()
    if told.table is not None:
        text = table(json.loads(told.table.read_text()))
        if told.into is None:
            print(text)
        else:
            put_table(told.into, text)
        return 0
    blocks, lengths = ([int(each) for each in text.split(",")] for text in (told.blocks, told.lengths))
    plan = Plan(tuple(blocks), tuple(lengths), told.prompts, told.lmcache, told.mooncake, not told.no_decode)
    for name, folder in (("lmcache", plan.lmcache), ("mooncake", plan.mooncake)):
        if folder is None:
            say(f"without {name}: --{name} names the bin folder of its environment")
    say(f"about {plan.estimate_s() / 60:.0f} minutes, once the model is there; load average {os.getloadavg()[0]:.1f}")
    BUILD.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    samples = measure(plan)
    data = report("vllm", cases_of(samples))
    data["machine"]["vllm"] = samples.version
    told.out.write_text(json.dumps(data, indent=2) + "\n")
    print(table(data))
    say(f"{(time.monotonic() - began) / 60:.1f} minutes; {samples.unequal} answers differ from vLLM's alone")
    return 1 if samples.unequal else 0


if __name__ == "__main__":
    sys.exit(main())

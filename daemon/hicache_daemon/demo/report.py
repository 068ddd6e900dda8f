"""The demo's figures: one case per way a prompt was served, its JSON and its table."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hicache_daemon.bench.report import SCHEMA_VERSION, machine

WARM_LIMIT = 1 / 5  # of cold: slower than that fails the demo
OWN_AIM = 1.3

# Short enough that the table fits 80 columns.
TITLES = {
    "cold": "(a) cold",
    "l2": "(b) warm, L2",
    "second_engine": "(c) 2nd engine",
    "engine_restart": "(d) after kill",
    "daemon_restart": "(e) restart, L3",
    "off": "(f) cache off",
    "own": "in-process *",
}


@dataclass(frozen=True)
class Case:
    """Median over the questions: TTFT, and the token counts of the question that had it."""

    case: str
    prompt_tokens: int
    tokens_l1: int
    tokens_l2: int
    tokens_l3: int
    recomputed: int
    ttft_ms: float
    identical: bool
    samples_ms: list[float] = field(default_factory=list)
    ratio_to_cold: float | None = None
    ratio_to_own: float | None = None


def case_of(name: str, answers: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> Case:
    """Sum up one case; `expected` are the answers to the same questions with the cache off."""
    ordered = sorted(answers, key=lambda a: float(a["ttft_ms"]))
    middle = ordered[len(ordered) // 2]
    counts = {k: int(middle[k]) for k in ("prompt_tokens", "tokens_l1", "tokens_l2", "tokens_l3", "recomputed")}
    return Case(
        case=name,
        **counts,
        ttft_ms=round(statistics.median(float(a["ttft_ms"]) for a in answers), 2),
        identical=[a["tokens"] for a in answers] == [e["tokens"] for e in expected],
        samples_ms=[round(float(a["ttft_ms"]), 2) for a in answers],
    )


def with_ratios(cases: Sequence[Case]) -> list[Case]:
    """The cases with their TTFT as a share of cold's and of transformers' own reuse.

    The median of each question's own ratio: a question is asked in all these ways in turn, so that what slows
    the machine for a while slows both sides of a ratio.
    """
    samples = {c.case: c.samples_ms for c in cases}

    def ratio(case: Case, to: str) -> float | None:
        if to not in samples:
            return None
        return round(statistics.median(a / b for a, b in zip(case.samples_ms, samples[to], strict=True)), 4)

    return [Case(**(asdict(c) | {"ratio_to_cold": ratio(c, "cold"), "ratio_to_own": ratio(c, "own")})) for c in cases]


def complaints(cases: Sequence[Case]) -> list[str]:
    """What makes the demo fail; empty when all is well."""
    by_name = {c.case: c for c in cases}
    found = [f"{TITLES[c.case]}: the output differs from that without a cache" for c in cases if not c.identical]
    share = by_name["l2"].ratio_to_cold
    if share is None or share > WARM_LIMIT:
        found.append(f"warm from L2 took {share} of cold's time to the first token, more than 1/5")
    for name, tier in (("l2", "l2"), ("second_engine", "l2"), ("engine_restart", "l2"), ("daemon_restart", "l3")):
        if getattr(by_name[name], f"tokens_{tier}") == 0:
            found.append(f"{TITLES[name]}: no token came from {tier.upper()}")
    return found


def to_json(cases: Sequence[Case], facts: dict[str, Any]) -> dict[str, Any]:
    """The report; `schema_version` first."""
    return {
        "schema_version": SCHEMA_VERSION,
        "name": "demo",
        "machine": machine(),
        **facts,
        "cases": [asdict(c) for c in cases],
        "failures": complaints(cases),
    }


def print_report(cases: Sequence[Case]) -> None:
    """The table on stdout, and what it says in words."""
    from hicache_daemon.cli.output import print_table

    headers = ("case", "prompt", "L1", "L2", "L3", "computed", "TTFT ms", "of cold", "same")
    rows = [
        (
            TITLES[c.case],
            *(f"{n:,}" for n in (c.prompt_tokens, c.tokens_l1, c.tokens_l2, c.tokens_l3, c.recomputed)),
            f"{c.ttft_ms:,.0f}",
            "–" if c.ratio_to_cold is None else f"{c.ratio_to_cold:.0%}",
            "yes" if c.identical else "NO",
        )
        for c in cases
    ]
    title = "Tokens by where they came from; TTFT: median; same: output equals (f)"
    print_table(title, headers, rows, right=tuple(range(1, 8)), lines=False)
    print("* transformers' own reuse: a DynamicCache of the system prompt, kept in the process")
    l2 = next(c for c in cases if c.case == "l2")
    if l2.ratio_to_cold and l2.ratio_to_own:
        print(
            f"Warm from L2: {1 / l2.ratio_to_cold:.1f}× faster than cold, {l2.ratio_to_own:.2f}× the time of "
            f"transformers' own in-memory prefix reuse (aim: at most {OWN_AIM}×)."
        )

"""The report of bench_vllm.py as tables for a page."""

import re
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
COLUMNS = {
    "vllm_miss": "vLLM alone, miss",
    "vllm_own_hit": "its own prefix hit",
    "hicache_miss": "hicache, miss",
    "hicache_l2_hit": "hit in L2",
    "hicache_l3_hit": "hit in L3",
    "lmcache_hit": "LMCache, hit",
    "mooncake_hit": "Mooncake, hit",
}
RATIOS = {
    "hicache_miss_{}": "miss, of vLLM's",
    "hicache_l2_hit_{}": "L2 hit, of vLLM's own hit",
    "hicache_l2_hit_{}_vs_lmcache": "L2 hit, of LMCache's",
    "hicache_l2_hit_{}_vs_mooncake": "L2 hit, of Mooncake's",
    "hicache_l3_hit_{}": "L3 hit, of L2 hit",
}
REST = ("hicache_decode_", "scheduler_hook_", "lookup_", "outputs_unequal")


def table(data: dict[str, Any]) -> str:
    """Markdown: the machine, times by prompt length and block size, what they are to each other, and the rest."""
    cases = {case["case"]: case for case in data["cases"]}
    places = [(int(n), int(b)) for n, b in re.findall(r"vllm_miss_(\d+)_block(\d+)\b", " ".join(cases))]
    machine = data["machine"]
    memory = machine["memory_bytes"] / (1 << 30)
    lines = [
        f"{machine['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, {memory:.0f} GiB, "
        f"Linux, Python {machine['python']}, vLLM {machine.get('vllm', '?')}.",
        "",
        "Time to the first token, ms:",
        "",
    ]
    shown = [name for name in COLUMNS if any(case.startswith(name) for case in cases)]
    lines += _head(["block", "tokens", *(COLUMNS[name] for name in shown)])
    for length, block in sorted(places, key=lambda place: place[::-1]):
        values = [cases.get(f"{name}_{length}_block{block}", {}).get("value") for name in shown]
        lines.append(_row([str(block), f"{length:,}", *map(_number, values)]))
    lines += ["", "Ratios of the same run:", ""]
    shown = [name for name in RATIOS if any(name.format(f"{n}_block{b}") in cases for n, b in places)]
    lines += _head(["block", "tokens", *(RATIOS[name] for name in shown)])
    for length, block in sorted(places, key=lambda place: place[::-1]):
        ratios = [cases.get(name.format(f"{length}_block{block}"), {}).get("ratio") for name in shown]
        lines.append(_row([str(block), f"{length:,}", *("" if each is None else f"{each:.3f}" for each in ratios)]))
    lines += ["", *_head(["case", "value", "unit", "vLLM alone", "ratio"])]
    for name, case in cases.items():
        if name.startswith(REST):
            ratio = "" if case["ratio"] is None else f"{case['ratio']:.3f}"
            lines.append(_row([f"`{name}`", _number(case["value"]), case["unit"], _number(case["limit"]), ratio]))
    return "\n".join(lines)


def put_table(page: Path, text: str) -> None:
    """Replace what stands between the marks. Raises `ValueError` if the page has none."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for figures: {BEGIN} … {END}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def _head(names: list[str]) -> list[str]:
    return [_row(names), "|" + "---|" * len(names)]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

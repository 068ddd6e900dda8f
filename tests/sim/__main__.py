"""`python -m tests.sim --seeds 10000`: long runs, on several processes, until one fails."""

import argparse
import sys
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.sim.run import Outcome, simulate


def _one(seed: int, steps: int) -> tuple[int, Outcome | None, str]:
    try:
        return seed, simulate(seed, steps), ""
    except Exception:  # noqa: BLE001  # told by the parent process
        return seed, None, traceback.format_exc()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many runs")
    parser.add_argument("--seed", type=int, help="only this run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=300, help="steps per run")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    seeds = [args.seed] if args.seed is not None else range(args.first, args.first + args.seeds)
    totals: Counter[str] = Counter()
    with ProcessPoolExecutor(args.jobs) as pool:
        for seed, outcome, trace in pool.map(partial(_one, steps=args.steps), seeds, chunksize=4):
            if outcome is None:
                print(f"seed {seed} failed\n{trace}", file=sys.stderr)
                pool.shutdown(cancel_futures=True)
                return 1
            totals.update(outcome.counters)
            totals["runs"] += 1
            totals["events"] += outcome.events
    for name, count in sorted(totals.items()):
        print(f"{name:20} {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures whole sessions of `flatout tune` on simulated processes that are cold after a start and after a stop.

The search is the real one, from the first process to the confirmed plan (`simulated_sessions.py`); the default budget
decides its time. Of the programs, three in ten have a loader with one worker, two augmented views and levers that fill
their stores at first; of those with data, three in ten have a slow first epoch.

The share is the speed of the plan that is kept, relative to the best plan. Coverage is the share of 95 % intervals of
single levers, relative to the plain program, that include the true value. Goals: a share of at least 0.95 in the
median and 0.85 at the 5th percentile; coverage of 93 to 97 %; no plan below 0.9 of what the search expected without a
word.

    python bench/search_sessions.py --sessions 500 --as before     the row of another revision, from a checkout of it
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from provenance import RESULTS, markdown_table, read_result, stamp, write_result
from simulated_programs import measured_effects
from simulated_sessions import blind, draw_scenario, recorded_scenario, run_session

from flatout.tune.one_thread import np

KEPT = ("number", "kind", "slow epoch", "best", "chosen", "share", "claimed", "budget_s", "spent_s", "alone")
KEPT += ("expected", "confirmed", "said", "compiled", "compile pays", "plan")
GOAL_OF_EXPECTED = 0.9
GROUPS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "all": lambda run: True,
    "no data": lambda run: run["kind"] == "no data",
    "data in the process": lambda run: run["kind"] == "data in the process",
    "one worker": lambda run: run["kind"] == "one worker",
    "slow first epoch": lambda run: run["slow epoch"],
    "compile pays": lambda run: run["compile pays"],
}
RECORDED = {"blind": "without cold blocks in mind", "seeing": "as it is"}


def session(number: int, measured: dict[str, list[float]]) -> dict[str, Any]:
    run = run_session(draw_scenario(number, measured), number, {})
    return {key: run[key] for key in KEPT if key in run} | {"number": number}


def below(runs: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """How many plans gave less of what was expected, and of how many the session said nothing."""
    found = [
        run
        for run in runs
        if any(
            got[1] < GOAL_OF_EXPECTED * want[1]
            for got, want in zip(run["confirmed"], run["expected"], strict=False)
        )
    ]
    return len(found), sum(not run["said"] for run in found)


def covered(runs: Sequence[dict[str, Any]]) -> tuple[float, int]:
    inside = [low <= truth <= high for run in runs for _, truth, low, _, high in run["alone"]]
    return float(np.mean(inside)), len(inside)


def rows(title: str, runs: Sequence[dict[str, Any]], groups: Sequence[str]) -> list[tuple[str, ...]]:
    found = []
    for name in groups:
        some = [run for run in runs if GROUPS[name](run)]
        if some:
            shares = [run["share"] for run in some]
            low, middle = np.quantile(shares, (0.05, 0.5))
            share, n = covered(some)
            less, silent = below(some)
            found.append(
                (
                    title,
                    name,
                    str(len(some)),
                    f"{middle:.3f}",
                    f"{low:.3f}",
                    f"{np.mean(shares):.3f}",
                    f"{share:.1%} of {n}",
                    f"{less}, {silent}",
                    f"{np.mean([run['compiled'] for run in some]):.0%}",
                    f"{np.mean([run['spent_s'] for run in some]):.0f} s",
                )
            )
    return found


HEADER = (
    "search",
    "programs",
    "n",
    "share, median",
    "5th percentile",
    "mean",
    "coverage of single levers",
    "plans below 0.9 of the expectation, of them unsaid",
    "compiled",
    "took",
)


def page(sessions: dict[str, list[dict[str, Any]]], recorded: dict[str, list[dict[str, Any]]]) -> str:
    lines = [line for title, runs in sessions.items() for line in rows(title, runs, list(GROUPS))]
    known = [
        (RECORDED[name], str(len(runs)), str(sum(not run["plan"] for run in runs)), *line[3:8])
        for name, runs in recorded.items()
        for line in rows("", runs, ["all"])
    ]
    best = [math.exp(run["best"]) for runs in sessions.values() for run in runs]
    parts = [
        f"# Whole searches on simulated processes\n\n{(__doc__ or '').split(chr(10), 2)[2].rsplit(chr(10), 3)[0].strip()}\n",
        markdown_table(HEADER, lines),
        f"\nThe best plan is {np.exp(np.mean(np.log(best))):.2f}x (geometric mean; {np.quantile(best, 0.1):.2f} to {np.quantile(best, 0.9):.2f} in 80 %).\n"
        if best
        else "",
        "## The recorded session\n",
        f"{inspect.getdoc(recorded_scenario)}\n",
        markdown_table(("search", "n", "ends with the plain program", "share, median", *HEADER[4:8]), known),
    ]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first session")
    parser.add_argument("--recorded", type=int, default=100, help="simulations of the recorded session")
    parser.add_argument("--as", dest="title", default="this revision", help="title of the row")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    made, measured = stamp(), measured_effects(sorted(RESULTS.glob("open_set_cpu_*.json")))
    known = read_result("search_sessions", made, args.out)
    sessions: dict[str, list[dict[str, Any]]] = dict(known.get("sessions", {}))
    recorded: dict[str, list[dict[str, Any]]] = dict(known.get("recorded", {}))
    for name, patches in (("blind", blind()), ("seeing", {})) if args.recorded else ():
        runs = [run_session(recorded_scenario(), n, patches) for n in range(args.recorded)]
        recorded[name] = [{key: run[key] for key in KEPT if key in run} for run in runs]
        print(f"  the recorded session, {RECORDED[name]}", file=sys.stderr, flush=True)
    runs = sessions.setdefault(args.title, [])
    done = {run["number"] for run in runs}
    paths: Sequence[Path] = ()
    for number in range(args.first, args.first + args.sessions):
        if number not in done:
            runs.append(session(number, measured))
        if (number + 1) % 20 == 0 or number + 1 == args.first + args.sessions:
            print(f"  {number + 1 - args.first} of {args.sessions} sessions", file=sys.stderr, flush=True)
            data = {"sessions": sessions, "recorded": recorded}
            paths = write_result("search_sessions", made, page(sessions, recorded), data, folder=args.out)
    print(page(sessions, recorded), *paths, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

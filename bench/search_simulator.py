"""Measures the quality of the plan that a search finds in a given time, on simulated programs.

Three searches (`search_strategies.py`) run on the same programs (`simulated_programs.py`): one lever at a
time; the races that `flatout tune` used before; and its current factorial design (the functions of
`flatout.tune.effects` and `flatout.tune.design` themselves). All have the same time, counted from the first
start of a process; the guard and the confirmation use none of it.

Regret is the step time under the chosen plan over that under the best one, minus 1. Coverage is the share of
95 % intervals that include the true value: of single levers relative to the plain program, and of the chosen
plan relative to it. Goals: at most half the regret of the races at equal time; coverage 93 to 97 %.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from provenance import RESULTS, markdown_table, read_result, stamp, write_result
from search_strategies import Races, factorial, one_at_a_time
from simulated_programs import Machine, Program, draw_program, measured_effects

from flatout.tune.design import worth_more_time
from flatout.tune.effects import Estimate, Fitted

BUDGETS_S = (45.0, 90.0, 180.0, 300.0)
STARTS_S = (4.0, 6.0, 12.0)
BLOCK_S = 0.35
LOOKS_S = (
    30.0,
    45.0,
    60.0,
    75.0,
    90.0,
    120.0,
    150.0,
    180.0,
    210.0,
    240.0,
    270.0,
    300.0,
)  # times at which the factorial search is evaluated
GOOD = 0.02  # regret
GOAL_SHARE, GOAL_COVERAGE = 0.5, (0.93, 0.97)
SEARCHES = {
    "one at a time": "one lever at a time",
    "races": "races, as before",
    "factorial": "factorial, neutral priors",
    "informed": "factorial, priors of the levers",
}


def regret(program: Program, plan: frozenset[str], best: float) -> float:
    return math.exp(program.log_time(plan) - best) - 1


def look(program: Program, fitted: Fitted, best: float, claims: bool) -> dict[str, Any]:
    """Returns the choice of the factorial search, and with ``claims`` its claims, with the true values."""
    plan = fitted.best()
    if not claims:
        return {"regret": regret(program, plan, best), "more": worth_more_time(fitted, plan)}
    alone = [covers(fitted.effect(key), program, frozenset({key})) for key in sorted(fitted.measured_keys)]
    found: dict[str, Any] = {
        "regret": regret(program, plan, best),
        "expected": fitted.regret(plan),
        "more": worth_more_time(fitted, plan),
        "covered": sum(alone),
        "levers": len(alone),
    }
    if plan:
        beside = [covers(fitted.effect(key, plan), program, plan, plan - {key}) for key in sorted(plan)]
        over = math.log(fitted.gain(plan).median) + program.log_time(plan)
        found["plan"] = {
            "covered": covers(fitted.gain(plan), program, plan),
            "over": over,
            "beside": sum(beside),
            "levers": len(beside),
        }
    return found


def covers(
    estimate: Estimate, program: Program, on: frozenset[str], against: frozenset[str] = frozenset()
) -> bool:
    """Returns whether the interval includes the true value."""
    return estimate.low <= math.exp(program.log_time(against) - program.log_time(on)) <= estimate.high


def simulate(
    number: int, process_s: float, measured: dict[str, list[float]], wanted: Sequence[str]
) -> dict[str, Any]:
    """Runs each search on one program. The same number gives the same program and the same random variation.

    Returns the regret by budget, and the evaluations of the factorial search.
    """
    found: dict[str, Any] = {}
    for informed in (False, True):
        program = draw_program(np.random.default_rng(number), measured, informed)
        best = program.best()

        def machine(program: Program = program) -> Machine:
            return Machine(program, np.random.default_rng([number, 1]), process_s, BLOCK_S)

        name = "informed" if informed else "factorial"
        if name in wanted:
            marks = sorted({*LOOKS_S, *BUDGETS_S})
            found[name] = {
                f"{at:g}": look(program, fitted, best, at in BUDGETS_S)
                for at, fitted in factorial(machine(), program.space, marks)
            }
        for other, search in (
            ("one at a time", one_at_a_time),
            ("races", lambda m, space, budget_s: Races(m, space, budget_s).search()),
        ):
            if other in wanted and not informed:
                found[other] = {
                    f"{budget_s:g}": {
                        "regret": regret(program, search(machine(), program.space, budget_s), best)
                    }
                    for budget_s in BUDGETS_S
                }
    found["program"] = {
        "levers": len(program.space.factors),
        "best": math.exp(-best),
        "data": 1 - program.shares[0],
        "work": program.work,
    }
    return found


# -- the page ------------------------------------------------------------------------------------------------


def at(runs: Sequence[dict[str, Any]], name: str, mark_s: float, what: str = "regret") -> list[float]:
    return [run[name][f"{mark_s:g}"][what] for run in runs if name in run]


def plans_at(runs: Sequence[dict[str, Any]], name: str, mark_s: float) -> list[dict[str, Any]]:
    """Returns the claims for the chosen plans, unless the plain program was the choice."""
    return [
        run[name][f"{mark_s:g}"]["plan"] for run in runs if name in run and "plan" in run[name][f"{mark_s:g}"]
    ]


def share_beside(plans: Sequence[dict[str, Any]]) -> float:
    """Returns the share of the chosen plans' levers whose effect in the plan lies in its interval."""
    return float(sum(plan["beside"] for plan in plans) / sum(plan["levers"] for plan in plans))


def bootstrapped(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean with an interval of 95 % over programs."""
    array, rng = np.array(values), np.random.default_rng(0)
    low, high = np.quantile(
        array[rng.integers(len(array), size=(2000, len(array)))].mean(axis=1), (0.025, 0.975)
    )
    return float(array.mean()), float(low), float(high)


def regret_rows(rows: dict[str, list[dict[str, Any]]]) -> list[tuple[str, ...]]:
    found = []
    for start, runs in rows.items():
        for name, title in SEARCHES.items():
            cells = []
            for budget_s in BUDGETS_S:
                values = at(runs, name, budget_s)
                if not values:
                    cells.append("-")
                    continue
                mean, low, high = bootstrapped(values)
                cells.append(
                    f"{100 * mean:.1f} % [{100 * low:.1f}, {100 * high:.1f}], p90 {100 * np.quantile(values, 0.9):.1f}"
                )
            found.append((f"{start} s", title, *cells, seconds_until_good(runs, name)))
    return found


def seconds_until_good(runs: Sequence[dict[str, Any]], name: str) -> str:
    """Returns the first evaluation from which on the mean regret stays below ``GOOD``."""
    if not any(name in run for run in runs):
        return "-"
    marks = LOOKS_S if name in ("factorial", "informed") else BUDGETS_S
    good = [np.mean(at(runs, name, mark)) < GOOD for mark in marks]
    first = next((mark for place, mark in enumerate(marks) if all(good[place:])), None)
    return f"{first:.0f} s" if first is not None else f"more than {marks[-1]:.0f} s"


def coverage_rows(rows: dict[str, list[dict[str, Any]]]) -> list[tuple[str, ...]]:
    found = []
    for start, runs in rows.items():
        for name in ("factorial", "informed"):
            for budget_s in BUDGETS_S:
                covered, levers = (
                    sum(at(runs, name, budget_s, "covered")),
                    sum(at(runs, name, budget_s, "levers")),
                )
                plans = plans_at(runs, name, budget_s)
                if levers and plans:
                    found.append(
                        (
                            f"{start} s",
                            SEARCHES[name],
                            f"{budget_s:.0f} s",
                            f"{covered / levers:.1%} of {levers:.0f}",
                            f"{share_beside(plans):.1%} of {sum(plan['levers'] for plan in plans)}",
                            f"{np.mean([plan['covered'] for plan in plans]):.1%} of {len(plans)}",
                            f"{100 * np.mean([plan['over'] for plan in plans]):+.1f} %",
                            f"{100 * np.mean(at(runs, name, budget_s, 'expected')):.1f} %",
                            f"{100 * np.mean(at(runs, name, budget_s)):.1f} %",
                        )
                    )
    return found


def stopping_rows(rows: dict[str, list[dict[str, Any]]]) -> list[tuple[str, ...]]:
    """Stops each program at the first evaluation with a small expected regret, or at the last one."""
    found = []
    for start, runs in rows.items():
        for name in ("factorial", "informed"):
            looks = [run[name] for run in runs if name in run]
            stops = [
                next((mark for mark in LOOKS_S if not each[f"{mark:g}"]["more"]), LOOKS_S[-1])
                for each in looks
            ]
            if stops:
                regrets = [each[f"{mark:g}"]["regret"] for each, mark in zip(looks, stops, strict=True)]
                quarter, middle, most = np.quantile(stops, (0.25, 0.5, 0.75))
                found.append(
                    (
                        f"{start} s",
                        SEARCHES[name],
                        f"{middle:.0f} s ({quarter:.0f} to {most:.0f})",
                        f"{100 * np.mean(regrets):.1f} %",
                        f"{100 * np.quantile(regrets, 0.9):.1f} %",
                        f"{np.mean([each[f'{LOOKS_S[-1]:g}']['more'] for each in looks]):.0%}",
                    )
                )
    return found


def goals(rows: dict[str, list[dict[str, Any]]]) -> str:
    """Returns sentences on how far the goals are met."""
    ratios = [
        np.mean(at(runs, "factorial", mark)) / np.mean(at(runs, "races", mark))
        for runs in rows.values()
        for mark in BUDGETS_S
        if at(runs, "races", mark) and at(runs, "factorial", mark)
    ]
    cells = [
        (runs, name, mark)
        for runs in rows.values()
        for name in ("factorial", "informed")
        for mark in BUDGETS_S
        if at(runs, name, mark)
    ]
    single = [sum(at(*cell, "covered")) / sum(at(*cell, "levers")) for cell in cells]
    beside = [share_beside(plans_at(*cell)) for cell in cells]
    plans = [float(np.mean([plan["covered"] for plan in plans_at(*cell)])) for cell in cells]

    def within(values: Sequence[float]) -> str:
        good = sum(GOAL_COVERAGE[0] <= value <= GOAL_COVERAGE[1] for value in values)
        return (
            f"{good} of {len(values)} rows are within 93 to 97 %; from {min(values):.1%} to {max(values):.1%}"
        )

    half = (
        f"{sum(ratio <= GOAL_SHARE for ratio in ratios)} of {len(ratios)} rows; from {min(ratios):.2f} to {max(ratios):.2f} times"
        if ratios
        else "not run"
    )
    return (
        f"* Regret at most half that of the races at equal time, with neutral priors: {half}.\n"
        f"* Coverage of single levers against plain: {within(single)}.\n"
        f"* Coverage of single levers of the chosen plan, together with the others: {within(beside)}.\n"
        f"* Coverage of the chosen plan: {within(plans)}.\n"
    )


def page(rows: dict[str, list[dict[str, Any]]]) -> str:
    programs = [run["program"] for run in max(rows.values(), key=len)]  # the same in all rows
    rows = {start: runs for start, runs in rows.items() if runs}
    speedups = [program["best"] for program in programs]
    header = f"# Searches on simulated programs\n\n{(__doc__ or '').split(chr(10), 2)[2].strip()}\n"
    programs_are = (
        f"{len(programs)} programs a row, with {min(p['levers'] for p in programs)} to {max(p['levers'] for p in programs)} values of levers; the best plan is "
        f"{np.exp(np.mean(np.log(speedups))):.2f}x (geometric mean; {np.quantile(speedups, 0.1):.2f} to {np.quantile(speedups, 0.9):.2f} in 80 %). "
        f"{sum(p['data'] > 0 for p in programs)} of them wait for data; in {sum(p['work'] > 0 for p in programs)} the work varies from window to window. "
        f"A block takes {BLOCK_S} s, two processes that start together take 1.3 times the time of one, and a compiled program takes 8 s more. "
        "Means with an interval of 95 % over programs.\n"
    )
    marks = [f"after {budget_s:.0f} s" for budget_s in BUDGETS_S]
    parts = [
        header,
        "## Goals\n",
        goals(rows),
        f"## Regret\n\n{programs_are}",
        markdown_table(
            ("start of a process", "search", *marks, f"mean below {GOOD:.0%} from"), regret_rows(rows)
        ),
        "\nThe priors of the levers are the mean and spread of the effects used to generate the programs, which is the best case.\n",
        "## Intervals of 95 %\n",
        markdown_table(
            (
                "start of a process",
                "search",
                "after",
                "levers relative to plain",
                "levers in the plan",
                "chosen plan",
                "plan overestimated by",
                "expected regret",
                "regret",
            ),
            coverage_rows(rows),
        ),
        "\n## Stopping where the expected regret is below 1 %\n",
        markdown_table(
            (
                "start of a process",
                "search",
                "stopped after: median (quartiles)",
                "mean regret then",
                "p90",
                "never stopped",
            ),
            stopping_rows(rows),
        ),
        "",
    ]
    return "\n".join(parts)


def main() -> None:
    global BUDGETS_S, LOOKS_S
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=200, help="programs for each row")
    parser.add_argument(
        "--starts",
        type=float,
        nargs="+",
        default=list(STARTS_S),
        help="duration of a process start, in seconds",
    )
    parser.add_argument("--only", nargs="+", default=list(SEARCHES), choices=list(SEARCHES))
    parser.add_argument(
        "--longest",
        type=float,
        default=BUDGETS_S[-1],
        help="seconds of the longest search; a shorter one simulates faster",
    )
    parser.add_argument("--from-scratch", action="store_true", help="also repeat finished simulations")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    BUDGETS_S, LOOKS_S = (
        tuple(mark for mark in marks if mark <= args.longest) for marks in (BUDGETS_S, LOOKS_S)
    )
    made = stamp()
    measured = measured_effects(sorted(RESULTS.glob("open_set_cpu_*.json")))
    known = {} if args.from_scratch else read_result("search_simulator", made, args.out).get("rows", {})
    rows: dict[str, list[dict[str, Any]]] = {
        f"{start_s:g}": known.get(f"{start_s:g}", [])
        for start_s in sorted({*args.starts, *map(float, known)})
    }
    for start_s in args.starts:
        runs = rows[f"{start_s:g}"]
        for number in range(args.programs):
            if number == len(runs):
                runs.append({})
            missing = [name for name in args.only if name not in runs[number]]
            if missing:
                runs[number] |= simulate(number, start_s, measured, missing)
            if (number + 1) % 20 == 0 or number + 1 == args.programs:
                print(
                    f"start {start_s:g} s: {number + 1} of {args.programs} programs",
                    file=sys.stderr,
                    flush=True,
                )
                write_result("search_simulator", made, page(rows), {"rows": rows}, folder=args.out)
    print(page(rows))


if __name__ == "__main__":
    main()

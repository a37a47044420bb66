"""Measures how often the 95 % interval of a plan's speed covers the truth.

Simulated sessions (`simulated_programs.py`): 60 s of the search choose a plan. Fresh pairs of processes then
confirm it, and `plan_speed` gives the interval, as in `flatout tune`. Half of the sessions have levers without
any effect (A/A). Beside it: the interval of the regression on all blocks, which `tune` calls the model's
expectation.

Real sessions: `flatout tune` on programs of examples/ with a plan that does nothing (debug_off, where a step uses
no distribution). The truth is 1. Goal: 93 to 97 %.

    python bench/coverage.py --simulated 300 --real 30        with 0, that part of the last result stays
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from provenance import RESULTS, ROOT, markdown_table, read_result, stamp, write_result
from search_strategies import factorial
from simulated_programs import Machine, draw_program, measured_effects

from flatout.job.folder import JobFolder
from flatout.launch.command import parse_command
from flatout.levers import TABLE
from flatout.probe.machine import look
from flatout.schema.enums import Effect
from flatout.schema.records import Ratio
from flatout.schema.session import SessionRecord
from flatout.tune.candidates import Candidate
from flatout.tune.effects import PLAN, Estimate, TimedBlock, fit_effects, plan_speed
from flatout.tune.explore import explore
from flatout.tune.goal import Goal
from flatout.tune.pairs import Pairs, measure_pairs
from flatout.tune.plan_files import plan_key
from flatout.tune.search import observe
from flatout.tune.tuning import Tuning

PAIRS, ROUNDS = (2, 3, 6), 8
SEARCH_S, START_S, BLOCK_S = 60.0, 6.0, 0.35
SPREADS = {"quiet machine": (0.003, 0.02), "shared machine": (0.02, 0.07)}  # of processes, sd of the log
PROGRAMS = ("mlp --epochs 10000", "linear --steps 10000000", "cnn --epochs 1000", "lstm --steps 100000")
REAL_BUDGET_S = 25.0
# One distribution outside of the steps makes debug_off applicable
WRAPPER = """
import runpy, sys, torch
torch.distributions.Normal(0.0, 1.0)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
NOTHING = next(lever for lever in TABLE if lever.name == "debug_off")


def simulated(number: int, spread: tuple[float, float], effect: bool) -> Iterator[dict[str, Any]]:
    """One session; a row for each number of pairs."""
    measured = measured_effects(sorted(RESULTS.glob("open_set_cpu_*.json")))
    rng = np.random.default_rng([number, 1])
    program = draw_program(np.random.default_rng(number), measured, informed=number % 2 == 1)
    program = dataclasses.replace(program, luck=float(rng.uniform(*spread)))
    if not effect:
        program = dataclasses.replace(
            program, effects=0 * program.effects, shares=(1.0, 0.0, 0.0), interactions=()
        )
    machine, blocks = Machine(program, rng, START_S, BLOCK_S), list[TimedBlock]()
    (_, fitted), space = list(factorial(machine, program.space, [SEARCH_S], blocks))[-1], program.space
    plan = fitted.best(0.003) or frozenset(sorted(fitted.measured_keys)[:1])
    truth, fresh = -program.log_time(plan), list[TimedBlock]()
    for pair in range(max(PAIRS)):
        numbers = machine.start(frozenset(), plan)
        for turn in range(ROUNDS):
            for process, on, key in zip(numbers, (frozenset[str](), plan), ((), (PLAN,)), strict=True):
                ms = machine.block_ms(process, on, 10**6 + ROUNDS * pair + turn)
                fresh.append(
                    TimedBlock(process, frozenset(key), machine.now_s, 10**6 + ROUNDS * pair + turn, ms)
                )
        if pair + 1 in PAIRS:
            joined = [dataclasses.replace(b, active=plan if b.active else b.active) for b in fresh]
            yield {
                "pairs": pair + 1,
                "fresh pairs": against(plan_speed(fresh), truth),
                "all blocks": against(fit_effects(space, [*blocks, *joined]).gain(plan), truth),
            }


def against(estimate: Estimate | Ratio, truth: float) -> dict[str, float]:
    low, middle, high = (math.log(x) for x in (estimate.low, estimate.median, estimate.high))
    return {"covers": low <= truth <= high, "half": (high - low) / 2, "error": middle - truth}


def real(words: str, folder: Path) -> dict[str, Any]:
    """One session of `flatout tune` with a plan that does nothing."""
    script, *arguments = words.split()
    (folder / "program.py").write_text(WRAPPER)
    command = parse_command(
        ("python", str(folder / "program.py"), str(ROOT / "examples" / f"{script}.py"), *arguments)
    )
    facts = look()
    session = SessionRecord(list(command.shown), str(folder), plan_key(command, facts))
    tuning = Tuning(command, JobFolder(folder / "job").make(), facts, session, Goal(budget_s=REAL_BUDGET_S))
    try:
        observe(tuning)
        nothing = Candidate(NOTHING, (True,), Effect.EXACT)
        tuning.candidates = {NOTHING.name: nothing}
        explore(tuning)
        tuning.finish_plain_trial()
        nothing.value, pairs = True, Pairs()
        rows = []
        for count in range(1, max(PAIRS[:2]) + 1):
            measure_pairs(tuning, [nothing], pairs)
            if pairs.failure:
                raise SystemExit(f"coverage: {words}: {pairs.failure}")
            if count in PAIRS:
                rows.append({"pairs": count, "fresh pairs": against(pairs.speed(tuning), 0.0)})
        return {"program": script, "load": tuning.disturbance.sentence(), "rows": rows}
    finally:
        tuning.interleaver.close()


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    lines = []
    for title, found in rows.items():
        for how in ("fresh pairs", "all blocks"):
            for pairs in PAIRS:
                values = [row[how] for row in found if row["pairs"] == pairs and how in row]
                if values:
                    share, n = np.mean([v["covers"] for v in values]), len(values)
                    half = np.median([v["half"] for v in values])
                    errors = [v["error"] for v in values]
                    lines.append(
                        (
                            title,
                            how,
                            str(pairs),
                            f"{share:.1%} of {n}",
                            f"{100 * half:.1f} %",
                            f"{100 * np.mean(errors):+.1f} %",
                            f"{100 * np.sqrt(np.mean(np.square(errors))):.1f} %",
                        )
                    )
    return markdown_table(
        ("sessions", "interval", "pairs", "covers", "half width", "mean error", "rms error"), lines
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulated", type=int, default=300, help="sessions of each kind")
    parser.add_argument("--real", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    made = stamp()
    known = read_result("coverage", made, args.out)
    rows: dict[str, list[dict[str, Any]]] = dict(known.get("rows", {}))
    sessions: list[dict[str, Any]] = [] if args.real else known.get("sessions", [])
    for number in range(args.real):
        with tempfile.TemporaryDirectory(prefix="flatout-coverage-") as folder:
            sessions.append(real(PROGRAMS[number % len(PROGRAMS)], Path(folder)))
        print(f"  {number + 1} of {args.real}: {sessions[-1]}", file=sys.stderr, flush=True)
    if sessions:
        rows["real, A/A"] = [row for session in sessions for row in session["rows"]]
    for name, spread in SPREADS.items() if args.simulated else ():
        for effect in (True, False):
            title = f"simulated, {name}, {'levers with effects' if effect else 'A/A'}"
            rows[title] = [row for n in range(args.simulated) for row in simulated(n, spread, effect)]
            print(f"  {title}", file=sys.stderr, flush=True)
    beside = sorted({session["load"] for session in sessions if session["load"]})
    text = "\n".join(
        [
            "# How often the interval of a plan's speed covers the truth\n",
            "*fresh pairs*: the interval of `flatout tune` and `flatout verify`. *all blocks*: the regression's expectation, which the blocks",
            "that chose the plan move, too. Errors are of the logarithm. Goal: intervals cover 93 to 97 %.\n",
            table(rows),
            f"\nOther programs beside the real sessions: {'; '.join(beside) or 'none'}.",
        ]
    )
    print(
        *write_result("coverage", made, text, {"rows": rows, "sessions": sessions}, folder=args.out), sep="\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

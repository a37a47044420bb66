"""What being attached costs when the plan changes nothing: microseconds a step, and seconds at the start.

`flatout run --plan X` starts the program with an environment that brings flatout into it; the program then applies the plan
and falls asleep. Here the plan is empty, so whatever differs from the plain program is flatout's own cost.

A round is three fresh processes, one after another: plain, attached, plain again (the order is turned round every second
time). The cost is the attached process minus the mean of its two neighbours; the two plain ones give the A/A difference, which
shows what the machine itself does between two equal processes. Reported is the median over rounds, with a 95 % interval
(bootstrap over rounds). Step times are taken inside each process by the loop itself, after its warm-up: the mean of all
steps, and the median, which a rare interruption does not move. Start-up is the wall time of `python -c "import torch"`.

Goals: at most 20 us a step, 1 % of a step of 2 ms, 0.15 s at the start.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

from provenance import HERE, markdown_table, stamp, write_result

from flatout.cli.run import _environment as run_environment
from flatout.measure.statistics import quantile
from flatout.plan.facts import Facts
from flatout.plan.plan import Plan
from flatout.probe.machine import look

LOOP = HERE / "programs" / "step_loop.py"
SIZES = {0.1: (8, 4), 0.5: (64, 16), 2.0: (256, 32), 10.0: (256, 64), 50.0: (512, 64)}  # ms -> width, batch of the loop
GOAL_US, GOAL_SHARE, GOAL_START_S = 20.0, 0.01, 0.15
DRAWS = 2000


@contextmanager
def attached_environment(facts: Facts) -> Iterator[dict[str, str]]:
    """The very environment that `flatout run` gives one program under an empty plan (`run` itself skips attaching for one)."""
    environment = run_environment(Plan(), facts)
    try:
        yield environment
    finally:
        shutil.rmtree(Path(environment["FLATOUT_JOB"]).parent, ignore_errors=True)


def run_loop(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, str(LOOP), *arguments], env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"overhead: the loop failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if ("applied nothing" in done.stderr) != ("FLATOUT_JOB" in environment) and "--calibrate" not in arguments:
        raise SystemExit(f"overhead: attached where it should not be, or the other way round; the loop said:\n{done.stderr[-2000:]}")
    return result


def import_torch(environment: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], env=environment, check=True, timeout=300, capture_output=True)
    return time.perf_counter() - start


def sandwich(measure: Any, plain: dict[str, str], facts: Facts, at: int) -> dict[str, Any]:
    """One round: plain, attached, plain. ``measure(environment)`` runs one fresh process."""
    before = measure(plain)
    with attached_environment(facts) as attached:
        middle = measure(attached)
    after = measure(plain)
    first, last = (before, after) if at % 2 == 0 else (after, before)
    return {"plain": first, "attached": middle, "plain_again": last}


def interval(values: list[float]) -> dict[str, float]:
    """Median with a 95 % bootstrap interval over rounds."""
    rng = random.Random(0)
    draws = [median(rng.choices(values, k=len(values))) for _ in range(DRAWS)]
    return {"median": median(values), "low": quantile(draws, 0.025), "high": quantile(draws, 0.975), "n": len(values)}


def cost(rounds: list[dict[str, Any]], of: Any) -> tuple[dict[str, float], dict[str, float]]:
    """The difference that attaching makes, and the A/A difference."""
    attached = [of(r["attached"]) - (of(r["plain"]) + of(r["plain_again"])) / 2 for r in rounds]
    same = [of(r["plain_again"]) - of(r["plain"]) for r in rounds]
    return interval(attached), interval(same)


def spell(x: dict[str, float], digits: int) -> str:
    return f"{x['median']:+.{digits}f} [{x['low']:+.{digits}f}, {x['high']:+.{digits}f}]"


def verdict(x: dict[str, float], same: dict[str, float], goal: float) -> str:
    """Where two equal processes differ by more than the goal, nothing is met and nothing is missed."""
    if max(abs(same["low"]), abs(same["high"])) > goal:
        return "open: the A/A interval is wider than the goal"
    if x["high"] <= goal:
        return "met"
    return "missed" if x["low"] > goal else "open: the interval holds the goal"


def measure_steps(sizes: list[float], count: int, seconds: float, plain: dict[str, str], facts: Facts) -> list[dict[str, Any]]:
    results = []
    for size in sizes:
        width, batch = SIZES[size]
        shape = ["--width", str(width), "--batch", str(batch)]
        layers = 1 if size == min(SIZES) else run_loop([*shape, "--calibrate", str(size)], plain)["layers"]
        arguments = [*shape, "--layers", str(layers), "--seconds", str(seconds)]
        rounds = []
        for at in range(count):
            rounds.append(sandwich(lambda environment, arguments=arguments: run_loop(arguments, environment), plain, facts, at))
            print(f"  step of {size} ms: round {at + 1} of {count}", file=sys.stderr, flush=True)
        results.append({"target_ms": size, "layers": layers, "width": width, "batch": batch, "rounds": rounds,
                        "plain_us": fmean(r[side]["median_us"] for r in rounds for side in ("plain", "plain_again"))})
        for of in ("mean_us", "median_us"):
            results[-1][of], results[-1][f"aa_{of}"] = cost(rounds, lambda record, of=of: record[of])
    return results


def measure_start(count: int, plain: dict[str, str], facts: Facts) -> dict[str, Any]:
    sandwich(import_torch, plain, facts, 0)  # byte code and file cache
    rounds = [sandwich(import_torch, plain, facts, at) for at in range(count)]
    difference, same = cost(rounds, float)
    return {"rounds": rounds, "plain_s": median(r[side] for r in rounds for side in ("plain", "plain_again")), "cost_s": difference, "aa_s": same}


def page(steps: list[dict[str, Any]], start: dict[str, Any]) -> str:
    rows = [(f"{s['plain_us'] / 1000:.3g}", spell(s["median_us"], 1), spell(s["mean_us"], 1), spell(s["aa_median_us"], 1),
             f"{s['median_us']['median'] / s['plain_us']:+.2%}", s["median_us"]["n"], verdict(s["median_us"], s["aa_median_us"], GOAL_US)) for s in steps]
    parts = ["# The cost of being attached\n", "Baseline: the same program without flatout, in fresh processes, interleaved (plain, attached, plain).",
             "Median over rounds, with a 95 % interval (bootstrap over rounds); A/A is one plain process against the other.\n",
             markdown_table(("plain step, ms", "attached: median step, us", "attached: mean step, us", "A/A: median step, us", "share of a step", "rounds",
                             f"at most {GOAL_US:.0f} us"), rows)]
    two = next((s for s in steps if s["target_ms"] == 2.0), None)
    if two:
        limit = GOAL_SHARE * two["plain_us"]
        parts.append(f"\nOn the step of {two['plain_us'] / 1000:.2g} ms, 1 % is {limit:.0f} us: {verdict(two['median_us'], two['aa_median_us'], limit)}.")
    goal = f"Goal of at most {GOAL_START_S} s: {verdict(start['cost_s'], start['aa_s'], GOAL_START_S)}."
    parts.append(f"\nStart-up: `import torch` alone takes {start['plain_s']:.2f} s; attached {spell(start['cost_s'], 3)} s "
                 f"(A/A {spell(start['aa_s'], 3)} s, {start['cost_s']['n']} rounds). {goal}")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of three processes for each step size (default 8)")
    parser.add_argument("--start-rounds", type=int, default=12, help="rounds of three processes for the start-up (default 12)")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each process measures its steps (default 2)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="milliseconds a step, of " + ", ".join(map(str, SIZES)))
    parser.add_argument("--out", type=Path, help="write the results to this folder instead of bench/results")
    args = parser.parse_args()
    sizes = [float(word) for word in args.sizes.split(",")]
    if not set(sizes) <= set(SIZES):
        parser.error(f"--sizes takes some of {', '.join(map(str, SIZES))}")
    facts = look()
    made = stamp(facts)
    plain = dict(os.environ)
    with attached_environment(facts) as attached:  # as long a path on both sides, but for our own folder
        plain["PYTHONPATH"] = attached["PYTHONPATH"].split(os.pathsep, 1)[-1]
    start = measure_start(args.start_rounds, plain, facts)
    steps = measure_steps(sizes, args.rounds, args.seconds, plain, facts)
    text = page(steps, start)
    paths = write_result("overhead", made, text, {"goals": {"us": GOAL_US, "share": GOAL_SHARE, "start_s": GOAL_START_S}, "start": start, "steps": steps},
                         **({"folder": args.out} if args.out else {}))
    print(text)
    print("\nwritten: " + ", ".join(path.name for path in paths))


if __name__ == "__main__":
    main()

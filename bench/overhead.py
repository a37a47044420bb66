"""Measures the cost of attaching flatout under an empty plan: microseconds a step, seconds at start-up.

`flatout run --plan X` starts the program with an environment that loads flatout; the program then applies the
plan, and flatout becomes inactive. Here the plan is empty, so any difference from the plain program is
flatout's own cost.

Steps. Two processes of one program differ by more than the cost. So the benchmark detaches and attaches
flatout inside one process: rounds of four blocks, off, on, on, off. The cost is the mean of the inner two
minus that of the outer two; the A/A difference is that of the outer two. Each figure is the median over
rounds, then over fresh processes; the 95 % interval is a bootstrap over both.

Start-up. A round is three fresh processes of `python -c "import torch"`: plain, attached, plain again (the
order reverses every second time). The cost is the attached process minus the mean of the two plain ones, as
processor time (less affected by other processes) and as wall time. Each figure is the median over rounds with
a 95 % interval. Two imports of torch differ by as much as the cost. So a timer inside the process also
measures how long flatout's own code runs before the first line after `import torch`.

First line. `flatout run python t.py` against `python t.py`: wall time from the spawn until the first byte of
output, in fresh processes that take turns, without a plan and with one; the byte code is warm.

Goals: at most 2 us a step, 0.15 s at start-up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from provenance import HERE, markdown_table, stamp, write_result
from run_environment import run_environment

from flatout.measure.statistics import quantile
from flatout.probe.machine import look
from flatout.schema.facts import Facts
from flatout.schema.plan import Plan

LOOP = HERE / "programs" / "step_loop.py"
ON_AND_OFF = HERE / "programs" / "on_and_off.py"
ENTERED = HERE / "programs" / "entered.py"
SIZES = {
    0.1: (8, 4),
    0.5: (64, 16),
    2.0: (256, 32),
}  # ms -> width, batch of the loop
GOAL_US, GOAL_START_S = 2.0, 0.15
FIRST_LINE = "print(1, flush=True)"  # the program of which `flatout run` is timed until it writes
WITH = ("--with", "gc_pause", "--with", "fused_optimizer")
DRAWS = 2000


@contextmanager
def attached_environment(facts: Facts) -> Iterator[dict[str, str]]:
    """Yields the environment of `flatout run` under an empty plan (`run` itself skips attaching for one)."""
    environment = run_environment(Plan(), facts)
    try:
        yield environment
    finally:
        shutil.rmtree(Path(environment["FLATOUT_JOB"]).parent, ignore_errors=True)


def run(
    program: Path, arguments: list[str], environment: dict[str, str], isolated: bool = False
) -> tuple[dict[str, Any], str]:
    """Returns the program's answer in its last line, and its output on standard error."""
    words = [sys.executable, *(["-I"] if isolated else []), str(program), *arguments]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"overhead: {program.name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def run_loop(program: Path, arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    result, said = run(program, arguments, environment)
    if ("applied nothing" in said) != ("FLATOUT_JOB" in environment):
        raise SystemExit(
            f"overhead: {program.name} is attached but should be plain, or plain but should be attached; its output:\n{said[-2000:]}"
        )
    return result


def import_torch(environment: dict[str, str]) -> dict[str, float]:
    """Returns the wall time and the processor time of one process, in seconds."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", "import torch"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit("overhead: `import torch` failed")
    return {"wall_s": time.perf_counter() - start, "cpu_s": used.ru_utime + used.ru_stime}


def first_line(words: list[str], folder: Path) -> float:
    """Returns the seconds until a process started in ``folder`` writes its first byte."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    with subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        written = process.stdout.read(1)
        took = time.perf_counter() - start
        process.stdout.read()  # a write to a closed pipe would fail
    if process.returncode or not written:
        raise SystemExit(f"overhead: {words} failed")
    return took


def measure_first_line(count: int) -> dict[str, Any]:
    """Plain, run, run under a plan, plain again, in turn; the order reverses every second time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "t.py").write_text(FIRST_LINE)
        plain = [sys.executable, "t.py"]
        attached = [sys.executable, "-m", "flatout", "run"]
        sides = {
            "plain": plain,
            "run": [*attached, *plain],
            "plan": [*attached, *WITH, *plain],
            "again": plain,
        }
        for words in sides.values():
            first_line(words, folder)
        rounds = []
        for at in range(count):
            order = list(sides) if at % 2 == 0 else list(sides)[::-1]
            rounds.append({side: first_line(sides[side], folder) for side in order})
    costs = {
        side: interval([[r[side] - (r["plain"] + r["again"]) / 2] for r in rounds])
        for side in ("run", "plan")
    }
    return {
        "rounds": rounds,
        "plain": median(r[side] for r in rounds for side in ("plain", "again")),
        "aa": interval([[r["again"] - r["plain"]] for r in rounds]),
        **costs,
    }


def sandwich(measure: Any, plain: dict[str, str], facts: Facts, at: int) -> dict[str, Any]:
    """Runs one round: plain, attached, plain. ``measure(environment)`` runs one fresh process."""
    before = measure(plain)
    with attached_environment(facts) as attached:
        middle = measure(attached)
    after = measure(plain)
    first, last = (before, after) if at % 2 == 0 else (after, before)
    return {"plain": first, "attached": middle, "plain_again": last}


def interval(groups: list[list[float]]) -> dict[str, float]:
    """Returns the median over groups of the median within each, and a 95 % interval (bootstrap over both)."""
    rng = random.Random(0)

    def draw() -> float:
        return median(
            median(rng.choices(group, k=len(group))) for group in rng.choices(groups, k=len(groups))
        )

    draws = [draw() for _ in range(DRAWS)]
    return {
        "median": median(map(median, groups)),
        "low": quantile(draws, 0.025),
        "high": quantile(draws, 0.975),
        "n": len(groups),
    }


def spell(x: dict[str, float], digits: int) -> str:
    return f"{x['median']:+.{digits}f} [{x['low']:+.{digits}f}, {x['high']:+.{digits}f}]"


def verdict(x: dict[str, float], same: dict[str, float], goal: float) -> str:
    """Returns "open" if two equal processes differ by more than the goal, otherwise "met" or "missed"."""
    if max(abs(same["low"]), abs(same["high"])) > goal:
        return "open: the A/A interval is wider than the goal"
    if x["high"] <= goal:
        return "met"
    return "missed" if x["low"] > goal else "open: the interval includes the goal"


def measure_steps(
    sizes: list[float],
    processes: int,
    seconds: float,
    plain: dict[str, str],
    facts: Facts,
    made: dict[str, Any],
    counted: bool,
) -> list[dict[str, Any]]:
    results = []
    for size in sizes:
        width, batch = SIZES[size]
        shape = ["--width", str(width), "--batch", str(batch)]
        layers = (
            1 if size == min(SIZES) else run_loop(LOOP, [*shape, "--calibrate", str(size)], plain)["layers"]
        )
        found = []
        for at in range(processes):
            with attached_environment(facts) as attached:
                found.append(
                    run_loop(
                        ON_AND_OFF,
                        [
                            *shape,
                            "--layers",
                            str(layers),
                            "--seconds",
                            str(seconds),
                            *["--counted"] * counted,
                        ],
                        attached,
                    )
                )
            print(f"  step of {size} ms: process {at + 1} of {processes}", file=sys.stderr, flush=True)
        results.append(
            {
                "target_ms": size,
                "made": made,
                "layers": layers,
                "width": width,
                "batch": batch,
                "processes": found,
                "plain_us": median((a + d) / 2 for one in found for a, _, _, d in one["rounds"]),
                "cost_us": interval([[(b + c - a - d) / 2 for a, b, c, d in one["rounds"]] for one in found]),
                "aa_us": interval([[d - a for a, _, _, d in one["rounds"]] for one in found]),
            }
        )
    return results


def measure_start(count: int, plain: dict[str, str], facts: Facts) -> dict[str, Any]:
    sandwich(import_torch, plain, facts, 0)  # warms byte code and file cache
    rounds = [sandwich(import_torch, plain, facts, at) for at in range(count)]
    found: dict[str, Any] = {
        "rounds": rounds,
        "inside": measure_inside(count, facts),
        "first_line": measure_first_line(2 * count),
    }
    for of in ("cpu_s", "wall_s"):
        found[of] = {
            "plain": median(r[side][of] for r in rounds for side in ("plain", "plain_again")),
            "cost": interval(
                [[r["attached"][of] - (r["plain"][of] + r["plain_again"][of]) / 2] for r in rounds]
            ),
            "aa": interval([[r["plain_again"][of] - r["plain"][of]] for r in rounds]),
        }
    return found


def measure_inside(count: int, facts: Facts) -> dict[str, Any]:
    """Returns the wall time of flatout's code in fresh processes up to the line after ``import torch``."""
    took = []
    for _ in range(count):
        with attached_environment(facts) as attached:
            took.append(run(ENTERED, [], attached, isolated=True)[0]["seconds"])
    return {"seconds": took, **interval([[each] for each in took])}


def steps_table(steps: list[dict[str, Any]], name: str) -> str:
    """A row for each step size. ``name``: what is switched on and off."""
    rows = [
        (
            f"{s['plain_us'] / 1000:.3g}",
            spell(s["cost_us"], 1),
            spell(s["aa_us"], 1),
            f"{s['cost_us']['median'] / s['plain_us']:+.2%}",
            f"{s['cost_us']['n']} x {len(s['processes'][0]['rounds'])}",
            s["made"]["date"][:10],
            verdict(s["cost_us"], s["aa_us"], GOAL_US),
        )
        for s in steps
    ]
    head = (
        "plain step, ms",
        f"{name}, us a step",
        "A/A, us a step",
        "share of a step",
        "processes x rounds",
        "date",
    )
    return markdown_table((*head, f"at most {GOAL_US:.0f} us"), rows)


def page(steps: list[dict[str, Any]], counted: list[dict[str, Any]], start: dict[str, Any]) -> str:
    parts = [
        "# The cost of attaching flatout\n",
        "Baseline: the same process with flatout detached; blocks off, on, on, off. 95 % intervals, bootstrap over processes and rounds.\n",
        steps_table(steps, "attached"),
    ]
    parts.append("\n## Counting the steps of a run, for its record and `--watch`\n")
    parts.append(steps_table(counted, "counted"))
    rows = [
        (
            name,
            f"{start[of]['plain']:.2f}",
            spell(start[of]["cost"], 3),
            spell(start[of]["aa"], 3),
            start[of]["cost"]["n"],
            verdict(start[of]["cost"], start[of]["aa"], GOAL_START_S),
        )
        for of, name in (("cpu_s", "processor time"), ("wall_s", "wall time"))
    ]
    inside = start["inside"]
    rows.append(
        (
            "inside the process",
            "-",
            spell(inside, 3),
            "-",
            inside["n"],
            "met" if inside["high"] <= GOAL_START_S else "missed",
        )
    )
    first = start["first_line"]
    rows += [
        (
            f"until the first line, {name}",
            f"{first['plain']:.3f}",
            spell(first[side], 3),
            spell(first["aa"], 3),
            first[side]["n"],
            verdict(first[side], first["aa"], GOAL_START_S),
        )
        for side, name in (("run", "no plan"), ("plan", "a plan of two levers"))
    ]
    parts.append(
        '\n## Start-up\n\nBaseline: `python -c "import torch"`; plain, attached, plain in fresh processes.'
        " `inside the process` times flatout's own code alone. `until the first line`: `flatout run python t.py` against `python t.py`, from the spawn to the first byte.\n"
    )
    parts.append(
        markdown_table(
            (
                "measured as",
                "plain, s",
                "cost of attaching, s",
                "A/A, s",
                "rounds",
                f"at most {GOAL_START_S} s",
            ),
            rows,
        )
    )
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=3, help="processes for each step size (default 3)")
    parser.add_argument(
        "--start-rounds", type=int, default=10, help="rounds of three processes for the start-up (default 10)"
    )
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="how long each process measures its steps (default 6)"
    )
    parser.add_argument(
        "--sizes",
        default=",".join(map(str, SIZES)),
        help="milliseconds a step, of " + ", ".join(map(str, SIZES)),
    )
    parser.add_argument("--out", type=Path, help="write the results to this folder instead of bench/results")
    args = parser.parse_args()
    sizes = [float(word) for word in args.sizes.split(",")]
    if not set(sizes) <= set(SIZES):
        parser.error(f"--sizes accepts some of {', '.join(map(str, SIZES))}")
    facts = look()
    made = stamp(facts)
    plain = dict(os.environ)
    with attached_environment(facts) as attached:  # the same path on both sides, except flatout's own folder
        plain["PYTHONPATH"] = attached["PYTHONPATH"].split(os.pathsep, 1)[-1]
    steps, counted = (
        measure_steps(sizes, args.processes, args.seconds, plain, facts, made, counted)
        for counted in (False, True)
    )
    start = measure_start(args.start_rounds, plain, facts)
    text = page(steps, counted, start)
    paths = write_result(
        "overhead",
        made,
        text,
        {
            "goals": {"us": GOAL_US, "start_s": GOAL_START_S},
            "start": start,
            "steps": steps,
            "counted": counted,
        },
        **({"folder": args.out} if args.out else {}),
    )
    print(text)
    print("\nwritten: " + ", ".join(path.name for path in paths))


if __name__ == "__main__":
    main()

"""Compares the advice of `flatout batch` with a sweep that measures every size on its own.

For each program, `flatout batch` gets the sizes and a moderate budget. Independently, every size runs in
fresh processes, in ascending and then descending order, for the given number of rounds. The throughput of a
size is the median of its rounds.

    regret   the best throughput of the sweep over that of the size called fastest (and of the size called
             enough), minus 1. Goals: at most 5 % for the fastest; `enough` may lose 5 % more, by definition
    kept     the computed speed of accumulation with the effective batch kept, over the speed of a program
             that really accumulates (bench/programs/accumulating.py). Goal: within 10 %

Baseline of all ratios: the same program at its own size. On a GPU, an exhaustive sweep is the reference for a
batch finder.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from provenance import ROOT, markdown_table, stamp, write_result

from flatout.cli.options.arguments import Duration
from flatout.job.folder import JobFolder
from flatout.launch.command import parse_command
from flatout.measure.clock import seconds
from flatout.probe.machine import look
from flatout.schema.batch import BatchRecord
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.trial.parent import Trial, measure
from flatout.tune.batch_curve import BatchCurve, BatchOptions

ACCUMULATING = "bench/programs/accumulating.py"
OWN = 256
PROGRAMS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "accumulating": ((ACCUMULATING, "--batch", str(OWN)), (32, 64, 128, 512)),
    "mlp": (("examples/mlp.py", "--epochs", "1000000"), (16, 32, 128, 256)),
    "cnn": (("examples/cnn.py", "--epochs", "10000"), (16, 32, 128, 256)),
}
GOAL, GOAL_KEPT = 0.05, 0.10
STEPS = 60
LONGEST_S = 120.0


def advice(
    argv: list[str], sizes: tuple[int, ...], budget_s: float, job: JobFolder, facts: Facts
) -> BatchRecord:
    record = BatchRecord(argv, str(ROOT))
    return BatchCurve(parse_command(argv), job, facts, record, BatchOptions(sizes, budget_s)).run()


def samples_per_s(argv: list[str], plan: Plan, job: JobFolder, facts: Facts) -> float | None:
    """Returns the throughput of one fresh process; None where it failed."""
    with Trial(parse_command(argv), job.new_trial(), plan, facts) as trial:
        return measure(trial, STEPS, seconds() + LONGEST_S).samples_per_s


def sweep(
    runs: dict[str, tuple[list[str], Plan]], rounds: int, job: JobFolder, facts: Facts
) -> dict[str, list[float]]:
    """Runs every command once a round; the order reverses each round."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for at in range(rounds):
        for name in list(runs) if at % 2 == 0 else list(runs)[::-1]:
            rate = samples_per_s(*runs[name], job, facts)
            if rate is not None:
                found[name].append(rate)
        print(f"    round {at + 1} of {rounds}", file=sys.stderr, flush=True)
    return found


def measure_program(name: str, budget_s: float, rounds: int, facts: Facts) -> dict[str, Any]:
    (script, *arguments), sizes = PROGRAMS[name]
    argv = ["python", str(ROOT / script), *arguments]
    place = Path(tempfile.mkdtemp(prefix="batch-"))
    try:
        job = JobFolder(place / "job").make()
        record = advice(argv, sizes, budget_s, job, facts)
        if record.why_no_curve or record.own_size is None:
            return {"record": record.to_json(), "sweep": {}}
        loader = record.loader or 0
        runs = {
            str(size): (
                argv,
                Plan((Choice("batch_size", {"size": size, "loader": loader}),))
                if size != record.own_size
                else Plan(),
            )
            for size in sorted({*sizes, record.own_size})
        }
        if script == ACCUMULATING:
            runs |= {
                f"{size} x {OWN // size}": (
                    ["python", str(ROOT / script), "--batch", str(size), "--parts", str(OWN // size)],
                    Plan(),
                )
                for size in sizes
                if size < OWN
            }
        return {"record": record.to_json(), "sweep": sweep(runs, rounds, job, facts)}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def regret(entry: dict[str, Any], size: int | None) -> float | None:
    rates = {name: median(found) for name, found in entry["sweep"].items() if found and name.isdigit()}
    return max(rates.values()) / rates[str(size)] - 1 if rates and str(size) in rates else None


def kept(entry: dict[str, Any]) -> list[tuple[int, float, float]]:
    """Yields size, computed speed and measured speed, both relative to the program's own size."""
    record, rates = (
        BatchRecord.from_json(entry["record"]),
        {name: median(found) for name, found in entry["sweep"].items() if found},
    )
    return [
        (
            point.size,
            point.accumulated_speed.median,
            rates[f"{point.size} x {OWN // point.size}"] / rates[str(record.own_size)],
        )
        for point in record.points
        if point.accumulated_speed is not None
        and f"{point.size} x {OWN // point.size}" in rates
        and str(record.own_size) in rates
    ]


def page(programs: dict[str, dict[str, Any]]) -> str:
    def spelled(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    rows = [
        (
            name,
            entry["record"]["own_size"],
            entry["record"]["best"],
            spelled(regret(entry, entry["record"]["best"])),
            entry["record"]["near_best"],
            spelled(regret(entry, entry["record"]["near_best"])),
            max(map(len, entry["sweep"].values()), default=0),
        )
        for name, entry in programs.items()
    ]
    header = ("program", "own size", "called fastest", "regret", "called enough", "regret", "n")
    parts = [
        "# Batch sizes: the advice compared with a sweep\n",
        markdown_table(header, rows),
        f"\nRegret: best throughput of the sweep over the recommended size's, minus 1. Goal: {GOAL:.0%} for the fastest, {2 * GOAL:.0%} for enough.\n",
    ]
    found = [
        (name, size, f"{a:.3f}", f"{b:.3f}", f"{a / b - 1:+.1%}")
        for name, entry in programs.items()
        for size, a, b in kept(entry)
    ]
    if found:
        parts += [
            markdown_table(
                (
                    "program",
                    "micro-batch",
                    "computed, relative to the own size",
                    "measured with accumulation",
                    "error",
                ),
                found,
            ),
            f"\nGoal: within {GOAL_KEPT:.0%}.",
        ]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS), help=f"some of {', '.join(PROGRAMS)}")
    parser.add_argument("--budget", default="3m", help="budget of `flatout batch` for each program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="write the results to this folder instead of bench/results"
    )
    asked = parser.parse_args()
    unknown = set(asked.programs) - set(PROGRAMS)
    if unknown:
        parser.error(f"unknown program {', '.join(sorted(unknown))}; choose from {', '.join(PROGRAMS)}")
    facts, made, found = look(), stamp(), {}
    for name in asked.programs:
        print(f"{name}", file=sys.stderr, flush=True)
        found[name] = measure_program(name, Duration().convert(asked.budget, None, None), asked.rounds, facts)
    print(page(found))
    text, _ = write_result(
        "batch", made, page(found), {"programs": found}, **({"folder": asked.folder} if asked.folder else {})
    )
    print(text)


if __name__ == "__main__":
    main()

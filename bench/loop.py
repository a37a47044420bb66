"""Measures the overhead of training loop libraries: `flatout.Loop` and others, compared with the raw loop.

One process holds every candidate, each with its own copy of one model, AdamW and the same ready batches, on
one thread. The candidates are interleaved block by block, in a different order each time. A figure is a
candidate's step time over the raw loop's: the median over fresh processes with a 95 % interval (bootstrap
over processes and rounds). "raw again" is a second raw loop, the A/A comparison. Libraries that are not
installed have no column. Composer (0.32.1) requires torch below 2.7.1 and is not included. Goal: at most 1.05
on a step of 0.3 ms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pairs import spell
from provenance import HERE, RESULTS, markdown_table, stamp, write_result

from flatout.measure.statistics import Round, compare, median
from flatout.schema.records import Ratio

PROGRAM = HERE / "programs" / "loops.py"
# approximate ms -> width, layers, batch, steps of a block
SIZES = {0.3: (32, 1, 16, 80), 1.0: (128, 3, 64, 40), 5.0: (256, 6, 256, 8), 20.0: (512, 6, 512, 3)}
NEEDS = {
    "raw": "",
    "Loop": "",
    "raw, clipped and scheduled": "",
    "Loop, clipped and scheduled": "",
    "Fabric": "lightning",
    "Accelerate": "accelerate",
    "Lightning": "lightning",
    "Ignite": "ignite",
}
DISTRIBUTIONS = {"ignite": "pytorch-ignite"}
BASELINE = {"Loop, clipped and scheduled": "raw, clipped and scheduled"}
GOAL, GOAL_SIZE = 1.05, 0.3


def measured(size: float, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds a step of each round by candidate, from one process."""
    width, layers, batch, steps = SIZES[size]
    words = [sys.executable, str(PROGRAM), *map(str, (width, layers, batch, steps, rounds)), *names]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"loop: the program failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def over_raw(processes: list[dict[str, list[float]]], name: str) -> Ratio:
    baseline = BASELINE.get(name, "raw")
    return compare(
        [[Round(a, b) for a, b in zip(each[name], each[baseline], strict=True)] for each in processes]
    )


def page(found: dict[float, list[dict[str, list[float]]]], missing: list[str]) -> str:
    names = list(next(iter(found.values()))[0])
    rows = []
    for processes in found.values():
        raw_ms = median([ms for each in processes for ms in each["raw"]])
        ratios = {
            name: over_raw(processes, name) for name in names if name not in ("raw", *BASELINE.values())
        }
        rows.append((f"{raw_ms:.3g}", *(f"{spell(ratios[name])}" for name in ratios)))
    header = ("raw, ms a step", *(name for name in names if name not in ("raw", *BASELINE.values())))
    goal = over_raw(found[GOAL_SIZE], "Loop") if GOAL_SIZE in found else None
    said = f"Goal: at most {GOAL} on the smallest step: {_judged(goal)}, {spell(goal)}.\n" if goal else ""
    present = sorted({NEEDS[name] for name in names if NEEDS.get(name)})
    versions = (
        f"Libraries: {', '.join(f'{each} {version(DISTRIBUTIONS.get(each, each))}' for each in present)}.\n"
        if present
        else ""
    )
    absent = f"Not installed, not run: {', '.join(missing)}.\n" if missing else ""
    return f"# Overhead of a training loop\n\n{(__doc__ or '').split(chr(10), 2)[2].strip()}\n\n{said}\n{versions}{absent}\n{markdown_table(header, rows)}\n"


def _judged(ratio: Ratio) -> str:
    if ratio.median > GOAL:
        return "**missed**"
    return "reached" if ratio.high <= GOAL else "reached by the median, but not by the whole interval"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", default=",".join(map(str, SIZES)), help="sizes to measure, in milliseconds of a raw step"
    )
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--only", default="", help="only these candidates in addition to raw, separated by semicolons"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    asked = [name for name in NEEDS if not args.only or name in ("raw", *args.only.split(";"))]
    names = [name for name in asked if not NEEDS[name] or find_spec(NEEDS[name])]
    missing = [name for name in asked if name not in names]
    made, found = stamp(), dict[float, Any]()
    for size in map(float, args.sizes.split(",")):
        found[size] = []
        for at in range(args.processes):
            found[size].append(measured(size, names, args.rounds))
            print(
                f"{size} ms, process {at + 1}: "
                + ", ".join(f"{name} {median(ms):.4g}" for name, ms in found[size][-1].items()),
                flush=True,
            )
    text = page(found, missing)
    print(text)
    raw = {"sizes": {str(size): processes for size, processes in found.items()}}
    print(*(path.name for path in write_result("loop", made, text, raw, folder=args.out)))


if __name__ == "__main__":
    main()

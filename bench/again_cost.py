"""Measures the cost of exact resume while a program trains: the journal and the hooks.

One process runs blocks of steps without flatout, with, with, without (``programs/again_cost.py``). The figure
is the processor time of a step: the median over rounds, and over processes. Interleaved blocks whose steps
read one value and eleven values give the cost of a value. ``again.py`` counts the values a step in the
journal of each public script. The cost as a share of that script's steps is computed from both, not timed: a
thousandth of a step is far below the difference between two runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from again import GOES_ON
from provenance import HERE, RESULTS, markdown_table, read_result, stamp, write_result

PROGRAM = HERE / "programs" / "again_cost.py"
READS = 10  # additional values a step
SIZES = {
    "0.3 ms": (32, 1, (1, 1 + READS)),
    "2 ms": (256, 8, (1,)),
    "20 ms": (1024, 12, (1,)),
}  # width, layers, values read


def measured(name: str, seconds: float, processes: int) -> list[dict[str, Any]]:
    """Returns a row for each number of values read."""
    width, layers, reads = SIZES[name]
    found = []
    for _ in range(processes):
        with tempfile.TemporaryDirectory() as folder:
            words = [
                sys.executable,
                "-m",
                "flatout",
                "run",
                "--plan",
                "none",
                "--resume",
                "python",
                str(PROGRAM),
                "--width",
                str(width),
                "--layers",
                str(layers),
                "--reads",
                *map(str, reads),
                "--seconds",
                str(seconds * len(reads)),
            ]
            done = subprocess.run(
                words,
                cwd=folder,
                capture_output=True,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=False,
            )
        if done.returncode:
            raise SystemExit(f"again_cost: the measuring program failed:\n{done.stderr[-2000:]}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return [row_of(name, list(records)) for records in zip(*found, strict=True)]


def row_of(name: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarises ``records``, the records of the processes for one number of values."""
    rounds, reads, steps = (
        [each["rounds"] for each in records],
        records[0]["reads"],
        sum(each["steps"] for each in records),
    )
    each = [median(map(cost_of, of_process)) for of_process in rounds]
    every = [found for of_process in rounds for found in of_process]
    return {
        "size": name if reads == 1 else f"{name}, {reads - 1} additional values",
        "reads": reads,
        "rounds": rounds,
        "plain_us": median((a + d) / 2 for a, _, _, d in every),
        "cost_us": median(each),
        "lowest_us": min(each),
        "highest_us": max(each),
        "aa_us": median(abs(a - d) for a, _, _, d in every),
        "entries": sum(each["entries"] for each in records) / steps,
        "bytes_a_step": sum(each["bytes"] for each in records) / steps,
    }


def cost_of(blocks: list[float]) -> float:
    off, on, on_again, off_again = blocks
    return (on + on_again - off - off_again) / 2


def value_of(one: dict[str, Any], more: dict[str, Any]) -> list[float]:
    """Returns the cost of a value for each process; steps of both kinds were interleaved."""
    return [
        median(
            (cost_of(b) - cost_of(a)) / (more["reads"] - one["reads"]) for a, b in zip(*both, strict=False)
        )
        for both in zip(one["rounds"], more["rounds"], strict=True)
    ]


def of_scripts(scripts: dict[str, Any], fixed_us: float, value_us: float) -> list[tuple[str, ...]]:
    found = []
    for name, script in scripts.items():
        rows = script["kills"]
        counts = [
            (row["synchronisations"] / row["journal_steps"], row["journal_bytes"] / row["synchronisations"])
            for row in rows
            if row.get("journal_steps")
        ]
        lengths = [
            float(records[3]) / int(records[1])
            for row in rows
            for line in row.get("said", ())
            if (records := GOES_ON.match(line)) and records[3] and int(records[1])
        ]
        if counts and lengths:
            values, step_s = median(each for each, _ in counts), median(lengths)
            cost_us = fixed_us + value_us * max(
                values - 3, 0
            )  # 3 fixed entries: end of step, batch shape, the value read
            size = median(each for _, each in counts)
            found.append(
                (
                    name,
                    f"{1e3 * step_s:,.1f}",
                    f"{values:,.1f}",
                    f"{size:,.1f}",
                    f"{cost_us:,.0f}",
                    f"{cost_us / step_s / 1e4:.2f}%",
                )
            )
    return found


def page(sizes: list[dict[str, Any]], scripts: dict[str, Any]) -> str:
    one = sizes[0]
    values_us = value_of(one, sizes[1])
    value_us = median(values_us)
    table = [
        (
            each["size"],
            len(each["rounds"]),
            sum(map(len, each["rounds"])),
            f"{each['plain_us']:,.0f}",
            f"{each['cost_us']:+.1f} [{each['lowest_us']:+.1f}, {each['highest_us']:+.1f}]",
            f"{each['cost_us'] / each['plain_us']:+.2%}",
            f"{each['aa_us']:.1f}",
            f"{each['entries']:.1f}",
            f"{each['bytes_a_step']:.0f}",
        )
        for each in sizes
    ]
    parts = [
        "# The cost of exact resume while a program trains\n",
        "Processor time of a step, in blocks without flatout, with, with, without: the median, lowest and highest over processes.\n",
        markdown_table(
            (
                "step",
                "processes",
                "rounds",
                "plain, us",
                "cost, us",
                "share of a step",
                "A/A, us",
                "entries a step",
                "bytes a step",
            ),
            table,
        ),
        f"\nEach additional value costs {value_us:.2f} us [{min(values_us):.2f}, {max(values_us):.2f}].\n",
    ]
    rows = of_scripts(scripts, one["cost_us"], value_us)
    if rows:
        parts += [
            "\n## Public scripts\n\nComputed from the table above and the contents of their journals; the fixed cost is that of the smallest step.\n",
            markdown_table(
                ("script", "step, ms", "entries a step", "bytes an entry", "cost, us", "share of a step"),
                rows,
            ),
        ]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="measuring time of each process (default 15)"
    )
    parser.add_argument("--processes", type=int, default=3, help="processes for each size (default 3)")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="write the results to this folder instead of bench/results"
    )
    args = parser.parse_args()
    made, sizes = stamp(), []
    for name in SIZES:
        for row in measured(name, args.seconds, args.processes):
            sizes.append(row)
            print(
                f"  {row['size']}: {row['cost_us']:+.1f} us of {row['plain_us']:,.0f}",
                file=sys.stderr,
                flush=True,
            )
    scripts = read_result("again", made, RESULTS).get("scripts", {})
    write_result("again_cost", made, page(sizes, scripts), {"sizes": sizes}, folder=args.out)


if __name__ == "__main__":
    main()

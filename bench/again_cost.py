"""What exact resume costs while a program trains: the journal, and listening for it.

In one process, blocks of steps without anything of flatout, with, with, without (``programs/again_cost.py``); processor time of a step, median over rounds, and
over processes. Reading one value in a step and eleven gives the cost of a value. From both, and from how many values each public script's journal holds a
step (``again.py`` has counted them), follows the share of that script's steps: computed, not timed, since a thousandth of a step is far below what two
runs of it differ by.
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
READS = 10  # more values in a step
SIZES = {"0.3 ms": (32, 1, 1), f"0.3 ms, {READS} values more": (32, 1, 1 + READS), "2 ms": (256, 8, 1), "20 ms": (1024, 12, 1)}  # width, layers, values read


def measured(name: str, seconds: float, processes: int) -> dict[str, Any]:
    width, layers, reads = SIZES[name]
    rounds, entries, steps, size = [], [], 0, 0
    for _ in range(processes):
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, "-m", "flatout", "run", "--plan", "none", "--resume", "python", str(PROGRAM), "--width", str(width),
                     "--layers", str(layers), "--reads", str(reads), "--seconds", str(seconds)]
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
        if done.returncode:
            raise SystemExit(f"again_cost: the program that measures failed:\n{done.stderr[-2000:]}")
        told = json.loads(done.stdout.splitlines()[-1])
        rounds.append(told["rounds"])
        entries.append(told["entries_a_step"])
        steps, size = steps + told["steps"], size + told["journal_bytes"]
    each = [median((b + c - a - d) / 2 for a, b, c, d in of_process) for of_process in rounds]
    every = [found for of_process in rounds for found in of_process]
    return {"size": name, "reads": reads, "rounds": rounds, "plain_us": median((a + d) / 2 for a, _, _, d in every), "cost_us": median(each),
            "lowest_us": min(each), "highest_us": max(each), "aa_us": median(abs(a - d) for a, _, _, d in every), "entries": median(entries),
            "bytes_a_step": size / steps}


def of_scripts(scripts: dict[str, Any], fixed_us: float, value_us: float) -> list[tuple[str, ...]]:
    found = []
    for name, script in scripts.items():
        rows = script["kills"]
        counts = [(row["crossings"] / row["journal_steps"], row["journal_bytes"] / row["crossings"]) for row in rows if row.get("journal_steps")]
        lengths = [float(told[3]) / int(told[1]) for row in rows for line in row.get("said", ()) if (told := GOES_ON.match(line)) and told[3] and int(told[1])]
        if counts and lengths:
            values, step_s = median(each for each, _ in counts), median(lengths)
            cost_us = fixed_us + value_us * max(values - 3, 0)  # a step without values has its end, the shape of its batch, and the one that is read
            size = median(each for _, each in counts)
            found.append((name, f"{1e3 * step_s:,.1f}", f"{values:,.1f}", f"{size:,.1f}", f"{cost_us:,.0f}", f"{cost_us / step_s / 1e4:.2f}%"))
    return found


def page(sizes: list[dict[str, Any]], scripts: dict[str, Any]) -> str:
    one, eleven = sizes[0], sizes[1]
    value_us = (eleven["cost_us"] - one["cost_us"]) / READS
    table = [(each["size"], len(each["rounds"]), sum(map(len, each["rounds"])), f"{each['plain_us']:,.0f}",
              f"{each['cost_us']:+.1f} [{each['lowest_us']:+.1f}, {each['highest_us']:+.1f}]", f"{each['cost_us'] / each['plain_us']:+.2%}",
              f"{each['aa_us']:.1f}", f"{each['entries']:.1f}", f"{each['bytes_a_step']:.0f}") for each in sizes]
    parts = ["# What exact resume costs while a program trains\n",
             "Processor time of a step, in blocks without flatout, with, with, without; the median over processes, and the lowest and highest of them.\n",
             markdown_table(("a step", "processes", "rounds", "plain, us", "costs, us", "of a step", "A/A, us", "entries a step", "bytes a step"), table),
             f"\nOne more value costs {value_us:.2f} us.\n"]
    rows = of_scripts(scripts, one["cost_us"], value_us)
    if rows:
        parts += ["\n## Public scripts\n\nComputed from the table above and from what their journals hold; the rest is that of the smallest step.\n",
                  markdown_table(("script", "a step, ms", "entries a step", "bytes an entry", "costs, us", "of a step"), rows)]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="how long each process measures (default 15)")
    parser.add_argument("--processes", type=int, default=3, help="of each size (default 3)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="write the results to this folder instead of bench/results")
    args = parser.parse_args()
    made, sizes = stamp(), []
    for name in SIZES:
        sizes.append(measured(name, args.seconds, args.processes))
        print(f"  {name}: {sizes[-1]['cost_us']:+.1f} us of {sizes[-1]['plain_us']:,.0f}", file=sys.stderr, flush=True)
    scripts = read_result("again", made, RESULTS).get("scripts", {})
    write_result("again_cost", made, page(sizes, scripts), {"sizes": sizes}, folder=args.out)


if __name__ == "__main__":
    main()

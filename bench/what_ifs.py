"""Compares the what-if bounds of `flatout profile` with the measured speed-up from removing each bottleneck.

Each program of bench/programs/what_if.py has one expensive part (a slow loader, a heavy optimizer, much
printing, ...). Predicted: the what-if of that part, switched on and off in one running program. Measured:
fresh pairs of processes, the unchanged program and a variant of its source without that part, interleaved
block by block; three pairs, whose order reverses from pair to pair. Both are medians with a 95 % interval
(bootstrap over pairs and rounds). The error is predicted over measured, minus 1. Goal: at most 20 % on at
least 18 of 20 programs. Some load their data in workers, so that loading overlaps with the step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from pairs import ComparisonSide, comparison, ratio_of, spell
from provenance import RESULTS, ROOT, markdown_table, read_result, stamp, write_result

from flatout.diagnose.profiling import ProfiledProgram, ProfileOptions, run_profile
from flatout.job.folder import JobFolder
from flatout.launch.command import Command, parse_command
from flatout.measure.clock import seconds
from flatout.probe.machine import look
from flatout.schema.errors import FlatoutError
from flatout.schema.facts import Facts
from flatout.schema.plan import Plan
from flatout.schema.profile import ProfileRecord
from flatout.schema.records import Ratio

PROGRAM = str(ROOT / "bench" / "programs" / "what_if.py")
# case of the program -> its what-if
ASKED = {
    "sleeping loader": "loader",
    "computing loader": "loader",
    "decoding loader": "loader",
    "computing loader beside a larger model": "loader",
    "loader with a worker": "loader",
    "loader with a worker, most of it hidden": "loader",
    "loader with two workers": "loader",
    "collation of many small samples": "loader",
    "stream of samples": "loader",
    "Adam, one loop over 60 layers": "optimizer",
    "NAdam, one loop over 40 layers": "optimizer",
    "RMSprop over a large table": "optimizer",
    "Adagrad over a large table": "optimizer",
    "AdamW over a large table": "optimizer",
    "printing": "logging",
    "logging": "logging",
    "progress bar": "logging",
    "garbage collection": "gc",
    "one thread more": "one thread more",
    "one thread fewer": "one thread fewer",
}
GOAL = 0.2
PROGRAMS_OF_THE_GOAL = 18
SETS, ROUNDS, SET_S = 3, 4, 60.0


def command(*words: str) -> Command:
    return parse_command([sys.executable, PROGRAM, *words])


def predicted(case: str, job: JobFolder, facts: Facts) -> tuple[Ratio | None, str]:
    """Returns the what-if as `flatout profile` measures it, or why there is none."""
    record = ProfileRecord(["python", PROGRAM, case], str(ROOT))
    requested = ProfileOptions(
        steps=20, budget_s=30.0, stages=frozenset({"what-ifs"}), what_ifs=frozenset({ASKED[case]})
    )
    try:
        run_profile(ProfiledProgram(command(case), job, facts, requested, record, {}))
    except FlatoutError as error:
        return None, str(error).splitlines()[0]
    asked = next(what_if for what_if in record.what_ifs if what_if.name == ASKED[case])
    return asked.ratio, asked.why_not


def measured(case: str, job: JobFolder, facts: Facts, sets: int) -> tuple[Ratio | None, str]:
    sides = [
        ComparisonSide("unchanged", command(case), Plan()),
        ComparisonSide("without", command(case, "--without"), Plan()),
    ]
    comparison(sides, job, facts, sets, ROUNDS, seconds() + sets * SET_S)
    return ratio_of(*sides), "; ".join(f"{side.name}: {side.failure}" for side in sides if side.failure)


def page(rows: list[dict[str, Any]]) -> str:
    done = [row for row in rows if row["error"] is not None]
    met = [row for row in done if abs(row["error"]) <= GOAL]
    said = f"{len(met)} of {len(done)} programs within {GOAL:.0%}"
    table = markdown_table(
        ("program", "what-if", "predicted", "measured", "error", f"within {GOAL:.0%}"),
        [
            (
                row["case"],
                row["what_if"],
                spell(row["predicted"]),
                spell(row["measured"]),
                "-" if row["error"] is None else f"{row['error']:+.1%}",
                row["why_not"]
                or ("-" if row["error"] is None else "yes" if abs(row["error"]) <= GOAL else "no"),
            )
            for row in rows
        ],
    )
    return f"# What-if bounds, checked\n\n{__doc__.split(chr(10), 2)[2].strip()}\n\n**{said}.** n: rounds of one program, and fresh pairs.\n\n{table}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=sorted(ASKED), help="run only this program; repeatable"
    )
    parser.add_argument("--sets", type=int, default=SETS, help="fresh pairs of processes for each program")
    parser.add_argument("--again", action="store_true", help="measure again what is measured already")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    facts, made = look(), stamp()
    done = {row["case"]: row for row in read_result("what_ifs", made, args.out).get("rows", [])}
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        job = JobFolder(Path(folder)).make()
        for case in args.only or ASKED:
            if case in done and not args.again:
                continue
            ratio, why = predicted(case, job, facts)
            truth, failure = measured(case, job, facts, args.sets)
            error = ratio.median / truth.median - 1 if ratio is not None and truth is not None else None
            done[case] = {
                "case": case,
                "what_if": ASKED[case],
                "predicted": ratio.to_json() if ratio else None,
                "measured": truth.to_json() if truth else None,
                "error": error,
                "why_not": why or failure,
            }
            metadata = f"error {error:+.1%}" if error is not None else why or failure
            print(f"{case}: predicted {spell(ratio)}, measured {spell(truth)}, {metadata}", flush=True)
            rows = [done[each] for each in ASKED if each in done]
            write_result("what_ifs", made, page(rows), {"goal": GOAL, "rows": rows}, folder=args.out)
    rows = [done[each] for each in ASKED if each in done]
    print(page(rows))
    met = [row for row in rows if row["error"] is not None and abs(row["error"]) <= GOAL]
    return 0 if len(met) >= min(PROGRAMS_OF_THE_GOAL, len(rows)) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Measures what `flatout tune` claims beside other programs, against the same plan on the quiet machine.

Each session runs beside one other program: a busy loop on one thread, or one on two threads, at the usual
priority or at the lowest. A headline with a factor is held against the same plan, measured afterwards without
the other program in three fresh pairs. Goal: no headline above 1.15 times that.

    python bench/busy.py --budget 40
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from open_set import tune
from pairs import FIRST_SEED, ComparisonSide, comparison, ratio_of
from provenance import RESULTS, ROOT, markdown_table, stamp, write_result

from flatout.job.folder import JobFolder
from flatout.launch.command import parse_command
from flatout.measure.clock import seconds
from flatout.probe.machine import look
from flatout.render.summary import headline
from flatout.schema.plan import Plan
from flatout.tune.session import plan_of

LOOP = "while True: pass"
TWO_THREADS = "import torch; torch.set_num_threads(2); a = torch.randn(512, 512)\nwhile True: a @ a"
OTHERS = {
    "a busy loop": (0, LOOP),
    "a busy loop, nice 19": (19, LOOP),
    "two threads": (0, TWO_THREADS),
    "two threads, nice 19": (19, TWO_THREADS),
}
PROGRAMS = {
    "mlp": ("--epochs", "1000000"),
    "linear": ("--steps", "100000000"),
    "cnn": ("--epochs", "10000"),
    "lstm": ("--steps", "1000000"),
    "gpt": ("--steps", "1000000"),
}
MAX_FACTOR = 1.15  # of a headline, against the quiet machine
PAIRS, ROUNDS, QUIET_S = 3, 8, 120.0


@contextmanager
def beside(nice: int, program: str) -> Iterator[None]:
    other = subprocess.Popen(["nice", "-n", str(nice), sys.executable, "-c", program])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def session_of(name: str, other: str, budget_s: float, folder: Path) -> dict[str, Any]:
    argv = ["python", str(ROOT / "examples" / f"{name}.py"), *PROGRAMS[name]]
    with beside(*OTHERS[other]):
        session, failure = tune(argv, budget_s, folder / "tune")
    row: dict[str, Any] = {"program": name, "other": other, "failure": failure}
    if session is None or failure:
        return row
    plan = plan_of(session)
    row |= {"headline": headline(session), "outcome": session.outcome, "plan": plan.describe()}
    if session.speedup is not None:
        row["claimed"] = session.speedup.to_json()
    if plan:
        row["quiet"] = quiet(argv, plan, folder)
        claimed = session.speedup.median if session.speedup is not None else None
        row["factor"] = claimed / row["quiet"]["median"] if claimed and row["quiet"] else None
    return row


def quiet(argv: list[str], plan: Plan, folder: Path) -> dict[str, Any] | None:
    command = parse_command(tuple(argv))
    sides = [ComparisonSide("plain", command, Plan()), ComparisonSide("tuned", command, plan)]
    job = JobFolder(folder / "quiet").make()
    comparison(sides, job, look(), PAIRS, ROUNDS, seconds() + QUIET_S, first_seed=FIRST_SEED)
    ratio = ratio_of(*sides)
    return ratio.to_json() if ratio is not None else None


def page(rows: list[dict[str, Any]]) -> str:
    def text(ratio: dict[str, Any] | None) -> str:
        return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else ""

    claims = [row["factor"] for row in rows if row.get("factor")]
    lines = [
        (
            row["program"],
            row["other"],
            row.get("headline") or row["failure"],
            row.get("plan", ""),
            text(row.get("claimed")),
            text(row.get("quiet")),
            f"{row['factor']:.2f}" if row.get("factor") else "",
        )
        for row in rows
    ]
    return "\n".join(
        [
            "# `flatout tune` beside other programs\n",
            f"{len(rows)} sessions; {len(claims)} claimed a factor; above {MAX_FACTOR} times that of the quiet machine: "
            f"**{sum(factor > MAX_FACTOR for factor in claims)}**.\n",
            markdown_table(
                ("program", "beside", "headline", "plan", "claimed", "quiet", "claimed / quiet"), lines
            ),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of each session")
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    made, rows = stamp(), list[dict[str, Any]]()
    for name in args.programs.split(","):
        for other in OTHERS:
            with tempfile.TemporaryDirectory(prefix="flatout-busy-") as folder:
                rows.append(session_of(name, other, args.budget, Path(folder)))
            print(f"  {rows[-1]}", file=sys.stderr, flush=True)
            text, data = write_result("busy", made, page(rows), {"rows": rows}, folder=args.out)
    print(text, data, sep="\n")
    return 1 if any((row.get("factor") or 0.0) > MAX_FACTOR for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())

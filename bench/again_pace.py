"""Measures how fast exact resume replays a small model, and whether the resumed training is correct.

``programs/again_small.py`` starts from scratch --processes times. SIGTERM ends it after half to all of
--first seconds; it resumes, is killed, and resumes again. Each end is a row. `again.py` defines the verdicts:
weights bit for bit and output lines, compared with the undisturbed program without flatout.
"""

from __future__ import annotations

import argparse
import tempfile
from argparse import Namespace
from pathlib import Path
from shutil import copy
from statistics import median
from typing import Any

from again import GOES_ON, measure
from provenance import HERE, RESULTS, markdown_table, stamp, write_result

PROGRAM = HERE / "programs" / "again_small.py"
SMALL: dict[str, Any] = {"name": "small", "cwd": "small", "argv": ["python", "train.py"]}


def measured(seconds: float, processes: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="pace-") as text:
        original, home = Path(text) / "original", Path(text) / "home"
        (original / SMALL["cwd"]).mkdir(parents=True)
        copy(PROGRAM, original / SMALL["cwd"] / "train.py")
        return measure(
            SMALL,
            home,
            original,
            Namespace(seed=0, kills=processes, lives=1, span=1.0, later=0.0, first=seconds, keep=None),
        )["kills"]


def page(rows: list[dict[str, Any]]) -> str:
    table, paces = [], []
    for row in rows:
        metadata: tuple[str, ...] = ("-",) * 5
        if found := next(
            (found for line in row.get("said", ()) if (found := GOES_ON.match(line)) and found[2]), None
        ):
            step, through_s, trained_s = int(found[1]), float(found[2]), float(found[3])
            paces.append(1e3 * through_s / step)
            metadata = (
                f"{step:,}",
                f"{trained_s:.1f}",
                f"{through_s:.1f}",
                f"{paces[-1]:.3f}",
                f"{trained_s / through_s:.1f}",
            )
        table.append((row.get("after", "-"), row["verdict"], *metadata))
    pace = (
        f"{median(paces):.3f} ms [{min(paces):.3f}, {max(paces):.3f}]: 100,000 steps in {100 * median(paces):.0f} s"
        if paces
        else "no reported time"
    )
    names = (
        "ended by",
        "verdict",
        "resumed after step",
        "original training, s",
        "replay, s",
        "replay of a step, ms",
        "replay speed-up",
    )
    return "\n".join(
        [
            "# Replaying the steps of a small model\n",
            f"The replay of a step takes {pace}.\n",
            markdown_table(names, table),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--first",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="SIGTERM hits each training after half to all of this time (default 120)",
    )
    parser.add_argument(
        "--processes", type=int, default=3, metavar="N", help="trainings to start (default 3)"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="write the results to this folder instead of bench/results"
    )
    args = parser.parse_args()
    made, rows = stamp(), measured(args.first, args.processes)
    write_result("again_pace", made, page(rows), {"kills": rows}, folder=args.out)


if __name__ == "__main__":
    main()

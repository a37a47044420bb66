"""Trains programs of the guard's test bed to their end and compares the last metric: plain, half precision.

A program prints the metric as its last line, "final NUMBER". With n seeds on each side, the difference of the
means is compared with their standard error: Student's t for both sides together, at 95 %. Accuracies may
coincide, so a difference up to RESOLUTION counts as none.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from provenance import markdown_table

from flatout.job.folder import read_json, write_json
from flatout.launch.command import parse_command
from flatout.measure.clock import seconds
from flatout.schema.plan import Choice, Plan
from flatout.trial.parent import measure

HALF = (Choice("autocast", "bfloat16"), Choice("reduced_precision", True))
ENDLESS = 10**9  # steps; the program ends by itself
TIMEOUT_S = 1800.0
T_95 = {4: 2.776, 8: 2.306}  # by degrees of freedom
RESOLUTION = 0.002


def rows_of_the_end(beds: Sequence[Any], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Returns one row for each program and lever, with the final metric of every seed."""
    rows = []
    for bed in beds:
        plain = [metric(bed, f"end-plain-{seed}", Plan(), seed) for seed in seeds]
        for choice in HALF:
            found = [metric(bed, f"end-{choice.name}-{seed}", Plan((choice,)), seed) for seed in seeds]
            rows.append(
                {
                    "program": bed.name,
                    "lever": choice.name,
                    "plain": plain,
                    "half": found,
                    **compared(plain, found),
                }
            )
    return rows


def metric(bed: Any, title: str, plan: Plan, seed: int) -> float:
    """Returns the program's final metric under the plan, from the folder if it exists there."""
    known = read_json(bed.folder / f"{title}.json")
    if known is None:
        ending = replace(bed)
        ending.command = parse_command(("python", str(bed.script)))
        with ending.trial(title, plan, seed) as trial:
            record = measure(trial, ENDLESS, seconds() + TIMEOUT_S)
            text = Path(trial.folder.stdout).read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line.startswith("final ")]
        if record.status != "ended" or not lines:
            raise SystemExit(
                f"guard: {bed.name}, {title}: {record.status}: {record.reason[-400:]}\n{record.log_tail[-800:]}"
            )
        known = {"final": float(lines[-1].split()[1]), "skipped": record.skipped}
        write_json(bed.folder / f"{title}.json", known)
    if known["skipped"]:
        raise SystemExit(f"guard: {bed.name}, {title}: not applied: {known['skipped'][0]['reason']}")
    print(f"  {bed.name}: {title} {known['final']:.6g}", file=sys.stderr, flush=True)
    return float(known["final"])


def compared(plain: Sequence[float], half: Sequence[float]) -> dict[str, Any]:
    difference = fmean(half) - fmean(plain)
    error = math.sqrt(variance(plain) / len(plain) + variance(half) / len(half))
    limit = max(T_95[len(plain) + len(half) - 2] * error, RESOLUTION * abs(fmean(plain)))
    return {"difference": difference, "limit": limit, "same": abs(difference) <= limit}


def end_section(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    table = [
        (
            row["program"],
            row["lever"],
            numbers(row["plain"]),
            numbers(row["half"]),
            f"{row['difference']:+.2g}",
            f"{row['limit']:.2g}",
            "yes" if row["same"] else "**no**",
        )
        for row in rows
    ]
    header = ("program", "lever", "plain", "half precision", "difference", "95 %", "same")
    return [
        "\n## Trained to the end\n",
        "The last metric of each seed (accuracy; a distance for gan and a loss for vae), and the difference of the means,\n"
        "compared with the range of 95 % of differences between equal programs.\n",
        markdown_table(header, table),
    ]


def numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)

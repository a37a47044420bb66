"""Compares the memory of a training step, as `flatout memory` predicts it, with the allocator's own events.

Each program of bench/programs/memory_cases.py trains a different kind of model. Predicted: `flatout memory
--no-measure --batch N` observes the program at its own batch size and computes nothing, so it predicts N from
a program that never ran at N. Measured: the same program really runs, at its own batch size and at N, under
bench/allocation_recorder.py, which shares no code with flatout. The recorder sums all events of torch's
allocator from the import of torch on (on CUDA it reads the allocator's statistics), and takes the peak over
three optimizer cycles after the first two. Error: predicted over measured, minus 1. Goal: at most 10 % at
both sizes, on at least eight programs.

With DIR (as for bench/open_set.py), it also runs unmodified public training scripts: `flatout memory --sizes
96`, which shows its own measurement of real steps. With --device cuda, the programs train on a GPU, and the
statistics of its allocator are the reference: *not run* yet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pairs import standing_in
from provenance import HERE, RESULTS, markdown_table, read_result, stamp, write_result

from flatout.render.formatting import size as spelled
from flatout.schema.batch import MemoryForecast

PROGRAM = str(HERE / "programs" / "memory_cases.py")
RECORDER = str(HERE / "allocation_recorder.py")
# case -> a batch size that differs from its own
CASES = {
    "mlp": 1024,
    "vae": 1000,
    "embedding": 4096,
    "lstm": 40,
    "gan": 128,
    "gpt": 32,
    "gpt bf16": 32,
    "gpt accumulate": 16,
    "vit": 48,
    "unet": 16,
    "resnet18 sgd": 40,
    "resnet18 adamw": 40,
    "resnet50 sgd": 24,
    "resnet50 adamw": 24,
}
GOAL, PROGRAMS_OF_THE_GOAL = 0.1, 8
CYCLES, LIMIT_S = 3, 600
PUBLIC_SIZE = 96


def predicted(words: list[str], *options: str) -> tuple[MemoryForecast | None, str]:
    """Returns the record of `flatout memory` in a separate process, or its error message."""
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        command = [sys.executable, "-m", "flatout", "memory", "--json", "--job", folder, *options, *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT_S)
        except subprocess.TimeoutExpired:
            return None, f"no result within {2 * LIMIT_S} s"
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("flatout: ")]
        return None, said[-1].removeprefix("flatout: ") if said else f"exit code {done.returncode}"
    return MemoryForecast.from_json(json.loads(done.stdout)), ""


def measured(case: str, size: int | None, device: str) -> tuple[int | None, str]:
    """Returns the bytes at the peak of really running the program."""
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        out = Path(folder) / "peak.json"
        words = [
            sys.executable,
            RECORDER,
            str(out),
            str(CYCLES),
            PROGRAM,
            case,
            "--device",
            device,
            *(["--batch-size", str(size)] if size else []),
        ]
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
        if not out.is_file():
            return None, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return int(json.loads(out.read_text(encoding="utf-8"))["peak_bytes"]), ""


def judged(case: str, device: str) -> list[dict[str, Any]]:
    """Returns a row for the program's own batch size, and one for another."""
    record, why_not = predicted(
        [sys.executable, PROGRAM, case, "--device", device], "--no-measure", "--sizes", str(CASES[case])
    )
    rows: list[dict[str, Any]] = []
    for own in (True, False):
        point = record and next(
            (
                p
                for p in record.points
                if (p.batch_size == record.own_size) == own and (own or p.batch_size == CASES[case])
            ),
            None,
        )
        row: dict[str, Any] = {"case": case, "own": own, "measured_bytes": None, "error": None}
        row |= (
            {"batch_size": None, "predicted_bytes": None, "kinds": {}, "why_not": why_not}
            if point is None
            else {
                "batch_size": point.batch_size,
                "predicted_bytes": point.peak_bytes,
                "kinds": point.kinds,
                "why_not": point.why_not,
            }
        )
        if point and point.peak_bytes:
            row["measured_bytes"], row["why_not"] = measured(case, None if own else CASES[case], device)
            row["error"] = point.peak_bytes / row["measured_bytes"] - 1 if row["measured_bytes"] else None
        rows.append(row)
    return rows


def public(script: dict[str, Any], home: Path, measure: bool) -> dict[str, Any]:
    """Predicts a public script's memory as a user would, at its own batch size and at PUBLIC_SIZE."""
    with standing_in(home / script["cwd"], script.get("env")):
        record, why_not = predicted(
            script["argv"],
            "--sizes",
            str(PUBLIC_SIZE),
            "--budget",
            "2m",
            *([] if measure else ["--no-measure"]),
        )
    if record is None:
        return {"name": script["name"], "why_not": why_not, "points": []}
    points = [{**point.to_json(), "error": point.error} for point in record.points]
    return {
        "name": script["name"],
        "why_not": "",
        "own": record.own_size,
        "points": points,
        "notes": record.notes,
    }


def met(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the programs with every row within the goal."""
    return [
        case
        for case in CASES
        if (own := [row for row in rows if row["case"] == case])
        and all(row["error"] is not None and abs(row["error"]) <= GOAL for row in own)
    ]


def page(rows: list[dict[str, Any]], scripts: list[dict[str, Any]]) -> str:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    worst = max(
        (row for row in rows if row["error"] is not None), key=lambda row: abs(row["error"]), default=None
    )
    said = f"{len(met(rows))} of {len(cases)} programs within {GOAL:.0%} at both batch sizes"
    said += (
        f"; the largest error is {worst['error']:+.1%} ({worst['case']}, {worst['batch_size']} samples)"
        if worst
        else ""
    )
    table = markdown_table(
        ("program", "samples a batch", "predicted", "measured", "error", "at the predicted peak"),
        [
            (
                row["case"],
                f"{row['batch_size']}{' (its own)' if row['own'] else ''}",
                spelled(row["predicted_bytes"]),
                spelled(row["measured_bytes"]),
                row["why_not"] if row["error"] is None else f"{row['error']:+.2%}",
                parts(row["kinds"]),
            )
            for row in rows
        ],
    )
    text = f"# The predicted memory of a step\n\n{__doc__.split(chr(10), 2)[2].strip()}\n\n**{said}.**\n\n{table}"
    return (
        text if not scripts else f"{text}\n\n## Unmodified public training scripts\n\n{public_table(scripts)}"
    )


def parts(kinds: dict[str, int]) -> str:
    largest = sorted(kinds.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {spelled(size)}" for name, size in largest)


def public_table(scripts: list[dict[str, Any]]) -> str:
    rows = []
    for script in scripts:
        if script["why_not"]:
            rows.append((script["name"], "-", "-", "-", "-", script["why_not"]))
        for point in script["points"]:
            size = (
                "unchanged"
                if point["batch_size"] is None
                else f"{point['batch_size']}{' (its own)' if point['batch_size'] == script['own'] else ''}"
            )
            error = "-" if point["error"] is None else f"{point['error']:+.2%}"
            rows.append(
                (
                    script["name"],
                    size,
                    spelled(point["peak_bytes"]),
                    spelled(point["measured_bytes"]),
                    error,
                    point["why_not"] or point["measured_why_not"] or parts(point["kinds"]),
                )
            )
    return markdown_table(
        (
            "script",
            "samples a batch",
            "predicted",
            "measured by flatout",
            "error",
            "at the predicted peak, or the error",
        ),
        rows,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "dir",
        type=Path,
        nargs="?",
        metavar="DIR",
        help="folder that holds set.json: also measure these public scripts",
    )
    parser.add_argument("--only", action="append", help="run only this program or public script; repeatable")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--no-measure", action="store_true", help="only predict public scripts, for those with slow steps"
    )
    parser.add_argument("--again", action="store_true", help="measure again what is measured already")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # hides the profiler's warning about the missing GPU
    made = stamp()
    before = read_result("memory_prediction", made, args.out)
    rows: list[dict[str, Any]] = before.get("rows", [])
    scripts: list[dict[str, Any]] = before.get("scripts", [])

    def write() -> None:
        rows.sort(key=lambda row: (list(CASES).index(row["case"]), not row["own"]))
        write_result(
            "memory_prediction",
            made,
            page(rows, scripts),
            {"goal": GOAL, "rows": rows, "scripts": scripts},
            folder=args.out,
        )

    for case in CASES:
        if (args.only and case not in args.only) or (
            any(row["case"] == case for row in rows) and not args.again
        ):
            continue
        found = judged(case, args.device)
        rows[:] = [row for row in rows if row["case"] != case] + found
        metadata = [row["why_not"] if row["error"] is None else f"{row['error']:+.2%}" for row in found]
        print(f"{case}: {'; '.join(metadata)}", flush=True)
        write()
    public_scripts = json.loads((args.dir / "set.json").read_text(encoding="utf-8")) if args.dir else []
    for script in public_scripts:
        if (args.only and script["name"] not in args.only) or (
            any(each["name"] == script["name"] for each in scripts) and not args.again
        ):
            continue
        scripts[:] = [each for each in scripts if each["name"] != script["name"]] + [
            public(script, args.dir.resolve(), not args.no_measure)
        ]
        metadata = [
            point["why_not"] if point["error"] is None else f"{point['error']:+.2%}"
            for point in scripts[-1]["points"]
        ]
        print(f"{script['name']}: {scripts[-1]['why_not'] or '; '.join(metadata)}", flush=True)
        write()
    return 0 if len(met(rows)) >= min(PROGRAMS_OF_THE_GOAL, len({row["case"] for row in rows})) else 1


if __name__ == "__main__":
    sys.exit(main())

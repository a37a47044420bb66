"""What a change of environment does to public scripts: `flatout compare` under two Pythons on each of them.

DIR holds ``set.json`` as open_set.py reads it. Both Pythons must have torch and what the scripts import.

    python bench/compare_environments.py DIR --python OLD/bin/python,NEW/bin/python --only word_lm,nanogpt
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

from pairs import standing_in
from provenance import RESULTS, markdown_table, read_result, stamp, write_result
from rivals import RowFailed, change, compare, environment_of

THEME = "compare_environments"


def measure(script: dict[str, Any], home: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the published part of the comparison, or why there is none."""
    with (
        tempfile.TemporaryDirectory(prefix="compare-") as job,
        standing_in(home / script["cwd"], environment_of(script)),
    ):
        try:
            words = script["argv"][1:] if script["argv"][0] == "python" else script["argv"]
            both = [shlex.join([python, *words]) for python in args.python.split(",")]
            return compare(both, Path(job), args)
        except RowFailed as failed:
            return {"failed": str(failed)}


def page(rows: dict[str, dict[str, Any]]) -> str:
    table = []
    for name, row in rows.items():
        if "failed" in row:
            table.append([name, f"failed: {row['failed']}", *[""] * 6])
            continue
        a, b = row["a"], row["b"]
        table.append(
            [
                name,
                f"{a['versions']['torch']} / {b['versions']['torch']}",
                f"{a['step_ms']:.4g} / {b['step_ms']:.4g} ms",
                change(row["step_time"]),
                change(row["start"]),
                change(row["memory"]),
                f"{row['losses']['verdict']}: {row['losses']['why']}",
                f"{row['seconds']:.0f} s" + "".join(f"; {note}" for note in row["notes"]),
            ]
        )
    header = [
        "script",
        "torch, A / B",
        "step",
        "step time",
        "start-up",
        "peak memory",
        "losses",
        "time; notes",
    ]
    return "\n".join(
        [
            "# Two environments, public scripts",
            "",
            "`flatout compare 'A/python SCRIPT' 'B/python SCRIPT'`: pairs of fresh processes with the same seed whose blocks alternate. Changes are",
            "B's figure over A's, with 95 % intervals. The peak memory of a process contains the libraries that torch loads.",
            "",
            markdown_table(header, table),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="the folder that holds set.json")
    parser.add_argument("--python", required=True, metavar="A,B", help="the Pythons of both environments")
    parser.add_argument("--only", required=True, help="names of scripts in set.json, separated by commas")
    parser.add_argument("--pairs", type=int, default=6, help="fewest pairs of processes (default 6)")
    parser.add_argument("--budget", default="3m", help="time for the pairs of a script (default 3m)")
    parser.add_argument("--again", action="store_true", help="measure again what is measured already")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    home = args.dir.resolve()
    scripts = {each["name"]: each for each in json.loads((home / "set.json").read_text(encoding="utf-8"))}
    if unknown := [name for name in args.only.split(",") if name not in scripts]:
        parser.error(f"set.json has no {', '.join(unknown)}")
    made = stamp()
    rows = read_result(THEME, made, args.out).get("rows", {})
    hidden = {
        str(home): "SET",
        **dict(zip(args.python.split(","), ("A/bin/python", "B/bin/python"), strict=True)),
    }
    for name in args.only.split(","):
        if name in rows and "failed" not in rows[name] and not args.again:
            continue
        print(f"{name} ...", flush=True)
        rows[name] = measure(scripts[name], home, args)
        write_result(THEME, made, page(rows), {"rows": rows}, hidden, args.out)
    print(page(rows))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()

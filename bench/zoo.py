"""Tests whether diagnosis finds the fault in a zoo of small programs with one planted fault each.

    python bench/zoo.py                      every program and its fixed version, by `flatout check` and
                                             `flatout profile`
    python bench/zoo.py --only leak,float64  only these
    python bench/zoo.py --show float64       print the two texts of one program

A file in bench/zoo contains both versions of a program: a line that ends in ``# ill`` is only in the faulty
one, ``# well`` only in the fixed one. ``# ill!``, and ``# both!`` for a line of both, mark an acceptable line
for the finding. The docstring states the fault and the rules that may report it. The judged programs do not
contain these comments.

A fault counts as named if it is the first finding of either command, with one of its lines. Any finding on a
fixed version is a false alarm.
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

from provenance import RESULTS, look, markdown_table, read_result, stamp, write_result
from specimens import ZOO, Specimen, read_specimen

LIMIT_S = 300


def findings_of(command: list[str], folder: Path) -> tuple[list[dict[str, Any]] | None, str]:
    """Returns the findings that a command gives as JSON, or the failure."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY")
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "flatout", *command],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return None, f"not finished after {LIMIT_S} s"
    try:
        said = json.loads(done.stdout)
    except ValueError:
        return None, (done.stderr.strip() or f"exit code {done.returncode}")[-400:]
    return list(said["findings"]), ""


def judged(text: str, steps: int, budget: str) -> dict[str, Any]:
    """Returns the findings of both commands on one program."""
    with tempfile.TemporaryDirectory(prefix="zoo-") as home:
        folder = Path(home)
        (folder / "train.py").write_text(text, encoding="utf-8")
        found = {}
        for name, command in (
            ("check", ["check", "--json", "--budget", "15s", "python", "train.py"]),
            (
                "profile",
                ["profile", "--json", "--steps", str(steps), "--budget", budget, "python", "train.py"],
            ),
        ):
            findings, why = findings_of(command, folder)
            found[name] = {"findings": None if findings is None else [brief(f) for f in findings], "why": why}
        return found


def brief(finding: dict[str, Any]) -> dict[str, Any]:
    place = finding.get("place") or {}
    lines = [place.get("line"), *(other.get("line") for other in finding.get("others") or ())]
    return {
        "rule": finding["rule"],
        "name": finding["name"],
        "severity": finding["severity"],
        "said": finding["message"],
        "fix": finding["fix"],
        "line": place.get("line"),
        "lines": [line for line in lines if line],
        "predicted": (finding.get("predicted") or {}).get("median"),
    }


def verdict(specimen: Specimen, found: dict[str, Any]) -> dict[str, str]:
    """Returns the result of each command on the ill program: first with its line, first, named, or silent."""
    said = {}
    for command, answer in found.items():
        findings = answer["findings"]
        ranks = [at for at, f in enumerate(findings or ()) if f["rule"] in specimen.codes]
        if findings is None:
            said[command] = "failed"
        elif not ranks:
            said[command] = "silent" if not findings else f"{findings[0]['rule']} instead"
        elif ranks[0] > 0:
            said[command] = f"named, after {findings[0]['rule']}"
        else:
            said[command] = (
                "first" if findings[0]["line"] in specimen.lines else f"first, line {findings[0]['line']}"
            )
    return said


def page(programs: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, entry in programs.items():
        false = [
            f"{command} {f['rule']} {f['name']} (line {f['line']}): {f['said']}"
            for command, answer in entry["well"].items()
            for f in answer["findings"] or ()
        ]
        broken = [command for command, answer in entry["well"].items() if answer["findings"] is None]
        named = next(
            (
                f["rule"]
                for command in ("profile", "check")
                if entry["verdict"][command] == "first"
                for f in entry["ill"][command]["findings"][:1]
            ),
            "",
        )
        rows.append(
            (
                name,
                entry["fault"],
                entry["verdict"]["check"],
                entry["verdict"]["profile"],
                named,
                "yes" if named else "**no**",
                "; ".join(false) or ("none" if not broken else f"{', '.join(broken)} failed"),
                entry["flatout"],
            )
        )
    total = len(programs)
    first = sum(row[5] == "yes" for row in rows)
    false_alarms = sum(
        any(answer["findings"] for answer in entry["well"].values()) for entry in programs.values()
    )
    return "\n".join(
        [
            "# Small programs with one planted fault each\n",
            "Named: the first finding of `flatout check` or of `flatout profile` is the planted fault, with one of its lines. False alarm: any finding on the\n"
            "fixed version, which is the same program without the fault. The programs are in [bench/zoo](../zoo). The authors wrote the rules and chose their\n"
            "thresholds with these programs at hand; bench/reports.py tests how `check` performs on other programs.\n",
            f"Named first with the right line: {first} of {total} ({100 * first / max(1, total):.0f} %). "
            f"Fixed versions with a false alarm: {false_alarms} of {total} ({100 * false_alarms / max(1, total):.0f} %).\n",
            markdown_table(
                (
                    "program",
                    "planted fault",
                    "check",
                    "profile",
                    "rule",
                    "named",
                    "on the fixed version",
                    "flatout",
                ),
                rows,
            ),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="only these programs, separated by commas")
    parser.add_argument("--show", metavar="NAME", help="print the two texts of one program and exit")
    parser.add_argument("--steps", type=int, default=40, help="undisturbed steps of a profile (default 40)")
    parser.add_argument("--budget", default="40s", help="time budget of a profile (default 40s)")
    parser.add_argument("--again", action="store_true", help="measure again what is measured already")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="write the results to this folder instead of bench/results"
    )
    args = parser.parse_args()
    zoo = {path.stem: read_specimen(path) for path in sorted(ZOO.glob("*.py"))}
    asked = [word for word in (args.show or args.only).split(",") if word]
    if unknown := set(asked) - set(zoo):
        parser.error(f"the zoo has no {', '.join(sorted(unknown))}; choose from {', '.join(zoo)}")
    if args.show:
        specimen = zoo[args.show]
        print(
            f"# ill: {specimen.fault}; lines {sorted(specimen.lines)}\n{specimen.ill}\n# well\n{specimen.well}"
        )
        return
    made = stamp(look())
    done: dict[str, dict[str, Any]] = read_result("zoo", made, args.out).get("programs", {})
    for name, specimen in zoo.items():
        if (asked and name not in asked) or (name in done and not args.again):
            continue
        found = {
            kind: judged(text, args.steps, args.budget)
            for kind, text in (("ill", specimen.ill), ("well", specimen.well))
        }
        done[name] = {
            "flatout": made["versions"]["flatout"],
            "fault": specimen.fault,
            "codes": list(specimen.codes),
            "lines": sorted(specimen.lines),
            **found,
            "verdict": verdict(specimen, found["ill"]),
        }
        false = [f["rule"] for answer in found["well"].values() for f in answer["findings"] or ()]
        print(
            f"{name}: check {done[name]['verdict']['check']}; profile {done[name]['verdict']['profile']}; "
            f"fixed version {', '.join(false) or 'no finding'}",
            flush=True,
        )
        done = {known: done[known] for known in zoo if known in done}
        write_result("zoo", made, page(done), {"programs": done}, folder=args.out)
    if done:
        print(f"\n{page(done)}")


if __name__ == "__main__":
    main()

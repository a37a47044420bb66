"""Tests whether diagnosis names mistakes from public reports: issues, forum threads, pull requests.

    DATA=DIR python bench/reports.py                       every program, about two hours
    DATA=DIR python bench/reports.py --only second         a set, or single programs

DIR holds the data that five programs read: mnist, as torchvision lays it out, and tinyshakespeare/input.txt.

A folder of bench/reports is a set. Each file holds a small program with the mistake of one report, and its fixed version (see
zoo.py for the marks of lines). Its docstring states the mistake, the link, and a pattern of what a true message says.
The programs were written without knowledge of the rules. `flatout check` runs each program; `flatout profile`, too, where
the report is about speed or memory. *First*: the first finding of a command has the right line and says it. *Named*: a
later one does. Findings on the fixed version are alarms. first_looks.json keeps what each set gave before any rule was
changed for it.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from provenance import HERE, markdown_table, read_result, some_or_all, stamp, write_result
from specimens import Specimen, read_specimen
from zoo import brief, findings_of

THEME, FOLDER = "reports", HERE / "reports"
COMMANDS = {
    "check": ["check", "--json", "python", "train.py"],
    "profile": ["profile", "--json", "python", "train.py"],
}


def judged(specimen: Specimen, text: str, command: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="report-") as folder:
        (Path(folder) / "train.py").write_text(text, encoding="utf-8")
        findings, why = findings_of(COMMANDS[command], Path(folder))
    findings = [brief(finding) for finding in findings or ()]
    right = [
        number
        for number, finding in enumerate(findings)
        if specimen.lines & set(finding["lines"])
        and (
            finding["rule"] in specimen.codes
            if specimen.codes
            else re.search(
                specimen.says, f"{finding['name'].replace('_', ' ')}: {finding['said']} {finding['fix']}"
            )
        )
    ]
    rank = "failed" if why else "no" if not right else "first" if right[0] == 0 else "named"
    return {"rank": rank, "findings": findings, "why": why}


def measured(path: Path) -> dict[str, Any]:
    specimen = read_specimen(path)
    commands = ["check", "profile"] if specimen.kind == "performance" else ["check"]
    row: dict[str, Any] = {
        "name": path.stem,
        "set": path.parent.name,
        "fault": specimen.fault,
        "link": specimen.link,
    }
    for command in commands:
        row[command] = {
            "ill": judged(specimen, specimen.ill, command),
            "well": judged(specimen, specimen.well, command),
        }
    print(row["set"], row["name"], {command: row[command]["ill"]["rank"] for command in commands}, flush=True)
    return row


def ranks(row: dict[str, Any]) -> list[str]:
    return [row[command]["ill"]["rank"] for command in COMMANDS if command in row]


def page(rows: Sequence[dict[str, Any]], first_looks: dict[str, str]) -> str:
    parts = ["# Mistakes from public reports\n"]
    for name in sorted({row["set"] for row in rows}):
        own = [row for row in rows if row["set"] == name]
        first = sum("first" in ranks(row) for row in own)
        named = first + sum("named" in ranks(row) and "first" not in ranks(row) for row in own)
        wrong = sum(
            finding["severity"] == "wrong result"
            for row in own
            for command in COMMANDS
            if command in row
            for finding in row[command]["well"]["findings"]
        )
        parts.append(
            f"## {name}\n\nNamed: {named} of {len(own)}, first: {first}. Findings of level *wrong* on the fixed versions: {wrong}. "
            f"{first_looks.get(name, '')}\n"
        )
        table = [
            (
                f"[{row['name']}]({row['link']})",
                row["fault"],
                *(row[command]["ill"]["rank"] if command in row else "" for command in COMMANDS),
                "; ".join(
                    f"{finding['rule']} (line {finding['line']})"
                    for command in COMMANDS
                    if command in row
                    for finding in row[command]["well"]["findings"]
                ),
            )
            for row in own
        ]
        parts.append(
            markdown_table(("report", "mistake", *COMMANDS, "findings on the fixed version"), table) + "\n"
        )
    return "\n".join(parts)


def main() -> None:
    options = some_or_all(__doc__, "sets or programs")
    made = stamp()
    first_looks = json.loads((FOLDER / "first_looks.json").read_text(encoding="utf-8"))
    done = {(row["set"], row["name"]): row for row in read_result(THEME, made, options.out).get("rows", ())}
    paths = [
        path
        for path in sorted(FOLDER.glob("*/*.py"))
        if not options.only or options.only & {path.stem, path.parent.name}
    ]
    for path in paths:
        row = measured(path)
        done[row["set"], row["name"]] = row
        rows = [done[key] for key in sorted(done)]
        write_result(THEME, made, page(rows, first_looks), {"made": made, "rows": rows}, {}, options.out)


if __name__ == "__main__":
    sys.exit(main())

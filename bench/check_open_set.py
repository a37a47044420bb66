"""Runs `flatout check` on public training scripts and rates each finding as a maintainer would.

    python bench/check_open_set.py DIR [--verdicts FILE]

DIR holds one folder for each repository in the verdict file; this repository keeps none of their code. Every
Python file and notebook below them is checked as a separate program, with the modules that it imports from
its folder. The same line counts once. FILE gives each repository's commit, and a verdict for each file and
rule: *true* (a maintainer would fix it), *opinion* (right, but they may leave it) or *false*. A finding
without a verdict is "not judged"; the page then says so, and the command exits with 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from provenance import HERE, markdown_table, stamp, write_result

from flatout.diagnose.check import check
from flatout.diagnose.rules import TABLE
from flatout.measure.clock import seconds
from flatout.probe.program import ScriptProgram
from flatout.probe.script import Unreadable
from flatout.schema.findings import Finding

VERDICTS = HERE / "check_open_set_verdicts.json"
KINDS = ("true", "opinion", "false", "not judged")


def alarms(folder: Path, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns every finding below one repository, once a line and rule, and the cost of reading it."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    files = sorted([*folder.rglob("*.py"), *folder.rglob("*.ipynb")])
    unread, began = [], seconds()
    for file in files:
        try:
            program = ScriptProgram.read(file)
        except Unreadable as error:
            unread.append(str(error).replace(str(folder), name))
            continue
        for finding in check(program):
            alarm = _alarm(finding, folder, name)
            found.setdefault((alarm["script"], alarm["code"], alarm["line"]), alarm)
    return sorted(found.values(), key=lambda alarm: (alarm["script"], alarm["line"], alarm["code"])), {
        "repository": name,
        "files": len(files),
        "unread": unread,
        "seconds": round(seconds() - began, 1),
    }


def _alarm(finding: Finding, folder: Path, name: str) -> dict[str, Any]:
    place = finding.place
    assert place is not None
    return {
        "script": f"{name}/{Path(place.file).relative_to(folder).as_posix()}",
        "line": place.line,
        "code": finding.rule,
        "said": finding.message,
    }


def judge(found: list[dict[str, Any]], verdicts: list[dict[str, Any]]) -> None:
    """Adds the verdict and its reason to each finding.

    A verdict with lines applies to these lines, a verdict without lines to the whole file.
    """
    table = {
        (verdict["script"], verdict["code"], line): verdict
        for verdict in verdicts
        for line in verdict.get("lines", [0])
    }
    for alarm in found:
        key = alarm["script"].partition("[")[0], alarm["code"]
        verdict = table.get((*key, alarm["line"])) or table.get((*key, 0)) or {}
        alarm["verdict"], alarm["why"] = verdict.get("verdict", "not judged"), verdict.get("why", "")


def page(found: list[dict[str, Any]], read: list[dict[str, Any]], known: dict[str, Any]) -> str:
    ten = [alarm for alarm in found if alarm["script"] in known["ten"]]
    others = [alarm for alarm in found if alarm["script"] not in known["ten"]]
    lines = [
        "# `flatout check` on public scripts",
        "",
        __doc__.split("\n\n")[2].replace("\n", " "),
        "",
        "The scripts are read, never run: no figure depends on the machine. The authors of the rules judged each finding by hand.",
        "",
        markdown_table(
            ("repository", "commit", "files", "alarms"),
            [
                (
                    f"`{each['repository']}`",
                    known["repositories"][each["repository"]],
                    each["files"],
                    sum(alarm["script"].startswith(each["repository"] + "/") for alarm in found),
                )
                for each in read
            ],
        ),
        "",
    ]
    if known.get("first_looks"):
        lines += [
            "## Programs not used while writing the rules",
            "",
            "The authors developed the rules on test pages and corrected them on the first eleven repositories. They then checked these two sets "
            "once, before any change because of them. The tables below show the current findings.",
            "",
            markdown_table(
                ("repositories", "files", "alarms", "false", "which"),
                [tuple(look.values()) for look in known["first_looks"]],
            ),
            "",
        ]
    for heading, alarms_there in (("The ten scripts of the open set", ten), ("All others", others)):
        counts = Counter(alarm["verdict"] for alarm in alarms_there)
        metadata = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind] or kind == "false")
        lines += [f"## {heading}", "", f"{len(alarms_there)} findings: {metadata}.", ""]
        rows: dict[tuple[str, str, str, str], list[int]] = {}
        for alarm in alarms_there:
            rows.setdefault((alarm["script"], alarm["code"], alarm["verdict"], alarm["why"]), []).append(
                alarm["line"]
            )
        lines += [
            markdown_table(
                ("script", "lines", "rule", "verdict", "why"),
                [
                    (script, ", ".join(map(str, at)), code, verdict, why)
                    for (script, code, verdict, why), at in rows.items()
                ],
            ),
            "",
        ]
    titles = {rule.code: rule.title for rule in TABLE}
    by_rule = Counter((alarm["code"], alarm["verdict"]) for alarm in found)
    lines += [
        "## By rule",
        "",
        markdown_table(
            ("rule", "what", *KINDS),
            [
                (code, titles[code], *(by_rule[code, kind] for kind in KINDS))
                for code in sorted({code for code, _ in by_rule})
            ],
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--verdicts", type=Path, default=VERDICTS)
    parser.add_argument(
        "--show", action="store_true", help="print the findings without a verdict, and write nothing"
    )
    given = parser.parse_args()
    known = json.loads(given.verdicts.read_text(encoding="utf-8"))
    found, read = [], []
    for name in known["repositories"]:
        if not (given.folder / name).is_dir():
            sys.exit(f"the verdict file expects a folder {name} in {given.folder}, which does not exist")
        alarms_there, about = alarms(given.folder / name, name)
        found += alarms_there
        read.append(about)
    judge(found, known["verdicts"])
    unjudged = [alarm for alarm in found if alarm["verdict"] == "not judged"]
    for alarm in unjudged:
        print(f"not judged: {alarm['script']}:{alarm['line']} {alarm['code']} {alarm['said']}")
    if not given.show:
        write_result("check_open_set", stamp(), page(found, read, known), {"read": read, "alarms": found})
    return bool(unjudged)


if __name__ == "__main__":
    sys.exit(main())

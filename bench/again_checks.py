"""Measures whether each check of exact resume matters: disables it, then kills and restarts a program.

The checks and the code that disables them are in ``bench/again_mutants.py``, the programs in
``tests/resume/traps.py`` and ``bench/more_traps.py``. With the check, each program must be rejected or end correctly. Without it, at
least one program must resume WRONG: it ends differently from an undisturbed run, without an error. Where
another check nearly always reports first, both cases run without that other check.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from again_mutants import CHECKS, Check
from more_traps import TRAPS
from provenance import ROOT, markdown_table, read_result, some_or_all, stamp, write_result

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "resume"))
from interrupted import Programs, live

SAFE, SEEN = ("refused", "right"), ("WRONG", "crashed")


def lived(programs: Programs, name: str, off: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="checks-") as place:
        found = live(programs, Path(place), TRAPS[name], off=off)
    return {"verdict": found.verdict, "why": found.why}


def measured(programs: Programs, name: str, check: Check) -> dict[str, Any]:
    off = ",".join(filter(None, (check.beside, name)))
    traps = [
        {"trap": trap, "on": lived(programs, trap, check.beside), "off": lived(programs, trap, off)}
        for trap in check.traps
    ]
    seen = any(trap["on"]["verdict"] in SAFE and trap["off"]["verdict"] in SEEN for trap in traps)
    for trap in traps:
        print(
            f"  {name}, {trap['trap']}: on {trap['on']['verdict']} ({short(trap['on'])}), off {trap['off']['verdict']} ({short(trap['off'])})",
            flush=True,
        )
    return {
        "name": name,
        "what": check.what,
        "module": check.module,
        "words": list(check.words),
        "beside": check.beside,
        "why": check.why,
        "traps": traps,
        "matters": seen,
    }


def short(verdict: dict[str, str]) -> str:
    return verdict["why"].partition(". `flatout")[0].partition(". The next start begins")[0]


def page(rows: list[dict[str, Any]]) -> str:
    seen = [row for row in rows if row["matters"]]
    table = markdown_table(
        ("check", "program", "with it", "without it"),
        [
            (
                row["what"] + (f" (without the check `{row['beside']}`, too)" if row["beside"] else ""),
                trap["trap"].replace("_", " "),
                short(trap["on"]),
                spelled(trap["off"]),
            )
            for row in rows
            for trap in row["traps"]
        ],
    )
    parts = [
        "# Checks of exact resume, each disabled\n",
        f"{len(rows)} checks, each disabled by itself. Disabling {len(seen)} of them makes a program resume WRONG that was rejected or right before: "
        f"it ends differently from an undisturbed run, without an error.\n",
        table,
    ]
    rest = [row for row in rows if not row["matters"]]
    if rest:
        parts.append(
            "\n## Checks without a wrong result when disabled\n\n"
            + "\n".join(f"- {row['what']}: {row['why'] or 'no reason known'}" for row in rest)
        )
    parts.append(
        "\n## How each check is disabled\n\n"
        + markdown_table(
            ("check", "module", "code", "replaced by"),
            [(row["name"], row["module"], *row["words"]) for row in rows],
        )
    )
    return "\n".join(parts)


def spelled(found: dict[str, str]) -> str:
    verdict = "**WRONG**" if found["verdict"] == "WRONG" else found["verdict"]
    return f"{verdict}: {short(found)}" if found["why"] else verdict


def main() -> None:
    args, made = some_or_all(__doc__, "checks"), stamp()
    known = {row["name"]: row for row in read_result("again_checks", made, args.out).get("checks", ())}
    programs = Programs()
    for name, check in CHECKS.items():
        if not args.only or name in args.only:
            known[name] = measured(programs, name, check)
    rows = [known[name] for name in CHECKS if name in known]
    write_result("again_checks", made, page(rows), {"checks": rows}, folder=args.out)
    unseen = [row["name"] for row in rows if not row["matters"] and not row["why"]]
    if unseen:
        raise SystemExit(
            f"again_checks: no program goes wrong without these checks, and no reason is recorded: {', '.join(unseen)}"
        )


if __name__ == "__main__":
    main()

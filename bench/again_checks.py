"""Does each check of exact resume matter? Each is switched off, and a program that it had refused is killed and typed again.

Checks and what switches them off are in ``tests/replay/mutants.py``, the programs in ``tests/replay/traps.py``. With the check each must be refused, or end
right; without it one of them must go on WRONG, that is, end otherwise than undisturbed without a word. Where another check nearly always comes first, that one
is off in both cases.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from provenance import ROOT, markdown_table, read_result, some_or_all, stamp, write_result

sys.path.insert(0, str(ROOT / "tests" / "replay"))
from interrupted import Programs, live
from mutants import CHECKS, Check
from traps import TRAPS

SAFE, SEEN = ("refused", "right"), ("WRONG", "crashed")


def lived(programs: Programs, name: str, off: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="checks-") as place:
        found = live(programs, Path(place), TRAPS[name], off=off)
    return {"verdict": found.verdict, "why": found.why}


def measured(programs: Programs, name: str, check: Check) -> dict[str, Any]:
    off = ",".join(filter(None, (check.beside, name)))
    traps = [{"trap": trap, "on": lived(programs, trap, check.beside), "off": lived(programs, trap, off)} for trap in check.traps]
    seen = any(trap["on"]["verdict"] in SAFE and trap["off"]["verdict"] in SEEN for trap in traps)
    for trap in traps:
        print(f"  {name}, {trap['trap']}: on {trap['on']['verdict']} ({short(trap['on'])}), off {trap['off']['verdict']} ({short(trap['off'])})", flush=True)
    return {"name": name, "what": check.what, "module": check.module, "words": list(check.words), "beside": check.beside, "why": check.why,
            "traps": traps, "matters": seen}


def short(told: dict[str, str]) -> str:
    return told["why"].partition(". `flatout")[0].partition(". It begins")[0]


def page(rows: list[dict[str, Any]]) -> str:
    seen = [row for row in rows if row["matters"]]
    table = markdown_table(("check", "program", "with it", "without it"), [
        (row["what"] + (f" (without the check `{row['beside']}`, too)" if row["beside"] else ""), trap["trap"].replace("_", " "), told(trap["on"]),
         told(trap["off"])) for row in rows for trap in row["traps"]])
    parts = ["# Checks of exact resume, switched off\n",
             f"{len(rows)} checks, each switched off by itself. Without {len(seen)} of them a program goes on WRONG that was refused, or right, with it: it "
             f"ends otherwise than undisturbed, without a word.\n", table]
    rest = [row for row in rows if not row["matters"]]
    if rest:
        parts.append("\n## Without which no program was seen to go on wrongly\n\n" + "\n".join(f"- {row['what']}: {row['why'] or 'no reason known'}"
                                                                                              for row in rest))
    parts.append("\n## How each is switched off\n\n" + markdown_table(("check", "module", "words", "become"), [
        (row["name"], row["module"], *row["words"]) for row in rows]))
    return "\n".join(parts)


def told(found: dict[str, str]) -> str:
    verdict = "**WRONG**" if found["verdict"] == "WRONG" else found["verdict"]
    return f"{verdict}: {short(found)}" if found["why"] else verdict


def main() -> None:
    args, made = some_or_all(__doc__, "checks"), stamp()
    known = {row["name"]: row for row in read_result("again_checks", made, args.out).get("checks", ())}
    programs = Programs()
    try:
        for name, check in CHECKS.items():
            if not args.only or name in args.only:
                known[name] = measured(programs, name, check)
    finally:
        programs.close()
    rows = [known[name] for name in CHECKS if name in known]
    write_result("again_checks", made, page(rows), {"checks": rows}, folder=args.out)
    unseen = [row["name"] for row in rows if not row["matters"] and not row["why"]]
    if unseen:
        raise SystemExit(f"again_checks: not seen to matter, and nobody knows why: {', '.join(unseen)}")


if __name__ == "__main__":
    main()

"""Kills small programs that exact resume could get wrong under `flatout run --resume`, and restarts them.

Each program of ``tests/resume/traps.py`` and ``bench/more_traps.py`` does one thing that a replay might miss. The test suite runs some of
them; this bench runs all. A program may end as without interruption, be rejected with an error, or start from
scratch where exact resume is impossible; any other end is WRONG. Some programs are killed twice. Some also
run in a separate process instead of a fork of a process that has imported torch.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from more_traps import TRAPS  # type: ignore[attr-defined]  # which has them of tests/resume
from provenance import ROOT, markdown_table, read_result, some_or_all, stamp, write_result

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "resume"))
from interrupted import BEFORE_ITS_NEXT_SAVE, ONCE, TWICE, Programs, live
from traps import Trap  # type: ignore[attr-defined]  # of tests/resume

OF_ITS_OWN = ("accumulator_made_before", "replay_buffers", "own_generators")
OWN_PROCESS, EARLY = "in a process of its own", "killed twice, the second time before its next save"
KILLS = {"killed once": ONCE, "killed twice": TWICE, EARLY: BEFORE_ITS_NEXT_SAVE, OWN_PROCESS: ONCE}
SAFE = ("right", "refused", "from_scratch", "unkilled")
MEANS = {
    "right": "resumed exactly",
    "refused": "rejected with an error",
    "from_scratch": "started from scratch",
    "unkilled": "finished before the kill",
    "WRONG": "**WRONG**",
    "crashed": "**crashed**",
}


def lived(programs: Programs, name: str, trap: Trap, how: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="traps-") as place:
        found = live(
            programs, Path(place), trap.in_a_process_of_its_own if how == OWN_PROCESS else trap, KILLS[how]
        )
    print(f"  {name}, {how}: {found.verdict} {found.after or ''} {found.why}".rstrip(), flush=True)
    return {"name": name, "how": how, "verdict": found.verdict, "after": found.after, "why": found.why}


def lives_so(name: str, trap: Trap, how: str) -> bool:
    """Returns whether the program supports this kind of kill.

    Programs that change something between two runs need a checkpoint after step 10.
    """
    return name in OF_ITS_OWN if how == OWN_PROCESS else not (trap.between and how == EARLY)


def page(rows: list[dict[str, Any]]) -> str:
    count = Counter(row["verdict"] for row in rows)
    metadata = ", ".join(f"{number} {MEANS[verdict].strip('*')}" for verdict, number in count.most_common())
    wrong = sum(row["verdict"] not in SAFE for row in rows)
    table = markdown_table(
        ("program", "how", "it", "after step", "why"),
        [
            (
                row["name"].replace("_", " "),
                row["how"],
                MEANS[row["verdict"]],
                row["after"] or "-",
                row["why"],
            )
            for row in rows
        ],
    )
    return (
        f"# Programs that exact resume could get wrong\n\n{len({row['name'] for row in rows})} programs, {len(rows)} runs: {metadata}. "
        f"{wrong} ended differently from an undisturbed run without an error.\n\nEach is {STEPS_TOLD}.\n\n{table}"
    )


STEPS_TOLD = (
    "a training of 24 steps, with checkpoints after the first step and after step 10, killed after step 16 (if killed twice: checkpoints after 8 "
    "and 16, kills after 12 and 20; or a checkpoint after 8, kills after 12 and 14)"
)


def main() -> None:
    args, made = some_or_all(__doc__, "programs"), stamp()
    known = {(row["name"], row["how"]): row for row in read_result("traps", made, args.out).get("lives", ())}
    lives = [(name, how) for name, trap in TRAPS.items() for how in KILLS if lives_so(name, trap, how)]
    programs = Programs()
    for name, how in lives:
        if not args.only or name in args.only:
            known[name, how] = lived(programs, name, TRAPS[name], how)
    rows = [known[each] for each in lives if each in known]
    write_result("traps", made, page(rows), {"lives": rows}, folder=args.out)
    wrong = [f"{row['name']} ({row['how']})" for row in rows if row["verdict"] not in SAFE]
    if wrong:
        raise SystemExit(f"traps: not safe: {', '.join(wrong)}")


if __name__ == "__main__":
    main()

"""A program's undisturbed life, and one that is interrupted: killed in its middle under ``flatout run --resume``, and typed again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from traps import Trap

SITE = str(Path(__file__).parent / "site")
SAVE, KILL = 10, 16
COMMAND = ("run", "--plan", "none", "--resume", "python", "train.py")
GOES_ON, REFUSES = "flatout: going on exactly after step", "flatout: cannot go on exactly: "


@dataclass
class Lives:
    """``verdict``: right, refused, anew (there was nothing that could be gone on with), WRONG, crashed; ``why`` it is that."""

    verdict: str
    why: str = ""
    after: int = 0


def live(flatout, trap: Trap) -> Lives:
    lines = []
    if not trap.itself:
        undisturbed = flatout.folder.parent / "undisturbed"
        write(undisturbed, trap)
        done = flatout.plain("python", "train.py", cwd=undisturbed, env={"PYTHONHASHSEED": "0"})
        assert done.code == 0, done.err
        lines = done.out.splitlines()
        assert any(line.startswith("end") for line in lines)
    write(flatout.folder, trap)
    saves = {"PYTHONPATH": SITE, "TRAP_SAVE": str(SAVE)}
    killed = flatout(*COMMAND, env={**saves, "TRAP_KILL": str(KILL)})
    if killed.code != -9:
        same = killed.code == 0 and (trap.itself or killed.out.splitlines() == lines)
        return Lives("unkilled" if same else "crashed", f"it was not killed: {killed.code}, {last(killed.err)}")
    for name, text in trap.between.items():
        (flatout.folder / name).write_text(text)
    told = [json.loads(path.read_text())["told"] for path in sorted(flatout.folder.glob(".flatout/*/rescue/step-*/manifest.json"))]
    again = flatout(*COMMAND, env=saves)
    return judged(trap, lines, killed, again, [each.get("exact", "no exact part") for each in told])


def write(folder: Path, trap: Trap) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(trap.source)
    for name, text in trap.files.items():
        (folder / name).write_text(text)


def judged(trap: Trap, lines: list[str], killed, again, exact: list[str]) -> Lives:
    refused = [line for line in again.said if line.startswith(REFUSES)]
    if again.code == 10 and refused:
        return Lives("refused", refused[0].removeprefix(REFUSES))
    if again.code:
        return Lives("crashed", f"{again.code}: {last(again.err)}")
    after = [int(line.removeprefix(GOES_ON)) for line in again.said if line.startswith(GOES_ON)]
    told = again.out.splitlines()
    if trap.itself:
        why = strange(killed.out.splitlines(), told, after[0] if after else 0)
    else:
        why = "" if told and told == lines[-len(told):] else f"{told[-1:]} instead of {lines[-1:]}"
    if why:
        return Lives("WRONG", why, after[0] if after else 0)
    return Lives("right", "", after[0]) if after else Lives("anew", "; ".join(exact))


def strange(killed: list[str], told: list[str], after: int) -> str:
    """What the two lives say of themselves, where that does not fit together: what the first said at its beginning must be what the second says at its end, and
    the ways that it went must be the first ones of those that have led to the end."""
    if after == 0:
        killed = []
    began = [line.removeprefix("began ") for line in (*killed, *told) if line.startswith("began ")]
    ended = [line.removeprefix("end ") for line in told if line.startswith("end ")]
    if not ended or "False" in ended[-1]:
        return f"{told[-1:]}"
    if began and began[0] != ended[-1]:
        return f"began with {began[0]}, ended with {ended[-1]}"
    steps = [line for line in killed if line.startswith("step ")][:after] + [line for line in told if line.startswith("step ")]
    if steps:
        import hashlib

        if [int(line.split()[1]) for line in steps] != list(range(24)):
            return f"steps {steps}"
        ways = "[" + ", ".join(line.split()[2] for line in steps) + "]"
        if hashlib.sha256(ways.encode()).hexdigest()[:12] != ended[-1].split()[-1]:
            return f"the ways that it printed are not those that it knows: {ways}"
    return ""


def last(text: str) -> str:
    found = [line for line in text.splitlines() if line.strip()]
    return " | ".join(found[-6:])[:700]

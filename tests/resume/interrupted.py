"""The undisturbed run of a program, and interrupted runs: killed in the middle under ``flatout run --resume``
and started again.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from limits import hang_s
from traps import STEPS
from warm import start_program

HERE = Path(__file__).parent
SITE = str(HERE / "site")
# For each run that is ended early: the step after which it saves, and the step after which it is killed.
ONCE, TWICE, BEFORE_ITS_NEXT_SAVE = ((10, 16),), ((8, 12), (16, 20)), ((8, 12), (99, 14))
COMMAND = ("run", "--plan", "none", "--resume", "python", "train.py")
GOES_ON, REFUSES = "flatout: resumed exactly after step", "flatout: cannot resume exactly: "
REFUSED = 10
LIMIT_S = 90


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def said(self):
        return [line for line in self.err.splitlines() if line.startswith("flatout: ")]


class Programs:
    """Runs programs; where that can be, as forks of a process that has imported torch, because that takes seconds."""

    def __call__(self, folder, argv, more, fresh):
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("FLATOUT_", "PYTEST_", "MALLOC_", "PYTHON"))
        }
        env = {**kept, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "COLUMNS": "120", **more}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        command = [sys.executable, *(["-m", *argv] if argv[0] == "flatout" else argv[1:])]
        process = start_program(command, env, fresh, cwd=folder)
        try:
            out, err = process.communicate(timeout=hang_s(LIMIT_S))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        return Done(process.returncode, out, err)


@dataclass
class Lives:
    """``verdict``: right, refused, from_scratch (no checkpoint to resume from), unkilled (it completed before
    the kill), WRONG or crashed. ``why`` is the reason; ``after`` is the step of the resume point.
    """

    verdict: str
    why: str = ""
    after: int = 0


def live(programs, folder, trap, kills=ONCE, off=""):
    """``off``: checks of ``bench/again_mutants.py`` that are switched off, before flatout is imported."""
    work, fresh = folder / "work", trap.fresh or bool(off)
    write(work, trap)
    said = []  # printed by the killed runs, each up to the step at which the next one resumed
    for number, (save, kill) in enumerate(kills):
        saves = {"PYTHONPATH": SITE, "TRAP_SAVE": str(save), "TRAP_OFF": off}
        killed = programs(work, ["flatout", *COMMAND], {**saves, "TRAP_KILL": str(kill)}, fresh)
        if number and killed.code in (0, REFUSED):  # it has already completed
            return judged(
                trap,
                undisturbed(programs, folder, trap) if not (killed.code or trap.itself) else [],
                said,
                killed,
                [],
            )
        if killed.code != -9:
            same = killed.code == 0 and (
                trap.itself or killed.out.splitlines() == undisturbed(programs, folder, trap)
            )
            return Lives(
                "unkilled" if same else "crashed", f"it was not killed: {killed.code}, {last(killed.err)}"
            )
        said = [*up_to(said, went_on_after(killed)), *killed.out.splitlines()]
    for name, text in trap.between.items():
        (work / name).write_text(text)
    metadata = [
        json.loads(path.read_text())["metadata"]
        for path in sorted(work.glob(".flatout/*/rescue/step-*/manifest.json"))
    ]
    again = programs(work, ["flatout", *COMMAND], {**saves, **trap.later}, fresh)
    lines = undisturbed(programs, folder, trap) if again.code == 0 and not trap.itself else []
    return judged(trap, lines, said, again, [each.get("exact", "no exact part") for each in metadata])


def undisturbed(programs, folder, trap):
    """The program's output without flatout and without a kill."""
    write(folder / "undisturbed", trap)
    done = programs(folder / "undisturbed", ["python", "train.py"], {"PYTHONHASHSEED": "0"}, trap.fresh)
    assert done.code == 0, done.err
    assert any(line.startswith("end") for line in done.out.splitlines())
    return done.out.splitlines()


def write(folder, trap):
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(trap.source)
    for name, text in trap.files.items():
        (folder / name).write_text(text)


def judged(trap, lines, killed, again, exact):
    refused = [line for line in again.said if line.startswith(REFUSES)]
    if again.code == REFUSED and refused:
        return Lives("refused", refused[0].removeprefix(REFUSES))
    if again.code:
        return Lives("crashed", f"{again.code}: {last(again.err)}")
    after = went_on_after(again)
    printed = again.out.splitlines()
    differs = (
        "" if printed and printed == lines[-len(printed) :] else f"{printed[-1:]} instead of {lines[-1:]}"
    )
    why = strange(up_to(killed, after), printed) if trap.itself else differs
    if why:
        return Lives("WRONG", why, after)
    return Lives("right", "", after) if after else Lives("from_scratch", "; ".join(exact))


def went_on_after(life):
    """The step of the resume point; 0 where it started from scratch."""
    return next(
        (int(line.removeprefix(GOES_ON).partition(",")[0]) for line in life.said if line.startswith(GOES_ON)),
        0,
    )


def up_to(lines, after):
    """The output of runs that were resumed after a step.

    Lines that name their step are kept up to that step.
    """
    steps = [line for line in lines if line.startswith("step ")][:after]
    return [line for line in lines if not line.startswith("step ")] + steps if after else []


def strange(killed, printed):
    """The contradictions in what the runs report about themselves.

    The first report at the start must equal the last report at the end, and their control flow must lead to
    the same end.
    """
    began = [line.removeprefix("began ") for line in (*killed, *printed) if line.startswith("began ")]
    ended = [line.removeprefix("end ") for line in printed if line.startswith("end ")]
    if not ended or "False" in ended[-1]:
        return f"{printed[-1:]}"
    if began and began[0] != ended[-1]:
        return f"began with {began[0]}, ended with {ended[-1]}"
    steps = [line for line in (*killed, *printed) if line.startswith("step ")]
    if steps:
        if [int(line.split()[1]) for line in steps] != list(range(STEPS)):
            return f"steps {steps}"
        ways = "[" + ", ".join(line.split()[2] for line in steps) + "]"
        if hashlib.sha256(ways.encode()).hexdigest()[:12] != ended[-1].split()[-1]:
            return f"the ways that it printed are not those that it knows: {ways}"
    return ""


def last(text):
    found = [line for line in text.splitlines() if line.strip()]
    return " | ".join(found[-6:])[:700]

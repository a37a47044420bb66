"""Where the Plan of a command is, and whether it fits. `flatout run` imports this file before each program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flatout.job.folder import FOLDER, JobFolder, flatout_folder
from flatout.job.plan_file import read_plan
from flatout.job.trust import distrusted
from flatout.launch.command import Command
from flatout.levers import checked
from flatout.schema.errors import FlatoutError
from flatout.schema.facts import Facts
from flatout.schema.plan import Plan

ANOTHER_COMMAND = "another command"
DIFFERENT = {
    "command": ANOTHER_COMMAND,
    "script": "the script has changed",
    "machine": "another machine",
    "versions": "other versions",
    "python": "another Python",
    "ranks": "another number of ranks",
    "device": "another device",
}
UNSAID = {"ranks": "one process", "device": "the device in the script"}


def key_of(command: Command, facts: Facts, ranks: str = "") -> dict[str, str]:
    """Return what a Plan is valid for: command, script, machine, versions.

    ``ranks``: how it is split, "" for one process.
    """
    return {
        "command": " ".join(command.shown),
        "script": command.script_digest,
        "machine": facts.machine,
        "versions": ", ".join(
            f"{name} {facts.versions[name]}" for name in ("torch", "torchvision") if name in facts.versions
        ),
        "python": ".".join(facts.python.split(".")[:2]),
        **({"ranks": ranks} if ranks else {}),
        **({"device": facts.redirected_device} if facts.redirected_device else {}),
    }


def differences(made_for: dict[str, str], key: dict[str, str]) -> list[str]:
    """Describe how a Plan's origin differs from the present command, machine and versions."""
    found = []
    for name, said in DIFFERENT.items():
        if made_for.get(name, "") != key.get(name, ""):
            found.append(
                said if name == "script" else f"{said} ({made_for.get(name, UNSAID.get(name, 'unknown'))!r})"
            )
    return found


def job_folder(command: Command, given: Path | None = None, ranks: str = "") -> JobFolder:
    name = "-".join(filter(None, (command.title, command.digest, ranks.replace(" ", "-"))))
    return JobFolder(flatout_folder(name) if given is None else given)


def newest(*patterns: str) -> Path | None:
    """Return the newest file among these, given as patterns below a job's folder; None if there is none."""
    found = [
        path
        for pattern in patterns
        for place in {flatout_folder(), Path(FOLDER)}
        for path in place.glob(f"*/{pattern}")
    ]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def beside_script(command: Command) -> Path:
    """Return the path of the plan that you see and may edit."""
    return (command.script.parent if command.script else Path.cwd()) / "flatout.toml"


def plan_files(command: Command, ranks: str = "") -> list[Path]:
    """Return the plan beside the script and the tuner's own copy, newest first, so that your edits count."""
    job = job_folder(command, ranks=ranks)
    here = JobFolder(Path(FOLDER, job.path.name))  # tuned before this folder became read-only
    there = {path for path in (beside_script(command), job.plan, here.plan) if path.is_file()}
    return sorted(there, key=lambda path: path.stat().st_mtime_ns, reverse=True)


@dataclass(frozen=True)
class Skipped:
    """A plan file that does not fit, and why. ``usable``: it can still be named with --plan.

    ``command`` is the command that it was made for, if that is another one."""

    path: Path
    why: str
    usable: bool = True
    command: str = ""
    only_command: bool = False  # everything else fits

    @property
    def remark(self) -> str:
        return f"the plan in {self.path} is not used: {self.why}" if self.usable else self.why


@dataclass(frozen=True)
class FoundPlan:
    """The plan that `flatout run` uses for a command, with its file; the plan files before it were skipped."""

    plan: Plan | None = None
    path: Path | None = None
    skipped: tuple[Skipped, ...] = ()


def find_plan(command: Command, facts: Facts, ranks: str = "") -> FoundPlan:
    """Return the newest plan that fits the command, script, machine and versions."""
    key, skipped = key_of(command, facts, ranks), list[Skipped]()
    for path in plan_files(command, ranks):
        if why := distrusted(path, owner_of=command.script):
            skipped.append(Skipped(path, why))
            continue
        try:
            plan = checked(read_plan(path), path)
        except FlatoutError as error:
            skipped.append(Skipped(path, str(error), usable=False))
            continue
        strange = differences(dict(plan.made_for), key) if plan.made_for else []
        if not strange:
            return FoundPlan(plan, path, tuple(skipped))
        made_for = str(plan.made_for.get("command", "")) if strange[0].startswith(ANOTHER_COMMAND) else ""
        skipped.append(Skipped(path, "; ".join(strange), command=made_for, only_command=len(strange) == 1))
    return FoundPlan(skipped=tuple(skipped))

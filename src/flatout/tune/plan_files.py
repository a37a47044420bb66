"""Where the Plan of a command is, and whether it fits. `flatout run` imports this file before each program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flatout.job.folder import FOLDER, JobFolder, flatout_folder
from flatout.job.plan_file import read_plan
from flatout.job.trust import distrusted, file_digest
from flatout.launch.command import Command
from flatout.levers import checked
from flatout.schema.errors import FlatoutError
from flatout.schema.facts import Facts
from flatout.schema.plan import Plan

ANOTHER_COMMAND = "another command"
KEY_LABELS = {
    "command": ANOTHER_COMMAND,
    "script": "the script has changed",
    "machine": "another machine",
    "versions": "other versions",
    "python": "another Python",
    "ranks": "another number of ranks",
    "device": "another device",
}
DEFAULT_LABELS = {"ranks": "one process", "device": "the device in the script"}


def plan_key(command: Command, facts: Facts, ranks: str = "") -> dict[str, str]:
    """What a Plan is valid for: command, script, machine, versions.

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


def sources_key(sources: Mapping[str, str]) -> str:
    """The user's imported files and their digests, as `differences` reads them."""
    return ", ".join(f"{name} {digest}" for name, digest in sources.items())


def differences(made_for: dict[str, str], key: dict[str, str]) -> list[str]:
    """Describe how a Plan's origin differs from the present command, machine, versions and imported files."""
    sentences = []
    for name, label in KEY_LABELS.items():
        if made_for.get(name, "") != key.get(name, ""):
            sentences.append(
                label
                if name == "script"
                else f"{label} ({made_for.get(name, DEFAULT_LABELS.get(name, 'unknown'))!r})"
            )
    parts = [part.rpartition(" ") for part in made_for.get("sources", "").split(", ") if part]
    changed = [name for name, _, digest in parts if file_digest(name) != digest]
    if changed and KEY_LABELS["script"] not in sentences:
        sentences.append(f"{', '.join(changed[:3])} {'has' if len(changed) == 1 else 'have'} changed")
    return sentences


def job_folder(command: Command, folder: Path | None = None, ranks: str = "") -> JobFolder:
    name = "-".join(filter(None, (command.title, command.digest, ranks.replace(" ", "-"))))
    return JobFolder(flatout_folder(name) if folder is None else folder)


def newest_file(*patterns: str) -> Path | None:
    """The newest file among these, given as patterns below a job's folder; None if there is none."""
    folders = {flatout_folder(), Path(FOLDER)}
    paths = [path for pattern in patterns for folder in folders for path in folder.glob(f"*/{pattern}")]
    return max(paths, key=lambda path: path.stat().st_mtime, default=None)


def plan_beside_script(command: Command) -> Path:
    return (command.script.parent if command.script else Path.cwd()) / "flatout.toml"


def certificate_beside(plan: Path) -> Path:
    return plan.with_suffix(".certificate.json")


def plan_files(command: Command, ranks: str = "") -> list[Path]:
    """The plan beside the script and the tuner's own copy, newest first, so that your edits count."""
    job = job_folder(command, ranks=ranks)
    fallback = JobFolder(Path(FOLDER, job.path.name))  # tuned before this folder became read-only
    existing = {path for path in (plan_beside_script(command), job.plan, fallback.plan) if path.is_file()}
    return sorted(existing, key=lambda path: path.stat().st_mtime_ns, reverse=True)


@dataclass(frozen=True)
class SkippedPlan:
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
    skipped: tuple[SkippedPlan, ...] = ()


def find_plan(command: Command, facts: Facts, ranks: str = "") -> FoundPlan:
    key, skipped = plan_key(command, facts, ranks), list[SkippedPlan]()
    for path in plan_files(command, ranks):
        if why := distrusted(path, owner_of=command.script):
            skipped.append(SkippedPlan(path, why))
            continue
        try:
            plan = checked(read_plan(path), path)
        except FlatoutError as error:
            skipped.append(SkippedPlan(path, str(error), usable=False))
            continue
        differing = differences(dict(plan.made_for), key) if plan.made_for else []
        if not differing:
            return FoundPlan(plan, path, tuple(skipped))
        made_for = str(plan.made_for.get("command", "")) if differing[0].startswith(ANOTHER_COMMAND) else ""
        skipped.append(
            SkippedPlan(path, "; ".join(differing), command=made_for, only_command=len(differing) == 1)
        )
    return FoundPlan(skipped=tuple(skipped))

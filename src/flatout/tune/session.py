"""Stores a session on disk, resumes it, and turns it into a Plan and a verdict."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from flatout import __version__
from flatout.job.folder import FOLDER, JobFolder, read_json, write_json, write_whole
from flatout.job.plan_file import read_plan
from flatout.job.trust import distrusted
from flatout.launch.command import Command
from flatout.levers import TABLE
from flatout.measure.clock import today
from flatout.schema.enums import Effect
from flatout.schema.errors import FlatoutError, PlanError, StorageError
from flatout.schema.facts import Facts
from flatout.schema.plan import Plan
from flatout.schema.session import SESSION_SCHEMA, SessionRecord

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
SAME = {"same": "with bitwise identical results", "equivalent": "with the same results up to {}"}


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
        "python": ".".join(map(str, sys.version_info[:2])),
        **({"ranks": ranks} if ranks else {}),
        **({"device": facts.asked_device} if facts.asked_device else {}),
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
    return JobFolder(
        given
        if given is not None
        else Path(FOLDER) / "-".join(filter(None, (command.title, command.digest, ranks.replace(" ", "-"))))
    )


def newest(*records: str) -> Path | None:
    """Return the newest file among these, given as patterns below a job's folder; None if there is none."""
    found = [path for record in records for path in Path(FOLDER).glob(f"*/{record}")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def beside_script(command: Command) -> Path:
    """Return the path of the plan that you see and may edit."""
    return (command.script.parent if command.script else Path.cwd()) / "flatout.toml"


def plan_files(command: Command, ranks: str = "") -> list[Path]:
    """Return the plan beside the script and the tuner's own copy, newest first, so that your edits count."""
    there = [
        path for path in (beside_script(command), job_folder(command, ranks=ranks).plan) if path.is_file()
    ]
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
        if why := distrusted(path, whose=command.script):
            skipped.append(Skipped(path, why))
            continue
        try:
            plan = read_plan(path)
        except FlatoutError as error:
            skipped.append(Skipped(path, str(error), usable=False))
            continue
        strange = differences(dict(plan.made_for), key) if plan.made_for else []
        if not strange:
            return FoundPlan(plan, path, tuple(skipped))
        made_for = str(plan.made_for.get("command", "")) if strange[0].startswith(ANOTHER_COMMAND) else ""
        skipped.append(Skipped(path, "; ".join(strange), command=made_for, only_command=len(strange) == 1))
    return FoundPlan(skipped=tuple(skipped))


def open_session(
    job: JobFolder,
    command: Command,
    facts: Facts,
    budget_s: float,
    effects: list[str],
    again: bool,
    memory_limit_bytes: int | None = None,
    ranks: str = "",
) -> SessionRecord:
    """Return the interrupted session with the same key, or a new one."""
    key = key_of(command, facts, ranks)
    ended = load_session(job)
    old = _load(job.unfinished) or ended
    if (
        old is not None
        and not again
        and old.key == key
        and old.status == "running"
        and old.effects == effects
        and old.memory_limit_bytes == memory_limit_bytes
    ):
        old.budget_s = max(old.budget_s, budget_s)
        # The old budget may be used up; resuming needs at least the budget of this call.
        old.spent_s = min(old.spent_s, 0.5 * old.budget_s)
        return old
    machine = {
        "cpu": facts.cpu,
        "cores": facts.cores,
        "memory_bytes": facts.memory_bytes,
        "system": facts.system,
        "device": facts.asked_device,
        "gpus": [
            {"name": g.name, "memory_bytes": g.memory_bytes, "capability": list(g.capability)}
            for g in facts.gpus
        ],
    }
    session = SessionRecord(
        list(command.shown),
        os.getcwd(),
        key,
        flatout=__version__,
        created=today(),
        budget_s=budget_s,
        effects=effects,
        memory_limit_bytes=memory_limit_bytes,
        machine=machine,
        versions={"python": facts.python, "flatout": __version__, **facts.versions},
    )
    if ended is not None and ended.status == "done":  # its plan is in use until the new session ends
        write_json(job.unfinished, session.to_json())
    return session


def load_session(job: JobFolder) -> SessionRecord | None:
    """Load the session; None if there is none or it is unreadable."""
    return _load(job.session)


def _load(path: Path) -> SessionRecord | None:
    data = read_json(path)
    if not isinstance(data, dict) or data.get("schema") != SESSION_SCHEMA:
        return None
    try:
        return SessionRecord.from_json(data)
    except (TypeError, ValueError, KeyError, AttributeError):
        return None


def session_file(job: JobFolder, session: SessionRecord) -> Path:
    """Return the file of the session: beside the record of a finished one until the new one ends, as it was opened."""
    return job.unfinished if session.status == "running" and job.unfinished.exists() else job.session


def save_session(job: JobFolder, session: SessionRecord) -> None:
    path = session_file(job, session)
    write_json(path, session.to_json())
    if path == job.session:
        job.unfinished.unlink(missing_ok=True)


def plan_of(session: SessionRecord) -> Plan:
    plan = Plan.from_json(session.best.plan) if session.best.plan else Plan()
    return replace(plan, made_for=session.key)


def write_plan(job: JobFolder, session: SessionRecord, command: Command, beside: bool) -> Path | None:
    """Write the Plan into the job folder, and beside the script if requested and possible.

    A plan that was made for another command stays beside the script: it may be the only one of that command."""
    text = plan_of(session).to_toml()
    write_whole(job.plan, text)
    target = beside_script(command)
    if not beside or made_for_another(target, session):
        return None
    try:
        write_whole(target, text)
    except StorageError:  # the folder is not writable; the plan is in the job folder
        return None
    return target


def made_for_another(path: Path, session: SessionRecord) -> str:
    """Return the other command that the plan in ``path`` was made for; "" if there is none."""
    try:
        made_for = str(read_plan(path).made_for.get("command", ""))
    except PlanError:
        return ""
    return made_for if made_for != session.key["command"] else ""


def verdict(session: SessionRecord) -> str:
    """Return the verdict of the session in one sentence."""
    limited = _of_the_limit(session)
    if limited:
        return limited
    if session.speedup is not None:
        likely = "" if session.speedup.certain else "probably "
        return f"{likely}{session.speedup.sentence()} as fast, {_results(session)}"
    failed = session.guard.verdict == "failed"
    if session.undecided and not failed:
        return f"no verdict is possible now: {session.obstacle}"
    why = (
        f"the faster plan was rejected: {session.guard.why}"
        if failed
        else "no plan was faster beyond the noise"
    )
    return f"the plain program is kept: {why}"


def _results(session: SessionRecord) -> str:
    """Say how close the results are to the plain program's.

    Names computations and messages below float32 precision.
    """
    levers = {lever.name: lever for lever in TABLE if lever.effect is Effect.PRECISION}
    halves = dict.fromkeys(
        levers[choice.name].half(choice.value) for choice in plan_of(session) if choice.name in levers
    )
    return SAME.get(session.guard.verdict, "results not compared").format(" and ".join(halves) or "rounding")


def _of_the_limit(session: SessionRecord) -> str:
    """Return the verdict if the plain program exceeds the memory limit; empty otherwise."""
    limit, known = (
        session.memory_limit_bytes,
        [point for point in session.frontier if point.peak_bytes is not None],
    )
    if limit is None or not known or known[0].fits:
        return ""
    within = f"{limit / 2**20:,.0f} MiB"
    if session.speedup is not None:
        chosen = next((point.plan for point in known if point.chosen), "the plan")
        return f"{chosen} fits into {within}, the plain program does not: {session.speedup.sentence()} as fast, {_results(session)}"
    smallest = min(known, key=lambda point: point.peak_bytes or 0)
    over = (smallest.peak_bytes or 0) - limit
    if over <= 0:
        return f"the plain program is kept, although it exceeds {within}: {smallest.plan} would fit, but was not confirmed"
    return (
        f"no measured plan fits into {within}: the smallest, {smallest.plan}, needs {over / 2**20:,.0f} MiB more. A smaller batch takes "
        "less; flatout.Loop keeps its effective size by accumulation"
    )

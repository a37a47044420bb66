"""Stores a session on disk, resumes it, and turns it into a Plan and a verdict."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from flatout import __version__
from flatout.job.folder import JobFolder, read_json, write_atomically, write_json
from flatout.job.plan_file import read_plan
from flatout.launch.command import Command
from flatout.levers import TABLE
from flatout.measure.clock import today
from flatout.schema.enums import Effect
from flatout.schema.errors import PlanError, StorageError
from flatout.schema.facts import Facts, untested_torch
from flatout.schema.plan import Plan
from flatout.schema.session import SESSION_SCHEMA, SessionRecord
from flatout.schema.sizes import size
from flatout.tune.plan_files import beside_script, key_of

SAME = {"same": "with bitwise identical results", "equivalent": "with the same results up to {}"}


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
    session = SessionRecord(
        list(command.shown),
        os.getcwd(),
        key,
        flatout=__version__,
        created=today(),
        budget_s=budget_s,
        effects=effects,
        memory_limit_bytes=memory_limit_bytes,
        machine=facts.description,
        versions={"python": facts.python, "flatout": __version__, **facts.versions},
        untested=untested_torch(facts.versions.get("torch", "")),
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
    write_atomically(job.plan, text)
    target = beside_script(command)
    if not beside or made_for_another(target, session):
        return None
    try:
        write_atomically(target, text)
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
    """Return the verdict of the session in one sentence, with what it does not cover."""
    own = f"; {session.nan_loss}, so nothing after that step was compared" if session.nan_loss else ""
    return _verdict(session) + own


def _verdict(session: SessionRecord) -> str:
    limited = _of_the_limit(session)
    if limited:
        return limited
    if session.speedup is not None:
        likely = "" if session.speedup.significant else "probably "
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
        levers[choice.name].reduced_part(choice.value) for choice in plan_of(session) if choice.name in levers
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
    within = size(limit)
    if session.speedup is not None:
        chosen = next((point.plan for point in known if point.chosen), "the plan")
        return f"{chosen} fits into {within}, the plain program does not: {session.speedup.sentence()} as fast, {_results(session)}"
    smallest = min(known, key=lambda point: point.peak_bytes or 0)
    over = (smallest.peak_bytes or 0) - limit
    if over <= 0:
        return f"the plain program is kept, although it exceeds {within}: {smallest.plan} would fit, but was not confirmed"
    return (
        f"no measured plan fits into {within}: the smallest, {smallest.plan}, needs {size(over)} more. A smaller batch takes "
        "less; flatout.Loop keeps its effective size by accumulation"
    )

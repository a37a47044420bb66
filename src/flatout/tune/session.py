"""Stores a session on disk, resumes it, and turns it into a Plan and a verdict."""

import os
from dataclasses import replace
from pathlib import Path

from flatout import __version__
from flatout.job.folder import JobFolder, read_json, write_atomically, write_json
from flatout.job.plan_file import read_plan
from flatout.launch.command import Command
from flatout.levers import TABLE
from flatout.measure.clock import utc_now
from flatout.schema.enums import Effect
from flatout.schema.errors import PlanError, StorageError
from flatout.schema.facts import Facts, untested_torch
from flatout.schema.plan import Plan
from flatout.schema.session import FASTER_BESIDE, SESSION_SCHEMA, SessionRecord
from flatout.schema.sizes import size
from flatout.tune.plan_files import certificate_beside, differences, plan_beside_script, plan_key

RESULT_WORDS = {"same": "with bitwise identical results", "equivalent": "with the same results up to {}"}


def open_session(
    job: JobFolder,
    command: Command,
    facts: Facts,
    budget_s: float,
    effects: list[str],
    from_scratch: bool,
    memory_limit_bytes: int | None = None,
    ranks: str = "",
) -> SessionRecord:
    """The interrupted session with the same key, or a new one."""
    key = plan_key(command, facts, ranks)
    previous = load_session(job)
    unfinished = _load(job.unfinished) or previous
    if (
        unfinished is not None
        and not from_scratch
        and not differences(unfinished.key, key)
        and unfinished.status == "running"
        and unfinished.effects == effects
        and unfinished.memory_limit_bytes == memory_limit_bytes
    ):
        unfinished.budget_s = max(unfinished.budget_s, budget_s)
        # The old budget may be used up; resuming needs at least the budget of this call.
        unfinished.spent_s = min(unfinished.spent_s, 0.5 * unfinished.budget_s)
        return unfinished
    session = SessionRecord(
        list(command.shown),
        os.getcwd(),
        key,
        flatout=__version__,
        created=utc_now(),
        budget_s=budget_s,
        effects=effects,
        memory_limit_bytes=memory_limit_bytes,
        machine=facts.description,
        versions={"python": facts.python, "flatout": __version__, **facts.versions},
        untested=untested_torch(facts.versions.get("torch", "")),
    )
    if previous is not None and previous.status == "done":  # its plan is in use until the new session ends
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
    """The file of the session: beside the record of a finished one until the new one ends, as it was opened."""
    return job.unfinished if session.status == "running" and job.unfinished.exists() else job.session


def save_session(job: JobFolder, session: SessionRecord) -> None:
    path = session_file(job, session)
    write_json(path, session.to_json())
    if path == job.session:
        job.unfinished.unlink(missing_ok=True)


def plan_of(session: SessionRecord) -> Plan:
    plan = Plan.from_json(session.best.plan) if session.best.plan else Plan()
    return replace(plan, made_for=session.key)


def write_plan(job: JobFolder, session: SessionRecord, command: Command, write_beside: bool) -> Path | None:
    """Write the Plan into the job folder, and beside the script if requested and possible.

    A plan that was made for another command stays beside the script: it may be the only one of that command."""
    _write_plan(job.plan, session)
    target = plan_beside_script(command)
    if not write_beside or made_for_another(target, session):
        return None
    try:
        _write_plan(target, session)
    except StorageError:  # the folder is not writable; the plan is in the job folder
        return None
    return target


def _write_plan(path: Path, session: SessionRecord) -> None:
    """Write the plan with its certificate. A plan without one leaves none of an earlier plan."""
    write_atomically(path, plan_of(session).to_toml())
    if session.certificate is not None:
        write_json(certificate_beside(path), session.certificate.to_json())
    else:
        certificate_beside(path).unlink(missing_ok=True)


def made_for_another(path: Path, session: SessionRecord) -> str:
    """The other command that the plan in ``path`` was made for; "" if there is none."""
    try:
        made_for = str(read_plan(path).made_for.get("command", ""))
    except PlanError:
        return ""
    return made_for if made_for != session.key["command"] else ""


def verdict(session: SessionRecord) -> str:
    """The verdict of the session in one sentence, with what it does not cover."""
    loss_note = f"; {session.nan_loss}, so nothing after that step was compared" if session.nan_loss else ""
    return _verdict(session) + loss_note


def _verdict(session: SessionRecord) -> str:
    limited = _memory_verdict(session)
    if limited:
        return limited
    if session.kept and session.speedup is None:
        return f"{FASTER_BESIDE}: {session.disturbance}; {_results(session)}"
    if session.speedup is not None:
        certainty = "" if session.speedup.significant else "probably "
        return f"{certainty}{session.speedup.sentence()} as fast, {_results(session)}"
    failed = session.guard.verdict == "failed"
    if session.undecided and not failed:
        return f"no verdict is possible now: {session.obstacle}"
    rejected = f"the faster plan was rejected: {session.guard.why}"
    return f"the plain program is kept: {rejected if failed else 'no plan was faster beyond the noise'}"


def _results(session: SessionRecord) -> str:
    """Say how close the results are to the plain program's.

    Names computations and messages below float32 precision.
    """
    levers = {lever.name: lever for lever in TABLE if lever.effect is Effect.PRECISION}
    precisions = dict.fromkeys(
        levers[choice.name].reduced_part(choice.value) for choice in plan_of(session) if choice.name in levers
    )
    return RESULT_WORDS.get(session.guard.verdict, "results not compared").format(
        " and ".join(precisions) or "rounding"
    )


def _memory_verdict(session: SessionRecord) -> str:
    limit, points = (
        session.memory_limit_bytes,
        [point for point in session.frontier if point.peak_bytes is not None],
    )
    if limit is None or not points or points[0].fits:
        return ""
    limit_words = size(limit)
    if session.kept:
        speed = f"{session.speedup.sentence()} as fast" if session.speedup else session.disturbance
        chosen = next((point.plan for point in points if point.chosen), "the plan")
        return f"{chosen} fits into {limit_words}, the plain program does not: {speed}, {_results(session)}"
    smallest = min(points, key=lambda point: point.peak_bytes or 0)
    excess = (smallest.peak_bytes or 0) - limit
    if excess <= 0:
        return f"the plain program is kept, although it exceeds {limit_words}: {smallest.plan} would fit, but was not confirmed"
    return (
        f"no measured plan fits into {limit_words}: the smallest, {smallest.plan}, needs {size(excess)} more. A smaller batch takes "
        "less; flatout.Loop keeps its effective size by accumulation"
    )

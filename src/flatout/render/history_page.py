"""Render what flatout left in a project: one page with its jobs, their runs, comparisons, profiles and reports."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from flatout.job.folder import FOLDER
from flatout.render.compare_page import GATE_STATUS, LOSS_STATUS, change_sentence
from flatout.render.formatting import (
    NOTHING,
    count,
    day,
    duration,
    figure,
    interval,
    milliseconds,
    one_line,
    sentence,
    several,
    shell,
    size,
    times,
)
from flatout.render.history_charts import Series, days_axis, letter, memory_plot, sign, speed_plot
from flatout.render.page import environment
from flatout.schema.history import (
    ComparisonSeen,
    HistoryRecord,
    JobSeen,
    Origin,
    ProfileSeen,
    RunSeen,
    SessionSeen,
)

FIRST_ROWS, MOST_ROWS = 8, 60  # of a job's runs: shown at once, and behind a fold; the chart has more
MOST_FINDINGS = 3
RESULT_STATUS = {"finished": "applied", "failed": "rejected", "interrupted": "skipped"}
OUTCOME_STATUS = {"faster": "equivalent", "fits": "equivalent", "changed": "failed", "failed": "failed"}
NOT_FASTER = {
    "unchanged": "nothing faster",
    "undecided": "no verdict yet",
    "running": "interrupted",
    "failed": "failed",
}


def history_html(history: HistoryRecord) -> str:
    jobs = [_job(number, job, history.here) for number, job in enumerate(history.jobs, 1)]
    runs = sum(len(job.runs) for job in history.jobs)
    return (
        environment("report.css", "history.css")
        .get_template("history.html.j2")
        .render(
            headline=f"{_project(history.folder)}: {several(len(jobs), 'command')}, {several(runs, 'run')}",
            folder=one_line(history.folder, 200),
            dateline=[
                part
                for part in (
                    day(history.created),
                    one_line(history.here.machine, 120),
                    f"torch {one_line(history.here.torch, 40)}" if history.here.torch else "",
                )
                if part
            ],
            jobs=jobs,
            baselines=[
                {
                    "name": one_line(each.name, 80),
                    "href": quote(each.record),
                    "command": shell(each.command),
                    "step": milliseconds(each.step_ms),
                    "processes": count(each.processes),
                    "when": " ".join(filter(None, [day(each.created), one_line(each.revision, 12)])),
                    "marks": marks(each.origin, history.here),
                    "verdicts": [
                        (job["comparison"]["message"], job["id"])
                        for job in jobs
                        if job["comparison"] and job["comparison"]["against"] == one_line(each.name, 80)
                    ],
                }
                for each in history.baselines
            ],
            skipped=[(one_line(each.path, 200), sentence(each.why)) for each in history.skipped],
            version=one_line(history.flatout, 40),
        )
    )


def marks(origin: Origin, here: Origin) -> list[str]:
    """Say how a record's origin differs from the machine and the torch that the page was made with."""
    found = []
    if not origin.machine:
        found.append("machine not recorded")
    elif origin.machine != here.machine:
        found.append(f"other machine: {one_line(origin.machine, 80)}")
    if not _same_version(origin.torch, here.torch):
        found.append(f"torch {one_line(origin.torch, 40)}")
    return found


def _same_version(a: str, b: str) -> bool:
    """Compare two versions. One of them may lack the local part (`+cu130`); an unknown one differs from none."""
    if "+" not in a or "+" not in b:
        a, b = a.partition("+")[0], b.partition("+")[0]
    return not a or not b or a == b


def _project(folder: str) -> str:
    path = PurePath(folder)
    return one_line((path.parent if path.name == FOLDER else path).name or folder, 60)


def _job(number: int, job: JobSeen, here: Origin) -> dict[str, Any]:
    series = Series.make(job.runs)
    newest = job.runs[-1] if job.runs else None
    ranks = job.session.origin.world_size if job.session is not None else 1
    rows = [_run_row(run, series) for run in job.runs[: -MOST_ROWS - 1 : -1]]
    return {
        "id": f"job-{number}",
        "command": shell(job.command) if job.command else one_line(job.folder, 120),
        "ranks": several(ranks, "rank") if ranks > 1 else "",
        "reports": [(name, quote(path)) for name, path in job.reports.items()],
        "runs": len(job.runs),
        "newest": _run_row(newest, series) if newest is not None else None,
        "plan": _plan_cell(job.session),
        "session": _session(job.session, here),
        "unfinished": job.unfinished,
        "again": shell(["flatout", "tune", *job.command]) if job.command else "",
        "speed": speed_plot(series),
        "memory": memory_plot(series),
        "days": days_axis(series),
        "keys": _keys(series),
        "origins": [
            (letter(at), _described(origin), several(series.of.count(at), "run"))
            for at, origin in enumerate(series.origins)
        ],
        "charted": len(series.runs),
        "ranges": any(run.low is not None for run in series.runs),
        "rows": rows[:FIRST_ROWS],
        "more": rows[FIRST_ROWS:],
        "older": max(0, len(job.runs) - MOST_ROWS),
        "comparison": _comparison(job.comparison, here),
        "profile": _profile(job.profile, here),
    }


def _described(origin: Origin) -> str:
    parts = [
        one_line(origin.machine, 100) or "machine not recorded",
        f"torch {one_line(origin.torch, 40)}" if origin.torch else "",
        one_line(origin.device, 40),
        several(origin.world_size, "rank") if origin.world_size > 1 else "",
    ]
    return ", ".join(filter(None, parts))


def _keys(series: Series) -> list[tuple[Any, str]]:
    """Return the legend: the marks of the runs in the chart."""
    kinds = {(run.result, bool(run.levers) and run.result != "failed") for run in series.runs}
    return [
        (
            sign(result, planned),
            result if result == "failed" else f"{result}, {'with' if planned else 'without'} a plan",
        )
        for result, planned in sorted(kinds, key=lambda kind: (kind[0] != "finished", kind))
    ]


def _run_row(run: RunSeen, series: Series) -> dict[str, Any]:
    ended = {"failed": f"failed: {one_line(run.how, 60)}"}.get(run.result, run.result)
    spread = f"{figure(run.low)} to {figure(run.high)}" if run.low is not None else ""
    return {
        "when": day(run.created).removesuffix(" UTC"),
        "href": quote(run.record),
        "result": ended,
        "status": RESULT_STATUS.get(run.result, "other"),
        "speed": figure(run.steps_per_s),
        "spread": spread,
        "steps": count(run.steps),
        "length": duration(run.seconds),
        "processes": several(run.processes, "process") if run.processes > 1 else "",
        "memory": size(run.peak_memory_bytes),
        "limit": one_line(run.limited_by, 120),
        "levers": one_line(", ".join(run.levers), 200) or "none",
        "origin": series.letter(run) if run in series.runs else "",
    }


def _plan_cell(session: SessionSeen | None) -> tuple[str, str]:
    """Return the speed-up of the plan with its interval, or why there is none."""
    if session is None:
        return "not tuned", ""
    ratio = session.speedup
    if ratio is None or not session.levers or session.outcome in NOT_FASTER:
        return NOT_FASTER.get(session.outcome, NOTHING), ""
    return times(ratio.median), f"{interval(ratio.low, ratio.high)}, n={ratio.n}"


def _session(session: SessionSeen | None, here: Origin) -> dict[str, Any] | None:
    if session is None:
        return None
    return {
        "status": OUTCOME_STATUS.get(session.outcome, "open"),
        "message": sentence(session.message) or "The search has no verdict yet.",
        "levers": one_line(", ".join(session.levers), 400),
        "when": day(session.created),
        "marks": marks(session.origin, here),
    }


def _comparison(comparison: ComparisonSeen | None, here: Origin) -> dict[str, Any] | None:
    if comparison is None:
        return None
    change = comparison.step_time
    failed = any(gate.verdict == "failed" for gate in comparison.gates) or comparison.status == "failed"
    slower, faster = change is not None and change.low > 0, change is not None and change.high < 0
    verdict, _, _ = comparison.losses.partition(":")
    return {
        "status": "failed" if failed or slower else "equivalent" if faster else "open",
        "message": sentence(comparison.message)
        if comparison.status == "failed"
        else sentence(change_sentence(change, one_line(comparison.unit, 24))),
        "sides": [("A", one_line(comparison.a, 160)), ("B", one_line(comparison.b, 160))],
        "against": one_line(comparison.against, 80),
        "losses": sentence(comparison.losses),
        "losses_failed": LOSS_STATUS.get(verdict) == "failed",
        "gates": [
            (
                one_line(gate.name, 60),
                one_line(gate.verdict, 40),
                sentence(gate.why),
                GATE_STATUS.get(gate.verdict, "other"),
            )
            for gate in comparison.gates
        ],
        "when": day(comparison.created),
        "marks": marks(comparison.origin, here),
    }


def _profile(profile: ProfileSeen | None, here: Origin) -> dict[str, Any] | None:
    if profile is None:
        return None
    time = f"a {one_line(profile.unit, 24)} takes {milliseconds(profile.step_ms)}"
    why = profile.bound_why or (f"limited by {one_line(profile.bound, 40)}" if profile.bound else "")
    return {
        "message": sentence(
            profile.message if profile.status == "failed" else f"{time}: {why}" if why else time
        ),
        "findings": [sentence(each) for each in profile.findings[:MOST_FINDINGS]],
        "more": max(0, len(profile.findings) - MOST_FINDINGS),
        "when": day(profile.created),
        "marks": marks(profile.origin, here),
    }

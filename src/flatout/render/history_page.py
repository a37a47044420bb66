"""The page of what flatout left in a project: its commands and reports, and the speed of its runs."""

from pathlib import PurePath
from urllib.parse import quote

from flatout.job.folder import FOLDER
from flatout.render.formatting import count, day, plural, rounded, sentence, shell, size
from flatout.render.page import Cell, Items, Page, Section, Table, dateline
from flatout.render.summary import with_interval
from flatout.schema.run_request import HistoryRecord, JobEntry, RunEntry

RUN_COLUMNS = "started, UTC", "command", "result", ">steps/s", ">steps", ">peak memory", "limited by", "plan"
CELL_KINDS = {"finished": "applied", "failed": "rejected", "interrupted": "skipped"}


def history_page(history: HistoryRecord) -> Page:
    runs = sorted(((job, run) for job in history.jobs for run in job.runs), key=lambda pair: pair[1].created)
    reports = [
        (shell(job.command), Cell(name, link=quote(path, errors="replace")))
        for job in history.jobs
        for name, path in job.reports.items()
    ]
    folder = PurePath(history.folder)
    project = (folder.parent if folder.name == FOLDER else folder).name or history.folder
    return Page(
        "history of a project",
        f"{project}: {plural(len(history.jobs), 'command')}, {plural(len(runs), 'run')}",
        "the records",
        [
            Section(
                "Commands",
                [Table(("command", "plan", "newest run", ">runs"), [_job(job) for job in history.jobs])],
            ),
            Section("Runs", [Table(RUN_COLUMNS, [_run(job, run) for job, run in reversed(runs)])]),
            Section("Reports", [Table(("command", "report"), reports)]),
            Section(
                "Skipped files",
                [Items([f"`{path}`: {sentence(why)}" for path, why in history.skipped.items()])],
            ),
        ],
        dateline=dateline(history.created, history.folder),
        version=history.flatout,
    )


def _job(job: JobEntry) -> tuple[Cell | str, ...]:
    ratio = job.speedup
    plan = with_interval(ratio.median, ratio.low, ratio.high, ratio.n) if ratio else ""
    verdict = job.verdict or "not tuned"
    if job.unfinished:
        command = shell(["flatout", "tune", *job.command])
        verdict = f"A search was interrupted; `{command}` continues it."
    newest = job.runs[-1] if job.runs else None
    return (
        Cell(shell(job.command) if job.command else job.folder, kind="code"),
        Cell(plan or verdict, verdict if plan else ""),
        Cell(f"{rounded(newest.steps_per_s)} steps/s", newest.setup) if newest else "",
        count(len(job.runs)),
    )


def _run(job: JobEntry, run: RunEntry) -> tuple[Cell | str, ...]:
    result = f"failed: {run.exit_reason}" if run.result == "failed" else run.result
    return (
        Cell(day(run.created).removesuffix(" UTC"), link=quote(run.record, errors="replace")),
        Cell(shell(job.command), kind="code"),
        Cell(
            result,
            plural(run.processes, "process") if run.processes > 1 else "",
            CELL_KINDS.get(run.result, "skipped"),
        ),
        rounded(run.steps_per_s),
        count(run.steps),
        size(run.peak_memory_bytes),
        run.limited_by,
        ", ".join(run.levers) or "none",
    )

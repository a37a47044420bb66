"""The page of what flatout left in a project: its commands and reports, and the speed of its runs."""

from __future__ import annotations

from itertools import groupby
from pathlib import PurePath
from urllib.parse import quote

from flatout.job.folder import FOLDER
from flatout.render.formatting import count, day, drawable, figure, sentence, several, shell, size
from flatout.render.page import Cell, Figure, Items, Page, Section, Table, dateline
from flatout.render.plot import Plot
from flatout.render.summary import with_interval
from flatout.render.svg import Scale, number_ticks, with_room
from flatout.schema.history import HistoryRecord, JobSeen, RunSeen

MOST_DRAWN, COLOURS = 200, 8
STATUS = {"finished": "applied", "failed": "rejected", "interrupted": "skipped"}
CAPTION = (
    "Steps/s of each run, relative to the first finished run of its command, in the order of their starts. A line joins finished runs of "
    "one machine, device, number of ranks and version of torch. A hollow dot was interrupted, a cross failed."
)


def history_page(history: HistoryRecord) -> Page:
    runs = sorted(((job, run) for job in history.jobs for run in job.runs), key=lambda pair: pair[1].created)
    reports = [
        (shell(job.command), Cell(name, link=quote(path, errors="replace")))
        for job in history.jobs
        for name, path in job.reports.items()
    ]
    folder = PurePath(history.folder)
    project = (folder.parent if folder.name == FOLDER else folder).name or history.folder
    legend = [(f"c{at}", shell(job.command)) for at, job in enumerate(history.jobs[:COLOURS]) if job.runs]
    return Page(
        "history of a project",
        f"{project}: {several(len(history.jobs), 'command')}, {several(len(runs), 'run')}",
        "the records",
        [
            Section(
                "Commands",
                [Table(("command", "plan", "newest run", ">runs"), [_job(job) for job in history.jobs])],
            ),
            Section(
                "Runs",
                [
                    Figure(runs_plot(history, runs[-MOST_DRAWN:]), CAPTION, legend),
                    Table(
                        (
                            "started, UTC",
                            "command",
                            "result",
                            ">steps/s",
                            ">steps",
                            ">peak memory",
                            "limited by",
                            "plan",
                        ),
                        [_run(job, run) for job, run in reversed(runs)],
                    ),
                ],
            ),
            Section("Reports", [Table(("command", "report"), reports)]),
            Section(
                "Skipped files",
                [Items([f"`{path}`: {sentence(why)}" for path, why in history.skipped.items()])],
            ),
        ],
        dateline=dateline(history.created, history.folder),
        version=history.flatout,
    )


def _job(job: JobSeen) -> tuple[Cell | str, ...]:
    ratio = job.speedup
    plan = with_interval(ratio.median, ratio.low, ratio.high, ratio.n) if ratio else ""
    again = shell(["flatout", "tune", *job.command])
    verdict = (
        f"A search was interrupted; `{again}` continues it." if job.unfinished else job.verdict or "not tuned"
    )
    newest = job.runs[-1] if job.runs else None
    return (
        Cell(shell(job.command) if job.command else job.folder, kind="code"),
        Cell(plan or verdict, verdict if plan else ""),
        Cell(f"{figure(newest.steps_per_s)} steps/s", newest.where) if newest else "",
        count(len(job.runs)),
    )


def _run(job: JobSeen, run: RunSeen) -> tuple[Cell | str, ...]:
    failed = f"failed: {run.how}" if run.result == "failed" else run.result
    return (
        Cell(day(run.created).removesuffix(" UTC"), link=quote(run.record, errors="replace")),
        Cell(shell(job.command), kind="code"),
        Cell(
            failed,
            several(run.processes, "process") if run.processes > 1 else "",
            STATUS.get(run.result, "skipped"),
        ),
        figure(run.steps_per_s),
        count(run.steps),
        size(run.peak_memory_bytes),
        run.limited_by,
        ", ".join(run.levers) or "none",
    )


def runs_plot(history: HistoryRecord, runs: list[tuple[JobSeen, RunSeen]]) -> Plot | None:
    """Return the speed of the runs, relative to the first finished run of each command. None for fewer than two."""
    first: dict[str, float] = {}
    points: dict[str, list[tuple[float, float, RunSeen]]] = {}
    for number, (job, run) in enumerate(runs, 1):
        speed = drawable(run.steps_per_s)
        if speed and speed > 0 and (run.result == "finished" or job.folder in first):
            first.setdefault(job.folder, speed)
            points.setdefault(job.folder, []).append((number, speed / first[job.folder], run))
    values = [value for line in points.values() for _, value, _ in line]
    if len(values) < 2:
        return None
    x, y = Scale(0.5, len(runs) + 0.5), with_room([*values, 0.9, 1.1])
    ticks = [(tick, name) for tick, name in number_ticks(x) if tick == int(tick)]
    plot = Plot(f"Speed of {len(values)} runs", x, y, ticks, number_ticks(y, unit="x"), axis="run")
    for colour, job in enumerate(history.jobs):
        kind = f"c{min(colour, COLOURS - 1)}"
        line = points.get(job.folder, [])
        finished = [point for point in line if point[2].result == "finished"]
        for _, series in groupby(finished, key=lambda point: point[2].where):
            plot.line([(at, value) for at, value, _ in series], f"thin {kind}")
        for at, value, run in line:
            shape = "cross" if run.result == "failed" else ""
            mark = f"{kind} cross" if shape else f"hollow {kind}" if run.result == "interrupted" else kind
            tip = f"{day(run.created)}: {shell(job.command)}, {figure(run.steps_per_s)} steps/s, {run.result}, {run.where}"
            plot.dot(at, value, mark, tip, shape=shape)
    return plot

"""Reads what flatout left in a folder: the jobs with their verdicts, reports and runs.

A record that cannot be read is named among the skipped ones; the others are shown.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from flatout.compare.baselines import FOLDER_NAME
from flatout.job.folder import FOLDER, RUNS, JobFolder, flatout_folder, read_json
from flatout.schema.errors import MALFORMED
from flatout.schema.plan import format_choice
from flatout.schema.records import Record
from flatout.schema.run_request import HistoryRecord, JobEntry, RunEntry, RunSummary
from flatout.schema.session import SessionRecord

REPORTS = {
    "tune": "report.html",
    **{name: f"{name}.html" for name in ("profile", "compare", "memory", "batch", "lr", "scale")},
    "incidents": "incidents.jsonl",
}
RECORDS = ("session.json", "unfinished.json", *(f"{name}.json" for name in REPORTS))
RUN_FOLDER = re.compile(r"\d{8}T\d{6}-\d+")
WORST_FIRST = ("failed", "interrupted", "finished")
R = TypeVar("R", bound=Record)


def records_folder(folder: Path) -> Path | None:
    """The folder of records that a user means by a project, by its .flatout, or by the folder of a job."""
    inner = flatout_folder() if folder == Path() else folder / FOLDER
    if inner.is_dir():
        return inner
    return folder if folder.name == FOLDER or _is_job(folder) else None


def read_history(root: Path, history: HistoryRecord) -> HistoryRecord:
    """Fill the record with the jobs below ``root``, or with the one that it is."""
    if root.name != FOLDER and _is_job(root):
        folders = [root]
    else:
        folders = sorted(path for path in root.iterdir() if path.is_dir() and path.name != FOLDER_NAME)
    reader = _Reader(root, history.skipped)
    jobs = [job for folder in folders if (job := reader.job(folder)) is not None]
    history.jobs = sorted(
        jobs, key=lambda job: max((run.created for run in job.runs), default=""), reverse=True
    )
    return history


def _is_job(folder: Path) -> bool:
    return any(os.path.exists(folder / name) for name in (*RECORDS, *REPORTS.values(), RUNS))


class _Reader:
    def __init__(self, root: Path, skipped: dict[str, str]) -> None:
        self.root, self.skipped = root, skipped

    def job(self, path: Path) -> JobEntry | None:
        folder = JobFolder(path)
        if not os.access(path, os.R_OK | os.X_OK):
            self.skipped[self._name(path)] = "not readable for this user"
            return None
        session = self._read(folder.session, SessionRecord)
        files_of_runs = _runs(path)
        runs = [run for files in files_of_runs if (run := self._merged_run(files)) is not None]
        job = JobEntry(self._name(path), _command(path, files_of_runs), runs=runs)
        job.reports = {
            name: self._name(path / file) for name, file in REPORTS.items() if (path / file).is_file()
        }
        job.unfinished = folder.unfinished.exists()
        if session is not None:
            job.command, job.verdict = list(map(str, session.command)) or job.command, str(session.message)
            job.unfinished |= session.outcome == "running"
            job.speedup = session.speedup if session.speedup is not None and session.speedup.usable else None
        return job if job.runs or job.verdict or job.reports or job.unfinished else None

    def _read(self, path: Path, kind: type[R]) -> R | None:
        """A record; None if there is none, or if it is skipped."""
        if not os.path.lexists(path):
            return None
        data, supported = read_json(path), kind.schema  # type: ignore[attr-defined]
        number = data.get("schema") if isinstance(data, dict) else None
        if number == supported:
            try:
                return kind.from_json(data)
            except MALFORMED as error:
                why = _not_of_its_form(error)
        elif isinstance(number, int) and number > supported:
            why = f"of a newer flatout (schema {number}, this one reads {supported})"
        elif not os.path.lexists(path):  # a run that ended meanwhile removed it
            return None
        else:
            why = "not readable as a record"
        self.skipped[self._name(path)] = why
        return None

    def _merged_run(self, files: Sequence[Path]) -> RunEntry | None:
        runs = []
        for path in files:
            summary = self._read(path, RunSummary)
            try:
                if summary is not None:
                    runs.append(_run_entry(self._name(path), summary))
            except MALFORMED as error:
                self.skipped[self._name(path)] = _not_of_its_form(error)
        if not runs:
            return None
        entry = max(runs, key=lambda run: run.steps)
        worst = min(runs, key=lambda run: WORST_FIRST.index(run.result))
        entry.result, entry.exit_reason, entry.processes = worst.result, worst.exit_reason, len(runs)
        entry.peak_memory_bytes = max(run.peak_memory_bytes for run in runs)
        return entry

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def _not_of_its_form(error: Exception) -> str:
    return f"not of its form ({type(error).__name__}: {str(error)[:120]})"


def _runs(job: Path) -> list[list[Path]]:
    """The records of each run, oldest start first. Links are left out: they lead to files of others."""
    runs = sorted(
        run for run in (job / RUNS).glob("*/") if RUN_FOLDER.fullmatch(run.name) and not run.is_symlink()
    )
    records = (
        [path for path in sorted(run.glob("rank*.json")) if path.is_file() and not path.is_symlink()]
        for run in runs
    )
    return [files for files in records if files]


def _command(path: Path, files_of_runs: Sequence[Sequence[Path]]) -> list[str]:
    runs = [file for files in files_of_runs for file in files]
    for file in (*reversed(runs), *(path / name for name in RECORDS)):
        data = read_json(file)
        if isinstance(data, dict) and isinstance(data.get("command"), list) and data["command"]:
            return [str(word) for word in data["command"]]
    return []


def _run_entry(name: str, run: RunSummary) -> RunEntry:
    """Raises what MALFORMED names: a file may hold anything."""
    origin = [run.machine, run.device, f"{run.world_size} ranks" if run.world_size > 1 else ""]
    origin.append(f"torch {run.versions.get('torch', 'not recorded')}")
    return RunEntry(
        name,
        str(run.created),
        run.result,
        str(run.exit_reason),
        ", ".join(filter(None, map(str, origin))),
        int(run.steps),
        None if run.steps_per_s is None else float(run.steps_per_s),
        int(run.peak_memory_bytes),
        run.limited_by,
        [format_choice(str(choice["name"]), choice["value"]) for choice in run.plan.get("choices", ())],
    )

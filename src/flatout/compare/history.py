"""Reads what flatout left in a folder: the jobs with their newest records and all of their runs, and baselines.

A record that cannot be read is named among the skipped ones; the others are shown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flatout.compare.baselines import FOLDER_NAME, Baseline
from flatout.job.folder import FOLDER, JobFolder, json_lines, read_json, records
from flatout.job.runs import RUNS, run_records
from flatout.measure.statistics import median, quantile
from flatout.schema.compare import Change, CompareRecord, Gate
from flatout.schema.facts import machine_name
from flatout.schema.history import (
    BaselineSeen,
    ComparisonSeen,
    HistoryRecord,
    JobSeen,
    Origin,
    ProfileSeen,
    RunSeen,
    SessionSeen,
    SkippedFile,
)
from flatout.schema.plan import spell
from flatout.schema.profile import ProfileRecord
from flatout.schema.records import Record
from flatout.schema.run_summary import RunSummary
from flatout.schema.session import SessionRecord

REPORTS = {
    "tune": "report.html",
    "profile": "profile.html",
    "compare": "compare.html",
    "memory": "memory.html",
    "batch": "batch.html",
    "lr": "lr.html",
    "scale": "scale.html",
    "incidents": "incidents.jsonl",
}
RECORDS = ("session.json", "profile.json", "compare.json", "unfinished.json")
WITH_A_COMMAND = ("memory.json", "batch.json", "lr.json", "scale.json", "unfinished.json")
NOT_OF_ITS_FORM = (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError)
WORST = ("failed", "interrupted", "finished")
FEWEST_LIVE = 5  # figures, for the range of steps/s
MOST_LIVE_BYTES = 1 << 22

R = TypeVar("R", bound=Record)
S = TypeVar("S")


def records_folder(folder: Path) -> Path | None:
    """Return the folder of records that a user means by a project, by its .flatout, or by the folder of a job."""
    inner = records() if folder == Path() else folder / FOLDER
    if inner.is_dir():
        return inner
    return folder if folder.name == FOLDER or _is_job(folder) else None


def read_history(root: Path, history: HistoryRecord) -> HistoryRecord:
    """Fill the record with the jobs and baselines below ``root``."""
    reader = _Reader(root, history.skipped)
    is_job = root.name != FOLDER and _is_job(root)
    jobs = [root] if is_job else [each for each in _folders(root) if each.name != FOLDER_NAME]
    found = (reader.job(folder) for folder in jobs)
    history.jobs = sorted((job for job in found if job is not None), key=lambda job: job.newest, reverse=True)
    stored = sorted((root / FOLDER_NAME).glob("*.json"))
    seen = (reader.record(path, Baseline, reader.baseline) for path in stored)
    history.baselines = [each for each in seen if each is not None]
    return history


def _is_job(folder: Path) -> bool:
    return any(os.path.exists(folder / name) for name in (*RECORDS, *REPORTS.values(), RUNS))


def _folders(root: Path) -> list[Path]:
    with os.scandir(root) as entries:
        return sorted(root / each.name for each in entries if each.is_dir())


class _Reader:
    def __init__(self, root: Path, skipped: list[SkippedFile]) -> None:
        self.root, self.skipped = root, skipped

    def record(self, path: Path, kind: type[R], see: Callable[[str, R], S]) -> S | None:
        """Return what ``see`` makes of a record; None if there is none, or if it is skipped."""
        if not os.path.lexists(path):
            return None
        data, known = read_json(path), kind.schema  # type: ignore[attr-defined]
        number = data.get("schema") if isinstance(data, dict) else None
        if number == known:
            try:
                return see(self._name(path), kind.from_json(data))
            except NOT_OF_ITS_FORM as error:
                why = f"not of its form ({type(error).__name__}: {str(error)[:120]})"
        elif isinstance(number, int) and number > known:
            why = f"of a newer flatout (schema {number}, this one reads {known})"
        elif not os.path.lexists(path):  # a run that ended meanwhile removed it
            return None
        else:
            why = "not readable as a record"
        self.skipped.append(SkippedFile(self._name(path), why))
        return None

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def job(self, path: Path) -> JobSeen | None:
        folder = JobFolder(path)
        if not os.access(path, os.R_OK | os.X_OK):
            self.skipped.append(SkippedFile(self._name(path), "not readable for this user"))
            return None
        job = JobSeen(
            self._name(path),
            [],
            session=self.record(folder.session, SessionRecord, _session),
            runs=[run for files in run_records(path / RUNS).values() if (run := self._run(files))],
            comparison=self.record(path / "compare.json", CompareRecord, _comparison),
            profile=self.record(folder.profile, ProfileRecord, _profile),
            reports={
                name: self._name(path / file) for name, file in REPORTS.items() if os.path.isfile(path / file)
            },
        )
        job.unfinished = os.path.exists(folder.unfinished) or (
            job.session is not None and job.session.outcome == "running"
        )
        job.command = self._command(path, job)
        return job if job.newest or job.reports or job.unfinished else None

    def _command(self, path: Path, job: JobSeen) -> list[str]:
        """Return the command of the newest record that tells it."""
        seen = (*job.runs[::-1], job.session, job.profile, job.comparison)
        records = [self.root / each.record for each in seen if each is not None]
        for file in (*records, *(path / name for name in WITH_A_COMMAND)):
            data = read_json(file)
            if isinstance(data, dict) and isinstance(data.get("command"), list) and data["command"]:
                return [str(word) for word in data["command"]]
        return []

    def _run(self, files: Sequence[Path]) -> RunSeen | None:
        processes = [seen for file in files if (seen := self.record(file, RunSummary, _run))]
        if not processes:
            return None
        first = min(rank for rank, _ in processes)
        of_first = [run for rank, run in processes if rank == first]
        shown = max(of_first, key=lambda run: run.steps)
        worst = min((run for _, run in processes), key=lambda run: WORST.index(run.result))
        shown.result, shown.how = worst.result, worst.how
        shown.peak_memory_bytes = max(run.peak_memory_bytes or 0 for _, run in processes)
        shown.processes = len(processes)
        if len(of_first) == 1:
            shown.low, shown.high = _live_range((self.root / shown.record).with_suffix(".jsonl"))
        return shown

    @staticmethod
    def baseline(name: str, stored: Baseline) -> BaselineSeen:
        blocks = [_number(ms) for run in stored.runs for ms in run["blocks_ms"]]
        return BaselineSeen(
            name,
            str(stored.name),
            [str(word) for word in stored.command],
            str(stored.created),
            _origin_of_key(stored.key),
            str(stored.revision),
            len(stored.runs),
            median(blocks) if blocks else None,
        )


def _run(name: str, record: RunSummary) -> tuple[int, RunSeen]:
    return int(_number(record.rank)), RunSeen(
        name,
        str(record.created),
        record.result,
        str(record.how),
        Origin(
            str(record.machine),
            str(record.versions.get("torch", "")),
            str(record.device),
            int(_number(record.world_size)),
        ),
        int(_number(record.steps)),
        _number(record.seconds),
        _known(record.steps_per_s),
        peak_memory_bytes=int(_number(record.peak_memory_bytes)),
        limited_by=record.limited_by,
        levers=_levers(record.plan),
    )


def _session(name: str, record: SessionRecord) -> SessionSeen:
    origin = _origin_of_key(record.key)
    if record.ranks is not None:
        origin.world_size = int(_number(record.ranks.procs))
    return SessionSeen(
        name,
        str(record.created),
        str(record.outcome),
        str(record.message),
        origin,
        record.speedup if record.speedup is not None and record.speedup.usable else None,
        _levers(record.best.plan) if record.speedup is not None else [],
    )


def _comparison(name: str, record: CompareRecord) -> ComparisonSeen:
    a, b, change = record.a, record.b, record.step_time
    return ComparisonSeen(
        name,
        str(record.created),
        str(record.status),
        str(record.message),
        Origin(str(record.machine.get("machine", "")), _torch_of(b.versions if b is not None else {})),
        str(a.label) if a is not None else "",
        str(b.label) if b is not None else "",
        str(record.against),
        str(b.unit) if b is not None else "step",
        None if change is None else _change(change),
        f"{record.losses.verdict}: {record.losses.why}",
        [Gate(str(gate.name), str(gate.limit), str(gate.verdict), str(gate.why)) for gate in record.gates],
    )


def _change(change: Change) -> Change:
    value, low, high = map(_number, (change.value, change.low, change.high))
    return Change(value, low, high, int(_number(change.n)))


def _profile(name: str, record: ProfileRecord) -> ProfileSeen:
    machine = record.machine
    gpus = [gpu["name"] for gpu in machine.get("gpus", ())]
    return ProfileSeen(
        name,
        str(record.created),
        str(record.status),
        str(record.message),
        Origin(
            machine_name(machine["cpu"], machine["cores"], gpus) if "cpu" in machine else "",
            _torch_of(record.versions),
            str(record.device),
        ),
        str(record.unit),
        _known(record.step_ms),
        str(record.bound),
        str(record.bound_why),
        [str(finding.said) for finding in record.findings],
    )


def _origin_of_key(key: dict[str, Any]) -> Origin:
    found = re.search(r"\btorch ([^\s,]+)", str(key.get("versions", "")))
    return Origin(str(key.get("machine", "")), found[1] if found else "", str(key.get("device", "")))


def _torch_of(versions: dict[str, str]) -> str:
    return str(versions.get("torch", ""))


def _levers(plan: dict[str, Any]) -> list[str]:
    return [spell(str(choice["name"]), choice["value"]) for choice in plan.get("choices", ())]


def _live_range(path: Path) -> tuple[float | None, float | None]:
    """Return the middle 90 % of the live figures of steps/s, without the first, which holds the start-up."""
    try:
        if path.stat().st_size > MOST_LIVE_BYTES:
            return None, None
        lines = json_lines(path)
    except OSError:
        return None, None
    figures = [line["steps_per_s"] for line in lines if isinstance(line.get("steps_per_s"), (int, float))][1:]
    if len(figures) < FEWEST_LIVE:
        return None, None
    return quantile(figures, 0.05), quantile(figures, 0.95)


def _number(value: Any) -> float:
    """Return a number of a record. Raises TypeError: a file may hold anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{str(value)[:40]!r} is not a number")
    return value


def _known(value: Any) -> float | None:
    return None if value is None else _number(value)

"""`flatout tune`: find the fastest plan for a program."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console

from flatout.cli.arguments import PROGRAM, Duration, program, words_or_usage
from flatout.cli.progress import LiveProgress
from flatout.launch.command import understand
from flatout.levers import TABLE
from flatout.measure.load import busy_cores
from flatout.plan.errors import FlatoutError, StorageError, UsageError
from flatout.plan.folder import JobFolder
from flatout.plan.records import SessionRecord
from flatout.plan.words import Effect
from flatout.probe.machine import look
from flatout.tune.search import search
from flatout.tune.session import job_folder, open_session, save_session, verdict, write_plan
from flatout.tune.tuning import Goal, Tuning

SHORTEST_S = 5.0


@click.command(context_settings=PROGRAM)
@click.option("--budget", default="5m", show_default=True, type=Duration(), help="Time to spend: 90s, 5m, 1h.")
@click.option("--effects", default="exact,rounding,resampled", show_default=True, help="What levers may change.")
@click.option("--levers", "only", default=None, help="Only these levers, separated by commas. See `flatout levers`.")
@click.option("--horizon", default="1h", show_default=True, type=Duration(), help="How long the real job will run; a warm-up must be repaid within it.")
@click.option("--no-write", is_flag=True, help="Do not write flatout.toml beside the script.")
@click.option("--job", type=click.Path(file_okay=False, path_type=Path), help="Folder for the records instead of .flatout/<job>.")
@click.option("--again", is_flag=True, help="Start anew, even where an interrupted session could go on.")
@program
def command(budget: float, effects: str, only: str | None, horizon: float, no_write: bool, job: Path | None, again: bool, words: tuple[str, ...]) -> int:
    """Find the fastest plan for a program that keeps its results.

    The program is started several times, measured step by step with everything in it (loader included), and stopped. Its
    files are not touched. What is found is written to flatout.toml, session.json and report.html.
    """
    goal = Goal(budget, _effects(effects), _levers(only), horizon)
    if budget < SHORTEST_S:
        raise UsageError(f"a budget of {budget:g} s cannot measure anything; give at least {SHORTEST_S:g} s, as in --budget 5m.")
    session, folder = tune(words_or_usage(words, "tune"), goal, beside=not no_write, job=job, again=again)
    console = Console()
    from flatout.render.terminal import session_tables

    console.print(session_tables(session))
    console.print(f"report: {folder.report}\nplan:   {folder.plan}", markup=False, highlight=False, soft_wrap=True)
    return 0


def tune(words: tuple[str, ...], goal: Goal, beside: bool, job: Path | None = None, again: bool = False) -> tuple[SessionRecord, JobFolder]:
    """One tuning session from a command line; also what `flatout run --budget` does first."""
    cmd = understand(words)
    facts = look()
    folder = _writable(job_folder(cmd, job), job is not None)
    session = open_session(folder, cmd, facts, goal.budget_s, sorted(goal.effects), again)
    busy = busy_cores()
    if busy is not None:
        session.machine["busy_cores_before"] = round(busy, 2)
    save_session(folder, session)
    console = Console(stderr=True)
    # A terminated tuner must end its programs as an interrupted one does.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with LiveProgress(console, goal.budget_s - session.spent_s) as progress:
            search(Tuning(cmd, folder, facts, session, goal, progress, lambda s: save_session(folder, s)))
    except FlatoutError as error:
        session.status, session.message = "failed", str(error)
        _finish(folder, session)
        raise
    except KeyboardInterrupt:
        session.message = "interrupted; the same command goes on from here"
        save_session(folder, session)
        kept = f"{len(session.contests)} contests are kept in {folder.session}"
        console.print(f"flatout: interrupted. {kept}; the same command goes on from there.", markup=False, soft_wrap=True)
        raise
    session.status, session.message = "done", verdict(session)
    _finish(folder, session)
    if write_plan(folder, session, cmd, beside) is None and beside:
        sys.stderr.write(f"flatout: flatout.toml cannot be written beside the script; the plan is in {folder.plan}\n")
    return session, folder


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _finish(folder: JobFolder, session: SessionRecord) -> None:
    from flatout.plan.folder import write_whole
    from flatout.render.report import report_html

    save_session(folder, session)
    write_whole(folder.report, report_html(session))


def _writable(folder: JobFolder, asked: bool) -> JobFolder:
    """The job's folder; where this one cannot be written and nobody asked for it, a temporary one, and a line that says so."""
    try:
        return folder.make()
    except StorageError:
        if asked:
            raise
        other = JobFolder(Path(tempfile.mkdtemp(prefix=f"flatout-{folder.path.name}-"))).make()
        sys.stderr.write(f"flatout: {os.getcwd()} cannot be written; the records go to {other.path}\n")
        return other


def _effects(text: str) -> frozenset[Effect]:
    try:
        found = frozenset(Effect(word.strip().lower()) for word in text.split(",") if word.strip())
    except ValueError as error:
        raise UsageError(f"{error}; use some of exact, rounding, resampled.") from None
    if not found or Effect.CHANGES_MATH in found:
        raise UsageError("--effects takes some of exact, rounding, resampled. What changes the maths is chosen by name in a plan, never by the tuner.")
    return found


def _levers(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    names = frozenset(word.strip() for word in text.split(",") if word.strip())
    unknown = names - {lever.name for lever in TABLE}
    if unknown:
        raise UsageError(f"there is no lever {', '.join(sorted(unknown))}. `flatout levers` lists them.")
    return names



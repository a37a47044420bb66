"""`flatout tune`: find the fastest plan for a program."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from flatout.cli import ranks
from flatout.cli.arguments import PROGRAM, Amount, Duration, LeverByName, program, words_or_usage, writable
from flatout.cli.asking import interrupt
from flatout.cli.device import choose, device_option
from flatout.cli.progress import LiveProgress
from flatout.cli.underneath import of_death
from flatout.diagnose.kept import load_profile
from flatout.launch.command import Command, understand
from flatout.levers import TABLE
from flatout.plan.errors import FlatoutError, ProgramFailed, UsageError
from flatout.plan.facts import Facts
from flatout.plan.folder import JobFolder, write_json, write_whole
from flatout.plan.plan import Choice
from flatout.plan.predictions import levers_first, predictions, with_measured
from flatout.plan.profile import ProfileRecord
from flatout.plan.records import RanksRecord, SessionRecord
from flatout.plan.words import Effect
from flatout.probe.machine import look, oom_kills
from flatout.tune.elsewhere import on_ray
from flatout.tune.ranks import base_plan
from flatout.tune.search import search
from flatout.tune.session import job_folder, open_session, save_session, verdict, write_plan
from flatout.tune.tuning import USUAL_BUDGET_S, Goal, Tuning

SHORTEST_S = 5.0


@click.command(context_settings=PROGRAM)
@click.option("--budget", default=None, type=Duration(),
              help="Time to spend: 90s, 5m, 1h.  [default: 90s; 5m where a start takes over 10s, a step over 100ms, or compiling usually pays]")
@click.option("--effects", default="exact,rounding,precision,resampled", show_default=True,
              help="What levers may change; without `precision`, nothing is multiplied or sent in half precision.")
@click.option("--levers", "only", default=None, help="Only these levers, separated by commas. See `flatout levers`.")
@click.option("--by-name", "named", multiple=True, type=LeverByName(), metavar="NAME[=VALUE]",
              help="A lever that changes what is learned, beside the plain program with its loss curve, never in the plan: 'local_sgd={every = 8}'.")
@click.option("--horizon", default="1h", show_default=True, type=Duration(), help="How long the real job will run; a warm-up must be repaid within it.")
@click.option("--memory-limit", "limit", default=None, type=Amount(), help="What the tensors of a step may take, 8GB or 800MiB: the fastest plan that fits.")
@click.option("--no-write", is_flag=True, help="Do not write flatout.toml beside the script.")
@click.option("--job", type=click.Path(file_okay=False, path_type=Path), help="Folder for the records instead of .flatout/<job>.")
@click.option("--ray", default=None, metavar="ADDRESS", help="Measure on the nodes of a Ray cluster that is there, at once: HOST:PORT, or auto.")
@click.option("--again", is_flag=True, help="Start anew, even where an interrupted session could go on.")
@device_option
@ranks.options
@program
def command(budget: float | None, effects: str, only: str | None, named: tuple[Choice, ...], horizon: float, limit: int | None, no_write: bool,
            job: Path | None, ray: str | None, again: bool, device: str | None, words: tuple[str, ...], **given: Any) -> int:
    """Find the fastest plan for a program that keeps its results.

    The program is started several times, measured step by step with everything in it (loader included), and stopped. Its
    files are not touched. What is found is written to flatout.toml, session.json and report.html. With --procs or --gpus it is tuned as several
    ranks, which are measured beside one process.
    """
    goal = Goal(budget, _effects(effects), _levers(only), horizon, memory_limit_bytes=limit, named=named)
    if budget is not None and budget < SHORTEST_S:
        raise UsageError(f"a budget of {budget:g} s cannot measure anything; give at least {SHORTEST_S:g} s, as in --budget 5m.")
    asked = ranks.ranks_asked(given)
    choose(device, understand(words_or_usage(words, "tune")), "tune", asked.procs, asked.gpus, "--ray" if ray is not None else "")
    session, folder = tune(words, goal, beside=not no_write, job=job, again=again, asked=asked, ray=ray)
    console = Console()
    from flatout.render.terminal import session_tables

    console.print(session_tables(session))
    console.print(f"report: {folder.report}\nplan:   {folder.plan}", markup=False, highlight=False, soft_wrap=True)
    return 0


def tune(words: tuple[str, ...], goal: Goal, beside: bool, job: Path | None = None, again: bool = False,
         asked: ranks.RanksAsked | None = None, ray: str | None = None) -> tuple[SessionRecord, JobFolder]:
    """One tuning session from a command line; also what `flatout run --budget` does first. ``asked``: as so many ranks; ``ray``: on that cluster."""
    if ray is not None and asked is not None and asked.several:
        raise UsageError("--ray measures one process on each of several machines, --procs and --gpus several ranks on this one. Give one of them.")
    cmd = understand(words)
    facts = look()
    made_for = asked.title if asked is not None else ""
    folder = writable(job_folder(cmd, job, made_for), job is not None)
    elsewhere = on_ray(ray, cmd, facts) if ray is not None else None
    session = open_session(folder, cmd, facts, goal.budget_s or USUAL_BUDGET_S, sorted(goal.effects), again, goal.memory_limit_bytes, made_for)
    profile = load_profile(folder)
    if profile is not None:
        goal = replace(goal, first=tuple(levers_first(profile.findings, [lever.name for lever in TABLE])))
    save_session(folder, session)
    how = {} if asked is None or not asked.several else _as_ranks(cmd, facts, asked, session)
    console, kills = Console(stderr=True), oom_kills()
    # A terminated tuner must end its programs as an interrupted one does.
    signal.signal(signal.SIGTERM, interrupt)
    try:
        with LiveProgress(console, session.budget_s - session.spent_s) as progress:
            search(Tuning(**{"command": cmd, "facts": facts, **how}, job=folder, session=session, goal=goal, watcher=progress,
                          save_session=lambda s: save_session(folder, s), elsewhere=elsewhere))
    except FlatoutError as error:
        session.status, session.message = "failed", str(error)
        _finish(folder, session)
        said = of_death(error.exit_code, str(error), (oom_kills() or 0) - (kills or 0)) if isinstance(error, ProgramFailed) else []
        if said:
            raise ProgramFailed("\n".join([str(error).rstrip(), *(f"flatout: {line}" for line in said)]), error.exit_code) from None
        raise
    except KeyboardInterrupt:
        session.message = "interrupted; the same command continues from here"
        save_session(folder, session)
        kept = f"{len(session.blocks)} measured blocks are kept in {folder.session}"
        console.print(f"flatout: interrupted. {kept}; the same command continues from there.", markup=False, soft_wrap=True)
        raise
    finally:
        if elsewhere is not None:
            session.machine["nodes"] = {"measured": elsewhere.hosts, "left_out": elsewhere.left_out}
            for sentence in elsewhere.left_out:
                console.print(f"flatout: a node was left out: {sentence}", markup=False, soft_wrap=True)
            elsewhere.close()
    session.status, session.message = "done", verdict(session)
    if profile is not None:
        session.predictions = predictions(profile.findings, session.levers)
        _tell_the_profile(folder, profile, session)
    _finish(folder, session)
    if write_plan(folder, session, cmd, beside) is None and beside:
        sys.stderr.write(f"flatout: flatout.toml cannot be written beside the script; the plan is in {folder.plan}\n")
    return session, folder


def _as_ranks(cmd: Command, facts: Facts, asked: ranks.RanksAsked, session: SessionRecord) -> dict[str, Any]:
    """What a search over ranks begins with, once it has been seen that the program divides. Raises CannotDivide, ProgramFailed."""
    from flatout.cli.dividing import rehearsed
    from flatout.launch.gang import launcher_of

    division, found = rehearsed(cmd, facts, asked)
    session.ranks = session.ranks or RanksRecord(asked.procs, division, asked.gpus, shards=found.shards)
    each = replace(facts, cores=max(1, facts.cores // asked.procs))
    return {"command": launcher_of(cmd, asked.procs, asked.gpus, facts.cores), "alone": cmd, "base": base_plan(division, found.shards), "facts": each}


def _tell_the_profile(folder: JobFolder, profile: ProfileRecord, session: SessionRecord) -> None:
    """What came of its findings is written beside them, in its record and on its page."""
    from flatout.render.profile_report import profile_html

    profile.findings = with_measured(profile.findings, session.levers)
    write_json(folder.profile, profile.to_json())
    write_whole(folder.profile_page, profile_html(profile))


def _finish(folder: JobFolder, session: SessionRecord) -> None:
    from flatout.render.report import report_html

    save_session(folder, session)
    write_whole(folder.report, report_html(session))


def _effects(text: str) -> frozenset[Effect]:
    try:
        found = frozenset(Effect(word.strip().lower()) for word in text.split(",") if word.strip())
    except ValueError as error:
        raise UsageError(f"{error}; use some of exact, rounding, precision, resampled.") from None
    if not found or Effect.CHANGES_MATH in found:
        raise UsageError("--effects takes some of exact, rounding, precision, resampled. What changes the maths is chosen by name in a plan alone.")
    return found


def _levers(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    names = frozenset(word.strip() for word in text.split(",") if word.strip())
    unknown = names - {lever.name for lever in TABLE}
    if unknown:
        raise UsageError(f"there is no lever {', '.join(sorted(unknown))}. `flatout levers` lists them.")
    return names



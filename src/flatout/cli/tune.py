"""`flatout tune`: find the fastest plan for a program."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from flatout.cli.options.arguments import (
    PROGRAM,
    Amount,
    Duration,
    Grouped,
    LeverByName,
    complete_levers,
    did_you_mean,
    lever_of,
    program_argument,
    require_program,
    writable,
)
from flatout.cli.options.device import apply_device, device_option
from flatout.cli.options.measurement import job_option
from flatout.cli.options.output import json_option, print_json, stop_on_sigterm, warn_untested
from flatout.cli.options.progress import LiveProgress
from flatout.cli.options.ranks import RankOptions, add_rank_options, read_rank_options
from flatout.diagnose.explain import explain_signal
from flatout.job.folder import JobFolder, write_atomically
from flatout.job.sanitize import sanitize
from flatout.launch.command import Command, check_measurable, parse_command
from flatout.launch.restart_policy import oom_kills
from flatout.probe.machine import look
from flatout.schema.enums import Effect
from flatout.schema.errors import FlatoutError, ProgramFailed, UsageError
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.schema.session import RanksRecord, SessionRecord
from flatout.trial.blocks import Watcher
from flatout.tune.budget import USUAL_BUDGET_S
from flatout.tune.goal import Goal
from flatout.tune.plan_files import job_folder, plan_beside_script
from flatout.tune.ranks import base_plan
from flatout.tune.remote import RemoteNodes
from flatout.tune.search import search
from flatout.tune.session import (
    made_for_another,
    open_session,
    save_session,
    session_file,
    verdict,
    write_plan,
)
from flatout.tune.tuning import Tuning

MIN_BUDGET_S = 5.0
EFFECTS = ("exact", "rounding", "precision", "resampled")  # without those that change the maths


@click.command(cls=Grouped, context_settings=PROGRAM)
@click.option(
    "--budget",
    type=Duration(),
    help="Time to spend.  [default: 90s; 3m if compiling may pay within --horizon; 5m if a start takes over 10s or a step over 100ms]",
)
@click.option(
    "--effects",
    default=",".join(EFFECTS),
    show_default=True,
    help="Effects that levers may have; without `precision`, nothing is computed or sent in half precision.",
)
@click.option(
    "--levers",
    shell_complete=complete_levers,
    help="Try only these levers, separated by commas; see `flatout levers`.",
)
@click.option(
    "--with",
    "named_levers",
    multiple=True,
    type=LeverByName(),
    metavar="NAME[=VALUE]",
    help="Also measure a lever that changes results, with loss curve, outside the plan: 'batch_size={size = 64}'.",
)
@click.option(
    "--horizon",
    default="1h",
    show_default=True,
    type=Duration(),
    help="Duration of the real job; warm-up costs must pay off within it.",
)
@click.option(
    "--memory-limit",
    type=Amount(),
    help="Find the fastest plan whose tensors fit into this much memory: 8GB, 800MiB.",
)
@click.option("--no-write", is_flag=True, help="Do not write flatout.toml next to the script.")
@job_option
@click.option(
    "--ray",
    metavar="ADDRESS",
    help="Measure on all nodes of a running Ray cluster in parallel: HOST:PORT, or auto.",
)
@click.option(
    "--from-scratch", is_flag=True, help="Start a new session, even if an interrupted one could continue."
)
@json_option
@device_option
@add_rank_options
@program_argument
def command(
    budget: float | None,
    effects: str,
    levers: str | None,
    named_levers: tuple[Choice, ...],
    horizon: float,
    memory_limit: int | None,
    no_write: bool,
    job: Path | None,
    ray: str | None,
    from_scratch: bool,
    as_json: bool,
    device: str | None,
    argv: tuple[str, ...],
    **options: object,
) -> int:
    """Find the fastest plan that keeps the program's results.

    flatout starts the program several times, measures whole steps including data loading, and stops it. It
    does not touch the program's files. The results are in flatout.toml, session.json and report.html. With
    --procs or --gpus it tunes several ranks and compares them with one process."""
    goal = Goal(
        budget,
        _effects(effects),
        _levers(levers),
        horizon,
        memory_limit_bytes=memory_limit,
        named=named_levers,
    )
    if budget is not None and budget < MIN_BUDGET_S:
        raise UsageError(
            f"a budget of {budget:g} s cannot measure anything; give at least {MIN_BUDGET_S:g} s, as in --budget 5m."
        )
    ranks = read_rank_options(options)
    cmd = parse_command(require_program(argv, "tune"))
    apply_device(device, cmd, "tune", ranks.procs, ranks.gpus, "--ray" if ray is not None else "")
    session, folder, plan = tune(
        argv, goal, write_beside=not no_write, job=job, from_scratch=from_scratch, ranks=ranks, ray=ray
    )
    from flatout.render.report import session_page
    from flatout.render.terminal import print_page

    if as_json:
        print_json(session)
    console = Console(stderr=as_json)
    print_page(console, session_page(session))
    console.print(f"report: {folder.report}\nplan:   {plan}", markup=False, highlight=False, soft_wrap=True)
    return 0


def tune(
    argv: tuple[str, ...],
    goal: Goal,
    write_beside: bool,
    job: Path | None = None,
    from_scratch: bool = False,
    ranks: RankOptions | None = None,
    ray: str | None = None,
) -> tuple[SessionRecord, JobFolder, Path]:
    """Run one tuning session, and return it with its folder and the file of the plan.

    ``ranks`` gives their number, ``ray`` the address of a cluster."""
    if ray is not None and ranks is not None and ranks.several:
        raise UsageError(
            "--ray measures one process on each of several machines, but --procs and --gpus start several ranks on this one. Use one of them."
        )
    cmd = check_measurable(parse_command(argv))
    facts = warn_untested(look(cmd.argv))
    made_for = ranks.title if ranks is not None else ""
    folder = writable(job_folder(cmd, job, made_for), job is not None)
    folder.lock()
    nodes = RemoteNodes(ray, cmd, facts) if ray is not None else None
    session = open_session(
        folder,
        cmd,
        facts,
        goal.budget_s or USUAL_BUDGET_S,
        sorted(goal.effects),
        from_scratch,
        goal.memory_limit_bytes,
        made_for,
    )
    save_session(folder, session)
    searched, single, base = cmd, None, None
    if ranks is not None and ranks.several:
        single, (searched, base, facts) = cmd, _as_ranks(cmd, facts, ranks, session)

    def tuning(watcher: Watcher) -> Tuning:
        return Tuning(
            command=searched,
            job=folder,
            facts=facts,
            session=session,
            goal=goal,
            watcher=watcher,
            save_session=lambda s: save_session(folder, s),
            base=base,
            single_command=single,
            remote=nodes,
        )

    _search(tuning, session, folder, nodes)
    session.status, session.message = "done", verdict(session)
    written = write_plan(folder, session, cmd, write_beside)
    session.plan_path = str(folder.plan) if written is None and job is not None else ""
    _finish(folder, session)
    if written is None and write_beside:
        sys.stderr.write(f"flatout: {_why_not_beside(folder, session, cmd)}\n")
    return session, folder, written or folder.plan


def _search(
    tuning: Callable[[Watcher], Tuning], session: SessionRecord, folder: JobFolder, nodes: RemoteNodes | None
) -> None:
    """Run the search and keep its record, however it ends. Raises FlatoutError, KeyboardInterrupt."""
    console, kills_before = Console(stderr=True), oom_kills()
    stop_on_sigterm()
    try:
        with LiveProgress(console, session.budget_s - session.spent_s) as progress:
            search(tuning(progress))
    except FlatoutError as error:
        session.status, session.message = "failed", str(error)
        _finish(folder, session)
        if isinstance(error, ProgramFailed):
            kills = (oom_kills() or 0) - (kills_before or 0)
            if explanation := explain_signal(error.exit_code, str(error), kills):
                lines = [str(error).rstrip(), *(f"flatout: {line}" for line in explanation)]
                raise ProgramFailed("\n".join(lines), error.exit_code) from None
        raise
    except KeyboardInterrupt:
        session.message = "interrupted; the same command continues from here"
        save_session(folder, session)
        saved_blocks = f"{len(session.blocks)} measured blocks are saved in {session_file(folder, session)}"
        console.print(
            f"flatout: interrupted. {saved_blocks}; the same command continues from there.",
            markup=False,
            soft_wrap=True,
        )
        raise
    finally:
        if nodes is not None:
            session.machine["nodes"] = {"measured": nodes.hosts, "left_out": nodes.excluded}
            for sentence in nodes.excluded:
                console.print(f"flatout: skipped a node: {sentence}", markup=False, soft_wrap=True)
            nodes.close()


def _why_not_beside(folder: JobFolder, session: SessionRecord, cmd: Command) -> str:
    target = plan_beside_script(cmd)
    if other := made_for_another(target, session):
        return sanitize(f"the plan is in {folder.plan}; {target} stays, because it was made for `{other}`")
    return f"cannot write flatout.toml next to the script; the plan is in {folder.plan}"


def _as_ranks(
    cmd: Command, facts: Facts, ranks: RankOptions, session: SessionRecord
) -> tuple[Command, Plan, Facts]:
    """Rehearse the program as ranks, and return the command that starts all, their base plan and facts.

    Raises CannotParallelize, ProgramFailed."""
    from flatout.cli.options.rank_plans import rehearse
    from flatout.launch.local_launcher import launcher_of

    division, rehearsal = rehearse(cmd, facts, ranks)
    session.ranks = session.ranks or RanksRecord(ranks.procs, division, ranks.gpus, shards=rehearsal.shards)
    rank_facts = replace(facts, cores=max(1, facts.cores // ranks.procs))
    launcher = launcher_of(cmd, ranks.procs, ranks.gpus, facts.cores)
    return launcher, base_plan(division, rehearsal.shards), rank_facts


def _finish(folder: JobFolder, session: SessionRecord) -> None:
    from flatout.render.page import html
    from flatout.render.report import session_page

    save_session(folder, session)
    write_atomically(folder.report, html(session_page(session)))


def _effects(text: str) -> frozenset[Effect]:
    names = [word.strip().lower() for word in text.split(",") if word.strip()]
    if unknown := [name for name in names if name not in {effect.value for effect in Effect}]:
        raise UsageError(
            f"there is no effect {unknown[0]!r}{did_you_mean(unknown[0], EFFECTS)} --effects takes some of {', '.join(EFFECTS)}."
        )
    effects = frozenset(map(Effect, names))
    if not effects or Effect.CHANGES_MATH in effects:
        raise UsageError(
            f"--effects takes some of {', '.join(EFFECTS)}. Levers that change the maths can only be chosen by name in a plan."
        )
    return effects


def _levers(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    names = frozenset(word.strip() for word in text.split(",") if word.strip())
    return frozenset(lever_of(name).name for name in sorted(names))

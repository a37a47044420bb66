"""`flatout run`: run the real job under its plan.

The program replaces this process. Without a plan flatout counts its steps, and explains a crash."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import click

from flatout.agent.applier import before_start
from flatout.cli.options import exports, ranks, supervision
from flatout.cli.options.arguments import (
    PROGRAM,
    Duration,
    LeverByName,
    program,
    read_plan,
    words_or_usage,
    writable,
)
from flatout.cli.options.device import choose, device_option, hint
from flatout.cli.options.grouped import Grouped, machines_option, survival_option
from flatout.cli.options.messages import say, warned
from flatout.job.folder import read_json, write_json
from flatout.job.temporary import temporary
from flatout.launch.caches import private_caches
from flatout.launch.command import Command, measurable, understand
from flatout.launch.entry_watch import EntryWatch, watch_beside
from flatout.launch.environment import ENTERED, attached, listening
from flatout.launch.torchrun import Torchrun, torchrun_of
from flatout.levers import TABLE
from flatout.probe.machine import hardware, with_software
from flatout.render.formatting import shell
from flatout.schema.errors import NothingMeasured, ProgramNotFound, UsageError
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.schema.run_request import ResumeOptions, RunRequest
from flatout.tune.plan_files import FoundPlan, differences, find_plan, job_folder, key_of, plan_files

COUNTED = "flatout.agent.run_summary:count"  # without levers
ENTRY, WITH_CHECKPOINTS = "flatout.agent.entry:attach", "flatout.checkpoint.attach:attach"
RESCUE = "rescue"  # subfolder of a job's folder


@click.command(cls=Grouped, context_settings=PROGRAM)
@click.option(
    "--plan",
    "plan_path",
    default=None,
    help="Plan file, or `none`. The default is the plan tuned for this command, script, machine and versions.",
)
@click.option(
    "--with",
    "chosen",
    multiple=True,
    type=LeverByName(),
    metavar="NAME[=VALUE]",
    help="Add or override a lever: --with autocast, --with 'batch_size={size = 64}'. Repeatable.",
)
@device_option
@click.option(
    "--watch",
    is_flag=True,
    help="Show a line on standard error every 10 s: samples/s, data wait, cores, memory, GPU, MFU if FLOPs are known.",
)
@survival_option(
    "--rescue",
    is_flag=True,
    help="Keep verified checkpoints: at intervals, on signals, at the end; see `flatout rescue`.",
)
@survival_option(
    "--resume",
    is_flag=True,
    help="Resume exactly where this command was interrupted, without code for it in the script.",
)
@survival_option(
    "--from-scratch",
    is_flag=True,
    help="Start from scratch even if there is a checkpoint to resume from; needs --resume.",
)
@survival_option(
    "--replay-output",
    is_flag=True,
    help="Show again what the program prints before its checkpoint; needs --resume.",
)
@exports.options
@supervision.options(Duration())
@ranks.options
@machines_option(
    "--ray",
    default=None,
    metavar="ADDRESS",
    help="Run the ranks on a running Ray cluster: HOST:PORT, or auto.",
)
@program
def command(
    plan_path: str | None,
    chosen: tuple[Choice, ...],
    device: str | None,
    watch: bool,
    rescue: bool,
    resume: bool,
    from_scratch: bool,
    replay_output: bool,
    summary: bool,
    export: tuple[str, ...],
    export_every: float,
    ray: str | None,
    words: tuple[str, ...],
    **elsewhere: object,
) -> int:
    """Run a program under its plan.

    The program replaces this process, so its input, output, signals and exit code are its own. With --procs
    or --gpus it runs as several ranks, each on its share of every batch, after a rehearsal has shown that
    they learn the same. torchrun behind these options, or --ray, starts them on several machines.
    """
    cmd = understand(words_or_usage(words, "run"))
    asked = ranks.ranks_asked(elsewhere)
    watched = supervision.supervision(elsewhere)
    place = torchrun_of(cmd, asked.procs) if asked.given and ray is None else ray
    if watched.asked and place is not None:
        raise UsageError(
            f"--supervise restarts the processes of this machine, but {'Ray' if ray else 'torchrun'} starts the ranks. Remove --supervise."
            f"{'' if ray else ' torchrun restarts them itself, if its max-restarts is above 0.'}"
        )
    cmd = place.program if isinstance(place, Torchrun) else cmd
    choose(device, cmd, "run", asked.procs, asked.gpus, "--ray" if ray is not None else "")
    facts = hardware()
    _look_at_folder(cmd, alone=not asked.several and place is None)
    left = exports.summary_of(cmd, facts.machine, summary, export, export_every)
    if asked.shard == "always" and not asked.several and place is None:
        raise UsageError(
            "--shard splits weights between ranks, but there is only one rank. Give their number: --procs 2 --shard always."
        )
    made_for = asked.title if place is None else ""
    if plan_path or chosen or asked.several or place is not None or plan_files(cmd, made_for):
        facts = warned(with_software(facts, cmd.argv))
    plan, remark, other = _plan_for(cmd, facts, plan_path, made_for)
    for choice in chosen:
        plan = (plan or Plan()).with_choice(choice)
    if plan is None and not asked.several and place is None:
        say(
            f"{remark or f'no plan fits this command yet{other}'}; running it as it is. {_how_to_tune(cmd, device)}"
        )
    elif remark:
        say(remark)
    keeps = rescue or resume or watched.asked
    request = RunRequest(
        WITH_CHECKPOINTS if keeps else ENTRY,
        plan or Plan(),
        facts,
        os.getpid(),  # exec keeps it, and it distinguishes the program from its children
        watch=known_ideal(cmd) if watch else None,
        rescue=str(rescue_folder(cmd, asked=rescue or resume)) if keeps else None,
        resume=ResumeOptions(from_scratch, replay_output, rescue, required=not watched.asked)
        if resume or watched.asked
        else None,
        summary=left,
    )
    if left is not None and not cmd.closed:
        exports.start(left, export)
    if asked.several or place is not None:
        return _run_as_ranks(cmd, request, chosen, asked, place, watched)
    return _run_alone(cmd, request, watched)


def _look_at_folder(cmd: Command, alone: bool) -> None:
    """In a removed folder there is no place for plans and records."""
    try:
        os.getcwd()
    except FileNotFoundError:
        if not alone:
            raise UsageError("the current folder was removed. Change to one that exists.") from None
        say("the current folder was removed, so there is no plan; running the program without flatout")
        _become(cmd, dict(os.environ))


def _run_alone(cmd: Command, request: RunRequest, watched: supervision.Supervision) -> NoReturn:
    becomes = watched.over(cmd, job_folder(cmd).path / "incidents.jsonl")
    counted = request.watch is None and request.rescue is None and not len(request.plan)
    if counted and request.summary is None:
        _become(becomes, {**_listening(), **watched.environment})
    if counted:
        request = replace(request, entry=COUNTED)
    prefix = f"flatout: {'this run is not counted' if counted else 'nothing was applied'}: "
    if cmd.closed:
        sys.stderr.write(f"{prefix}`python {cmd.closed}` disables flatout; remove {cmd.closed}\n")
        _become(becomes, dict(os.environ))
    environment = _environment(request)
    watch_beside(EntryWatch(Path(environment[ENTERED])), prefix)
    _become(becomes, {**environment, **watched.environment})


def _run_as_ranks(
    cmd: Command,
    request: RunRequest,
    chosen: tuple[Choice, ...],
    asked: ranks.RankOptions,
    place: Torchrun | str | None,
    watched: supervision.Supervision,
) -> int:
    """Run the program as ranks on this machine, by torchrun, or on the Ray cluster at the address ``place``."""
    import secrets

    from flatout.cli.options.rank_plans import plan_of_ranks, run_divided
    from flatout.launch.local_launcher import launcher_of

    if cmd.closed:
        raise UsageError(
            f"`python {cmd.closed}` disables flatout, so every rank would train on the same data. Remove the option."
        )
    plan = plan_of_ranks(cmd, request.facts, request.plan, chosen, asked.at_least_two, say)
    seed = place.seed if isinstance(place, Torchrun) else secrets.randbits(31)
    environment = _environment(replace(request, plan=plan, seed=seed))
    if isinstance(place, Torchrun):
        return _become(place.command, place.environment(environment, asked.procs, asked.gpus))
    if place is not None:
        return _on_ray(place, cmd, asked, environment)
    if watched.asked:
        ranks_of_it = launcher_of(cmd, asked.procs, asked.gpus, request.facts.cores)
        return _become(
            watched.over(ranks_of_it, job_folder(cmd).path / "incidents.jsonl"),
            {**environment, **watched.environment},
        )
    return run_divided(cmd, request.facts, asked, Path(environment["FLATOUT_JOB"]), environment)


def _on_ray(address: str, cmd: Command, asked: ranks.RankOptions, environment: dict[str, str]) -> int:
    from flatout.launch.ray_cluster import run_ranks, work

    def show(part: bytes) -> None:
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()

    return run_ranks(address, work(cmd.argv, environment), asked.procs, asked.gpus, show)


def rescue_folder(cmd: Command, asked: bool) -> Path:
    """Return the absolute folder for checkpoints of this command, which is created only if ``asked`` for."""
    folder = job_folder(cmd)
    return (writable(folder, asked=False) if asked else folder).path.resolve() / RESCUE


def known_ideal(cmd: Command) -> dict[str, float]:
    """Return the time of a step's FLOPs at the machine's measured peaks, from this command's profile if there is one."""
    seen = read_json(job_folder(cmd).path / "profile.json")
    mfu, step_ms = (seen.get("mfu"), seen.get("step_ms")) if isinstance(seen, dict) else (None, None)
    return (
        {"ideal_ms": float(mfu) * float(step_ms)}
        if isinstance(mfu, (int, float)) and isinstance(step_ms, (int, float))
        else {}
    )


def _plan_for(cmd: Command, facts: Facts, given: str | None, made_for: str) -> tuple[Plan | None, str, str]:
    """Return the plan, a remark about it, and a mention of a plan for another command of the script.

    A plan given by name is used even if it was made for something else; the remark says so."""
    if given is not None:
        plan = read_plan(given)
        key = key_of(cmd, facts, made_for)
        strange = differences(dict(plan.made_for), key) if plan.made_for else []
        return (
            plan,
            f"this plan was made for {'; '.join(strange)}; each lever is checked again here"
            if strange
            else "",
            "",
        )
    found = find_plan(cmd, facts, made_for)
    remark = next(
        (
            f"{each.remark} (--plan {each.path} uses it anyway)" if each.usable else each.remark
            for each in reversed(found.skipped)
            if not each.command
        ),
        "",
    )
    return found.plan, remark if found.plan is None else "", _another_command(cmd, found)


def _another_command(cmd: Command, found: FoundPlan) -> str:
    """Return a mention of a plan for another command of the same script, which fits apart from that; "" if none."""
    for each in found.skipped:
        if each.only_command and cmd.script is not None and str(cmd.script) in each.command.split():
            return f" (a plan for `{each.command}` exists: --plan {each.path} uses it)"
    return ""


def _how_to_tune(cmd: Command, device: str | None) -> str:
    try:
        return f"To tune: flatout tune {hint(device)}{shell(measurable(cmd).shown)}"
    except NothingMeasured as why:
        return f"It cannot be tuned: {why}"


def _environment(request: RunRequest) -> dict[str, str]:
    """Write the request for the program; return its environment, with the variables of PROCESS levers.

    Several ranks get the same random numbers, if the script sets no seed, and the same order of sets.
    """
    extra: dict[str, str] = {}
    if request.seed is not None or request.resume is not None:
        # 0, not a random number: the ranks of several nodes must agree, and each node runs this code itself.
        extra["PYTHONHASHSEED"] = os.environ.get("PYTHONHASHSEED") or "0"
    variables, outcomes = before_start(TABLE.of(request.plan.names), request.plan, request.facts)
    for sentence in private_caches(os.environ)[1]:
        say(sentence)
    job = temporary("run") / "job.json"
    write_json(job, replace(request, started=tuple(outcome.to_json() for outcome in outcomes)).to_json())
    return attached(job, {**extra, **variables}, becomes=request.seed is None)


def _listening() -> dict[str, str]:
    """Return the environment for a program that runs unchanged: only its crash report is written."""
    return listening(temporary("run") / "explained", becomes=True)


def _become(cmd: Command, environment: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would keep that for a shell
    try:
        os.execvpe(cmd.argv[0], list(cmd.argv), environment)
    except OSError as error:
        raise ProgramNotFound(f"{cmd.argv[0]} cannot be started: {error.strerror}.") from None

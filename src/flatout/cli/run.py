"""`flatout run`: run the real job under its plan.

The program replaces this process. Without a plan flatout counts its steps, and explains a crash."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import click

from flatout.agent.applier import before_start
from flatout.cli.options import exports
from flatout.cli.options.arguments import (
    PROGRAM,
    Grouped,
    LeverByName,
    machines_option,
    program_argument,
    read_plan,
    recovery_option,
    require_program,
    writable,
)
from flatout.cli.options.configuration import ignored
from flatout.cli.options.device import apply_device, device_hint, device_option
from flatout.cli.options.output import notify, warn_untested
from flatout.cli.options.ranks import RankOptions, add_rank_options, read_rank_options
from flatout.cli.options.supervision import Supervision, add_supervision_options, read_supervision
from flatout.job.folder import read_json, write_json
from flatout.job.temporary import temporary
from flatout.launch.command import Command, EntryWatch, check_measurable, parse_command, watch_from_beside
from flatout.launch.environment import ENTERED, crash_environment, job_environment, private_caches
from flatout.launch.torchrun import Torchrun, torchrun_of
from flatout.levers import TABLE
from flatout.probe.machine import hardware, with_software
from flatout.render.formatting import shell
from flatout.schema.errors import MALFORMED, NothingMeasured, ProgramNotFound, UsageError
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.schema.run_request import ResumeOptions, RunRequest
from flatout.tune.plan_files import differences, find_plan, job_folder, plan_files, plan_key

COUNT_ENTRY = "flatout.agent.run_summary:count"  # without levers
CHECKS_ENTRY = "flatout.diagnose.run_checks:attach"
ENTRY, CHECKPOINT_ENTRY = "flatout.agent.entry:attach", "flatout.checkpoint.attach:attach"
RESCUE = "rescue"  # subfolder of a job's folder


@click.command(cls=Grouped, context_settings=PROGRAM)
@click.option(
    "--plan",
    "plan_path",
    help="Plan file, or `none`. The default is the plan tuned for this command, script, machine and versions.",
)
@click.option(
    "--with",
    "levers",
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
@recovery_option(
    "--rescue",
    is_flag=True,
    help="Keep verified checkpoints: at intervals, on signals, at the end; see `flatout rescue`.",
)
@recovery_option(
    "--resume",
    is_flag=True,
    help="Resume exactly where this command was interrupted, without code for it in the script.",
)
@recovery_option(
    "--from-scratch",
    is_flag=True,
    help="Start from scratch even if there is a checkpoint to resume from; needs --resume.",
)
@recovery_option(
    "--replay-output",
    is_flag=True,
    help="Show again what the program prints before its checkpoint; needs --resume.",
)
@click.option(
    "--no-checks", is_flag=True, help="Do not watch the first 200 steps for mistakes (`flatout check`)."
)
@exports.add_export_options
@add_supervision_options
@add_rank_options
@machines_option(
    "--ray",
    metavar="ADDRESS",
    help="Run the ranks on a running Ray cluster: HOST:PORT, or auto.",
)
@program_argument
def command(
    plan_path: str | None,
    levers: tuple[Choice, ...],
    device: str | None,
    watch: bool,
    rescue: bool,
    resume: bool,
    from_scratch: bool,
    replay_output: bool,
    no_checks: bool,
    summary: bool,
    export: tuple[str, ...],
    export_every: float,
    ray: str | None,
    argv: tuple[str, ...],
    **options: object,
) -> int:
    """Run a program under its plan.

    The program replaces this process, so its input, output, signals and exit code are its own. With --procs
    or --gpus it runs as several ranks, each on its share of every batch, after a rehearsal has shown that
    they learn the same. torchrun behind these options, or --ray, starts them on several machines."""
    cmd = parse_command(require_program(argv, "run"))
    ranks = read_rank_options(options)
    supervision = read_supervision(options)
    launcher = torchrun_of(cmd, ranks.procs) if ranks.explicit and ray is None else ray
    as_ranks = ranks.several or launcher is not None
    if supervision.enabled and launcher is not None:
        raise UsageError(
            f"--supervise restarts the processes of this machine, but {'Ray' if ray else 'torchrun'} starts the ranks. Remove --supervise."
            f"{'' if ray else ' torchrun restarts them itself, if its max-restarts is above 0.'}"
        )
    cmd = launcher.program if isinstance(launcher, Torchrun) else cmd
    apply_device(device, cmd, "run", ranks.procs, ranks.gpus, "--ray" if ray is not None else "")
    facts = hardware()
    _run_in_removed_folder(cmd, one_process=not as_ranks)
    summary_request = exports.summary_of(cmd, facts.machine, summary, export, export_every)
    if ranks.shard == "always" and not as_ranks:
        raise UsageError(
            "--shard splits weights between ranks, but there is only one rank. Give their number: --procs 2 --shard always."
        )
    made_for = ranks.title if launcher is None else ""
    if plan_path or levers or as_ranks or plan_files(cmd, made_for):
        facts = warn_untested(with_software(facts, cmd.argv))
    plan, remark, other_plan = _plan_for(cmd, facts, plan_path, made_for)
    for choice in levers:
        plan = (plan or Plan()).with_choice(choice)
    if plan is None and not as_ranks:
        notify(
            f"{remark or f'no plan fits this command yet{other_plan}'}; running it as it is. {_how_to_tune(cmd, device)}"
        )
    elif remark:
        notify(remark)
    keeps_checkpoints = rescue or resume or supervision.enabled
    request = RunRequest(
        CHECKPOINT_ENTRY if keeps_checkpoints else ENTRY,
        plan or Plan(),
        facts,
        os.getpid(),  # exec keeps it, and it distinguishes the program from its children
        live_line=ideal_step(cmd) if watch else None,
        checkpoint_folder=str(rescue_folder(cmd, create=rescue or resume)) if keeps_checkpoints else None,
        resume=ResumeOptions(from_scratch, replay_output, rescue, required=not supervision.enabled)
        if resume or supervision.enabled
        else None,
        summary=summary_request,
        checks=() if no_checks or resume or summary_request is None else (CHECKS_ENTRY,),
        silenced=tuple(ignored()),
    )
    if summary_request is not None and not cmd.disabled_by:
        exports.start_trackers(summary_request, export)
    if as_ranks:
        return _run_as_ranks(cmd, request, levers, ranks, launcher, supervision)
    return _run_alone(cmd, request, supervision)


def _run_in_removed_folder(cmd: Command, one_process: bool) -> None:
    """If the current folder was removed, run the program without flatout, or raise UsageError for ranks."""
    try:
        os.getcwd()
    except FileNotFoundError:
        if not one_process:
            raise UsageError("the current folder was removed. Change to one that exists.") from None
        notify("the current folder was removed, so there is no plan; running the program without flatout")
        _exec(cmd, dict(os.environ))


def _run_alone(cmd: Command, request: RunRequest, supervision: Supervision) -> NoReturn:
    target = supervision.wrap(cmd, job_folder(cmd).path / "incidents.jsonl")
    counts_only = request.live_line is None and request.checkpoint_folder is None and not len(request.plan)
    if counts_only and request.summary is None:
        crash_report = crash_environment(temporary("run") / "explained", replaces_process=True)
        _exec(target, {**crash_report, **supervision.environment})
    if counts_only:
        request = replace(request, entry=COUNT_ENTRY)
    prefix = f"flatout: {'this run is not counted' if counts_only else 'nothing was applied'}: "
    if cmd.disabled_by:
        sys.stderr.write(f"{prefix}`python {cmd.disabled_by}` disables flatout; remove {cmd.disabled_by}\n")
        _exec(target, dict(os.environ))
    environment = _environment(request)
    watch_from_beside(EntryWatch(Path(environment[ENTERED])), prefix)
    _exec(target, {**environment, **supervision.environment})


def _run_as_ranks(
    cmd: Command,
    request: RunRequest,
    levers: tuple[Choice, ...],
    ranks: RankOptions,
    launcher: Torchrun | str | None,
    supervision: Supervision,
) -> int:
    """Run the ranks here, by torchrun, or on the Ray cluster at the address ``launcher``."""
    import secrets

    from flatout.cli.options.rank_plans import plan_of_ranks, run_ranks
    from flatout.launch.local_launcher import launcher_of

    if cmd.disabled_by:
        raise UsageError(
            f"`python {cmd.disabled_by}` disables flatout, so every rank would train on the same data. Remove the option."
        )
    plan = plan_of_ranks(cmd, request.facts, request.plan, levers, ranks.at_least_two, notify)
    seed = launcher.seed if isinstance(launcher, Torchrun) else secrets.randbits(31)
    environment = _environment(replace(request, plan=plan, seed=seed))
    if isinstance(launcher, Torchrun):
        return _exec(launcher.command, launcher.environment(environment, ranks.procs, ranks.gpus))
    if launcher is not None:
        return _on_ray(launcher, cmd, ranks, environment)
    if supervision.enabled:
        launcher_command = launcher_of(cmd, ranks.procs, ranks.gpus, request.facts.cores)
        return _exec(
            supervision.wrap(launcher_command, job_folder(cmd).path / "incidents.jsonl"),
            {**environment, **supervision.environment},
        )
    return run_ranks(cmd, request.facts, ranks, Path(environment["FLATOUT_JOB"]), environment)


def _on_ray(address: str, cmd: Command, ranks: RankOptions, environment: dict[str, str]) -> int:
    from flatout.launch.ray_cluster import ray_job, run_ranks

    def show(chunk: bytes) -> None:
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()

    return run_ranks(address, ray_job(cmd.argv, environment), ranks.procs, ranks.gpus, show)


def rescue_folder(cmd: Command, create: bool) -> Path:
    """Return the absolute folder for checkpoints of this command, which is created only if ``create``."""
    folder = job_folder(cmd)
    return (writable(folder, explicit=False) if create else folder).path.resolve() / RESCUE


def ideal_step(cmd: Command) -> dict[str, float]:
    """Return the time of a step's FLOPs at the machine's measured peaks, from this command's profile if there is one."""
    profile = read_json(job_folder(cmd).path / "profile.json")
    try:
        return {"ideal_ms": float(profile["mfu"]) * float(profile["step_ms"])}
    except MALFORMED:
        return {}


def _plan_for(
    cmd: Command, facts: Facts, plan_path: str | None, made_for: str
) -> tuple[Plan | None, str, str]:
    """Return the plan, a remark about it, and a mention of a plan for another command of the script.

    A plan given by name is used even if it was made for something else; the remark says so."""
    if plan_path is not None:
        plan = read_plan(plan_path)
        key = plan_key(cmd, facts, made_for)
        mismatches = differences(dict(plan.made_for), key) if plan.made_for else []
        remark = f"this plan was made for {'; '.join(mismatches)}; each lever is checked again here"
        return plan, remark if mismatches else "", ""
    found = find_plan(cmd, facts, made_for)
    remark = other_plan = ""
    for skipped in reversed(found.skipped):
        if found.plan is None and not skipped.command and not remark:
            remark = skipped.remark + (f" (--plan {skipped.path} uses it anyway)" if skipped.usable else "")
        # it fits apart from the command
        if skipped.only_command and cmd.script is not None and str(cmd.script) in skipped.command.split():
            other_plan = f" (a plan for `{skipped.command}` exists: --plan {skipped.path} uses it)"
    return found.plan, remark, other_plan


def _how_to_tune(cmd: Command, device: str | None) -> str:
    try:
        return f"To tune: flatout tune {device_hint(device)}{shell(check_measurable(cmd).shown)}"
    except NothingMeasured as why:
        return f"It cannot be tuned: {why}"


def _environment(request: RunRequest) -> dict[str, str]:
    """Write the request for the program; return its environment, with the variables of PROCESS levers.

    Several ranks get the same random numbers, if the script sets no seed, and the same order of sets."""
    extra: dict[str, str] = {}
    if request.seed is not None or request.resume is not None:
        # 0, not a random number: the ranks of several nodes must agree, and each node runs this code itself.
        extra["PYTHONHASHSEED"] = os.environ.get("PYTHONHASHSEED") or "0"
    variables, outcomes = before_start(TABLE.of(request.plan.names), request.plan, request.facts)
    for sentence in private_caches(os.environ)[1]:
        notify(sentence)
    job = temporary("run") / "job.json"
    write_json(
        job, replace(request, process_outcomes=tuple(outcome.to_json() for outcome in outcomes)).to_json()
    )
    return job_environment(job, {**extra, **variables}, replaces_process=request.seed is None)


def _exec(cmd: Command, environment: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would keep that for a shell
    try:
        os.execvpe(cmd.argv[0], list(cmd.argv), environment)
    except OSError as error:
        raise ProgramNotFound(f"{cmd.argv[0]} cannot be started: {error.strerror}.") from None

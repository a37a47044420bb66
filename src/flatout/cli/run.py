"""`flatout run`: the real job, under its plan. Without a plan the program replaces this process, and nothing happens until it dies."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any, NoReturn

import click

from flatout.cli import places
from flatout.cli.arguments import PROGRAM, Duration, program, read_plan, words_or_usage
from flatout.launch.command import Command, understand
from flatout.launch.elastic import agent_command
from flatout.launch.environment import attached, listening
from flatout.levers import TABLE
from flatout.plan.errors import FlatoutError, ProgramNotFound, UsageError
from flatout.plan.facts import Facts
from flatout.plan.folder import read_json, write_json
from flatout.plan.plan import Plan
from flatout.plan.words import Moment
from flatout.probe.machine import look
from flatout.tune.session import differences, job_folder, key_of, plan_files

ENTRY = "flatout.cli.attached:attach"


@click.command(context_settings=PROGRAM)
@click.option("--plan", "plan_path", default=None, help="A plan file, or `none`; else the plan tuned for this command, script, machine and versions.")
@click.option("--budget", default=None, type=Duration(), help="Tune first for this long, where no plan fits.")
@click.option("--procs", default=1, show_default=True, type=click.IntRange(1), help="Train as so many ranks on this machine what was written for one process.")
@click.option("--gpus", default=0, type=click.IntRange(0), help="The same with one CUDA device each.")
@click.option("--sync-batchnorm", is_flag=True, help="With several ranks: batch normalisation over the whole batch, for an exchange a layer.")
@click.option("--whole", is_flag=True, help="With several ranks: the script sees whole batches on each; all that it counts is of the whole.")
@click.option("--shard", default="auto", show_default=True, type=click.Choice(["auto", "always", "never"]),
              help="With several ranks: each keeps a part of weights, gradients and optimizer state; auto where they do not fit.")
@click.option("--rehearse", is_flag=True, help="With several ranks: compare them with one process once more, though it was done before.")
@places.options
@click.option("--watch", is_flag=True, help="A live line on standard error: samples/s, waiting for data, cores, memory, MFU where FLOPs are known.")
@program
def command(plan_path: str | None, budget: float | None, procs: int, gpus: int, sync_batchnorm: bool, whole: bool, shard: str, rehearse: bool,
            watch: bool, words: tuple[str, ...], **elsewhere: Any) -> int:
    """Run a program under its plan.

    The program takes this process over: its input, output, signals and exit code are its own. With --procs or --gpus it is started several times, each on
    its share of every batch, after a rehearsal has shown that this learns the same; --nodes, --slurm, --ray and --k8s do so on several machines.
    """
    cmd = understand(words_or_usage(words, "run"))
    place = places.place_of(elsewhere, procs if procs > 1 else None, gpus or None)
    if place is not None and place.cluster in ("slurm", "k8s"):
        return places.go(place, cmd, os.environ, ["--plan", plan_path] if plan_path is not None else [])
    ranks = _ranks_asked(procs, gpus, sync_batchnorm, whole, shard, rehearse)
    if shard == "always" and ranks is None and place is None:
        raise UsageError("--shard divides weights between ranks, and there is only one. Say how many there are: --procs 2 --shard always.")
    facts = look()
    plan, remark = _plan_for(cmd, facts, plan_path)
    if plan is None and budget:
        plan = _tune_first(words, budget)
    if plan is None and ranks is None and place is None:
        remark = remark or "no plan fits this command yet"
        _say(f"{remark}; running it as it is. To tune: flatout tune {' '.join(words)}")
    elif remark:
        _say(remark)
    if ranks is not None or place is not None:
        plan = (plan or Plan()).without("sharding") if shard == "never" else plan
        return _run_as_ranks(cmd, facts, plan or Plan(), ranks, place, shard, known_ideal(cmd) if watch else None)
    if not watch and not (plan is not None and len(plan)):
        _become(cmd, _listening())
    if cmd.closed:
        _say(f"nothing can be applied: `python {cmd.closed}` keeps flatout out; leave the option away")
        _become(cmd, dict(os.environ))
    return _become(cmd, _environment(plan or Plan(), facts, known_ideal(cmd) if watch else None))


def _ranks_asked(procs: int, gpus: int, sync_batchnorm: bool, whole: bool, shard: str, again: bool) -> Any:
    """None for one process. Raises UsageError."""
    if gpus and procs > 1 and gpus != procs:
        raise UsageError(f"--procs {procs} and --gpus {gpus} do not agree; --gpus {gpus} alone starts {gpus} ranks with a GPU each.")
    if max(procs, gpus) == 1:
        return None
    from flatout.cli.dividing import Asked

    return Asked(max(procs, gpus), bool(gpus), sync_batchnorm, whole, shard, again)


def _run_as_ranks(cmd: Command, facts: Facts, plan: Plan, asked: Any, place: Any, shard: str, watch: dict[str, float] | None) -> int:
    """On this machine, or with the nodes of ``place``."""
    from flatout.cli.dividing import Asked, divided_plan, rehearsed, run_divided
    from flatout.tune.rehearsal import LEVER

    if cmd.closed:
        raise UsageError(f"`python {cmd.closed}` keeps flatout out, and every rank would train the same. Leave the option away.")
    asked = asked or Asked(2, shard=shard)  # one rank a node: two of them are rehearsed here
    given = plan.get(LEVER)
    value = given.value if given is not None and isinstance(given.value, dict) else None
    shards = asked.shard == "always"
    if value is None and not (place is not None and place.nodes.node_rank):  # the other nodes take what the first one found
        value, found = rehearsed(cmd, facts, asked)
        shards = found.shards
        if found.memory:
            _say(found.memory)
    plan, left_out = divided_plan(plan, value or {}, shards)
    if [name for name in left_out if name != LEVER]:
        _say(f"with several ranks these levers of the plan are left out: {', '.join(name for name in left_out if name != LEVER)}")
    environment = _environment(plan, facts, watch, seed=secrets.randbits(31))
    if place is not None and place.cluster == "ray":
        return places.go(place, cmd, environment)
    if place is not None:
        agent = Command(cmd.typed, tuple(agent_command(place.nodes, cmd, divided=True)))
        return _become(agent, {**environment, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")})
    return run_divided(cmd, facts, asked, Path(environment["FLATOUT_JOB"]), environment)


def known_ideal(cmd: Command) -> dict[str, float]:
    """How long a step's FLOPs would take at the machine's measured peaks, from the profile of this command; empty where there is none."""
    seen = read_json(job_folder(cmd).path / "profile.json")
    mfu, step_ms = (seen.get("mfu"), seen.get("step_ms")) if isinstance(seen, dict) else (None, None)
    return {"ideal_ms": float(mfu) * float(step_ms)} if isinstance(mfu, (int, float)) and isinstance(step_ms, (int, float)) else {}


def _plan_for(cmd: Command, facts: Facts, given: str | None) -> tuple[Plan | None, str]:
    """The plan, and what has to be said about it. A plan given by name is used wherever it comes from, and says so."""
    key = key_of(cmd, facts)
    if given is not None:
        plan = read_plan(given)
        strange = differences(dict(plan.made_for), key) if plan.made_for else []
        return plan, f"this plan was made for {'; '.join(strange)}; each lever is checked again here" if strange else ""
    remark = ""
    for path in plan_files(cmd):
        try:
            plan = read_plan(str(path))
        except FlatoutError as error:
            remark = str(error)
            continue
        strange = differences(dict(plan.made_for), key) if plan.made_for else []
        if not strange:
            return plan, ""
        if not strange[0].startswith("another command"):
            remark = f"the plan in {path} is not used: {'; '.join(strange)} (--plan {path} uses it all the same)"
    return None, remark


def _tune_first(words: tuple[str, ...], budget: float) -> Plan | None:
    from flatout.cli.tune import tune
    from flatout.plan.words import Effect
    from flatout.tune.session import plan_of
    from flatout.tune.tuning import Goal

    effects = frozenset({Effect.EXACT, Effect.ROUNDING, Effect.RESAMPLED})
    try:
        session, _ = tune(words, Goal(budget, effects), beside=False)
    except ProgramNotFound:
        raise
    except FlatoutError as error:
        _say(f"tuning ended without a plan ({str(error).splitlines()[0]}); running the program as it is")
        return Plan()
    _say(session.message)
    return plan_of(session)


def _environment(plan: Plan, facts: Facts, watch: dict[str, float] | None = None, seed: int | None = None) -> dict[str, str]:
    """The environment for the program: the job that names the plan, and what PROCESS levers need. A lever that cannot be had is left out.

    ``seed``: several ranks must begin with the same random numbers, where the script does not seed itself.
    """
    extra: dict[str, str] = {}
    left_out: list[tuple[str, str]] = []
    for lever in TABLE:
        choice = plan.get(lever.name)
        if choice is None or lever.moment is not Moment.PROCESS:
            continue
        try:
            answer = lever.applies(facts, None)
            if hasattr(answer, "reason"):
                raise LookupError(answer.reason)
            extra.update(lever.environment(facts, choice.value))
        except Exception as error:
            left_out.append((choice.name, str(error)))
    job = Path(tempfile.mkdtemp(prefix="flatout-run-")) / "job.json"
    # exec keeps the process number, which is how the program knows itself among its children.
    write_json(job, {"entry": ENTRY, "plan": plan.to_json(), "facts": facts.to_json(), "pid": os.getpid(), "left_out": left_out, "watch": watch,
                     "seed": seed})
    return attached(job, extra, becomes=seed is None)


def _listening() -> dict[str, str]:
    """For a program that runs as it is: only its last words are heard."""
    return listening(Path(tempfile.gettempdir()) / f"flatout-{uuid.uuid4().hex}.explained", becomes=True)


def _become(cmd: Command, environment: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(cmd.argv[0], list(cmd.argv), environment)
    except OSError as error:
        raise ProgramNotFound(f"{cmd.argv[0]} cannot be started: {error.strerror}.") from None


def _say(sentence: str) -> None:
    sys.stderr.write(f"flatout: {sentence}\n")

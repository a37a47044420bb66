"""`flatout run --procs N`: run a single-device program as several ranks, after a successful rehearsal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from flatout.cli.options.arguments import writable
from flatout.cli.options.progress import LiveProgress
from flatout.cli.options.ranks import RankOptions
from flatout.job.folder import read_json, write_json
from flatout.job.temporary import remove
from flatout.launch.command import Command
from flatout.launch.launcher_signals import exit_by_signal
from flatout.launch.local_launcher import LocalLauncher, launcher_of
from flatout.launch.rank import cuda_devices
from flatout.levers import TABLE
from flatout.schema.errors import MALFORMED, CannotParallelize
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.tune.plan_files import job_folder, plan_key
from flatout.tune.ranks import base_plan, why_incompatible
from flatout.tune.rehearsal import LEVER, Rehearsal, RehearsalResult
from flatout.tune.sharding import ALWAYS, NEVER
from flatout.tune.sharding import LEVER as SHARDING

REHEARSAL_S = 120.0  # approximate; displayed, not enforced


def rehearse(command: Command, facts: Facts, ranks: RankOptions) -> tuple[dict[str, Any], RehearsalResult]:
    """Return the lever's value for this program, and the whole result of the rehearsal.

    Reuses an earlier rehearsal of the same command, script, machine and versions; otherwise rehearses now.
    Raises CannotParallelize, ProgramFailed."""
    folder = writable(job_folder(command), explicit=False)
    key = {
        **plan_key(command, facts),
        "procs": str(ranks.procs),
        "gpus": str(ranks.gpus),
        "whole_batches": str(ranks.whole_batches),
        "shard": ranks.shard,
    }
    rehearsal = None if ranks.rehearse_again else load_rehearsal(folder.ranks, key)
    if rehearsal is None:
        with LiveProgress(Console(stderr=True), REHEARSAL_S) as progress:
            rehearsal = Rehearsal(
                command,
                lambda rank_command: launcher_of(rank_command, ranks.procs, ranks.gpus, facts.cores),
                ranks.procs,
                folder,
                facts,
                whole=ranks.whole_batches,
                stage=progress.stage,
                shard=ranks.shard,
            ).run()
        write_json(folder.ranks, {"key": key, "rehearsed": rehearsal.to_json()})
    if rehearsal.division is None:
        raise CannotParallelize(
            f"this program cannot run as {ranks.procs} ranks: {rehearsal.why_not}. {rehearsal.advice}\n"
            f"The details are in {folder.ranks}."
        )
    return {**rehearsal.division, **ranks.lever_options}, rehearsal


def load_rehearsal(path: Path, key: object) -> RehearsalResult | None:
    """Return the result of an earlier rehearsal; None if there is none for this key or it cannot be read."""
    earlier = read_json(path)
    try:
        if isinstance(earlier, dict) and earlier.get("key") == key:
            rehearsal = RehearsalResult.from_json(earlier["rehearsed"])
            if rehearsal.division is None or isinstance(rehearsal.division, dict):
                return rehearsal
    except MALFORMED:
        pass
    return None


def plan_of_ranks(
    command: Command,
    facts: Facts,
    plan: Plan,
    requested: Sequence[Choice],
    ranks: RankOptions,
    notify: Callable[[str], None],
) -> Plan:
    """Return the plan of each rank: how the program is split, and the levers of ``plan`` that are compatible.

    ``requested`` levers were given by name for this run; they stay. Raises CannotParallelize, ProgramFailed."""
    division, sharding = plan.get(LEVER), plan.get(SHARDING) if ranks.shard != NEVER else None
    ranks = replace(ranks, shard=ALWAYS) if sharding is not None else ranks
    value = division.value if division is not None and isinstance(division.value, dict) else None
    is_sharded = ranks.shard == ALWAYS
    if value is None:
        value, found = rehearse(command, facts, ranks)
        is_sharded = found.shards
        if found.memory:
            notify(found.memory)
    base = base_plan(value, is_sharded)
    table, chosen_names = {lever.name: lever for lever in TABLE}, {choice.name for choice in requested}
    others = [choice for choice in plan if choice.name not in (LEVER, SHARDING)]
    optional = [choice for choice in others if choice.name in table and choice.name not in chosen_names]
    left_out = [choice for choice in optional if why_incompatible(table[choice.name], base)]
    if left_out:
        notify(
            f"these levers of the plan are skipped because they do not work with several ranks: {', '.join(choice.name for choice in left_out)}"
        )
    choices = [choice for choice in others if choice not in left_out]
    choices += [sharding] if sharding is not None else []
    return Plan(tuple(choices)).on_top_of(base)


def run_ranks(
    command: Command, facts: Facts, ranks: RankOptions, job: Path, environment: Mapping[str, str]
) -> int:
    """Start the ranks and wait for them. ``environment`` names ``job``, which is removed at the end.

    Raises FlatoutError."""
    launcher = LocalLauncher(
        command,
        ranks.procs,
        environment,
        cuda_devices(environment, ranks.procs) if ranks.gpus else None,
        cores=facts.cores,
    )
    try:
        code = launcher.run()
    finally:
        remove(job.parent)
    if launcher.stop_signal is not None:
        exit_by_signal(launcher.stop_signal)
    return code

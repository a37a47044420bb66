"""`flatout run --procs N`: run a single-device program as several ranks, after a successful rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from flatout.cli.options.arguments import writable
from flatout.cli.options.progress import LiveProgress
from flatout.cli.options.ranks import RankOptions
from flatout.job.folder import JobFolder, read_json, write_json
from flatout.job.temporary import remove
from flatout.launch.command import Command
from flatout.launch.launcher_signals import exit_by_signal
from flatout.launch.local_launcher import LocalLauncher, launcher_of
from flatout.launch.rank_variables import cuda_devices
from flatout.levers import TABLE
from flatout.schema.errors import CannotParallelize
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.tune.plan_files import job_folder, key_of
from flatout.tune.ranks import base_plan, unfit
from flatout.tune.rehearsal import LEVER, Rehearsal, Rehearsed
from flatout.tune.sharding import ALWAYS, NEVER
from flatout.tune.sharding import LEVER as SHARDING

REHEARSAL_S = 120.0  # approximate; displayed, not enforced


def rehearsed(command: Command, facts: Facts, asked: RankOptions) -> tuple[dict[str, Any], Rehearsed]:
    """Return the lever's value for this program, and the whole result of the rehearsal.

    Reuses an earlier rehearsal of the same command, script, machine and versions; otherwise rehearses now.
    Raises CannotDivide, ProgramFailed.
    """
    folder = writable(job_folder(command), asked=False)
    key = {
        **key_of(command, facts),
        "procs": str(asked.procs),
        "gpus": str(asked.gpus),
        "whole_batches": str(asked.whole_batches),
        "shard": asked.shard,
    }
    known = remembered(folder.ranks, key)
    if known is not None and not asked.again:
        found = known
    else:
        found = _rehearse(command, facts, asked, folder)
        write_json(folder.ranks, {"key": key, "rehearsed": found.to_json()})
    if found.division is None:
        raise CannotParallelize(
            f"this program cannot run as {asked.procs} ranks: {found.why_not}. {found.instead}\n"
            f"The details are in {folder.ranks}."
        )
    return {**found.division, **asked.words}, found


def remembered(path: Path, key: object) -> Rehearsed | None:
    """Return the result of an earlier rehearsal; None if there is none for this key or it cannot be read."""
    known = read_json(path)
    try:
        found = (
            Rehearsed.from_json(known["rehearsed"])
            if isinstance(known, dict) and known.get("key") == key
            else None
        )
    except (TypeError, AttributeError, KeyError, ValueError):
        return None
    return found if found is None or found.division is None or isinstance(found.division, dict) else None


def _rehearse(command: Command, facts: Facts, asked: RankOptions, folder: JobFolder) -> Rehearsed:
    with LiveProgress(Console(stderr=True), REHEARSAL_S) as progress:
        return Rehearsal(
            command,
            lambda one: launcher_of(one, asked.procs, asked.gpus, facts.cores),
            asked.procs,
            folder,
            facts,
            whole=asked.whole_batches,
            stage=progress.stage,
            shard=asked.shard,
        ).run()


def plan_of_ranks(
    command: Command,
    facts: Facts,
    plan: Plan,
    chosen: Sequence[Choice],
    asked: RankOptions,
    say: Callable[[str], None],
) -> Plan:
    """Return the plan of each rank: how the program is split, and the levers of ``plan`` that are compatible.

    ``chosen`` are levers given by name for this run; they stay. Raises CannotDivide, ProgramFailed.
    """
    given, parts = plan.get(LEVER), plan.get(SHARDING) if asked.shard != NEVER else None
    asked = replace(asked, shard=ALWAYS) if parts is not None else asked
    value = given.value if given is not None and isinstance(given.value, dict) else None
    shards = asked.shard == ALWAYS
    if value is None:
        value, found = rehearsed(command, facts, asked)
        shards = found.shards
        if found.memory:
            say(found.memory)
    base = base_plan(value, shards)
    table, by_name = {lever.name: lever for lever in TABLE}, {choice.name for choice in chosen}
    others = [choice for choice in plan if choice.name not in (LEVER, SHARDING)]
    left_out = [
        choice
        for choice in others
        if choice.name in table and choice.name not in by_name and unfit(table[choice.name], base)
    ]
    if left_out:
        say(
            f"these levers of the plan are skipped because they do not work with several ranks: {', '.join(choice.name for choice in left_out)}"
        )
    kept = [*(choice for choice in others if choice not in left_out), *([parts] if parts is not None else [])]
    return Plan(tuple(kept)).on_top_of(base)


def run_divided(
    command: Command, facts: Facts, asked: RankOptions, job: Path, environment: Mapping[str, str]
) -> int:
    """Start the ranks and wait for them. ``environment`` names ``job``, which is removed at the end.

    Raises FlatoutError."""
    local_launcher = LocalLauncher(
        command,
        asked.procs,
        environment,
        cuda_devices(environment, asked.procs) if asked.gpus else None,
        cores=facts.cores,
    )
    try:
        code = local_launcher.run()
    finally:
        remove(job.parent)
    if local_launcher.ended_by is not None:
        exit_by_signal(local_launcher.ended_by)
    return code

"""`flatout run --procs N`: a program written for one device as several ranks, once it has been seen that it divides."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flatout.cli.arguments import writable
from flatout.cli.progress import LiveProgress
from flatout.launch.command import Command
from flatout.launch.gang import Gang, launcher_of
from flatout.launch.hearing import end_like
from flatout.launch.identity import cuda_devices
from flatout.levers import TABLE
from flatout.plan.errors import CannotDivide
from flatout.plan.facts import Facts
from flatout.plan.folder import JobFolder, read_json, write_json
from flatout.plan.plan import Choice, Plan
from flatout.plan.words import Moment, Origin
from flatout.tune.rehearsal import LEVER, Rehearsal, Rehearsed
from flatout.tune.session import job_folder, key_of
from flatout.tune.sharding import AUTO, choices
from flatout.tune.sharding import LEVER as SHARDING

BESIDE_PARTS = ("autocast",)  # levers that act on models or optimizers, and leave their weights alone
REHEARSAL_S = 120.0  # about; shown, not enforced


@dataclass(frozen=True)
class Asked:
    """``procs`` ranks; ``gpus``: with a CUDA device each. ``sync_batchnorm``: batch normalisation looks at all ranks. ``whole``: the script sees whole
    batches."""

    procs: int
    gpus: bool = False
    sync_batchnorm: bool = False
    whole: bool = False
    shard: str = AUTO  # whether each rank keeps a part of weights, gradients and optimizer state
    again: bool = False  # rehearse though it was done before


def rehearsed(command: Command, facts: Facts, asked: Asked) -> tuple[dict[str, Any], Rehearsed]:
    """The value of the lever for this program, and all that was found: from an earlier rehearsal of the same command, script, machine and versions, else from
    one now.

    Raises CannotDivide, ProgramFailed.
    """
    folder = writable(job_folder(command), asked=False)
    key = {**key_of(command, facts), "procs": str(asked.procs), "gpus": str(asked.gpus), "whole": str(asked.whole), "shard": asked.shard}
    known = read_json(folder.ranks)
    if isinstance(known, dict) and known.get("key") == key and not asked.again:
        found = Rehearsed.from_json(known["rehearsed"])
    else:
        found = _rehearse(command, facts, asked, folder)
        write_json(folder.ranks, {"key": key, "rehearsed": found.to_json()})
    if found.division is None:
        raise CannotDivide(f"this program is not run as {asked.procs} ranks: {found.why_not}. Leave --procs away to run it as one process; "
                           f"what was compared is in {folder.ranks}.")
    return ({**found.division, "batchnorm": "all"} if asked.sync_batchnorm else found.division), found


def _rehearse(command: Command, facts: Facts, asked: Asked, folder: JobFolder) -> Rehearsed:
    with LiveProgress(Console(stderr=True), REHEARSAL_S) as progress:
        return Rehearsal(command, lambda one: launcher_of(one, asked.procs, asked.gpus, facts.cores), asked.procs, folder, facts, whole=asked.whole,
                         stage=progress.stage, shard=asked.shard).run()


def divided_plan(plan: Plan, value: Mapping[str, Any], shards: bool = False) -> tuple[Plan, list[str]]:
    """The plan of each rank, and the levers of ``plan`` that are left out: they were found with one process that fetched all samples by itself, or want
    whole weights where each rank keeps a part of them."""
    moments = {lever.name: lever for lever in TABLE}
    ours = tuple(choice for choice in plan if choice.name == SHARDING) or choices(shards)
    kept = [choice for choice in plan if (lever := moments.get(choice.name)) is not None and lever.moment is not Moment.LOADER and not lever.warms_up
            and not (ours and lever.moment in (Moment.MODEL, Moment.OPTIMIZER) and lever.name not in BESIDE_PARTS)]
    left_out = [choice.name for choice in plan if choice not in (*kept, *ours)]
    return Plan((*kept, Choice(LEVER, dict(value), Origin.USER), *ours)), left_out


def run_divided(command: Command, facts: Facts, asked: Asked, job: Path, environment: Mapping[str, str]) -> int:
    """Start the ranks, and wait for them. ``environment`` names ``job``, which is removed at the end. Raises FlatoutError."""
    common = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED") or str(secrets.randbits(31))}
    gang = Gang(command, asked.procs, {**environment, **common}, cuda_devices(os.environ, asked.procs) if asked.gpus else None,
                cores=facts.cores)
    try:
        code = gang.run()
    finally:
        shutil.rmtree(job.parent, ignore_errors=True)
    if gang.ended_by is not None:
        end_like(gang.ended_by)
    return code

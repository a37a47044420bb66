"""`flatout run --procs N`: a program written for one device as several ranks, once it has been seen that it divides."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from flatout.cli.arguments import writable
from flatout.cli.progress import LiveProgress
from flatout.cli.ranks import RanksAsked
from flatout.launch.command import Command
from flatout.launch.gang import Gang, launcher_of
from flatout.launch.hearing import end_like
from flatout.launch.identity import cuda_devices
from flatout.levers import TABLE
from flatout.plan.errors import CannotDivide
from flatout.plan.facts import Facts
from flatout.plan.folder import JobFolder, read_json, write_json
from flatout.plan.plan import Choice, Plan
from flatout.plan.words import Origin
from flatout.tune.rehearsal import LEVER, Rehearsal, Rehearsed
from flatout.tune.session import job_folder, key_of

REHEARSAL_S = 120.0  # about; shown, not enforced


def division(command: Command, facts: Facts, asked: RanksAsked) -> dict[str, Any]:
    """The value of the lever for this program: from an earlier rehearsal of the same command, script, machine and versions, else from one now.

    Raises CannotDivide, ProgramFailed.
    """
    folder = writable(job_folder(command), asked=False)
    key = {**key_of(command, facts), "procs": str(asked.procs), "gpus": str(asked.gpus), "whole": str(asked.whole)}
    known = read_json(folder.ranks)
    if isinstance(known, dict) and known.get("key") == key and not asked.again:
        found = Rehearsed.from_json(known["rehearsed"])
    else:
        found = _rehearse(command, facts, asked, folder)
        write_json(folder.ranks, {"key": key, "rehearsed": found.to_json()})
    if found.division is None:
        raise CannotDivide(f"this program is not run as {asked.procs} ranks: {found.why_not}. {found.instead}\n"
                           f"What was seen of it is in {folder.ranks}.")
    return {**found.division, "batchnorm": "all"} if asked.sync_batchnorm else found.division


def _rehearse(command: Command, facts: Facts, asked: RanksAsked, folder: JobFolder) -> Rehearsed:
    with LiveProgress(Console(stderr=True), REHEARSAL_S) as progress:
        return Rehearsal(command, lambda one: launcher_of(one, asked.procs, asked.gpus, facts.cores), asked.procs, folder, facts, whole=asked.whole,
                         stage=progress.stage).run()


def divided_plan(plan: Plan, value: Mapping[str, Any]) -> tuple[Plan, list[str]]:
    """The plan of each rank, and the levers of ``plan`` that are left out: they were found with one process."""
    found = {lever.name: lever for lever in TABLE}
    kept = [choice for choice in plan if choice.name in found and not found[choice.name].of_one_process]
    left_out = [choice.name for choice in plan if choice not in kept]
    return Plan((*kept, Choice(LEVER, dict(value), Origin.USER))), left_out


def run_divided(command: Command, facts: Facts, asked: RanksAsked, job: Path, environment: Mapping[str, str]) -> int:
    """Start the ranks, and wait for them. ``environment`` names ``job``, which is removed at the end. Raises FlatoutError."""
    gang = Gang(command, asked.procs, environment, cuda_devices(environment, asked.procs) if asked.gpus else None, cores=facts.cores)
    try:
        code = gang.run()
    finally:
        shutil.rmtree(job.parent, ignore_errors=True)
    if gang.ended_by is not None:
        end_like(gang.ended_by)
    return code

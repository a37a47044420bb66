"""Runs `flatout profile`: measures the steady state, records activity, tries what-ifs, writes a record.

    quiet      step times, phases, loader waits, garbage collection: nothing is recorded
    listening  device synchronisations; operators (torch's profiler); memory within a step and across steps
    what-ifs   switched on and off between blocks of steps (diagnose/what_ifs)
    fetching   fetches batches again at the very end, to time the lines of the data set

A program that ends early is started again for the remaining stages.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from flatout.diagnose.bottleneck import name_bottleneck
from flatout.diagnose.profiled_program import SETTLING_TICKS, ProfiledProgram
from flatout.diagnose.ranking import judge, placed
from flatout.diagnose.what_ifs import TABLE as WHAT_IFS
from flatout.measure.clock import seconds
from flatout.measure.roofline import flops_a_step, place_under_roof, utilisation
from flatout.measure.statistics import Round, compare, median
from flatout.probe.program import ScriptProgram
from flatout.probe.script import Unreadable
from flatout.schema.enums import Origin
from flatout.schema.findings import SourceLocation
from flatout.schema.lever import Lever
from flatout.schema.plan import Choice
from flatout.schema.profile import (
    IdleGap,
    MemoryGrowth,
    MemoryProfile,
    Operation,
    ProfileRecord,
    SyncRecord,
    WhatIf,
)
from flatout.schema.records import Ratio
from flatout.trial.blocks import LeverFailed
from flatout.trial.parent import ProgramGone, Trial

SYNCHRONISATION_TICKS = 10
BETWEEN_TICKS = 8
MEMORY_TICKS = 4
FEWEST_LEAK_TICKS = 16
LITTLE = 0.01  # of a step; smaller costs are not measured
NARROW = 1.04  # high over low of an interval that needs no more rounds
LEAST_BLOCKS = 8  # per what-if: two rounds in both orders
MOST_ROUNDS = 14
OPERATIONS_KEPT = 60
CLOSED = "a step of this program is a closure that takes seconds; what-ifs cannot be switched inside it"


MEMORY_STAGES = frozenset({"memory", "growth"})


def run_profile(program: ProfiledProgram) -> ProfileRecord:
    """Profile a program and return its record, filled.

    Raises ProgramFailed if the program itself fails, NothingMeasured if it does not train.
    """
    record = program.record
    try:
        program.watcher.stage("observing", "the unchanged program, until its steps are steady")
        program.measure()
        for name, stage in STAGES.items():
            if name in program.requested.stages:
                program.attempt(name, stage)
                program.save()
    finally:
        program.leave()
    place_under_roof(record.operations, record.ceilings, _tf32(program))
    record.flops_a_step = flops_a_step(record.operations)
    if record.step_ms and record.ceilings:
        record.mfu = utilisation(record.operations, record.step_ms, record.ceilings, _tf32(program))
    if not record.ceilings and record.operations:
        record.notes.append(
            "the operators' share of this machine's peak is unknown: `flatout doctor --bench` measures the peak"
        )
    record.bound, record.bound_why = name_bottleneck(record)
    record.findings = judge(record)
    if program.command.script is not None and record.findings:
        with suppress(OSError, Unreadable):
            record.findings = placed(record.findings, ScriptProgram.read(program.command.script))
    record.status = "done"
    return record


# -- recording ------------------------------------------------------------------------------------------


def _synchronisations(program: ProfiledProgram, trial: Trial) -> None:
    observed = program.listen(trial, "synchronisations", SYNCHRONISATION_TICKS, 2)
    program.record.synchronisations = [
        SyncRecord.from_json(synchronisation) for synchronisation in observed.get("synchronisations", ())
    ]


def _between(program: ProfiledProgram, trial: Trial) -> None:
    observed = program.listen(trial, "between", BETWEEN_TICKS, 2).get("between")
    if observed:
        program.record.events["between"] = observed


def _operations(program: ProfiledProgram, trial: Trial) -> None:
    record, schedule = program.record, list(program.requested.schedule)
    observed = program.listen(
        trial, "operations", 1 + sum(schedule), schedule=schedule, trace=program.requested.trace
    )
    if not observed.get("operations"):
        return
    record.schedule, record.trace = schedule, program.requested.trace
    operations = [Operation.from_json(operation) for operation in observed["operations"]]
    record.operations = operations[:OPERATIONS_KEPT]
    record.operators_a_step = observed["operators"]
    record.operator_us = (
        1000 * observed["operators_ms"] / observed["operators"] if observed["operators"] else None
    )
    step_ms = record.step_ms or 0.0
    if observed["python_share"] is not None:  # a share, because recorded steps are longer and vary in length
        record.python_ms = step_ms * observed["python_share"]
    record.idle_gaps = [IdleGap.from_json(gap) for gap in observed["gaps"]]
    record.device_ms = observed["device_ms"]
    if observed["busy_ms"] is not None:
        record.idle_ms = max(0.0, step_ms - observed["busy_ms"])
    listened = observed["ms"][-schedule[2] :]
    if listened and program.plain_ms:
        quiet = median(program.plain_ms)
        record.overhead = compare([[Round(ms, quiet) for ms in listened]])


def _memory(program: ProfiledProgram, trial: Trial) -> None:
    observed = program.listen(trial, "memory", MEMORY_TICKS).get("memory")
    if observed:
        program.record.memory = memory = MemoryProfile.from_json(observed)
        emptied = program.record.events.get("empty_cache")
        if emptied:
            memory.empty_cache_calls, memory.empty_cache_ms = emptied["calls"], emptied["ms"]
            memory.empty_cache_place = (
                SourceLocation.from_json(emptied["places"][0]) if emptied["places"] else None
            )


def _leak(program: ProfiledProgram, trial: Trial) -> None:
    observed = program.listen(trial, "leak", program.requested.leak_ticks, FEWEST_LEAK_TICKS)
    program.record.leak = MemoryGrowth.from_json(observed["leak"]) if observed.get("leak") else None
    program.record.host_growth = (
        MemoryGrowth.from_json(observed["host_growth"]) if observed.get("host_growth") else None
    )


def _fetches(program: ProfiledProgram, trial: Trial) -> None:
    later = trial.ask({"do": "watch"}, seconds() + 60)["settings"]
    program.record.settings["training"] = later["training"]  # an evaluation may have changed the mode
    places = {
        (seen.place.file, seen.place.line): seen for seen in program.record.loaders if seen.place is not None
    }
    for fetch in trial.ask({"do": "fetch"}, seconds() + 120)["fetches"]:
        made_at = fetch["made_at"]
        seen = places.get((made_at["file"], made_at["line"])) if made_at else None
        if fetch.get("why_not"):
            program.record.notes.append(f"no batch could be fetched again: {fetch['why_not']}")
        if seen is not None and fetch.get("fetch_ms") is not None:
            seen.fetch_ms, seen.slow_share = fetch["fetch_ms"], fetch.get("slow_share")
            seen.slow_place = (
                SourceLocation.from_json(fetch["slow_place"]) if fetch.get("slow_place") else None
            )


# -- what-ifs -------------------------------------------------------------------------------------------


def _what_ifs(program: ProfiledProgram, trial: Trial) -> None:
    record = program.record
    if program.blocks.unit != "step":
        record.what_ifs = [WhatIf(lever.name, why_not=CLOSED) for lever in WHAT_IFS]
        return
    answers = trial.ask({"do": "options"}, seconds() + 120)["options"]
    record.what_ifs = [WhatIf(lever.name) for lever in WHAT_IFS]
    left = []
    for what_if, lever in zip(record.what_ifs, WHAT_IFS, strict=True):
        unasked = "" if lever.name in program.requested.what_ifs else "it was not requested"
        what_if.why_not = unasked or answers[lever.name].get("skip", "") or _pointless(program, lever.name)
        if not what_if.why_not:
            left.append((what_if, lever, answers[lever.name]["values"]))
    while left:
        what_if, lever, values = left.pop(0)
        left_s = program.end_s - seconds()
        share_s = max(left_s / (len(left) + 1), min(left_s, LEAST_BLOCKS * program.blocks.block_s))
        if share_s < LEAST_BLOCKS * program.blocks.block_s:
            what_if.why_not = "no time was left to measure it; increase --budget"
            continue
        _what_if(program, what_if, lever, values, share_s)
        program.save()


def _pointless(program: ProfiledProgram, name: str) -> str:
    """The reason why there is nothing to switch off, according to the records."""
    if name == "syncs" and program.record.operations and not program.record.synchronisations:
        return "Python never waits for a tensor"
    if name == "gc" and program.record.gc_ms < LITTLE * (program.record.mean_step_ms or 0.0):
        return f"the collector takes less than {LITTLE:.0%} of the {program.record.unit}"
    return ""


def _what_if(
    program: ProfiledProgram, what_if: WhatIf, lever: Lever, values: list[Any], share_s: float
) -> None:
    """Measures one what-if, with its next value if the program fails with the first."""
    for value in values:
        try:
            trial = program.trial or program.enter()
            choice = Choice(lever.name, value, Origin.TUNER)
            program.watcher.stage(
                "what-ifs", f"without {lever.name}" if " " not in lever.name else lever.name
            )
            if lever.warms_up:
                program.blocks.switch(trial, (choice,))
                program.blocks.run(trial, SETTLING_TICKS + 1)
            until_s = seconds() + share_s
            ratio = program.blocks.live(trial, (), (choice,), until_s, enough=_narrow)
            program.blocks.switch(trial, ())
            trial.hold()
        except LeverFailed as failed:
            what_if.why_not = failed.reason
            return
        except ProgramGone as gone:
            program.leave()
            what_if.why_not = (
                f"the program fails with it: {gone.record.last_line}"
                if gone.record.status != "ended"
                else "the program is too short"
            )
            continue
        what_if.ratio, what_if.why_not = ratio, ""
        what_if.step_ms = program.record.step_ms / ratio.median if program.record.step_ms else None
        program.watcher.comparison(what_if.name, ratio)
        return


def _tf32(program: ProfiledProgram) -> bool:
    return program.record.device == "cuda" and program.record.settings.get("matmul_precision") in (
        "high",
        "medium",
    )


def _narrow(ratio: Ratio, rounds: int) -> bool:
    return rounds >= MOST_ROUNDS or (rounds >= 4 and ratio.high < NARROW * ratio.low)


# In the order in which they disturb the program.
STAGES = {
    "synchronisations": _synchronisations,
    "lines": _between,
    "operators": _operations,
    "memory": _memory,
    "growth": _leak,
    "what-ifs": _what_ifs,
    "data set": _fetches,
}

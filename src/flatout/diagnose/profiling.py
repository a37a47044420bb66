"""Runs `flatout profile`: measures the steady state, records activity, tries what-ifs, writes a record.

    measuring  step times, phases, loader waits, garbage collection: nothing is recorded
    recording  device synchronisations; operators (torch's profiler); memory within a step and across steps
    what-ifs   switched on and off between blocks of steps (diagnose/what_ifs)
    data set   fetches batches again at the very end, to time the lines of the data set

A program that ends early is started again for the remaining stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flatout.diagnose.bottleneck import WHAT_IF_OF_BOUND, name_bottleneck
from flatout.diagnose.check import profile_findings
from flatout.diagnose.what_ifs import TABLE as WHAT_IFS
from flatout.job.folder import JobFolder
from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.measure.disturbance import Disturbance
from flatout.measure.roofline import fill_roofline, flops_a_step, utilisation
from flatout.measure.statistics import Round, block_ms, compare, median
from flatout.schema.enums import Origin
from flatout.schema.errors import FlatoutError, NothingMeasured, ProgramFailed, error_line
from flatout.schema.facts import Facts
from flatout.schema.findings import SourceLocation
from flatout.schema.lever import Lever
from flatout.schema.plan import Choice, Plan
from flatout.schema.profile import (
    IdleGap,
    LoaderRecord,
    MemoryGrowth,
    MemoryProfile,
    Operation,
    ProfileRecord,
    SyncRecord,
    WhatIf,
)
from flatout.schema.records import PhaseTime, Ratio, TrialRecord
from flatout.schema.run_request import CompileRecord
from flatout.trial.blocks import PREFETCHED_BATCHES, BlockTimer, LeverFailed, Watcher
from flatout.trial.parent import ProgramGone, Trial
from flatout.trial.spec import TrialOptions

WHAT_IF_TABLE = "flatout.diagnose.what_ifs:TABLE"
STEADY_LIMIT_S = 600.0  # until the steps are steady
SETTLING_TICKS = 4
LEAK_TICKS = 40
MAX_PROBE_S = 8.0  # of one recording; slow programs are recorded over fewer steps
WHAT_IF_SHARE = 0.5  # of the budget is reserved for what-ifs
ALL_STAGES = frozenset(["synchronisations", "lines", "operators", "memory", "growth", "what-ifs", "data set"])


class ProfiledProgram:
    """Runs the program of a profile."""

    def __init__(
        self,
        command: Command,
        job: JobFolder,
        facts: Facts,
        options: ProfileOptions,
        record: ProfileRecord,
        ceilings: dict[str, float],
        watcher: Watcher | None = None,
        save: Callable[[], None] = lambda: None,
    ) -> None:
        self.command, self.job, self.facts = command, job, facts
        self.options, self.record = options, record
        self.watcher, self.save = watcher or Watcher(), save
        record.ceilings = ceilings
        self.blocks = BlockTimer()
        self.disturbance = Disturbance(facts.cores)
        self.trial: Trial | None = None
        self._begin_budget()
        self.startup_s = 0.0
        self.plain_ms: list[float] = []
        self.not_finite_share = 0.0  # share of the losses that are NaN or infinite

    def _begin_budget(self) -> None:
        """Begin the time in steady state. The start of the program, however slow, takes none of it."""
        self.end_s = seconds() + self.options.budget_s
        self.probes_until_s = self.end_s - WHAT_IF_SHARE * self.options.budget_s
        self.watcher.set_end(self.end_s)

    def start_trial(self) -> Trial:
        start_s = seconds()
        options = TrialOptions(table=WHAT_IF_TABLE, monitor=True)
        trial = self.trial = Trial(self.command, self.job.new_trial(), Plan(), self.facts, options)
        trial.start()
        ready = trial.wait_ready(start_s + STEADY_LIMIT_S)
        self.startup_s = seconds() - start_s
        self.blocks.unit, self.blocks.tick_ms = ready["unit"], max(ready["tick_ms"], 1e-3)
        if self.blocks.tick_ms < 2000:
            ticks = trial.run_ticks(SETTLING_TICKS, self.blocks.deadline(SETTLING_TICKS))
            self.blocks.tick_ms = max(block_ms(ticks), 1e-3)
        return trial

    def close_trial(self) -> None:
        if self.trial is not None:
            self.trial.close()
            self.trial = None

    def run_stage(self, name: str, stage: Callable[[ProfiledProgram, Trial], None]) -> None:
        """Runs one stage, in a new program if the current one has ended. A failure becomes a note."""
        for attempt in (1, 2):
            try:
                if self.trial is None:
                    if self.end_s - seconds() < self.startup_s:
                        self.record.notes.append(
                            f"{name}: the program ended and no time was left to start it again; increase --budget"
                        )
                        return
                    self.start_trial()
                assert self.trial is not None
                if name == "what-ifs":
                    self.watcher.stage(name, "which costs can be switched off")
                else:
                    self.watcher.stage("recording", name)
                stage(self, self.trial)
                return
            except ProgramGone as ended:
                self.close_trial()
                if attempt == 2 or ended.record.status != "ended":
                    what = "is too short" if ended.record.status == "ended" else "failed during it"
                    self.record.notes.append(f"{name}: the program {what}: {error_line(ended.record.reason)}")
                    return

    def measure(self) -> None:
        """Measures step times and phases while nothing is recorded."""
        record = self.record
        self.disturbance.sample()
        try:
            trial = self.start_trial()
            self._begin_budget()
        except ProgramGone as ended:
            raise profile_error(ended.record) from None
        try:
            record.context = trial.ask({"do": "options"}, seconds() + 120)["context"]
            self.disturbance.observe(record.context)
            workers = max((loader["num_workers"] for loader in record.context["loaders"]), default=0)
            self.blocks.prefetched_ticks = PREFETCHED_BATCHES * workers
            trial.ask({"do": "monitor"}, seconds() + 60)
            until_s = seconds() + max(5.0, 0.3 * self.options.budget_s)
            self.watcher.stage("measuring", f"{self.options.steps} steps without recording")
            while len(self.plain_ms) < self.options.steps and seconds() < until_s:
                ticks = min(self.blocks.block_ticks, self.options.steps - len(self.plain_ms))
                self.plain_ms += trial.run_ticks(ticks, self.blocks.deadline(ticks))
            self._copy_record(TrialRecord.from_json(trial.ask({"do": "record"}, seconds() + 60)["record"]))
            self._copy_watched(trial.ask({"do": "monitor"}, seconds() + 60))
            trial.pause()
        except ProgramGone as ended:
            self.close_trial()
            if not self.plain_ms:
                raise profile_error(ended.record) from None
            self._copy_record(ended.record)
            record.notes.append(
                f"the program ended after {len(self.plain_ms)} measured steps: {error_line(ended.record.reason)}"
            )

    def _copy_record(self, trial: TrialRecord) -> None:
        record = self.record
        record.device, record.unit = trial.device, trial.unit
        record.versions = {**record.versions, **trial.versions}
        record.warmup_steps, record.warmup_ms = trial.warmup_steps, trial.warmup_ms
        record.steps, record.step_ms_list = len(self.plain_ms), self.plain_ms
        record.step_ms = block_ms(self.plain_ms)
        samples = trial.samples_per_step
        record.samples_per_s = 1000 * samples / record.step_ms if samples else None
        record.phases = {name: PhaseTime.from_json(phase) for name, phase in trial.phases.items()}
        self.blocks.tick_ms = record.step_ms
        not_finite = [not math.isfinite(float.fromhex(loss)) for loss in trial.losses]
        self.not_finite_share = sum(not_finite) / max(len(not_finite), 1)

    def _copy_watched(self, watched: dict[str, Any]) -> None:
        record = self.record
        record.gc_ms, record.gc_longest_ms = watched["gc_ms"], watched["gc_longest_ms"]
        record.gc_calls = watched["gc_calls"]
        record.settings, record.events = watched["settings"], watched["events"]
        if self.not_finite_share:
            record.events["loss_not_finite"] = {
                **record.events.get("backward", {"places": []}),
                "calls": self.not_finite_share,
                "ms": 0.0,
            }
        record.compile_record = CompileRecord.from_json(watched["compiled"]) if watched["compiled"] else None
        record.loaders = [LoaderRecord.from_json(loader) for loader in watched["loaders"]]

    def run_probe(
        self, trial: Trial, probe: str, ticks: int, min_ticks: int = 0, **options: object
    ) -> dict[str, Any]:
        """The record of a probe over ``ticks`` ticks.

        A slow program is recorded over fewer ticks, at least ``min_ticks`` if given."""
        deadline_s = self.end_s
        if "what-ifs" in self.options.stages:
            deadline_s = min(self.probes_until_s, seconds() + MAX_PROBE_S)
        affordable = int(1000 * (deadline_s - seconds()) / self.blocks.tick_ms)
        ticks = max(min_ticks, min(ticks, affordable)) if min_ticks else ticks
        if ticks * self.blocks.tick_ms / 1000 > max(self.end_s - seconds(), MAX_PROBE_S / 4):
            self.record.notes.append(f"{probe}: no time was left to record {ticks} steps; increase --budget")
            return {}
        answer = trial.run_probe(probe, self.blocks.deadline(10 * ticks) + 120, ticks=ticks, **options)
        if answer.get("why_not"):
            self.record.notes.append(f"{probe}: not recorded, {answer['why_not']}")
        return answer


@dataclass(frozen=True)
class ProfileOptions:
    """Options of a profile.

    ``schedule`` are the wait, warm-up and recorded steps. ``leak_ticks`` are the steps that are monitored for
    memory growth."""

    steps: int = 40
    schedule: tuple[int, int, int] = (1, 2, 3)
    budget_s: float = 30.0
    stages: frozenset[str] = ALL_STAGES
    what_ifs: frozenset[str] = frozenset(lever.name for lever in WHAT_IFS)
    leak_ticks: int = LEAK_TICKS
    trace: str = ""


def profile_error(record: TrialRecord) -> FlatoutError:
    """The error for a program that could not be profiled: its own failure, or nothing to measure."""
    if record.status == "failed":
        output = record.log_tail.strip() or record.reason
        failed = f"the program itself fails (exit code {record.exit_code}):\n\n{output}"
        return ProgramFailed(failed, record.exit_code or 1)
    if record.status == "broken":
        return NothingMeasured(
            f"flatout could not instrument this program and left it unchanged. Please report this:\n\n{record.reason.strip()}"
        )
    steps = len(set(record.loss_steps))
    when = f"after {steps} training steps, before they were steady" if steps else "without a training step"
    why = {
        "unattached": record.reason,
        "hung": f"the program did not train: {record.reason}",
    }.get(record.status, f"the program ended {when}. Let it train longer")
    return NothingMeasured(f"there is nothing to profile: {why}.")


SYNCHRONISATION_TICKS = 10
LINE_TICKS = 8
MEMORY_TICKS = 4
MIN_LEAK_TICKS = 16
MIN_COST_SHARE = 0.01  # of a step; smaller costs are not measured
MAX_INTERVAL_RATIO = 1.04  # high over low of an interval that needs no more rounds
MIN_BLOCKS = 8  # per what-if: two rounds in both orders
MAX_ROUNDS = 14
MAX_OPERATIONS = 60
CLOSURE_REASON = (
    "a step of this program is a closure that takes seconds; what-ifs cannot be switched inside it"
)


MEMORY_STAGES = frozenset({"memory", "growth"})


def run_profile(program: ProfiledProgram) -> ProfileRecord:
    """Profile a program and return its record, filled.

    Raises ProgramFailed if the program itself fails, NothingMeasured if it does not train."""
    record = program.record
    try:
        program.watcher.stage("observing", "the unchanged program, until its steps are steady")
        program.measure()
        shown = _show_new(program, set())
        for name, stage in STAGES.items():
            if name in program.options.stages:
                program.run_stage(name, stage)
                program.save()
                shown = _show_new(program, shown)
    finally:
        program.close_trial()
    record.disturbance = program.disturbance.beside
    fill_roofline(record.operations, record.ceilings, _tf32(program))
    record.flops_a_step = flops_a_step(record.operations)
    if record.step_ms and record.ceilings:
        record.mfu = utilisation(record.operations, record.step_ms, record.ceilings, _tf32(program))
    if not record.ceilings and record.operations:
        record.notes.append(
            "the operators' share of this machine's peak is unknown: `flatout doctor --bench` measures the peak"
        )
    record.bound, record.bound_why = name_bottleneck(record)
    record.findings = profile_findings(record)
    record.status = "done"
    return record


def _show_new(program: ProfiledProgram, shown: set[str]) -> set[str]:
    """Show the findings that are not in ``shown`` yet, while the profile goes on; return all that were shown."""
    found = profile_findings(program.record)
    for finding in found:
        if finding.rule not in shown:
            where = f" ({finding.place.sentence()})" if finding.place is not None else ""
            program.watcher.report(f"found {finding.rule}: {finding.message}{where}")
    return shown | {finding.rule for finding in found}


# -- recording


def _synchronisations(program: ProfiledProgram, trial: Trial) -> None:
    observed = program.run_probe(trial, "synchronisations", SYNCHRONISATION_TICKS, 2)
    program.record.synchronisations = list(map(SyncRecord.from_json, observed.get("synchronisations", ())))


def _python_lines(program: ProfiledProgram, trial: Trial) -> None:
    observed = program.run_probe(trial, "between", LINE_TICKS, 2).get("between")
    if observed:
        program.record.events["between"] = observed


def _operations(program: ProfiledProgram, trial: Trial) -> None:
    record, schedule = program.record, list(program.options.schedule)
    observed = program.run_probe(
        trial, "operations", 1 + sum(schedule), schedule=schedule, trace=program.options.trace
    )
    if not observed.get("operations"):
        return
    record.schedule, record.trace = schedule, program.options.trace
    record.operations = list(map(Operation.from_json, observed["operations"][:MAX_OPERATIONS]))
    record.operators_a_step = operators = observed["operators"]
    record.operator_us = 1000 * observed["operators_ms"] / operators if operators else None
    step_ms = record.step_ms or 0.0
    if observed["python_share"] is not None:  # a share, because recorded steps are longer and vary in length
        record.python_ms = step_ms * observed["python_share"]
    record.idle_gaps = [IdleGap.from_json(gap) for gap in observed["gaps"]]
    record.device_ms = observed["device_ms"]
    if observed["busy_ms"] is not None:
        record.idle_ms = max(0.0, step_ms - observed["busy_ms"])
    recorded_ms = observed["ms"][-schedule[2] :]
    if recorded_ms and program.plain_ms:
        plain_ms = median(program.plain_ms)
        record.overhead = compare([[Round(ms, plain_ms) for ms in recorded_ms]])


def _memory(program: ProfiledProgram, trial: Trial) -> None:
    observed = program.run_probe(trial, "memory", MEMORY_TICKS).get("memory")
    if observed:
        program.record.memory = memory = MemoryProfile.from_json(observed)
        empty_cache = program.record.events.get("empty_cache")
        if empty_cache:
            memory.empty_cache_calls, memory.empty_cache_ms = empty_cache["calls"], empty_cache["ms"]
            for place in empty_cache["places"][:1]:
                memory.empty_cache_place = SourceLocation.from_json(place)


def _memory_growth(program: ProfiledProgram, trial: Trial) -> None:
    observed = program.run_probe(trial, "leak", program.options.leak_ticks, MIN_LEAK_TICKS)
    leak, host_growth = observed.get("leak"), observed.get("host_growth")
    program.record.tensor_growth = MemoryGrowth.from_json(leak) if leak else None
    program.record.host_growth = MemoryGrowth.from_json(host_growth) if host_growth else None


def _fetches(program: ProfiledProgram, trial: Trial) -> None:
    watched = trial.ask({"do": "monitor"}, seconds() + 60)["settings"]
    program.record.settings["training"] = watched["training"]  # an evaluation may have changed the mode
    loaders = {(seen.place.file, seen.place.line): seen for seen in program.record.loaders if seen.place}
    for fetch in trial.ask({"do": "fetch"}, seconds() + 120)["fetches"]:
        place = fetch["made_at"]
        loader = loaders.get((place["file"], place["line"])) if place else None
        if fetch.get("why_not"):
            program.record.notes.append(f"no batch could be fetched again: {fetch['why_not']}")
        if loader is not None and fetch.get("fetch_ms") is not None:
            loader.fetch_ms, loader.slow_share = fetch["fetch_ms"], fetch.get("slow_share")
            loader.slow_place = (
                SourceLocation.from_json(fetch["slow_place"]) if fetch.get("slow_place") else None
            )


# -- what-ifs


def _what_ifs(program: ProfiledProgram, trial: Trial) -> None:
    record = program.record
    if program.blocks.unit != "step":
        record.what_ifs = [WhatIf(lever.name, why_not=CLOSURE_REASON) for lever in WHAT_IFS]
        return
    answers = trial.ask({"do": "options"}, seconds() + 120)["options"]
    pending, record.what_ifs = [], []
    for lever in WHAT_IFS:
        answer = answers[lever.name]
        requested = lever.name in program.options.what_ifs
        why_not = answer.get("skip") or _nothing_to_remove(program, lever.name)
        what_if = WhatIf(lever.name, why_not=why_not if requested else "it was not requested")
        record.what_ifs.append(what_if)
        if not what_if.why_not:
            pending.append((what_if, lever, answer["values"]))
    shares = {
        name: phase.share
        for kind, name in WHAT_IF_OF_BOUND.items()
        if (phase := record.phases.get(kind)) is not None
    }
    pending.sort(key=lambda each: -shares.get(each[0].name, 0.0))  # the largest cost while there is time
    while pending:
        what_if, lever, values = pending.pop(0)
        remaining_s = program.end_s - seconds()
        share_s = max(remaining_s / (len(pending) + 1), min(remaining_s, MIN_BLOCKS * program.blocks.block_s))
        if share_s < MIN_BLOCKS * program.blocks.block_s:
            what_if.why_not = "no time was left to measure it; increase --budget"
            continue
        _what_if(program, what_if, lever, values, share_s)
        program.save()


def _nothing_to_remove(program: ProfiledProgram, name: str) -> str:
    """The reason why there is nothing to switch off, according to the records."""
    if name == "syncs" and program.record.operations and not program.record.synchronisations:
        return "Python never waits for a tensor"
    if name == "gc" and program.record.gc_ms < MIN_COST_SHARE * (program.record.mean_step_ms or 0.0):
        return f"the collector takes less than {MIN_COST_SHARE:.0%} of the {program.record.unit}"
    return ""


def _what_if(
    program: ProfiledProgram, what_if: WhatIf, lever: Lever, values: list[Any], share_s: float
) -> None:
    """Measures one what-if, with its next value if the program fails with the first."""
    for value in values:
        try:
            trial = program.trial or program.start_trial()
            choice = Choice(lever.name, value, Origin.TUNER)
            program.watcher.stage(
                "what-ifs", f"without {lever.name}" if " " not in lever.name else lever.name
            )
            if lever.warms_up:
                program.blocks.switch(trial, (choice,))
                program.blocks.run(trial, SETTLING_TICKS + 1)
            trial.pause()
            program.disturbance.sample()
            if lever.sets_threads and (beside := program.disturbance.beside):
                what_if.why_not = f"{beside}; stop them and profile again"
                return
            until_s = seconds() + share_s
            ratio = program.blocks.compare_live(trial, (), (choice,), until_s, should_stop=_precise_enough)
            program.blocks.switch(trial, ())
            trial.pause()
        except LeverFailed as failed:
            what_if.why_not = failed.reason
            return
        except ProgramGone as ended:
            program.close_trial()
            what_if.why_not = (
                f"the program fails with it: {ended.record.error_line}"
                if ended.record.status != "ended"
                else "the program is too short"
            )
            continue
        what_if.ratio, what_if.why_not = ratio, ""
        what_if.step_ms = program.record.step_ms / ratio.median if program.record.step_ms else None
        program.watcher.comparison(what_if.name, ratio)
        return


def _tf32(program: ProfiledProgram) -> bool:
    precision = program.record.settings.get("matmul_precision")
    return program.record.device == "cuda" and precision in ("high", "medium")


def _precise_enough(ratio: Ratio, rounds: int) -> bool:
    return rounds >= MAX_ROUNDS or (rounds >= 4 and ratio.high < MAX_INTERVAL_RATIO * ratio.low)


# In the order in which they disturb the program.
STAGES = {
    "synchronisations": _synchronisations,
    "lines": _python_lines,
    "operators": _operations,
    "memory": _memory,
    "growth": _memory_growth,
    "what-ifs": _what_ifs,
    "data set": _fetches,
}

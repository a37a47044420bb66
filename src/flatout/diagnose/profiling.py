"""Runs `flatout profile`: measures the steady state, records activity, tries what-ifs, writes a record.

    quiet      step times, phases, loader waits, garbage collection: nothing is recorded
    listening  device synchronisations; operators (torch's profiler); memory within a step and across steps
    what-ifs   switched on and off between blocks of steps (diagnose/what_ifs)
    fetching   fetches batches again at the very end, to time the lines of the data set

A program that ends early is started again for the remaining stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flatout.diagnose.bottleneck import name_bottleneck
from flatout.diagnose.ranking import judge
from flatout.diagnose.rules import TABLE as RULES
from flatout.diagnose.what_ifs import TABLE as WHAT_IFS
from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.measure.roofline import flops_a_step, place_under_roof, utilisation
from flatout.measure.statistics import Round, block_ms, compare, median
from flatout.plan.enums import Origin
from flatout.plan.errors import FlatoutError, NothingMeasured, ProgramFailed
from flatout.plan.facts import Facts
from flatout.plan.findings import SourceLocation
from flatout.plan.folder import JobFolder
from flatout.plan.lever import Lever
from flatout.plan.plan import Choice, Plan
from flatout.plan.profile import (
    Compiled,
    IdleGap,
    LoaderSeen,
    MemoryGrowth,
    MemorySeen,
    Operation,
    ProfileRecord,
    SyncRecord,
    WhatIf,
)
from flatout.plan.records import PhaseTime, Ratio, TrialRecord
from flatout.trial.blocks import PREFETCHED_BATCHES, BlockTimer, LeverFailed, Watcher
from flatout.trial.parent import ProgramGone, Trial

TABLE = "flatout.diagnose.what_ifs:TABLE"
START_S = 600.0  # until the steps are steady
SETTLING_TICKS = 4
SYNCHRONISATION_TICKS = 10
BETWEEN_TICKS = 8
MEMORY_TICKS = 4
LEAK_TICKS = 40
LONGEST_LISTENING_S = 8.0  # of one recording; slow programs are recorded over fewer steps
FEWEST_LEAK_TICKS = 16
WHAT_IF_SHARE = 0.5  # of the budget is reserved for what-ifs
LITTLE = 0.01  # of a step; smaller costs are not measured
NARROW = 1.04  # high over low of an interval that needs no more rounds
LEAST_BLOCKS = 8  # per what-if: two rounds in both orders
MOST_ROUNDS = 14
OPERATIONS_KEPT = 60
CLOSED = "a step of this program is a closure that takes seconds; what-ifs cannot be switched inside it"


ALL_STAGES = frozenset({"synchronisations", "lines", "operators", "memory", "growth", "what-ifs", "data set"})
MEMORY_STAGES = frozenset({"memory", "growth"})


@dataclass(frozen=True)
class ProfileOptions:
    """Options of a profile.

    ``schedule`` are the wait, warm-up and recorded steps. ``leak_ticks`` are the steps that are monitored for
    memory growth.
    """

    steps: int = 40
    schedule: tuple[int, int, int] = (1, 2, 3)
    budget_s: float = 120.0
    stages: frozenset[str] = ALL_STAGES
    what_ifs: frozenset[str] = frozenset(lever.name for lever in WHAT_IFS)
    leak_ticks: int = LEAK_TICKS
    trace: str = ""


class Profiling:
    """Profiles one program. ``run`` fills the record.

    Raises ProgramFailed if the program itself fails, NothingMeasured if it does not train.
    """

    def __init__(
        self,
        command: Command,
        job: JobFolder,
        facts: Facts,
        requested: ProfileOptions,
        record: ProfileRecord,
        ceilings: dict[str, float],
        watcher: Watcher | None = None,
        save: Callable[[], None] = lambda: None,
    ) -> None:
        self.command, self.job, self.facts, self.requested, self.record = (
            command,
            job,
            facts,
            requested,
            record,
        )
        self.watcher, self.save = watcher or Watcher(), save
        record.ceilings = ceilings
        self.blocks = BlockTimer()
        self.trial: Trial | None = None
        self.end_s = seconds() + requested.budget_s
        self.listen_until_s = self.end_s - WHAT_IF_SHARE * requested.budget_s
        self.start_cost_s = 0.0
        self.plain_ms: list[float] = []
        self.not_finite = 0.0  # share of the losses that are NaN or infinite

    def run(self) -> ProfileRecord:
        record = self.record
        try:
            self.watcher.stage("observing", "the unchanged program, until its steps are steady")
            self._quiet()
            for name, stage in self._stages():
                self._try(name, stage)
                self.save()
        finally:
            if self.trial is not None:
                self.trial.close()
        place_under_roof(record.operations, record.ceilings, self._tf32())
        record.flops_a_step = flops_a_step(record.operations)
        if record.step_ms and record.ceilings:
            record.mfu = utilisation(record.operations, record.step_ms, record.ceilings, self._tf32())
        if not record.ceilings and record.operations:
            record.notes.append(
                "the operators' share of this machine's peak is unknown: `flatout doctor --bench` measures the peak"
            )
        record.bound, record.bound_why = name_bottleneck(record)
        record.findings = judge(record, RULES)
        record.status = "done"
        return record

    def _stages(self) -> list[tuple[str, Callable[[Trial], None]]]:
        """The stages in the order in which they disturb the program."""
        stages = {
            "synchronisations": self._synchronisations,
            "lines": self._between,
            "operators": self._operations,
            "memory": self._memory,
            "growth": self._leak,
            "what-ifs": self._what_ifs,
            "data set": self._fetches,
        }
        return [(name, stage) for name, stage in stages.items() if name in self.requested.stages]

    # -- programs -------------------------------------------------------------------------------------------

    def _enter(self) -> Trial:
        start_s = seconds()
        trial = self.trial = Trial(
            self.command, self.job.new_trial(), Plan(), self.facts, table=TABLE, watch=True
        )
        trial.start()
        ready = trial.wait_ready(start_s + START_S)
        self.start_cost_s = seconds() - start_s
        self.blocks.unit, self.blocks.tick_ms = ready["unit"], max(ready["tick_ms"], 1e-3)
        if self.blocks.tick_ms < 2000:
            self.blocks.tick_ms = max(
                block_ms(trial.go(SETTLING_TICKS, self.blocks.deadline(SETTLING_TICKS))), 1e-3
            )
        return trial

    def _leave(self) -> None:
        if self.trial is not None:
            self.trial.close()
            self.trial = None

    def _try(self, name: str, stage: Callable[[Trial], None]) -> None:
        """Runs one stage, in a new program if the current one has ended. A failure becomes a note."""
        for attempt in (1, 2):
            try:
                if self.trial is None:
                    if self.end_s - seconds() < self.start_cost_s:
                        self.record.notes.append(
                            f"{name}: the program ended and no time was left to start it again; increase --budget"
                        )
                        return
                    self._enter()
                assert self.trial is not None
                if name == "what-ifs":
                    self.watcher.stage(name, "which costs can be switched off")
                else:
                    self.watcher.stage("recording", name)
                stage(self.trial)
                return
            except ProgramGone as gone:
                self._leave()
                if attempt == 2 or gone.record.status != "ended":
                    what = "is too short" if gone.record.status == "ended" else "failed during it"
                    self.record.notes.append(f"{name}: the program {what}: {_last_line(gone.record)}")
                    return

    # -- steps without recording ----------------------------------------------------------------------------

    def _quiet(self) -> None:
        """Measures step times and phases while nothing is recorded."""
        record = self.record
        try:
            trial = self._enter()
        except ProgramGone as gone:
            raise why_not(self.command, gone.record) from None
        try:
            record.context = trial.ask({"do": "options"}, seconds() + 120)["context"]
            workers = max((loader["num_workers"] for loader in record.context["loaders"]), default=0)
            self.blocks.prefetched_ticks = PREFETCHED_BATCHES * workers
            trial.ask({"do": "watch"}, seconds() + 60)
            until_s = seconds() + max(5.0, 0.3 * self.requested.budget_s)
            self.watcher.stage("measuring", f"{self.requested.steps} steps without recording")
            while len(self.plain_ms) < self.requested.steps and seconds() < until_s:
                ticks = min(self.blocks.block_ticks, self.requested.steps - len(self.plain_ms))
                self.plain_ms += trial.go(ticks, self.blocks.deadline(ticks))
            self._take(TrialRecord.from_json(trial.ask({"do": "record"}, seconds() + 60)["record"]))
            self._take_watched(trial.ask({"do": "watch"}, seconds() + 60))
            trial.hold()
        except ProgramGone as gone:
            self._leave()
            if not self.plain_ms:
                raise why_not(self.command, gone.record) from None
            self._take(gone.record)
            record.notes.append(
                f"the program ended after {len(self.plain_ms)} measured steps: {_last_line(gone.record)}"
            )

    def _take(self, trial: TrialRecord) -> None:
        record = self.record
        record.device, record.unit, record.versions = (
            trial.device,
            trial.unit,
            {**record.versions, **trial.versions},
        )
        record.warmup_steps, record.warmup_ms = trial.warmup_steps, trial.warmup_ms
        record.steps, record.step_ms, record.step_ms_list = (
            len(self.plain_ms),
            block_ms(self.plain_ms),
            self.plain_ms,
        )
        record.samples_per_s = (
            1000 * trial.samples_per_step / record.step_ms if trial.samples_per_step else None
        )
        record.phases = {name: PhaseTime.from_json(phase) for name, phase in trial.phases.items()}
        self.blocks.tick_ms = record.step_ms
        losses = [float.fromhex(loss) for loss in trial.losses]
        self.not_finite = sum(not math.isfinite(loss) for loss in losses) / len(losses) if losses else 0.0

    def _take_watched(self, watched: dict[str, Any]) -> None:
        record = self.record
        record.gc_ms, record.gc_longest_ms, record.gc_calls = (
            watched["gc_ms"],
            watched["gc_longest_ms"],
            watched["gc_calls"],
        )
        record.settings, record.events = watched["settings"], watched["events"]
        if self.not_finite:
            record.events["loss_not_finite"] = {
                **record.events.get("backward", {"places": []}),
                "calls": self.not_finite,
                "ms": 0.0,
            }
        record.compiled = Compiled.from_json(watched["compiled"]) if watched["compiled"] else None
        record.loaders = [LoaderSeen.from_json(seen) for seen in watched["loaders"]]

    # -- recording ------------------------------------------------------------------------------------------

    def _listen(
        self, trial: Trial, probe: str, ticks: int, fewest: int = 0, **requested: Any
    ) -> dict[str, Any]:
        """The record of a probe over ``ticks`` ticks.

        A slow program is recorded over fewer ticks, at least ``fewest`` if given.
        """
        last = (
            min(self.listen_until_s, seconds() + LONGEST_LISTENING_S)
            if "what-ifs" in self.requested.stages
            else self.end_s
        )
        affordable = int(1000 * (last - seconds()) / self.blocks.tick_ms)
        ticks = max(fewest, min(ticks, affordable)) if fewest else ticks
        if ticks * self.blocks.tick_ms / 1000 > max(self.end_s - seconds(), LONGEST_LISTENING_S / 4):
            self.record.notes.append(f"{probe}: no time was left to record {ticks} steps; increase --budget")
            return {}
        answer = trial.listen(probe, self.blocks.deadline(10 * ticks) + 120, ticks=ticks, **requested)
        if answer.get("why_not"):
            self.record.notes.append(f"{probe}: not recorded, {answer['why_not']}")
        return answer

    def _synchronisations(self, trial: Trial) -> None:
        observed = self._listen(trial, "synchronisations", SYNCHRONISATION_TICKS, 2)
        self.record.synchronisations = [
            SyncRecord.from_json(synchronisation) for synchronisation in observed.get("synchronisations", ())
        ]

    def _between(self, trial: Trial) -> None:
        observed = self._listen(trial, "between", BETWEEN_TICKS, 2).get("between")
        if observed:
            self.record.events["between"] = observed

    def _operations(self, trial: Trial) -> None:
        record, schedule = self.record, list(self.requested.schedule)
        observed = self._listen(
            trial, "operations", 1 + sum(schedule), schedule=schedule, trace=self.requested.trace
        )
        if not observed.get("operations"):
            return
        record.schedule, record.trace = schedule, self.requested.trace
        operations = [Operation.from_json(operation) for operation in observed["operations"]]
        record.operations = operations[:OPERATIONS_KEPT]
        record.operators_a_step = observed["operators"]
        record.operator_us = (
            1000 * observed["operators_ms"] / observed["operators"] if observed["operators"] else None
        )
        step_ms = record.step_ms or 0.0
        if (
            observed["python_share"] is not None
        ):  # a share, because recorded steps are longer and vary in length
            record.python_ms = step_ms * observed["python_share"]
        record.idle_gaps = [IdleGap.from_json(gap) for gap in observed["gaps"]]
        if observed["busy_ms"] is not None:
            record.idle_ms = max(0.0, step_ms - observed["busy_ms"])
        listened = observed["ms"][-schedule[2] :]
        if listened and self.plain_ms:
            quiet = median(self.plain_ms)
            record.overhead = compare([[Round(ms, quiet) for ms in listened]])

    def _memory(self, trial: Trial) -> None:
        observed = self._listen(trial, "memory", MEMORY_TICKS).get("memory")
        if observed:
            self.record.memory = memory = MemorySeen.from_json(observed)
            emptied = self.record.events.get("empty_cache")
            if emptied:
                memory.empty_cache_calls, memory.empty_cache_ms = emptied["calls"], emptied["ms"]
                memory.empty_cache_place = (
                    SourceLocation.from_json(emptied["places"][0]) if emptied["places"] else None
                )

    def _leak(self, trial: Trial) -> None:
        observed = self._listen(trial, "leak", self.requested.leak_ticks, FEWEST_LEAK_TICKS)
        self.record.leak = MemoryGrowth.from_json(observed["leak"]) if observed.get("leak") else None
        self.record.host_growth = (
            MemoryGrowth.from_json(observed["host_growth"]) if observed.get("host_growth") else None
        )

    def _fetches(self, trial: Trial) -> None:
        places = {
            (seen.place.file, seen.place.line): seen for seen in self.record.loaders if seen.place is not None
        }
        for fetch in trial.ask({"do": "fetch"}, seconds() + 120)["fetches"]:
            made_at = fetch["made_at"]
            seen = places.get((made_at["file"], made_at["line"])) if made_at else None
            if fetch.get("why_not"):
                self.record.notes.append(f"no batch could be fetched again: {fetch['why_not']}")
            if seen is not None and fetch.get("fetch_ms") is not None:
                seen.fetch_ms, seen.slow_share = fetch["fetch_ms"], fetch.get("slow_share")
                seen.slow_place = (
                    SourceLocation.from_json(fetch["slow_place"]) if fetch.get("slow_place") else None
                )

    # -- what-ifs -------------------------------------------------------------------------------------------

    def _what_ifs(self, trial: Trial) -> None:
        record = self.record
        if self.blocks.unit != "step":
            record.what_ifs = [WhatIf(lever.name, why_not=CLOSED) for lever in WHAT_IFS]
            return
        answers = trial.ask({"do": "options"}, seconds() + 120)["options"]
        record.what_ifs = [WhatIf(lever.name) for lever in WHAT_IFS]
        left = []
        for what_if, lever in zip(record.what_ifs, WHAT_IFS, strict=True):
            unasked = "" if lever.name in self.requested.what_ifs else "it was not requested"
            what_if.why_not = unasked or answers[lever.name].get("skip", "") or self._pointless(lever.name)
            if not what_if.why_not:
                left.append((what_if, lever, answers[lever.name]["values"]))
        while left:
            what_if, lever, values = left.pop(0)
            left_s = self.end_s - seconds()
            share_s = max(left_s / (len(left) + 1), min(left_s, LEAST_BLOCKS * self.blocks.block_s))
            if share_s < LEAST_BLOCKS * self.blocks.block_s:
                what_if.why_not = "no time was left to measure it; increase --budget"
                continue
            self._what_if(what_if, lever, values, share_s)
            self.save()

    def _pointless(self, name: str) -> str:
        """The reason why there is nothing to switch off, according to the records."""
        if name == "syncs" and self.record.operations and not self.record.synchronisations:
            return "Python never waits for a tensor"
        if name == "gc" and self.record.gc_ms < LITTLE * (self.record.step_ms or 0.0):
            return f"the collector takes less than {LITTLE:.0%} of the {self.record.unit}"
        return ""

    def _what_if(self, what_if: WhatIf, lever: Lever, values: list[Any], share_s: float) -> None:
        """Measures one what-if, with its next value if the program fails with the first."""
        for value in values:
            try:
                trial = self.trial or self._enter()
                choice = Choice(lever.name, value, Origin.TUNER)
                self.watcher.stage(
                    "what-ifs", f"without {lever.name}" if " " not in lever.name else lever.name
                )
                if lever.warms_up:
                    self.blocks.switch(trial, (choice,))
                    self.blocks.run(trial, SETTLING_TICKS + 1)
                until_s = seconds() + share_s
                ratio = self.blocks.live(trial, (), (choice,), until_s, enough=_narrow)
                self.blocks.switch(trial, ())
                trial.hold()
            except LeverFailed as failed:
                what_if.why_not = failed.reason
                return
            except ProgramGone as gone:
                self._leave()
                what_if.why_not = (
                    f"the program fails with it: {_last_line(gone.record)}"
                    if gone.record.status != "ended"
                    else "the program is too short"
                )
                continue
            what_if.ratio, what_if.why_not = ratio, ""
            what_if.step_ms = self.record.step_ms / ratio.median if self.record.step_ms else None
            self.watcher.comparison(what_if.name, ratio)
            return

    def _tf32(self) -> bool:
        return self.record.device == "cuda" and self.record.settings.get("matmul_precision") in (
            "high",
            "medium",
        )


def why_not(command: Command, record: TrialRecord) -> FlatoutError:
    """The error for a program that could not be profiled: its own failure, or nothing to measure."""
    if record.status == "failed":
        said = record.log_tail.strip() or record.reason
        return ProgramFailed(
            f"the program itself fails (exit code {record.exit_code}):\n\n{said}", record.exit_code or 1
        )
    if record.status == "unattached":
        return NothingMeasured(
            f"there is nothing to profile: {f'`python {command.closed}` disables flatout; remove the option' if command.closed else record.reason}."
        )
    if record.status == "broken":
        return NothingMeasured(
            f"flatout could not instrument this program and left it unchanged. Please report this:\n\n{record.reason.strip()}"
        )
    if record.status == "hung":
        return NothingMeasured(f"the program did not train: {record.reason}.")
    steps = len(set(record.loss_steps))
    seen = (
        f"after {steps} training {'step' if steps == 1 else 'steps'}, before they were steady"
        if steps
        else "without a training step"
    )
    return NothingMeasured(f"there is nothing to profile: the program ended {seen}. Let it train longer.")


def _narrow(ratio: Ratio, rounds: int) -> bool:
    return rounds >= MOST_ROUNDS or (rounds >= 4 and ratio.high < NARROW * ratio.low)


def _last_line(record: TrialRecord) -> str:
    lines = [line.strip() for line in record.reason.strip().splitlines() if line.strip()]
    return lines[-1][:240] if lines else "it ended without a message"

"""One program that is profiled: started again if it ends, measured while undisturbed, then recorded by probes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flatout.diagnose.what_ifs import TABLE as WHAT_IFS
from flatout.job.folder import JobFolder
from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.measure.disturbance import Disturbance
from flatout.measure.statistics import block_ms
from flatout.schema.errors import FlatoutError, NothingMeasured, ProgramFailed, last_line
from flatout.schema.facts import Facts
from flatout.schema.plan import Plan
from flatout.schema.profile import CompileRecord, LoaderRecord, ProfileRecord
from flatout.schema.records import PhaseTime, TrialRecord
from flatout.trial.blocks import PREFETCHED_BATCHES, BlockTimer, Watcher
from flatout.trial.parent import ProgramGone, Trial
from flatout.trial.spec import TrialOptions

WHAT_IF_TABLE = "flatout.diagnose.what_ifs:TABLE"
STEADY_LIMIT_S = 600.0  # until the steps are steady
SETTLING_TICKS = 4
LEAK_TICKS = 40
MAX_PROBE_S = 8.0  # of one recording; slow programs are recorded over fewer steps
WHAT_IF_SHARE = 0.5  # of the budget is reserved for what-ifs
ALL_STAGES = frozenset({"synchronisations", "lines", "operators", "memory", "growth", "what-ifs", "data set"})


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
        self.end_s = seconds() + options.budget_s
        self.probes_until_s = self.end_s - WHAT_IF_SHARE * options.budget_s
        self.startup_s = 0.0
        self.plain_ms: list[float] = []
        self.not_finite_share = 0.0  # share of the losses that are NaN or infinite

    def start_trial(self) -> Trial:
        start_s = seconds()
        trial = self.trial = Trial(
            self.command,
            self.job.new_trial(),
            Plan(),
            self.facts,
            TrialOptions(table=WHAT_IF_TABLE, monitor=True),
        )
        trial.start()
        ready = trial.wait_ready(start_s + STEADY_LIMIT_S)
        self.startup_s = seconds() - start_s
        self.blocks.unit, self.blocks.tick_ms = ready["unit"], max(ready["tick_ms"], 1e-3)
        if self.blocks.tick_ms < 2000:
            self.blocks.tick_ms = max(
                block_ms(trial.run_ticks(SETTLING_TICKS, self.blocks.deadline(SETTLING_TICKS))), 1e-3
            )
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
                    self.record.notes.append(f"{name}: the program {what}: {last_line(ended.record.reason)}")
                    return

    def measure(self) -> None:
        """Measures step times and phases while nothing is recorded."""
        record = self.record
        self.disturbance.sample()
        try:
            trial = self.start_trial()
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
                f"the program ended after {len(self.plain_ms)} measured steps: {last_line(ended.record.reason)}"
            )

    def _copy_record(self, trial: TrialRecord) -> None:
        record = self.record
        record.device, record.unit = trial.device, trial.unit
        record.versions = {**record.versions, **trial.versions}
        record.warmup_steps, record.warmup_ms = trial.warmup_steps, trial.warmup_ms
        record.steps, record.step_ms_list = len(self.plain_ms), self.plain_ms
        record.step_ms = block_ms(self.plain_ms)
        record.samples_per_s = (
            1000 * trial.samples_per_step / record.step_ms if trial.samples_per_step else None
        )
        record.phases = {name: PhaseTime.from_json(phase) for name, phase in trial.phases.items()}
        self.blocks.tick_ms = record.step_ms
        losses = [float.fromhex(loss) for loss in trial.losses]
        self.not_finite_share = (
            sum(not math.isfinite(loss) for loss in losses) / len(losses) if losses else 0.0
        )

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

        A slow program is recorded over fewer ticks, at least ``min_ticks`` if given.
        """
        deadline_s = (
            min(self.probes_until_s, seconds() + MAX_PROBE_S)
            if "what-ifs" in self.options.stages
            else self.end_s
        )
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
    memory growth.
    """

    steps: int = 40
    schedule: tuple[int, int, int] = (1, 2, 3)
    budget_s: float = 120.0
    stages: frozenset[str] = ALL_STAGES
    what_ifs: frozenset[str] = frozenset(lever.name for lever in WHAT_IFS)
    leak_ticks: int = LEAK_TICKS
    trace: str = ""


def profile_error(record: TrialRecord) -> FlatoutError:
    """The error for a program that could not be profiled: its own failure, or nothing to measure."""
    if record.status == "failed":
        output = record.log_tail.strip() or record.reason
        return ProgramFailed(
            f"the program itself fails (exit code {record.exit_code}):\n\n{output}", record.exit_code or 1
        )
    if record.status == "unattached":
        return NothingMeasured(f"there is nothing to profile: {record.reason}.")
    if record.status == "broken":
        return NothingMeasured(
            f"flatout could not instrument this program and left it unchanged. Please report this:\n\n{record.reason.strip()}"
        )
    if record.status == "hung":
        return NothingMeasured(f"the program did not train: {record.reason}.")
    steps = len(set(record.loss_steps))
    when = (
        f"after {steps} training {'step' if steps == 1 else 'steps'}, before they were steady"
        if steps
        else "without a training step"
    )
    return NothingMeasured(f"there is nothing to profile: the program ended {when}. Let it train longer.")

"""Runs a program under the invariants, and collects what they found (`flatout.diagnose.observer` runs inside)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flatout.diagnose.invariants.hash_order import BATCHES, finding_at, order_place
from flatout.diagnose.observer import ENTRY
from flatout.diagnose.profiling import profile_error
from flatout.job.folder import JobFolder
from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.probe.program import ScriptProgram
from flatout.schema.errors import FlatoutError, NothingMeasured
from flatout.schema.facts import Facts
from flatout.schema.findings import Finding
from flatout.schema.plan import Plan
from flatout.schema.records import TrialRecord
from flatout.trial.blocks import Watcher
from flatout.trial.parent import ProgramGone, Trial
from flatout.trial.spec import TrialOptions

MAX_START_S = 600.0  # until the first backward pass
SHOW_EVERY_S = 5.0
MAX_SEEDED_START_S = 8.0  # of a program that is started again under another hash seed
HASH_SEED = "PYTHONHASHSEED"


@dataclass
class ObservedRun:
    """What was seen. ``record``: of the program's end; None if the time limit ended it.

    ``labels``: digests of the first labels that a loss got. ``failed``: invariants that raised an error."""

    findings: list[Finding] = field(default_factory=list)
    steps: int = 0
    passes: int = 0
    evaluated: bool = False
    labels: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0  # since the first backward pass
    start_s: float = 0.0  # until then
    loaders: int = 0
    unseen: list[str] = field(default_factory=list)  # what was not compared
    record: TrialRecord | None = None

    @property
    def error(self) -> FlatoutError | None:
        """What to tell about a program that failed, or that did not train."""
        if self.record is not None and self.record.status != "ended":
            return profile_error(self.record)
        if not self.seconds:
            return NothingMeasured("the program ended without a backward pass: there was nothing to observe.")
        return None

    @property
    def scope(self) -> str:
        epochs = f" and {self.passes} epochs" if self.passes else ""
        return f"{self.steps:,} steps{epochs} of a run" if self.seconds else ""

    @property
    def notes(self) -> list[str]:
        """What could not be seen."""
        notes = [f"not checked: {name} failed ({why})" for name, why in self.failed.items()] + self.unseen
        if self.seconds and not self.steps:
            notes.append("no optimizer of torch stepped: what concerns optimizers was not seen")
        if self.record is None:
            unseen = [
                what
                for what, seen in (
                    ("the end of an epoch", self.passes or not self.loaders),
                    ("an evaluation", self.evaluated),
                )
                if not seen
            ]
            more = f"not seen: {' and '.join(unseen)}; give a longer --budget" if unseen else ""
            notes.append(f"observed the first {self.seconds:.0f} s of training{more and '. ' + more}")
        return notes


def observe(
    command: Command,
    job: JobFolder,
    facts: Facts,
    limit_s: float,
    show: Callable[[ObservedRun], None] = lambda run: None,
    labels: int = 0,
) -> ObservedRun:
    """Run the program until it ends, or for ``limit_s`` after its first backward pass.

    ``labels``: stop as soon as this many digests of labels are known."""
    run = ObservedRun()
    with Trial(command, job.new_trial(), Plan(), facts, TrialOptions(entry=ENTRY)) as trial:
        begun_s, start_s = seconds(), 0.0
        end_s = begun_s + MAX_START_S
        try:
            while not (labels and len(run.labels) >= labels):
                message = trial.poll(end_s)
                if trial.training and not start_s:
                    start_s, end_s = seconds(), min(end_s, seconds() + limit_s)
                    run.start_s = start_s - begun_s
                if message is not None and "findings" in message:
                    findings = [Finding.from_json(finding) for finding in message.pop("findings")]
                    run = replace(run, findings=findings, seconds=seconds() - start_s, **message)
                    show(run)
        except ProgramGone as gone:
            if not (start_s and gone.record.status == "hung"):
                run.record = gone.record
        if start_s:
            run.seconds = seconds() - start_s
    return run


def observe_twice(
    command: Command, job: JobFolder, facts: Facts, limit_s: float, program: ScriptProgram, watcher: Watcher
) -> ObservedRun:
    """Observe the program. If its source reads a set in its order, compare the labels under another hash seed."""
    shown_s = seconds()

    def show(run: ObservedRun) -> None:
        nonlocal shown_s
        if not shown_s or seconds() - shown_s >= SHOW_EVERY_S:
            shown_s = seconds()
            watcher.stage("observing", f"{run.steps:,} steps")

    watcher.stage("observing", f"the program, for {limit_s:.0f} s after its first backward pass")
    run = observe(command, job, facts, limit_s, show)
    place = order_place({source.path: source.text for source in program.sources})
    if place is None or len(run.labels) < BATCHES or HASH_SEED in dict(command.environment):
        return run
    if run.start_s > MAX_SEEDED_START_S:
        run.unseen.append(
            f"not compared under another hash seed: the program starts for {run.start_s:.0f} s ({place.sentence()} "
            "reads a set in its order)"
        )
        return run

    def labels_under(seed: str) -> list[str]:
        watcher.stage("observing", f"the first labels under {HASH_SEED}={seed}")
        seeded = replace(command, environment=(*command.environment, (HASH_SEED, seed)))
        return observe(seeded, job, facts, limit_s, labels=BATCHES).labels

    if labels_under("1") != run.labels and labels_under("0") == run.labels:
        run.findings.append(finding_at(place))
    return run

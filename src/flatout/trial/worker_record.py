"""The state and the record of a worker: what a trial has measured so far."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from flatout.agent.applier import Applier, Outcome
from flatout.agent.bootstrap import notify
from flatout.agent.file_sandbox import overlay_of_process
from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.guard.replica import StepReplica
from flatout.guard.sample_draws import SampleDrawProbe
from flatout.job.claims import claim
from flatout.job.folder import TrialFolder, write_json
from flatout.measure.clock import Clock, HostClock, seconds
from flatout.measure.load import peak_bytes
from flatout.measure.phases import PhaseRecorder
from flatout.measure.statistics import block_ms
from flatout.schema.enums import Moment
from flatout.schema.records import TrialRecord
from flatout.trial.channel import Channel, Hangup
from flatout.trial.monitor import ProgramMonitor
from flatout.trial.probes.active import ActiveProbe
from flatout.trial.probes.probe import ProbeTools
from flatout.trial.rank_sync import RankSync
from flatout.trial.recorder import TrainingRecorder
from flatout.trial.spec import TrialSpec, levers


class WorkerRecord(Listener):
    """Holds what was measured, and talks to the parent."""

    wants_phases = True

    def __init__(self, spec: TrialSpec, torch: ModuleType) -> None:
        self.spec = spec
        self.torch = torch
        self.folder = TrialFolder(Path(spec.folder))
        self.ledger = Ledger()
        self.context = TrainingContext(torch, self, self.ledger)
        self.applier = Applier(levers(spec.table), spec.facts, self.context)
        self.real_files = overlay_of_process().bypass  # inside, files are the real ones
        if self.folder.shared_samples.is_dir():
            from flatout.data.shared_samples import SharedSamples

            self.context.shared_samples = SharedSamples(self.folder.shared_samples, self.real_files, seconds)
        self.recorder = TrainingRecorder(torch, self.context, spec.sketches)
        self.sample_probe = SampleDrawProbe(torch)
        self.pending_losses: tuple[Any, ...] = ()
        self.fetched_samples: list[list[list[float]]] = []
        self.replica: StepReplica | None = None
        self.peak_bytes: int | None = None  # measured before a replica
        self.monitor: ProgramMonitor | None = None
        self.active_probe = ActiveProbe(
            ProbeTools(torch, self.context, self.real_files, self.recorder.loss_tensors)
        )
        self.ranks = RankSync(self.folder, self.real_files)
        self.channel: Channel | None = None
        self.owner_pid = os.getpid()
        self.claimed: bool | None = None  # None until the first step
        self.unit = "step"
        self.clock: Clock = HostClock()
        self.phases = PhaseRecorder(self.clock)
        self.started_s = seconds()
        self.first_backward_s: float | None = None
        self.warm = False
        self.min_warmup_ticks = 1
        self.warmup_steps = 0
        self.warmup_ms = 0.0
        self.ticks_ms: list[float] = []
        self.data_waits_ms: list[float] = []  # for data, during the warm-up
        self.tick_start: Any = None
        self.block: list[tuple[Any, Any]] = []
        self.block_samples = 0
        self.ticks_left = 0
        self.block_until_s = 0.0
        self.measured: list[float] = []
        self.measured_samples = 0
        self.written = False
        self.stopping = False
        self.late_applied = False

    def _forward(self, event: str, *args: object) -> None:
        for listener in (self.monitor, self.active_probe.probe):
            if listener is not None:
                getattr(listener, event)(*args)

    def next_command(self) -> dict[str, Any]:
        if self.channel is None:
            return {"do": "finish"}
        try:
            return self.channel.receive()
        except Hangup:
            os._exit(1)  # the parent is gone, so the trial is useless

    def send(self, message: dict[str, Any]) -> None:
        if self.channel is not None:
            try:
                self.channel.send(message)
            except Hangup:
                os._exit(1)

    def _claim(self) -> None:
        self.claimed = self.ranks.measurable and claim(str(self.folder.claim))
        if not self.claimed:
            self.phases.reset()

    def record(self, status: str, reason: str) -> TrialRecord:
        outcomes = [
            Outcome(c, True)
            for c in self.spec.plan
            if (lv := self.applier.table.get(c.name)) and lv.moment is Moment.PROCESS
        ]
        outcomes += self.applier.outcomes
        step_ms = block_ms(self.measured) if self.measured else None
        recorder = self.recorder
        per_step = (
            self.measured_samples / len(self.measured)
            if self.measured and self.measured_samples and self.unit == "step"
            else None
        )
        if per_step and self.context.data_parallel is not None:
            per_step *= self.context.data_parallel.whole_batch_ratio
        return TrialRecord(
            status=status,
            reason=reason,
            steps=len(self.measured),
            warmup_steps=self.warmup_steps,
            warmup_ms=self.warmup_ms,
            unit=self.unit,
            step_ms=step_ms,
            step_ms_list=self.measured,
            samples_per_step=per_step,
            samples_per_s=per_step / step_ms * 1000 if per_step and step_ms else None,
            phases={name: phase.to_json() for name, phase in self.phases.summary().items()},
            losses=recorder.losses(),
            loss_steps=recorder.loss_steps,
            batch_hashes=recorder.batch_hashes,
            batch_statistics=recorder.batch_statistics,
            fetched_samples=self.fetched_samples,
            weights_digests=recorder.weights_digests,
            weights_sketches=recorder.weights_sketches,
            peak_memory_bytes=self.current_peak(),
            device=self.context.device_type,
            seed=self.spec.seed,
            plan=self.spec.plan.to_json(),
            applied=[o.to_json() for o in outcomes if o.applied],
            skipped=[
                *(o.to_json() for o in outcomes if not o.applied),
                *({"name": n, "reason": r} for n, r in self.context.reports),
            ],
            context=self.context.describe(),
            versions={"python": sys.version.split()[0], "torch": str(self.torch.__version__)},
        )

    def current_peak(self) -> int:
        return peak_bytes(self.torch, self.context.device) if self.peak_bytes is None else self.peak_bytes

    def write_record(self, status: str, reason: str) -> None:
        if not self.written:
            self.written = True
            with self.real_files():  # the record is written outside the overlay
                write_json(self.folder.result, self.record(status, reason).to_json())

    def _write_last(self, status: str, reason: str) -> None:
        try:
            self.write_record(status, reason)
        except Exception as error:
            notify(f"could not write the trial's record ({type(error).__name__}: {error})")

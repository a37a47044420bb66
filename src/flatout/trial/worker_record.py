"""The state and the record of a worker: what a trial has measured so far."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from flatout.job.folder import TrialFolder, read_json, write_json
from flatout.job.rank_environment import this_rank
from flatout.measure import parity
from flatout.measure.clock import Clock, HostClock, seconds
from flatout.measure.load import peak_bytes
from flatout.measure.nests import tensors_in
from flatout.measure.phases import PhaseRecorder
from flatout.measure.statistics import block_ms
from flatout.schema.enums import Moment, Origin
from flatout.schema.plan import Choice
from flatout.schema.records import TrialRecord
from flatout.trial.channel import Channel, Hangup
from flatout.trial.monitor import ProgramMonitor
from flatout.trial.probes.active import ActiveProbe
from flatout.trial.probes.probe import ProbeTools
from flatout.trial.spec import TrialSpec, levers

MAX_HASHED = 32
MAX_LOSSES = 100_000
DIGEST_STEPS = (1, 2, 4, 8, 16, 32)  # the weights are digested after these steps


class TrainingRecorder:
    def __init__(self, torch: ModuleType, context: TrainingContext, sketches: bool = False) -> None:
        self.torch, self._sketches = torch, sketches
        self.context = context
        self.loss_steps: list[int] = []
        self.batch_hashes: list[Any] = []
        self.batch_statistics: list[list[float]] = []
        self.weights_digests: dict[str, Any] = {}
        self.weights_sketches: dict[str, dict[str, list[float]]] = {}
        self.from_loader = False
        self._samples = 0
        self._losses: list[Any] = []

    def loss(self, losses: tuple[Any, ...]) -> None:
        """Keep a copy of the losses of a backward pass; scripts may scale them in place afterwards."""
        if len(self._losses) < MAX_LOSSES:
            self._losses.append(
                [loss.detach().clone() for loss in losses] if len(losses) > 1 else losses[0].detach().clone()
            )
            self.loss_steps.append(self.context.steps)

    def kept_tensors(self) -> list[Any]:
        """The tensors that this recorder keeps."""
        return list(tensors_in([self._losses, self.batch_hashes, self.weights_digests]))

    def batch(self, batch: object, describe: bool) -> None:
        """Record a batch of a DataLoader. Describing it costs time, so it is limited to the warm-up."""
        self.from_loader = True
        first = next(tensors_in(batch), None)
        if first is not None and first.dim():
            self._samples += len(first)
        if describe and len(self.batch_hashes) < MAX_HASHED:
            with self.context.untimed():
                self.batch_hashes.append(parity.fingerprints(tensors_in(batch), self.torch))
                self.batch_statistics.extend(parity.batch_statistics(batch, self.torch))

    def take_samples(self) -> int:
        """How many samples came since the last call."""
        samples, self._samples = self._samples, 0
        return samples

    def model_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the batch of a program without a DataLoader: the first tensor that enters a root module."""
        if not self.from_loader and len(self.batch_hashes) < MAX_HASHED:
            first = next(tensors_in((args, kwargs)), None)
            if first is not None:
                with self.context.untimed():
                    self.batch_hashes.append(parity.fingerprints([first], self.torch))

    def step(self, steps: int) -> None:
        if steps & (steps - 1):
            return
        with self.context.untimed():
            if steps in DIGEST_STEPS:
                buffers = [b for root in self.context.roots for b in root.buffers()]
                tensors = [*self.context.parameters, *buffers]
                self.weights_digests[str(steps)] = parity.fingerprints(tensors, self.torch)
            if self._sketches:
                self.weights_sketches[str(steps)] = {
                    f"{i}.{name}": parity.sketch(tensor, self.torch)
                    for i, root in enumerate(self.context.roots)
                    for name, tensor in (*root.named_parameters(), *root.named_buffers())
                }

    def losses(self) -> list[str]:
        """Return hexadecimal floats, one per backward pass; turn fingerprints into digests.

        Waits for the device, so call it between blocks only.
        """
        self.batch_hashes = [*map(_read, self.batch_hashes)]
        self.weights_digests = {step: _read(found) for step, found in self.weights_digests.items()}
        for i, loss in enumerate(self._losses):
            if not isinstance(loss, str):
                parts = loss if isinstance(loss, list) else [loss]
                self._losses[i] = float(sum(float(tensor.double().mean()) for tensor in parts)).hex()
        return self._losses


def _read(found: Any) -> str:
    return found if isinstance(found, str) else parity.digest_of(found)


# Makes all ranks of a program switch levers after the same step.
#
# The measured rank writes each switch and its step; the others look for it after each step. A lever active in
# one rank alone would show no gain, and a lever that changes messages between ranks would break the exchange.
# So a switch takes effect one step later: no rank reaches the end of that step before the measured one has
# written, because all exchange gradients in it. On a GPU the host runs ahead of the exchange. There it
# takes effect two steps later, and each other rank waits at the end of a step until the step before it is
# computed.


class RankSync:
    """The place of this process: ``rank`` of ``world``, with ``local_world`` ranks on this machine.

    ``measurable``: only the first rank of a machine may be measured, so that two programs show the same
    batches. ``real_files()`` lets it read and write where the program may not. ``pending``: in the measured rank,
    what all do at the end of the current step.
    """

    def __init__(self, folder: TrialFolder, real_files: Callable[[], AbstractContextManager[Any]]) -> None:
        rank_env = this_rank()
        torchrun_values = [
            int(os.environ.get(name, default))
            for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"))
        ]
        self.rank, self.world, self.local_world = (
            (rank_env.rank, rank_env.world_size, rank_env.local_world_size)
            if rank_env is not None
            else torchrun_values
        )
        self.measurable = self.rank == 0 if rank_env is not None else os.environ.get("LOCAL_RANK", "0") == "0"
        self.pending: dict[str, Any] | None = None
        self._folder, self._real_files = folder, real_files
        self._last_change = 0
        self.announce_ahead_steps = 1
        self._clock: Clock | None = None  # of a GPU
        self._step_before: Any = None
        self._announced: dict[str, Any] | None = None

    @property
    def multi_rank(self) -> bool:
        return self.world > 1

    def use_gpu_clock(self, clock: Clock) -> None:
        self.announce_ahead_steps, self._clock = 2, clock

    # -- the measured rank

    def is_for_all(self, command: dict[str, Any]) -> bool:
        return self.multi_rank and bool(command["do"] == "switch")

    def announce(self, command: dict[str, Any], step: int) -> None:
        """Announce what all ranks do after ``step``."""
        self.pending = command
        with self._real_files():
            write_json(self._folder.rank_command_file, {**command, "step": step})

    def take_pending(self) -> dict[str, Any] | None:
        pending, self.pending = self.pending, None
        return pending

    # -- the other ranks

    def apply_due(self, step: int, switch: Callable[[Sequence[Choice]], Any]) -> None:
        """At the end of each step: switch the levers that are due."""
        if self._clock is not None:
            if self._step_before is not None:
                self._clock.wait_for(self._step_before)
            self._step_before = self._clock.mark()
        command = self._pending_after(step)
        if command is not None:
            switch(choices_of(command["choices"]))

    def _pending_after(self, step: int) -> dict[str, Any] | None:
        with self._real_files():
            try:
                changed = os.stat(self._folder.rank_command_file).st_mtime_ns
            except OSError:
                return None
            if changed != self._last_change:
                self._last_change, self._announced = changed, read_json(self._folder.rank_command_file)
        if self._announced is None or step < self._announced["step"]:
            return None
        pending, self._announced = self._announced, None
        return pending


def choices_of(data: list[dict[str, Any]]) -> list[Choice]:
    return [Choice(c["name"], c["value"], Origin.TUNER) for c in data]


class WorkerRecord(Listener):
    """Holds what was measured, and talks to the parent."""

    wants_phases = True

    def __init__(self, spec: TrialSpec, torch: ModuleType) -> None:
        self.spec = spec
        self.torch = torch
        self.folder = TrialFolder(Path(spec.folder))
        self.ledger, self.hold_ledger = Ledger(), Ledger()
        self.context = TrainingContext(torch, self, self.ledger)
        self.context.untimed = self._untimed
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
            ProbeTools(torch, self.context, self.real_files, self.recorder.kept_tensors)
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
        self.tick_parts: list[tuple[Any, Any]] = []  # of the current tick, between which flatout worked
        self.block: list[list[tuple[Any, Any]]] = []
        self.block_samples = 0
        self.ticks_left = 0
        self.block_until_s = 0.0
        self.measured: list[float] = []
        self.measured_samples = 0
        self.written = False
        self.stopping = False
        self.late_applied = False
        self.checked_steps = 0  # that were done
        self.end_checked_steps: Callable[[], None] | None = None  # while deterministic kernels are asked for

    def _forward(self, event: str, *args: object) -> None:
        for listener in (self.monitor, self.active_probe.probe):
            if listener is not None:
                getattr(listener, event)(*args)

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        """No part of the current tick. Work that a device has yet to do belongs to the body as well."""
        start, self.tick_start = self.tick_start, None
        if start is not None:
            self.tick_parts.append((start, self.clock.mark()))
        try:
            yield
        finally:
            if start is not None:
                self.tick_start = self.clock.mark()

    def start_tick(self) -> None:
        self.tick_start, self.tick_parts = self.clock.mark(), []

    def tick_ms(self, parts: Sequence[tuple[Any, Any]]) -> float:
        return sum(self.clock.elapsed_ms(start, end) for start, end in parts)

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

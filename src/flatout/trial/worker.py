"""The part of a trial inside the program: observes steps, keeps time, runs commands between two ticks.

Commands (one JSON object a line), each answered with one object:

    {"do": "run", "ticks": n}           run n ticks ("seconds" ends them early, "core" is where to begin), report
                                        them and the core: {"ms": [...], "core": n}
    {"do": "switch", "choices": [...]}  make exactly these live levers active
    {"do": "options"}                   return what every lever says about this program
    {"do": "replica", "choices": [...]} run the guard's step replica with these live levers, the most valuable first;
                                          "remaining": false does not judge what is left of them
    {"do": "probe", "probe": name, ...}  run some ticks with a probe (trial/probes/), and return its results
    {"do": "monitor"}                   return the monitor's results since the last call (trial/monitor.py)
    {"do": "record"}                    return the record so far
    {"do": "fetch"}                     fetch some batches repeatedly; return slow lines of the data set
    {"do": "finish"}                    write the record and stop the program; "fetch_samples" first fetches some
                                        samples repeatedly

Only one process of the program is measured: the first rank of a machine, or, without a launcher, the first
process that finishes a step. The others use the same levers, and switch after the same step (trial/worker_record.py).
"""

from __future__ import annotations

import atexit
import functools
import os
import random
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flatout.agent.applier import AFTER_FIRST_STEP, BEFORE_FIRST_STEP
from flatout.agent.frames import is_torch
from flatout.guard.deterministic import deterministic_kernels
from flatout.guard.perturb import perturb
from flatout.job.parent_exit import die_with_parent
from flatout.measure.clock import clock_for, seconds
from flatout.measure.cores import current_core
from flatout.measure.load import copies_that_fit, resident_bytes
from flatout.measure.phases import PhaseRecorder
from flatout.measure.statistics import block_ms, median
from flatout.measure.steady import is_steady
from flatout.schema.enums import Effect, Moment
from flatout.schema.plan import Plan
from flatout.trial.channel import Channel, Hangup
from flatout.trial.monitor import ProgramMonitor
from flatout.trial.spec import TrialSpec
from flatout.trial.worker_commands import StopTrial, run_commands
from flatout.trial.worker_record import DIGEST_STEPS, WorkerRecord

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

COMPILE_TICKS = 4  # shapes, train and eval, graph recording: each may cost one
CLOSURE_PASSES = 4  # after this many backward passes and CLOSURE_S in one optimizer step, a pass is a tick
CLOSURE_S = 1.0
MAX_CHECKED_S = 3.0  # for the checked steps; then they end at the next digest of the weights


def attach(job: dict[str, Any]) -> None:
    """The entry that the bootstrap calls right after ``import torch``."""
    import torch

    Worker(TrialSpec.from_json(job), torch).attach()


class Worker(WorkerRecord):
    # -- the program's events

    def attach(self) -> None:
        if not self.spec.hold:
            self.applier.start(self.spec.plan, BEFORE_FIRST_STEP)
        self.context.install()
        if self.spec.monitor:
            self.monitor = ProgramMonitor(self.torch, self.context, self.ledger)
        if self.spec.reseed and self.spec.seed:
            self._shift_seeds(self.spec.seed)
        die_with_parent()
        try:
            self.channel = Channel.connect(self.spec.address)
            self.channel.send({"attached": os.getpid(), "rank": os.environ.get("RANK", "0")})
        except (OSError, Hangup):
            self.channel = None
        if self.spec.hold:
            self._hold_at(self.torch.cuda, "_lazy_init")
            self._hold_at(self.torch.utils.data.DataLoader, "__init__")
        atexit.register(self._at_exit)
        self._excepthook = self.ledger.set(sys, "excepthook", self._program_failed)
        os.register_at_fork(after_in_child=self._after_fork)

    def _hold_at(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def held(*args: Any, **kwargs: Any) -> Any:
            self._wait_for_plan()
            current = getattr(owner, name)  # a lever of the plan may have replaced it
            return (original if current is held else current)(*args, **kwargs)

        self.hold_ledger.set(owner, name, held)

    def _wait_for_plan(self) -> None:
        """Hold the program until the parent sends its plan, and apply it."""
        if not self.spec.hold or os.getpid() != self.owner_pid:
            return
        self.hold_ledger.restore()
        self.send({"held": os.getpid()})
        self.spec = replace(self.spec, hold=False, plan=Plan.from_json(self.next_command()["plan"]))
        self.applier.start(self.spec.plan, BEFORE_FIRST_STEP)

    def _end_checked_steps(self) -> None:
        """Let the program choose its kernels again, and apply the rest of the plan."""
        self._restore_kernels()
        self.checked_steps = self.context.steps
        table = self.applier.table
        live = [
            c for c in self.spec.plan if table[c.name].live and table[c.name].moment is not Moment.PROCESS
        ]
        first = [o for o in self.applier.outcomes if o.choice not in live]
        self.applier.outcomes = first + self.applier.switch(live)
        self._expect_warm_up()
        self.tick_start = None

    def _restore_kernels(self) -> None:
        end, self.end_checked_steps = self.end_checked_steps, None
        if end is not None:
            end()

    def _expect_warm_up(self) -> None:
        if any(o.applied and self.applier.table[o.choice.name].warms_up for o in self.applier.outcomes):
            self.min_warmup_ticks = COMPILE_TICKS

    def _shift_seeds(self, offset: int) -> None:
        """Shift the program's own seeds; otherwise every seed of flatout would give the same curve.

        Seeds that torch sets itself (in loader workers) follow from those, so they are not shifted again.
        """
        owners = [(self.torch, "manual_seed"), (random, "seed")]
        if "numpy" in sys.modules:
            owners.append((sys.modules["numpy"].random, "seed"))
        for owner, name in owners:
            original = getattr(owner, name)

            def shifted(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                name = next(iter(kwargs.keys() & {"a", "seed"}), None)
                seed = kwargs.get(name) if name else next(iter(args), None)
                if isinstance(seed, int) and not is_torch(sys._getframe(1).f_code.co_filename):
                    args, kwargs = (
                        (args, {**kwargs, name: seed + offset})
                        if name
                        else ((seed + offset, *args[1:]), kwargs)
                    )
                return original(*args, **kwargs)

            self.ledger.set(owner, name, shifted)

    def iterator_begin(self, loader: DataLoader) -> None:
        self._wait_for_plan()
        self._forward("iterator_begin", loader)

    def iterator_end(self, loader: DataLoader, iterator: object) -> None:
        self._forward("iterator_end", loader, iterator)

    def data_begin(self, loader: DataLoader) -> None:
        self._forward("data_begin", loader)
        self.phases.begin("data")

    def data_end(self, loader: DataLoader, batch: object) -> None:
        self.phases.end("data")
        self._forward("data_end", loader, batch)
        self.sample_probe.observe(loader)
        self.recorder.batch(batch, describe=not self.warm)

    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._wait_for_plan()
        if (
            self.spec.checked_steps
            and not self.context.backwards
            and self.end_checked_steps is None
            and any(parameter.is_cuda for parameter in root.parameters())
        ):
            kernels = ExitStack()
            kernels.enter_context(deterministic_kernels(self.context))
            self.end_checked_steps = kernels.close
        self.phases.begin("forward")
        self._forward("forward_begin", root, args, kwargs)
        if not self.warm:
            self.recorder.model_input(args, kwargs)
        if self.replica is not None:
            self.replica.forward_begin(root, args, kwargs)

    def forward_end(self, root: Module, output: object) -> None:
        self.phases.end("forward")
        self._forward("forward_end", root, output)
        if self.replica is not None:
            self.replica.forward_end(root, output)

    def backward_begin(self, losses: tuple[Any, ...]) -> None:
        if self.context.data_parallel is None:
            self.recorder.loss(losses)
        else:  # the loss of the whole batch is known after the exchange
            self.pending_losses = losses
        self._forward("backward_begin", losses)
        self.phases.begin("backward")

    def backward_end(self) -> None:
        self.phases.end("backward")
        if self.pending_losses:
            self.recorder.loss(self.pending_losses)
            self.pending_losses = ()
        self._forward("backward_end")
        if self.first_backward_s is None:
            self.first_backward_s = seconds()
            self.start_tick()
            self.send({"training": os.getpid()})
        elif self.unit == "backward":
            self._tick()
        elif (
            self.context.steps == 0
            and self.context.closure_steps
            and self.context.backwards >= CLOSURE_PASSES
            and seconds() - self.first_backward_s > CLOSURE_S
        ):
            self._claim()
            self._restore_kernels()
            self.unit = "backward"
            self._use_device_clock()
            self.start_tick()

    def exchange_begin(self) -> None:
        self._forward("exchange_begin")
        self.phases.begin("exchange")

    def exchange_end(self, traffic: object) -> None:
        self.phases.end("exchange")
        self._forward("exchange_end", traffic)

    def optimizer_begin(self, optimizer: Optimizer) -> None:
        if self.replica is not None:
            self.replica.optimizer_begin(optimizer)
        self._forward("optimizer_begin", optimizer)
        self.phases.begin("optimizer")

    def optimizer_end(self, optimizer: Optimizer) -> None:
        self.phases.end("optimizer")
        self._forward("optimizer_end", optimizer)

    def step_end(self) -> None:
        if self.claimed is None:
            self._claim()
        if not self.late_applied:
            self._first_step_end()
        if not self.claimed:
            self.ranks.apply_due(self.context.steps, self.applier.switch)
            return
        if self.active_probe.probe is None:  # a probe would measure it
            self.recorder.step(self.context.steps)
        if self.end_checked_steps is not None:
            late = seconds() - (self.first_backward_s or 0.0) > MAX_CHECKED_S
            if self.context.steps >= self.spec.checked_steps or (
                self.context.steps in DIGEST_STEPS[1:] and late
            ):
                self._end_checked_steps()
            return
        if self.unit == "step":
            self._tick()
        elif self.stopping:
            raise StopTrial

    def on_error(self, error: Exception) -> None:
        self._write_last("broken", "".join(traceback.format_exception(error))[-8000:])
        if self.channel is not None:
            self.channel.close()  # if the program swallows the stop, the parent ends it
        raise StopTrial

    def _first_step_end(self) -> None:
        """Apply the levers that need the training context, which is known now."""
        self.late_applied = True
        if self.spec.perturbation:
            perturb(self.context, self.spec.perturbation, self.ledger)
        plan = self.spec.plan
        if self.end_checked_steps is not None:
            table = self.applier.table
            plan = Plan(
                tuple(c for c in plan if not table[c.name].live or table[c.name].effect is Effect.EXACT)
            )
        self.applier.start(plan, AFTER_FIRST_STEP)
        self._expect_warm_up()
        self._use_device_clock()
        if self.unit == "step":
            self.first_step_s = seconds()
            self.tick_start = None

    # -- ticks

    def _use_device_clock(self) -> None:
        """Switch to the device's clock once the device is known.

        Marks of the two clocks cannot be mixed, so earlier marks are dropped.
        """
        if self.context.device_type == "cuda" and self.clock.name != "cuda":
            self.clock = clock_for(self.torch, self.context.device)
            self.phases = PhaseRecorder(self.clock)
            self.ranks.use_gpu_clock(self.clock)
            self.tick_start = None

    def _tick(self) -> None:
        if self.stopping:
            # The program swallowed StopTrial. The record is written; nothing of the program is lost.
            os._exit(0)
        if not self.claimed:
            return
        if self.tick_start is None:
            self.start_tick()
            if self.replica is None:
                return
        else:
            parts = [*self.tick_parts, (self.tick_start, self.clock.mark())]
            self.tick_start, self.tick_parts = parts[-1][1], []
            self._book(parts)
        if self.warm and self.ticks_left <= 0:
            self._end_block()

    def _book(self, parts: list[tuple[Any, Any]]) -> None:
        if self.warm:
            probe = self.active_probe.probe
            if probe is None and self.replica is None and len(parts) == 1:
                self.phases.step(*parts[0])
            else:
                self.phases.discard_spans()
            if probe is not None:
                self.active_probe.tick()
            self.block.append(parts)
            self.block_samples += self.recorder.take_samples()
            self.ticks_left = self.ticks_left - 1 if seconds() < self.block_until_s else 0
        elif self.replica is None:
            self.ticks_ms.append(self.tick_ms(parts))
            self.data_waits_ms.append(self.phases.waited_ms())
            self.phases.reset()
            if is_steady(self.ticks_ms, seconds() - (self.first_backward_s or 0.0), self.min_warmup_ticks):
                self._warmed_up()

    def _warmed_up(self) -> None:
        self.warm = True
        self.warmup_steps = len(self.ticks_ms) + (1 if self.unit == "step" else CLOSURE_PASSES)
        self.warmup_ms = (seconds() - self.started_s) * 1000
        self.recorder.losses()
        self.recorder.take_samples()
        self.send(
            {
                "ready": True,
                "unit": self.unit,
                "ticks": len(self.ticks_ms),
                "tick_ms": block_ms(self.ticks_ms[-8:]),
                "warmup_ms": self.warmup_ms,
                "data_ms": median(self.data_waits_ms[-8:]),
                "dataset_fetch_s": self.context.shared_samples.fetch_s
                if self.context.shared_samples is not None
                else 0.0,
                "max_copies": copies_that_fit(self.torch, self.context.device, self.ranks.local_world),
                "checked_steps": self.checked_steps,
                "host_bytes": resident_bytes(),
                "device": self.context.device_type,
                "boundaries": "backward" if self.context.boundaries.by_backward else "optimizer",
                "applied": [o.to_json() for o in self.applier.outcomes if o.applied],
                "skipped": [o.to_json() for o in self.applier.outcomes if not o.applied],
            }
        )
        run_commands(self)

    def _end_block(self) -> None:
        if self.ranks.pending is not None:
            self.block = []  # the step in which the other ranks received the command
        elif self.replica is not None and self.replica.captured:
            verdict, self.replica = self.replica.judge_and_blame(), None
            self.block = []  # steps with a probe are not measured
            self.send({"replica": verdict})
        elif self.replica is None:
            self.clock.synchronize()
            ms = [*map(self.tick_ms, self.block)]
            self.block = []
            if self.active_probe.probe is not None:
                self.send({**self.active_probe.end(), "ms": ms})
            else:
                self.measured.extend(ms)
                self.measured_samples += self.block_samples
                self.send({"ms": ms, "core": current_core()})
        else:
            return  # the replica needs another step
        self.block_samples = 0
        run_commands(self)

    # -- the record

    def _program_failed(self, kind: Any, error: Any, trace: Any) -> None:
        # A launcher fails because its ranks were stopped: the record of the measured rank stays.
        if os.getpid() == self.owner_pid and (
            self.claimed or (self.claimed is None and not self.folder.claim.exists())
        ):
            text = "".join(traceback.format_exception(kind, error, trace))
            recorded = self.active_probe.partial_result()
            self._write_last("failed", text[-8000:])
            if recorded is not None:
                ms = [*map(self.tick_ms, self.block)]
                why = traceback.format_exception_only(kind, error)[-1].strip()[:400]
                self.send({**recorded, "ms": ms, "failed": why})
        self._excepthook(kind, error, trace)

    def _at_exit(self) -> None:
        if os.getpid() == self.owner_pid and self.claimed:
            self._write_last("ended", "the program finished by itself")

    def _after_fork(self) -> None:
        if self.claimed or self.context.steps or self.context.backwards:
            self.written = True  # a forked child has nothing to record
        elif self.channel is not None:
            self.owner_pid = os.getpid()
        die_with_parent()

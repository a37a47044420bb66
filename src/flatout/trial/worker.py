"""The part of a trial inside the program: observes steps, keeps time, runs commands between two ticks.

Commands (one JSON object a line), each answered with one object:

    {"do": "go", "ticks": n}            run n ticks ("seconds" ends them early), report them: {"ms": [...]}
    {"do": "switch", "choices": [...]}  make exactly these live levers active
    {"do": "options"}                   return what every lever says about this program
    {"do": "replica", "choices": [...]} run the guard's step replica with these live levers
    {"do": "listen", "probe": name, ...}  run some ticks with a probe (trial/probes.py), in all ranks if
                                        "everywhere", and return its results
    {"do": "watch"}                     return the monitor's results since the last call (trial/monitor.py)
    {"do": "record"}                    return the record so far
    {"do": "fetch"}                     fetch some batches repeatedly; return slow lines of the data set
    {"do": "finish"}                    write the record and stop the program; "draws" first fetches some
                                        samples repeatedly

Only one process of the program is measured: the first rank of a machine, or, without a launcher, the first
process that finishes a step. The others use the same levers, and switch and probe after the same step
(trial/rank_sync.py).
"""

from __future__ import annotations

import atexit
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

from flatout.capture.bootstrap import say
from flatout.capture.file_sandbox import FileSandbox
from flatout.capture.ledger import Ledger
from flatout.capture.listener import Listener
from flatout.capture.rank_environment import die_with_parent
from flatout.capture.training_context import TrainingContext
from flatout.engine.applier import EARLY, LATE, Applier, Outcome
from flatout.engine.perturb import perturb
from flatout.engine.replica import StepReplica
from flatout.engine.sample_draws import SampleDrawProbe
from flatout.measure.clock import HostClock, clock_for, seconds
from flatout.measure.load import copies_that_fit, peak_bytes
from flatout.measure.phases import PhaseRecorder
from flatout.measure.statistics import block_ms, median
from flatout.measure.steady import is_steady
from flatout.plan.enums import Moment
from flatout.plan.folder import TrialFolder, write_json
from flatout.plan.lever import Options
from flatout.plan.records import TrialRecord
from flatout.trial.channel import Channel, Hangup
from flatout.trial.fetching import fetches
from flatout.trial.monitor import ProgramMonitor
from flatout.trial.probes import ActiveProbe, ProbeContext
from flatout.trial.rank_sync import RankSync, choices_of
from flatout.trial.recorder import TrainingRecorder
from flatout.trial.spec import TrialSpec, levers

TICKS_OF_A_COMPILER = 4  # shapes, train and eval, graph recording: each may cost one
CLOSURE_PASSES = 4  # after this many backward passes and CLOSURE_S in one optimizer step, a pass is a tick
CLOSURE_S = 1.0


class StopTrial(SystemExit):
    """Ends the program silently with exit code 0; ``except Exception`` does not catch it."""

    def __init__(self) -> None:
        super().__init__(0)


def attach(job: dict[str, Any]) -> None:
    """The entry that the bootstrap calls right after ``import torch``."""
    import torch

    Worker(TrialSpec.from_json(job), torch).attach()


class Worker(Listener):
    wants_phases = True

    def __init__(self, spec: TrialSpec, torch: Any) -> None:
        self.spec = spec
        self.torch = torch
        self.folder = TrialFolder(Path(spec.folder))
        self.ledger = Ledger()
        self.context = TrainingContext(torch, self, self.ledger)
        self.applier = Applier(levers(spec.table), spec.facts, self.context)
        self.sandbox = FileSandbox(str(self.folder.saved), self.ledger)
        if self.folder.handed_on.is_dir():
            from flatout.pipeline.shared_samples import SharedSamples

            self.context.handed_on = SharedSamples(
                self.folder.handed_on, self.sandbox.overlay.looking, seconds
            )
        self.notes = TrainingRecorder(torch, self.context)
        self.draws = SampleDrawProbe(torch)
        self.open_losses: tuple[Any, ...] = ()
        self.drawn: list[list[list[float]]] = []
        self.replica: StepReplica | None = None
        self.peak_bytes: int | None = None  # measured before a replica
        self.watch: ProgramMonitor | None = None
        self.listening = ActiveProbe(
            ProbeContext(torch, self.context, self.sandbox.overlay.looking, self.notes.kept)
        )
        self.ranks = RankSync(self.folder, self.listening, self.sandbox.overlay.looking)
        self.channel: Channel | None = None
        self.owner = os.getpid()
        self.claimed: bool | None = None  # None until the first step
        self.unit = "step"
        self.clock: Any = HostClock()
        self.phases = PhaseRecorder(self.clock)
        self.started_s = seconds()
        self.first_backward_s: float | None = None
        self.warm = False
        self.fewest_ticks = 1
        self.warmup_steps = 0
        self.warmup_ms = 0.0
        self.ticks_ms: list[float] = []
        self.waits_ms: list[float] = []  # for data, during the warm-up
        self.tick_start: Any = None
        self.block: list[tuple[Any, Any]] = []
        self.block_samples = 0
        self.block_left = 0
        self.block_until_s = 0.0
        self.measured: list[float] = []
        self.measured_samples = 0
        self.written = False
        self.stopping = False
        self.late_done = False

    # -- the program's events ---------------------------------------------------------------------------------------

    def attach(self) -> None:
        self.applier.start(self.spec.plan, EARLY)
        self.context.install()
        if self.spec.watch:
            self.watch = ProgramMonitor(self.torch, self.context, self.ledger)
        if self.spec.reseed and self.spec.seed:
            self._shift_seeds(self.spec.seed)
        if self.spec.sandbox:
            self.sandbox.install(self.torch)
        die_with_parent()
        try:
            self.channel = Channel.connect(self.spec.address)
            self.channel.send({"attached": os.getpid(), "rank": os.environ.get("RANK", "0")})
        except (OSError, Hangup):
            self.channel = None
        atexit.register(self._at_exit)
        self._excepthook = self.ledger.set(sys, "excepthook", self._program_failed)
        os.register_at_fork(after_in_child=self._forked)

    def _shift_seeds(self, offset: int) -> None:
        """Shift the program's own seeds; otherwise every seed of flatout would give the same curve."""
        owners = [(self.torch, "manual_seed"), (random, "seed")]
        if "numpy" in sys.modules:
            owners.append((sys.modules["numpy"].random, "seed"))
        for owner, name in owners:
            really = getattr(owner, name)
            self.ledger.set(
                owner,
                name,
                lambda seed=None, *args, really=really: really(
                    seed + offset if isinstance(seed, int) else seed, *args
                ),
            )

    def _pass_on(self, event: str, *what: Any) -> None:
        """Pass an event on to the monitor and the open probe."""
        for other in (self.watch, self.listening.probe):
            if other is not None:
                getattr(other, event)(*what)

    def iterator_begin(self, loader: Any) -> None:
        self._pass_on("iterator_begin", loader)

    def iterator_end(self, loader: Any, iterator: Any) -> None:
        self._pass_on("iterator_end", loader, iterator)

    def data_begin(self, loader: Any) -> None:
        self._pass_on("data_begin", loader)
        self.phases.begin("data")

    def data_end(self, loader: Any, batch: Any) -> None:
        self.phases.end("data")
        self._pass_on("data_end", loader, batch)
        self.draws.observe(loader)
        self.notes.batch(batch, describe=not self.warm)

    def forward_begin(self, root: Any, args: tuple, kwargs: dict) -> None:
        self.phases.begin("forward")
        self._pass_on("forward_begin", root, args, kwargs)
        if not self.warm:
            self.notes.model_input(args, kwargs)
        if self.replica is not None:
            self.replica.forward_begin(root, args, kwargs)

    def forward_end(self, root: Any, output: Any) -> None:
        self.phases.end("forward")
        self._pass_on("forward_end", root, output)
        if self.replica is not None:
            self.replica.forward_end(root, output)

    def backward_begin(self, losses: tuple) -> None:
        if self.context.divided is None:
            self.notes.loss(losses)
        else:  # the loss of the whole batch is known after the exchange
            self.open_losses = losses
        self._pass_on("backward_begin", losses)
        self.phases.begin("backward")

    def backward_end(self) -> None:
        self.phases.end("backward")
        if self.open_losses:
            self.notes.loss(self.open_losses)
            self.open_losses = ()
        self._pass_on("backward_end")
        if self.first_backward_s is None:
            self.first_backward_s = seconds()
            self.tick_start = self.clock.mark()
            self._answer({"training": os.getpid()})
        elif self.unit == "backward":
            self._tick()
        elif (
            self.context.steps == 0
            and self.context.closure_steps
            and self.context.backwards >= CLOSURE_PASSES
            and seconds() - self.first_backward_s > CLOSURE_S
        ):
            self._claim()
            self.unit = "backward"
            self._read_the_device_clock()
            self.tick_start = self.clock.mark()

    def exchange_begin(self) -> None:
        self._pass_on("exchange_begin")
        self.phases.begin("exchange")

    def exchange_end(self, traffic: Any) -> None:
        self.phases.end("exchange")
        self._pass_on("exchange_end", traffic)

    def optimizer_begin(self, optimizer: Any) -> None:
        if self.replica is not None:
            self.replica.optimizer_begin(optimizer)
        self._pass_on("optimizer_begin", optimizer)
        self.phases.begin("optimizer")

    def optimizer_end(self, optimizer: Any) -> None:
        self.phases.end("optimizer")
        self._pass_on("optimizer_end", optimizer)

    def step_end(self) -> None:
        if self.claimed is None:
            self._claim()
        if not self.late_done:
            self._first_step_done()
        if not self.claimed:
            self.ranks.follow(self.context.steps, self.applier.switch)
            return
        self.notes.step(self.context.steps)
        if self.unit == "step":
            self._tick()
        elif self.stopping:
            raise StopTrial

    def broke(self, error: Exception) -> None:
        self._last_words("broken", "".join(traceback.format_exception(error))[-8000:])
        if self.channel is not None:
            self.channel.close()  # if the program swallows the stop, the parent ends it
        raise StopTrial

    def _first_step_done(self) -> None:
        """Apply the levers that need the training context, which is known now."""
        self.late_done = True
        if self.spec.perturbation:
            perturb(self.context, self.spec.perturbation, self.ledger)
        self.applier.start(self.spec.plan, LATE)
        if any(o.applied and self.applier.table[o.choice.name].warms_up for o in self.applier.outcomes):
            self.fewest_ticks = TICKS_OF_A_COMPILER
        self._read_the_device_clock()
        if self.unit == "step":
            self.first_step_s = seconds()
            self.tick_start = None

    # -- ticks ------------------------------------------------------------------------------------------------------

    def _read_the_device_clock(self) -> None:
        """Switch to the device's clock once the device is known.

        Marks of the two clocks cannot be mixed, so earlier marks are dropped.
        """
        if self.context.device_type == "cuda" and self.clock.name != "cuda":
            self.clock = clock_for(self.torch, self.context.device)
            self.phases = PhaseRecorder(self.clock)
            self.ranks.on_gpu(self.clock)
            self.tick_start = None

    def _tick(self) -> None:
        if self.stopping:
            # The program swallowed StopTrial. The record is written; nothing of the program is lost.
            os._exit(0)
        if not self.claimed:
            return
        now = self.clock.mark()
        start, self.tick_start = self.tick_start, now
        if start is None:
            if self.replica is None:
                return
        elif self.warm:
            if self.listening.probe is None:
                self.phases.step(start, now)
            else:
                self.phases.leave_out()
                self.listening.tick()
            self.block.append((start, now))
            self.block_samples += self.notes.take_samples()
            self.block_left = self.block_left - 1 if seconds() < self.block_until_s else 0
        elif self.replica is None:
            self.ticks_ms.append(self.clock.elapsed_ms(start, now))
            self.waits_ms.append(self.phases.waited_ms())
            self.phases.forget()
            if is_steady(self.ticks_ms, seconds() - (self.first_backward_s or 0.0), self.fewest_ticks):
                self._becomes_warm()
        if self.warm and self.block_left <= 0:
            self._end_block()

    def _becomes_warm(self) -> None:
        self.warm = True
        self.warmup_steps = len(self.ticks_ms) + (1 if self.unit == "step" else CLOSURE_PASSES)
        self.warmup_ms = (seconds() - self.started_s) * 1000
        self.notes.losses()
        self.notes.take_samples()
        self._answer(
            {
                "ready": True,
                "unit": self.unit,
                "ticks": len(self.ticks_ms),
                "tick_ms": block_ms(self.ticks_ms[-8:]),
                "warmup_ms": self.warmup_ms,
                "data_ms": median(self.waits_ms[-8:]),
                "once_s": self.context.handed_on.filled_s if self.context.handed_on is not None else 0.0,
                "copies": copies_that_fit(self.torch, self.context.device, self.ranks.local_world),
                "device": self.context.device_type,
                "boundaries": "backward" if self.context.boundaries.by_backward else "optimizer",
                "applied": [o.to_json() for o in self.applier.outcomes if o.applied],
                "skipped": [o.to_json() for o in self.applier.outcomes if not o.applied],
            }
        )
        self._obey()

    def _end_block(self) -> None:
        if self.ranks.due is not None:
            self.block = []  # the step in which the other ranks received the command
        elif self.replica is not None and self.replica.captured:
            verdict, self.replica = self.replica.judge(), None
            self.block = []  # steps with a probe are not measured
            self._answer({"replica": verdict})
        elif self.replica is None:
            self.clock.settle()
            ms = [self.clock.elapsed_ms(a, b) for a, b in self.block]
            self.block = []
            if self.listening.probe is not None:
                self._answer({**self._observed(), "ms": ms})
            else:
                self.measured.extend(ms)
                self.measured_samples += self.block_samples
                self._answer({"ms": ms})
        else:
            return  # the replica needs another step
        self.block_samples = 0
        self._obey()

    def _obey(self) -> None:
        while True:
            due = self.ranks.take_due()
            command = due or self._next_command()
            do = command["do"]
            if due is None and self.ranks.concerns_all(command):
                self.ranks.tell(command, self.context.steps + self.ranks.lead_steps)
                self.block_left, self.block_until_s = self.ranks.lead_steps, float("inf")
                break
            if do == "go":
                self.block_left = int(command["ticks"])
                self.block_until_s = seconds() + float(command.get("seconds", "inf"))
                break
            if do == "replica":
                # The replica's copies of the model do not belong to the program
                self.peak_bytes = self._peak_bytes()
                self.replica = StepReplica(
                    self.context, self.applier, choices_of(command["choices"]), median(self.ticks_ms)
                )
                self.block_left = 0
                break
            if do == "listen":
                failed = self.listening.begin(command)
                if self.listening.probe is not None:
                    self.block_left = self.listening.probe.ticks
                    self.block_until_s = seconds() + (
                        float("inf") if command.get("everywhere") else float(command.get("seconds", "inf"))
                    )
                    break
                self._answer({"why_not": failed})
                continue
            if do == "finish":
                self._finish(bool(command.get("draws")))
            self._answer(self._do(do, command))
        self.phases._open.clear()
        self.clock.settle()
        self.tick_start = self.clock.mark()

    def _do(self, do: str, command: dict[str, Any]) -> dict[str, Any]:
        if do == "switch":
            outcomes = self.applier.switch(choices_of(command["choices"]))
            # Reports of other levers stay for the record
            switched = {choice["name"] for choice in command["choices"]}
            reports = [report for report in self.context.reports if report[0] in switched]
            self.context.reports = [report for report in self.context.reports if report[0] not in switched]
            return {
                "applied": [o.to_json() for o in outcomes if o.applied],
                "skipped": [o.to_json() for o in outcomes if not o.applied],
                "ticks": self.ranks.lead_steps if self.ranks.several else 0,
                "reports": [{"name": name, "reason": sentence} for name, sentence in reports],
            }
        if do == "options":
            answers = self.applier.options()
            return {
                "options": {
                    name: {"values": list(a.values), "effect": a.effect}
                    if isinstance(a, Options)
                    else {"skip": a.reason}
                    for name, a in answers.items()
                },
                "context": self.context.describe(),
            }
        if do == "watch":
            if self.watch is None:
                return {"error": "this trial runs without the monitor"}
            info = self.watch.summary()
            self.watch.start_window()
            return info
        if do == "record":
            return {"record": self.record("running", "").to_json()}
        if do == "fetch":
            return {"fetches": fetches(self.torch, self.context)}
        return {"error": f"unknown command {do!r}"}

    def _observed(self) -> dict[str, Any]:
        """Return the results of the probe, of all ranks if they ran it together."""
        everywhere = self.listening.probe is not None and self.listening.probe.requested.get("everywhere")
        recorded = self.listening.end()
        return self.ranks.reached_by_all(recorded) if everywhere else recorded

    def _next_command(self) -> dict[str, Any]:
        if self.channel is None:
            return {"do": "finish"}
        try:
            return self.channel.receive()
        except Hangup:
            os._exit(1)  # the parent is gone, so the trial is useless

    def _answer(self, message: dict[str, Any]) -> None:
        if self.channel is not None:
            try:
                self.channel.send(message)
            except Hangup:
                os._exit(1)

    # -- the record -------------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        try:
            if not self.ranks.measurable:
                raise FileExistsError("rank 0 is the one")
            os.close(os.open(self.folder.claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            self.claimed = True
        except OSError:
            self.claimed = False
            self.phases.forget()

    def _finish(self, draws: bool) -> None:
        if draws:
            self.context.asleep = True  # this loader is not the program's
            self.drawn = self.draws.take()
            self.context.asleep = False
        self.write_record("finished", "stopped after the requested steps")
        self._answer({"written": True, "pid": os.getpid()})
        self.stopping = True
        raise StopTrial

    def record(self, status: str, reason: str) -> TrialRecord:
        outcomes = [
            Outcome(c, True)
            for c in self.spec.plan
            if (lv := self.applier.table.get(c.name)) and lv.moment is Moment.PROCESS
        ]
        outcomes += self.applier.outcomes
        step_ms = block_ms(self.measured) if self.measured else None
        notes = self.notes
        per_step = (
            self.measured_samples / len(self.measured)
            if self.measured and self.measured_samples and self.unit == "step"
            else None
        )
        if per_step and self.context.divided is not None:
            per_step *= self.context.divided.whole_of_seen
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
            losses=notes.losses(),
            loss_steps=notes.loss_steps,
            batch_hashes=notes.batch_hashes,
            batch_statistics=notes.batch_statistics,
            draws=self.drawn,
            weights_digests=notes.weights_digests,
            peak_memory_bytes=self._peak_bytes(),
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

    def _peak_bytes(self) -> int:
        return peak_bytes(self.torch, self.context.device) if self.peak_bytes is None else self.peak_bytes

    def write_record(self, status: str, reason: str) -> None:
        if not self.written:
            self.written = True
            with self.sandbox.overlay.looking():  # the record is written outside the overlay
                write_json(self.folder.result, self.record(status, reason).to_json())
            self.sandbox.leave()

    def _program_failed(self, kind: Any, error: Any, trace: Any) -> None:
        # A launcher fails because its ranks were stopped: the record of the measured rank stays.
        if os.getpid() == self.owner and (
            self.claimed or (self.claimed is None and not self.folder.claim.exists())
        ):
            text = "".join(traceback.format_exception(kind, error, trace))
            recorded = self.listening.last_words()
            self._last_words("failed", text[-8000:])
            if recorded is not None:
                ms = [self.clock.elapsed_ms(a, b) for a, b in self.block]
                self._answer(
                    {
                        **recorded,
                        "ms": ms,
                        "failed": traceback.format_exception_only(kind, error)[-1].strip()[:400],
                    }
                )
        self._excepthook(kind, error, trace)

    def _at_exit(self) -> None:
        if os.getpid() == self.owner and self.claimed:
            self._last_words("ended", "the program finished by itself")

    def _last_words(self, status: str, reason: str) -> None:
        try:
            self.write_record(status, reason)
        except Exception as error:
            say(f"could not write the trial's record ({type(error).__name__}: {error})")

    def _forked(self) -> None:
        if self.claimed or self.context.steps or self.context.backwards:
            self.written = True  # a forked child has nothing to record
        elif self.channel is not None:
            self.owner = os.getpid()
        die_with_parent()

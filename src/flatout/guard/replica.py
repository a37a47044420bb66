"""The guard's step replica: runs training steps again plainly, under the levers, and in float64.

The replica records a few steps of a running script: a copy of the root modules and optimizers, then for each
step the inputs of each root's first forward, the random state, and the gradient that returns to each output.
From these it repeats the steps without the script's code: forward, vector-Jacobian product, optimizer. It
compares them (`flatout.guard.rounding`; docs/explanation/guard.md lists the checks).

A root module that computes its own loss is first trained on one captured step. The network of the later step
is then confident of its samples: only there do a vanishing gradient p - 1 and a saturated softmax show. For
other modules the later step starts from the present weights, and a replica late in a training shows their
effects.

The replica does not repeat the script's code between forward and backward (its loss) or between backward and
optimizer. The losses of the trials cover it. So a replica cannot detect a loss function outside the modules
whose gradient vanishes late, nor a lever that breaks after more updates than the replica makes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatout.agent.applier import Applier
from flatout.guard.batch_slices import (
    MIN_SAMPLES,
    batch_size,
    gradients_are_sums,
    half_samples,
    take_samples,
    whole_batch_factor,
)
from flatout.guard.captured_steps import CapturedCall, StepReplayer, StepResults
from flatout.guard.copies import clone, deep_copy, random_state, set_random_state
from flatout.guard.rounding import HALF_NUDGE, NUDGE, check, compare, later_checks
from flatout.measure.clock import seconds
from flatout.measure.nests import tensors_in
from flatout.schema.enums import Effect
from flatout.schema.plan import Choice

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from flatout.schema.program import TrainingContext

CAPTURED_STEPS = 4
MAX_UPDATES = 64  # of overfitting
MIN_UPDATES = 32
OVERFIT_S = 4.0  # for more than MIN_UPDATES on one captured step (`StepReplayer.overfit`)
MAX_OVERFIT_S = 8.0  # no such updates if MIN_UPDATES take longer
LARGE_MODEL_STEPS = 2  # also for slow models
SLOW_STEP_MS = 1000.0
LARGE_PARAMETERS = 100_000_000  # parameters; the gradients of all steps are held at once
MAX_CAPTURE_STEPS = 12
MEMORY_SHARE = 0.8  # of a GPU's free memory
TOO_LITTLE = "there is too little memory to run a step again next to the program"


@dataclass
class ReferencePlays:
    """The plays without levers: plain, in float64, and with nudged weights.

    ``later`` is the later step from weights nudged by half precision's last place. ``overfitted``: the network of
    the later weights is confident of its samples.
    """

    replay: StepReplayer
    plain: StepResults
    double: StepResults
    nudged: StepResults
    later: StepResults
    overfitted: bool
    half: StepResults | None = None  # of half of the samples, if only a part of them is played


class StepReplica:
    """Records a few steps of the script, then judges. ``captured`` is True once it has enough."""

    def __init__(
        self,
        context: TrainingContext,
        applier: Applier,
        choices: Sequence[Choice],
        step_ms: float = 0.0,
        judge_remaining: bool = True,
        unit: str = "step",
    ) -> None:
        """``judge_remaining``: `judge_and_blame` also judges what is left if levers fail.

        ``unit``: "backward" captures passes, for a closure of many passes a step.
        """
        self.context = context
        self.torch = context.torch
        self.applier = applier
        self.choices = list(choices)
        self._judge_remaining = judge_remaining
        self.failure = ""
        self._frozen: tuple[list[Any], list[Any]] | None = None
        self._originals: list[Any] = []
        self._optimizers: list[Any] = []
        self._stepped: set[int] = set()
        self._steps: dict[int, list[CapturedCall]] = {}
        self._unit = unit
        self._start = self._number
        self._reference: ReferencePlays | None = None
        self._step_ms = step_ms
        self._sliced_steps: list[
            list[CapturedCall]
        ] = []  # the captured steps, with ``_share`` of their samples
        self._share, self._max_samples = 1.0, sys.maxsize
        self._step_count = (
            LARGE_MODEL_STEPS
            if step_ms > SLOW_STEP_MS or sum(p.numel() for p in context.parameters) > LARGE_PARAMETERS
            else CAPTURED_STEPS
        )

    @property
    def _number(self) -> int:
        return self.context.steps if self._unit == "step" else self.context.backwards

    @property
    def captured(self) -> bool:
        """Checked at the end of each step."""
        timed_out = self._number - self._start >= MAX_CAPTURE_STEPS
        return (
            bool(self.failure)
            or timed_out
            or (len(self._steps) >= self._step_count and self._number > max(self._steps))
        )

    # -- capturing

    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self._number
        if self.context.data_parallel is not None and self.context.data_parallel.sharding is not None:
            self.failure = "each rank holds a part of the weights, so no rank can run a step alone"  # nor copy them alone
        if self.failure or (step not in self._steps and len(self._steps) >= self._step_count):
            return
        try:
            if self._frozen is None:
                self._originals, self._optimizers = self.context.roots, self.context.optimizers
                roots = [self.context.unwrap_ddp(root) for root in self._originals]
                with self._bounded_memory():
                    self._frozen = deep_copy((roots, self._optimizers), self.torch)
            root_number = next((i for i, original in enumerate(self._originals) if original is root), None)
            calls = self._steps.setdefault(step, [])
            if root_number is not None and all(call.root != root_number for call in calls):
                state = random_state(self.context)
                calls.append(CapturedCall(root_number, clone(args), clone(kwargs), state, self._autocast()))
        except self.torch.OutOfMemoryError:
            self.failure = TOO_LITTLE
        except Exception as error:
            why = f"{type(error).__name__}: {str(error)[:120]}"
            self.failure = f"a step of this program cannot be copied ({why})"

    @contextmanager
    def _bounded_memory(self) -> Iterator[None]:
        """Leave memory of a GPU to the program and to others on it: beyond its share, the replica runs out."""
        if self.context.device_type != "cuda":
            yield
            return
        cuda, device = self.torch.cuda, self.context.device
        free, total = cuda.mem_get_info(device)
        share, before = (
            cuda.memory_reserved(device) + MEMORY_SHARE * free,
            cuda.get_per_process_memory_fraction(device),
        )
        cuda.set_per_process_memory_fraction(min(before, share / total), device)
        try:
            yield
        finally:
            cuda.set_per_process_memory_fraction(before, device)
            cuda.empty_cache()

    def forward_end(self, root: Module, output: object) -> None:
        calls = self._steps.get(self._number, ())
        call = next((c for c in calls if c.running and self._originals[c.root] is root), None)
        if call is None:
            return
        call.running = False
        for i, tensor in enumerate(tensors_in(output)):
            if tensor.requires_grad:
                tensor.register_hook(
                    lambda grad, i=i, call=call: call.grads.__setitem__(i, grad.detach().clone())
                )

    def optimizer_begin(self, optimizer: Optimizer) -> None:
        """Record which optimizers step; the others make no update."""
        i = next((i for i, original in enumerate(self._optimizers) if original is optimizer), None)
        if i is not None:
            self._stepped.add(i)

    def _autocast(self) -> tuple[str, Any, bool]:
        device = self.context.device_type
        return device, self.torch.get_autocast_dtype(device), self.torch.is_autocast_enabled(device)

    # -- judging

    def judge_and_blame(self) -> dict[str, Any]:
        """The verdict on all choices, and which of them to leave out (`blame_levers`)."""
        return blame_levers(self.judge, self.choices, self._judge_remaining)

    def judge(self, choices: Sequence[Choice] | None = None) -> dict[str, Any]:
        """The answer of `flatout.guard.rounding.compare`, or ``{"failure": sentence}``.

        ``choices``: those of other levers.
        """
        if choices is not None:
            self.choices = list(choices)
        steps = [calls for _, calls in sorted(self._steps.items()) if any(call.grads for call in calls)]
        if not self.failure and len(steps) < 2:
            self.failure = "no root module of this program received a gradient in consecutive steps"
        if self.failure:
            return {"failure": self.failure}
        was_asleep, self.context.paused = self.context.paused, True
        state, parallel = random_state(self.context), self.context.data_parallel
        try:
            with self._bounded_memory(), parallel.single_rank() if parallel is not None else nullcontext():
                while True:
                    try:
                        return self._judge(steps)
                    except (
                        self.torch.OutOfMemoryError
                    ):  # the copies need memory too: this says nothing of the levers
                        half = min(self._max_samples, batch_size(self._sliced_steps)) // 2
                        self._max_samples, self._reference = half - half % MIN_SAMPLES, None
                        if not self._max_samples:
                            return {"failure": TOO_LITTLE}
        except Exception as error:
            return {"failure": f"the replica of a step failed ({type(error).__name__}: {str(error)[:200]})"}
        finally:
            set_random_state(self.context, state)
            self.context.paused = was_asleep

    def _judge(self, steps: list[list[CapturedCall]]) -> dict[str, Any]:
        if self._reference is None:
            self._sliced_steps, self._share = take_samples(steps, self._step_ms, self._max_samples)
            try:
                self._reference = self._plain_plays(self._sliced_steps)
            except Exception as error:  # a module that rejects fewer samples
                if self._share == 1.0 or isinstance(error, self.torch.OutOfMemoryError):
                    raise
                self._sliced_steps, self._share = steps, 1.0
                self._reference = self._plain_plays(self._sliced_steps)
        reference, steps = self._reference, self._sliced_steps
        gradients = [grad for grads in reference.plain.gradients for grad in grads if grad is not None]
        if not all(bool(grad.isfinite().all()) for grad in gradients):
            why = "the program's own gradients are NaN or infinite, so rounding cannot be checked"
            return {"checks": [check("gradient", 1.0, 0.0, why)]}
        try:
            levers = reference.replay.play(steps, self.applier.in_order(self.choices))
        except self.torch.OutOfMemoryError:
            raise
        except Exception as error:  # the plain play has just succeeded
            levers = StepResults(failure=f"{type(error).__name__}: {str(error)[:160]}")
        if levers.failure:
            why = f"a step of the program fails under the levers: {levers.failure}"
            return {"checks": [check("levers", 1.0, 0.0, why)]}
        half = reference.half
        batch_factor = 1.0 if half is None else self._batch_factor(reference, half, levers)
        plain, double, nudged = reference.plain, reference.double, reference.nudged
        answer = compare(
            plain, levers, double, nudged, self.torch, self._share, batch_factor, self._same_format()
        )
        later, overfitted = reference.later, reference.overfitted
        answer["checks"] += later_checks(reference.plain, levers, later, overfitted, self.torch)
        return answer

    def _same_format(self) -> bool:
        """Whether no lever claims more than rounding within the number format of the program."""
        levers = [self.applier.lever(choice) for choice in self.choices]
        return all(lever is None or lever.effect.rank <= Effect.ROUNDING.rank for lever in levers)

    def _batch_factor(self, reference: ReferencePlays, plain_half: StepResults, levers: StepResults) -> float:
        """The error of a whole batch as a multiple of that of the part."""
        steps, choices = half_samples(self._sliced_steps), self.applier.in_order(self.choices)
        half = reference.replay.play(steps, choices, gradients_only=True)
        if half.failure:
            raise RuntimeError(f"half of the samples fail under the levers: {half.failure}")
        summed = gradients_are_sums(self._sliced_steps)
        return whole_batch_factor((reference.plain, levers), (plain_half, half), self._share, summed)

    def _plain_plays(self, steps: list[list[CapturedCall]]) -> ReferencePlays:
        replay = StepReplayer(self.context, self.applier, self._frozen, sorted(self._stepped))
        updates = self._updates(replay, steps)
        if updates:
            replay.overfit(steps[0], updates)
        plain = replay.play(steps)
        try:
            double = replay.play(steps[:1], double=True)
        except self.torch.OutOfMemoryError:
            raise
        except Exception:  # the forward pass fixes a dtype: no float64 reference
            double = StepResults()
        nudged = replay.play(steps[:1], nudge=NUDGE)
        later, half = replay.play_later(None, steps, HALF_NUDGE), None
        if self._share < 1.0:
            half = replay.play(half_samples(steps), gradients_only=True)
        return ReferencePlays(replay, plain, double, nudged, later, updates > 0, half)

    def _updates(self, replay: StepReplayer, steps: list[list[CapturedCall]]) -> int:
        """How many overfitting updates the time allows.

        It is 0 if no root module computes the loss, which is then unknown.
        """
        replay.play_later(None, steps)
        if self._step_count < CAPTURED_STEPS or any(
            grad.dim() for call in steps[0] for grad in (call.outside or {}).values()
        ):
            return 0
        start = seconds()
        replay.play_later(None, steps)
        step_s = max(seconds() - start, 1e-6)
        return (
            0
            if MIN_UPDATES * step_s > MAX_OVERFIT_S
            else max(MIN_UPDATES, min(MAX_UPDATES, int(OVERFIT_S / step_s)))
        )


Judge = Callable[[list[Choice]], dict[str, Any]]


def blame_levers(judge: Judge, choices: Sequence[Choice], judge_remaining: bool = True) -> dict[str, Any]:
    """Return the verdict on all choices, and which of them to leave out.

    ``choices``: the most valuable first. Without ``judge_remaining``, the levers left are not judged.
    The answer is that of ``judge``, and also

        failing_alone   the reason for each lever that fails by itself
        failing         the same for all levers to leave out: also those that fail with more valuable ones
        remaining       the verdict on the others; None if nothing was left out or nothing is left
    """
    verdicts: dict[tuple[str, ...], dict[str, Any]] = {}

    def verdict(levers: Sequence[Choice]) -> dict[str, Any]:
        key = tuple(choice.name for choice in levers)
        if key not in verdicts:
            verdicts[key] = judge(list(levers))
        return verdicts[key]

    answer = verdict(choices)
    failing_alone: dict[str, str] = {}
    if _failure(answer) and len(choices) > 1:
        failing_alone = {choice.name: why for choice in choices if (why := _failure(verdict([choice])))}
    failing, rest = dict(failing_alone), [choice for choice in choices if choice.name not in failing_alone]
    if not judge_remaining:
        return {**answer, "failing_alone": failing_alone, "failing": failing, "remaining": None}
    if rest and _failure(verdict(rest)):
        candidates, rest = rest, []
        for choice in candidates:
            if why := _failure(verdict([*rest, choice])):
                failing[choice.name] = why
            else:
                rest.append(choice)
    rest_verdict = verdict(rest) if rest and failing else None
    return {**answer, "failing_alone": failing_alone, "failing": failing, "remaining": rest_verdict}


def _failure(answer: dict[str, Any]) -> str:
    return next((str(check["why"]) for check in answer.get("checks", ()) if not check["passed"]), "")

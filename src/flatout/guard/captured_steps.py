"""Runs captured steps again on fresh copies of modules and optimizers: plainly, under levers, or in float64.

After the updates, every run repeats its first step, from weights that ``overfit`` trained on that step alone.
The network is then as confident as late in a training. Without them, it starts from the first weights.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.applier import Applier
from flatout.agent.ledger import Ledger
from flatout.guard.copies import (
    CopiedContext,
    adam,
    mapped_tensors,
    norm,
    outside_gradients,
    set_random_state,
    step_sizes,
    tensors_of,
    to_float64,
)
from flatout.guard.float32_draws import float32_draws
from flatout.measure.nests import tensors_in
from flatout.schema.plan import Choice

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from flatout.schema.program import TrainingContext

UPDATE_STEPS = 16  # enough to show a step that is skipped, or a state that is reset, now and then
CLIP_SHARE = 0.5  # share of the total gradient norm
RESULT_COPIES = 24  # models: the results of all runs of a step
FREE_SHARE = 0.5  # of the free device memory, for these results


@dataclass
class CapturedCall:
    """One call of a root module in a step. ``grads`` are the gradients of its outputs, by position.

    ``outside``: the part of them that does not come from another output; None before the first play.
    """

    root: int
    args: Any
    kwargs: Any
    random: tuple[Any, Any]
    autocast: tuple[str, Any, bool]
    grads: dict[int, Any] = field(default_factory=dict)
    outside: dict[int, Any] | None = None
    running: bool = True


@dataclass
class StepResults:
    """The results of a play, by step.

    These are the outputs of the roots, the gradients of all parameters and the changes of all buffers.
    ``updates`` is how far the optimizers moved each parameter. ``clipped`` is the size of each gradient of
    the first step after clipping. ``later`` is that step once more, after the updates.
    """

    outputs: list[list[Any]] = field(default_factory=list)
    gradients: list[list[Any]] = field(default_factory=list)
    buffer_changes: list[list[Any]] = field(default_factory=list)
    updates: list[Any] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    later: StepResults | None = None
    failure: str = ""


class StepReplayer:
    """Plays captured steps.

    ``frozen`` holds the copies of (root modules, optimizers) from which every play starts. ``stepped`` holds
    the positions of the optimizers that step.
    """

    def __init__(
        self, context: TrainingContext, applier: Applier, frozen: Any, stepped: Sequence[int]
    ) -> None:
        self.context, self.torch, self.applier, self.frozen = context, context.torch, applier, frozen
        self.stepped = stepped
        self._plain_gradients: list[list[Any]] = []
        self._on_host = _device_full(context, self.torch)
        self._later_weights = tensors_of(frozen[0])  # weights and buffers at the start of the later step

    def play(
        self,
        steps: Sequence[list[CapturedCall]],
        choices: Sequence[Choice] = (),
        double: bool = False,
        nudge: float = 0.0,
        gradients_only: bool = False,
    ) -> StepResults:
        """Play the steps. ``nudge`` moves every weight by up to this share; ``gradients_only``: no updates.

        The first play must be the plain one: its gradients are the input of every optimizer.
        """
        roots, optimizers = copy.deepcopy(self.frozen)
        if double:
            to_float64(roots, optimizers, self.torch)
        if nudge:
            perturb_weights([p for root in roots for p in root.parameters()], nudge, self.torch)
        undo, failure = self._apply(CopiedContext(self.context, roots, optimizers), choices)
        results = StepResults(failure=failure)
        try:
            if not failure:
                with float32_draws(self.torch) if double else nullcontext():
                    self._play_steps(roots, steps, double, results)
                self._plain_gradients = self._plain_gradients or results.gradients
                if not nudge and not gradients_only:
                    self._clip(roots, results)
                    self._update(roots, optimizers, results)
                if not nudge and not double and not gradients_only:
                    results.later = self.play_later(roots, steps)
        finally:
            for undo_lever in reversed(undo):
                undo_lever()
        return results

    def overfit(self, step: list[CapturedCall], updates: int) -> None:
        """Train a copy on one step alone with Adam-like updates.

        Later steps start from there, unless it is not finite.
        """
        roots = copy.deepcopy(self.frozen[0])
        parameters = _trained(roots)
        rates = step_sizes(parameters)
        moments = [[self.torch.zeros_like(p), self.torch.zeros_like(p)] for p in parameters]
        for i in range(1, updates + 1):
            self._one_step(roots, parameters, step, False, StepResults())
            for p, rate, moment in zip(parameters, rates, moments, strict=True):
                if p.grad is not None:
                    adam(p, p.grad, rate, moment, i, self.torch)
        weights = [tensor.detach() for tensor in tensors_of(roots)]
        if all(bool(tensor.isfinite().all()) for tensor in weights):
            self._later_weights = weights

    def play_later(
        self, roots: list[Any] | None, steps: Sequence[list[CapturedCall]], nudge: float = 0.0
    ) -> StepResults:
        """Play the first step from the later weights, on a fresh copy if ``roots`` is None.

        ``nudge`` as in ``play``.
        """
        roots = copy.deepcopy(self.frozen[0]) if roots is None else roots
        self._load(roots)
        if nudge:
            perturb_weights([p for root in roots for p in root.parameters()], nudge, self.torch)
        results = StepResults()
        self._play_steps(roots, steps[:1], False, results)
        return results

    def _load(self, roots: list[Any]) -> None:
        """Load in place, so that code compiled by a lever for these modules stays valid."""
        with self.torch.no_grad():
            for weights, target in zip(tensors_of(roots), self._later_weights, strict=True):
                weights.copy_(target)

    def _play_steps(
        self, roots: list[Any], steps: Sequence[list[CapturedCall]], double: bool, results: StepResults
    ) -> None:
        parameters = _trained(roots)
        for calls in steps:
            self._one_step(roots, parameters, calls, double, results)

    def _apply(
        self, copied_context: CopiedContext, choices: Sequence[Choice]
    ) -> tuple[list[Callable[[], None]], str]:
        undo: list[Callable[[], None]] = []
        for choice in choices:
            lever = self.applier.lever(choice)
            if lever is None or lever.apply is None:
                continue
            ledger = Ledger()
            try:
                undo.append(lever.apply(copied_context, choice.value, ledger))
            except Exception as error:
                ledger.restore()
                return undo, f"{choice.name}: {type(error).__name__}: {str(error)[:160]}"
        return undo, ""

    def _one_step(
        self,
        roots: list[Any],
        parameters: list[Any],
        calls: list[CapturedCall],
        double: bool,
        results: StepResults,
    ) -> None:
        buffers = [b for root in roots for b in root.buffers() if b.is_floating_point()]
        before = [b.detach().clone() for b in buffers]
        for p in parameters:
            p.grad = None
        results.outputs.append(
            [out for call in calls for out in self._one_call(roots[call.root], call, double)]
        )
        results.gradients.append([None if p.grad is None else self._copy(p.grad) for p in parameters])
        after = [b for root in roots for b in root.buffers() if b.is_floating_point()]
        results.buffer_changes.append(
            [a.detach().double() - b.double() for a, b in zip(after, before, strict=True)]
        )

    def _one_call(self, root: Module, call: CapturedCall, double: bool) -> list[Any]:
        torch = self.torch
        set_random_state(self.context, call.random)
        convert = (lambda t: t.double() if t.is_floating_point() else t) if double else (lambda t: t)
        args, kwargs = mapped_tensors((call.args, call.kwargs), convert)
        device, dtype, enabled = call.autocast
        with torch.autocast(device, dtype=dtype, enabled=enabled and not double):
            outputs = list(tensors_in(root(*args, **kwargs)))
        if call.outside is None:
            call.outside = outside_gradients(outputs, call.grads, torch)
        pairs = [
            (outputs[i], grad)
            for i, grad in sorted(call.outside.items())
            if i < len(outputs) and outputs[i].requires_grad
        ]
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g.to(o.dtype).reshape(o.shape) for o, g in pairs])
        return [self._copy(o) for o in outputs if o.is_floating_point()]

    def _copy(self, tensor: Tensor) -> Any:
        return tensor.detach().to("cpu", copy=True) if self._on_host else tensor.detach().clone()

    def _clip(self, roots: list[Any], results: StepResults) -> None:
        """Clip the gradients of the plain play by torch's function, in case the program clips.

        It is called by the name that a lever may replace.
        """
        parameters = _trained(roots)
        _set_gradients(parameters, self._plain_gradients[0])
        total = math.sqrt(sum(norm(p.grad) ** 2 for p in parameters if p.grad is not None))
        self.torch.nn.utils.clip_grad_norm_(parameters, CLIP_SHARE * total)
        results.clipped = [norm(p.grad) for p in parameters if p.grad is not None]

    def _update(self, roots: list[Any], optimizers: list[Any], results: StepResults) -> None:
        """Step every optimizer on the gradients of the plain play, one after another and repeatedly."""
        torch = self.torch
        parameters = _trained(roots)
        stepping = [optimizers[i] for i in self.stepped]
        if not stepping or any(needs_closure(optimizer) for optimizer in stepping):
            return
        before = [p.detach().to(torch.float64, copy=True) for p in parameters]
        for i in range(UPDATE_STEPS):
            gradients = self._plain_gradients[i % len(self._plain_gradients)]
            _set_gradients(parameters, gradients)
            for p in parameters:
                if p.grad is not None and p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last):
                    p.grad = p.grad.contiguous(memory_format=torch.channels_last)
            for optimizer in stepping:
                optimizer.step()
        results.updates = [
            None if p.grad is None else self._copy(p.detach().double() - b)
            for p, b in zip(parameters, before, strict=True)
        ]


def _device_full(context: TrainingContext, torch: ModuleType) -> bool:
    if context.device_type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(context.device)
    model_bytes = sum(p.numel() * p.element_size() for p in context.parameters)
    return bool(RESULT_COPIES * model_bytes > FREE_SHARE * free)


def perturb_weights(parameters: Sequence[Any], share: float, torch: ModuleType) -> None:
    """Move every weight by up to this share, each time by the same draws.

    The program's random state does not change.
    """
    draw = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for p in (p for p in parameters if p.is_floating_point()):
            draws = 2 * torch.rand(p.shape, generator=draw, device="cpu") - 1
            p.mul_(1 + share * draws.to(p.device, p.dtype))


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the step requires a closure, as LBFGS does; others accept one."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _trained(roots: Sequence[Module]) -> list[Any]:
    return [p for root in roots for p in root.parameters() if p.requires_grad]


def _set_gradients(parameters: Sequence[Any], gradients: Sequence[Any]) -> None:
    for p, grad in zip(parameters, gradients, strict=True):
        p.grad = None if grad is None else grad.to(p.device, p.dtype, copy=True)

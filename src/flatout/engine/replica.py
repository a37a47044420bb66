"""The guard's step replica: one training step, done again plainly, under the levers, and in float64.

In a running script the next step is captured: a copy of the root modules and optimizers, the inputs of each root's
first forward, the random state, and the gradient that came back to each output. From these the step can be done again
without the script's code: forward, vector-Jacobian product, optimizer step. Compared are

    gradient   the levers' error against float64, beside the error that plain float32 makes and beside the script's own
               gradient noise from batch to batch. No fixed tolerance: a script that is noisy bears more rounding.
    update     what the optimizer makes of the *same* gradient, levers against plain
    buffers    how running statistics moved, levers against plain
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from flatout.capture.ledger import Ledger
from flatout.engine.applier import Applier
from flatout.measure.parity import relative_distance, tensors_in
from flatout.plan.plan import Choice

NOISE_FRACTION = 0.10  # rounding may be this share of the gradient noise between two batches
FLOAT32_FACTOR = 20.0  # or this many times the error that plain float32 makes itself
UPDATE_LIMIT = 1e-3
BUFFER_LIMIT = 0.05
USABLE_REFERENCE = 1e-2  # float32 further than this from float64: the random draws differed, or the maths is chaotic
NOISE_STEPS = 4


class StepReplica:
    """Listens to a few steps of the script, then judges. ``captured`` is True once it has seen enough."""

    def __init__(self, scene: Any, applier: Applier, choices: Sequence[Choice]) -> None:
        self.scene = scene
        self.torch = scene.torch
        self.applier = applier
        self.choices = list(choices)
        self.failure = ""
        self._frozen: tuple[list[Any], list[Any]] | None = None
        self._calls: list[dict[str, Any]] = []
        self._last_gradient: list[Any] | None = None
        self._noise: list[float] = []
        self._optimizer: Any = None

    @property
    def captured(self) -> bool:
        return bool(self.failure) or len(self._noise) >= NOISE_STEPS

    # -- capturing --------------------------------------------------------------------------------------------------

    def forward_begin(self, root: Any, args: tuple, kwargs: dict) -> None:
        if self.failure or self._noise or self._last_gradient is not None:
            return
        try:
            if self._frozen is None:
                self._originals = self.scene.roots
                self._frozen = copy.deepcopy((self._originals, self.scene.optimizers))
            at = next(i for i, known in enumerate(self._originals) if known is root)
            if all(call["root"] != at for call in self._calls):
                self._calls.append({"root": at, "args": self._clone(args), "kwargs": self._clone(kwargs), "rng": self._random_state(),
                                    "autocast": self._autocast(), "grads": {}, "open": True})
        except Exception as error:
            self.failure = f"a step of this program cannot be copied ({type(error).__name__}: {str(error)[:120]})"

    def forward_end(self, root: Any, output: Any) -> None:
        call = next((c for c in self._calls if c["open"] and self._originals[c["root"]] is root), None)
        if call is None:
            return
        call["open"] = False
        for at, tensor in enumerate(tensors_in(output, self.torch)):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad, at=at, call=call: call["grads"].__setitem__(at, grad.detach().clone()))

    def optimizer_begin(self, optimizer: Any) -> None:
        """Gradient noise: how far the gradient of one batch is from the next one's."""
        if self._frozen is None or self.failure:
            return
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        now = [p.grad.detach().clone() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self._last_gradient is not None and len(now) == len(self._last_gradient):
            self._noise.append(relative_distance(now, self._last_gradient, self.torch) / math.sqrt(2))
        self._last_gradient = now

    # -- judging ----------------------------------------------------------------------------------------------------

    def judge(self) -> dict[str, Any]:
        """``{"checks": [{name, value, limit, passed, why}], "noise": float}`` or ``{"failure": sentence}``."""
        if self.failure:
            return {"failure": self.failure}
        asleep, self.scene.asleep = self.scene.asleep, True
        state = self._random_state()
        try:
            return self._judge()
        except Exception as error:
            return {"failure": f"the replica of a step failed ({type(error).__name__}: {str(error)[:200]})"}
        finally:
            self._set_random_state(state)
            self.scene.asleep = asleep

    def _judge(self) -> dict[str, Any]:
        plain = self._play(())
        with_levers = self._play(self.choices)
        if with_levers.get("failure"):
            return {"checks": [_check("levers", 1.0, 0.0, f"the levers could not be applied to a copy: {with_levers['failure']}")]}
        try:
            double = self._play((), double=True)
            own_error = relative_distance(plain["grads"], double["grads"], self.torch)
        except Exception:  # a dtype written into the forward pass: no float64 reference to be had
            double, own_error = None, math.inf
        noise = sorted(self._noise)[len(self._noise) // 2]
        if double is not None and own_error <= USABLE_REFERENCE:
            reference, error_name = double, "float64"
        else:
            reference, error_name, own_error = plain, "the plain step (float64 is not comparable here)", 0.0
        error = relative_distance(with_levers["grads"], reference["grads"], self.torch)
        limit = max(NOISE_FRACTION * noise, FLOAT32_FACTOR * own_error, 1e-6)
        checks = [_check("gradient", error, limit,
                         f"the gradient is {error:.2g} (relative) from {error_name}; plain float32 is {own_error:.2g} from it, and two batches differ by {noise:.2g}")]
        if plain["updates"] is not None:
            value = relative_distance(with_levers["updates"], plain["updates"], self.torch)
            checks.append(_check("update", value, UPDATE_LIMIT, f"from the same gradient the optimizer makes an update {value:.2g} (relative) from the plain one"))
        if plain["buffers"]:
            value = relative_distance(with_levers["buffers"], plain["buffers"], self.torch)
            checks.append(_check("buffers", value, BUFFER_LIMIT, f"running statistics moved {value:.2g} (relative) from where the plain step moved them"))
        return {"checks": checks, "noise": noise}

    def _play(self, choices: Sequence[Choice], double: bool = False) -> dict[str, Any]:
        """The captured step on fresh copies: gradients of all parameters, moves of all buffers, updates of the optimizers."""
        roots, optimizers = copy.deepcopy(self._frozen)  # type: ignore[misc]
        if double:
            roots = [root.double() for root in roots]
        stage = _Stage(self.scene, roots, optimizers)
        undo = []
        for choice in choices:
            lever = self.applier.lever(choice)
            if lever is None or lever.apply is None:
                continue
            try:
                undo.append(lever.apply(stage, choice.value, Ledger()))
            except Exception as error:
                return {"failure": f"{choice.name}: {type(error).__name__}: {str(error)[:160]}"}
        try:
            buffers_before = [b.detach().clone() for root in roots for b in root.buffers() if b.is_floating_point()]
            for call in self._calls:
                self._replay(roots[call["root"]], call, double)
            parameters = [p for root in roots for p in root.parameters() if p.requires_grad]
            grads = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
            after = [b.detach().clone() for root in roots for b in root.buffers() if b.is_floating_point()]
            moves = [b.double() - a.double() for a, b in zip(buffers_before, after, strict=True)]
            updates = None if double else self._update(roots, optimizers)
        finally:
            for take_off in reversed(undo):
                take_off()
        return {"grads": grads, "buffers": moves if any(bool((m != 0).any()) for m in moves) else [], "updates": updates}

    def _replay(self, root: Any, call: dict[str, Any], double: bool) -> None:
        torch = self.torch
        self._set_random_state(call["rng"])
        convert = (lambda t: t.double() if t.is_floating_point() else t) if double else (lambda t: t)
        args, kwargs = _map(call["args"], convert, torch), _map(call["kwargs"], convert, torch)
        device, dtype, enabled = call["autocast"]
        with torch.autocast(device, dtype=dtype, enabled=enabled and not double):
            outputs = list(tensors_in(root(*args, **kwargs), torch))
        pairs = [(outputs[at], grad) for at, grad in sorted(call["grads"].items()) if at < len(outputs) and outputs[at].requires_grad]
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g.to(o.dtype).reshape(o.shape) for o, g in pairs])

    def _update(self, roots: list[Any], optimizers: list[Any]) -> list[Any] | None:
        """Each optimizer's step on one fixed gradient: the one the script's own outputs gave the plain copy."""
        torch = self.torch
        if self.scene.closure_steps:
            return None
        parameters = [p for root in roots for p in root.parameters() if p.requires_grad]
        if not hasattr(self, "_fixed_gradient"):
            self._fixed_gradient = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
        for p, grad in zip(parameters, self._fixed_gradient, strict=True):
            p.grad = None if grad is None else grad.clone().to(p.dtype)
            if p.grad is not None and p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last):
                p.grad = p.grad.contiguous(memory_format=torch.channels_last)
        before = [p.detach().clone() for p in parameters]
        for optimizer in optimizers:
            optimizer.step()
        return [p.detach().double() - b.double() for p, b in zip(parameters, before, strict=True)]

    # -- state ------------------------------------------------------------------------------------------------------

    def _clone(self, thing: Any) -> Any:
        return _map(thing, lambda t: t.detach().clone(), self.torch)

    def _autocast(self) -> tuple[str, Any, bool]:
        device = self.scene.device_type
        return device, self.torch.get_autocast_dtype(device), self.torch.is_autocast_enabled(device)

    def _random_state(self) -> tuple[Any, Any]:
        cuda = self.torch.cuda.get_rng_state_all() if self.scene.device_type == "cuda" else None
        return self.torch.get_rng_state(), cuda

    def _set_random_state(self, state: tuple[Any, Any]) -> None:
        self.torch.set_rng_state(state[0])
        if state[1] is not None:
            self.torch.cuda.set_rng_state_all(state[1])


class _Stage:
    """The Scene with copies in place of the live modules and optimizers; everything else is the Scene's."""

    def __init__(self, scene: Any, roots: list[Any], optimizers: list[Any]) -> None:
        self.scene, self.roots, self.optimizers = scene, roots, optimizers

    @property
    def parameters(self) -> list[Any]:
        return [p for root in self.roots for p in root.parameters() if p.requires_grad]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scene, name)


def _map(thing: Any, convert: Any, torch: Any) -> Any:
    if isinstance(thing, torch.Tensor):
        return convert(thing)
    if isinstance(thing, dict):
        return {key: _map(value, convert, torch) for key, value in thing.items()}
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(_map(value, convert, torch) for value in thing))
    if isinstance(thing, (list, tuple)):
        return type(thing)(_map(value, convert, torch) for value in thing)
    return thing


def _check(name: str, value: float, limit: float, why: str) -> dict[str, Any]:
    return {"name": name, "value": value if math.isfinite(value) else None, "limit": limit, "passed": value <= limit, "why": why}

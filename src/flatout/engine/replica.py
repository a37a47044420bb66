"""The guard's step replica: training steps done again plainly, under the levers, and in float64.

In a running script a few steps are listened to: a copy of the root modules and optimizers, then for each step the inputs of
each root's first forward, the random state, and the gradient that came back to each output. From these the steps can be
done again without the script's code: forward, vector-Jacobian product, optimizer. Compared are

    gradient     of all parameters together: the levers' error against float64, beside the error that plain float32 makes
                 and beside the script's own gradient noise from batch to batch. No fixed tolerance: a script that is
                 noisy bears more rounding
    parameters   the same for each parameter tensor alone: a small one may be wrong without being seen in the whole
    update       what the optimizer makes of the *same* gradients over some steps, against float64
    buffers      how running statistics move, against how they differ from batch to batch

What the script does between forward and backward (its loss) and between backward and optimizer (clipping) is not done
again; the loss curves of the trials answer for that.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from flatout.engine.applier import Applier
from flatout.engine.replay import Played, Replay, clone, random_state, set_random_state
from flatout.measure.parity import relative_distance, tensors_in
from flatout.plan.plan import Choice

NOISE_FRACTION = 0.10  # rounding may be this share of the gradient noise between two batches
TENSOR_FRACTION = 0.1
OUTPUT_FRACTION = 0.02
BUFFER_FRACTION = 0.10
FLOAT32_FACTOR = 20.0  # or this many times the error that plain float32 makes itself,
FLOAT32_MORE = 0.02  # but never so much more than it
FLOOR = 1e-5
USABLE_REFERENCE = 1e-2  # float32 further than this from float64: the random draws differed, or the maths is chaotic
STEPS = 4
STEPS_OF_A_LARGE_MODEL = 2
LARGE = 100_000_000  # parameters; the gradients of all steps are held at once
PATIENCE_STEPS = 12


class StepReplica:
    """Listens to a few steps of the script, then judges. ``captured`` is True once it has seen enough."""

    def __init__(self, scene: Any, applier: Applier, choices: Sequence[Choice]) -> None:
        self.scene = scene
        self.torch = scene.torch
        self.applier = applier
        self.choices = list(choices)
        self.failure = ""
        self._frozen: tuple[list[Any], list[Any]] | None = None
        self._originals: list[Any] = []
        self._optimizers: list[Any] = []
        self._stepped: set[int] = set()
        self._steps: dict[int, list[dict[str, Any]]] = {}
        self._start = scene.steps
        self._wanted = STEPS if sum(p.numel() for p in scene.parameters) <= LARGE else STEPS_OF_A_LARGE_MODEL

    @property
    def captured(self) -> bool:
        """Asked at the end of each step."""
        late = self.scene.steps - self._start >= PATIENCE_STEPS
        return bool(self.failure) or late or (len(self._steps) >= self._wanted and self.scene.steps > max(self._steps))

    # -- capturing --------------------------------------------------------------------------------------------------

    def forward_begin(self, root: Any, args: tuple, kwargs: dict) -> None:
        step = self.scene.steps
        if self.failure or (step not in self._steps and len(self._steps) >= self._wanted):
            return
        try:
            if self._frozen is None:
                self._originals, self._optimizers = self.scene.roots, self.scene.optimizers
                self._frozen = copy.deepcopy((self._originals, self._optimizers))
            at = next((i for i, known in enumerate(self._originals) if known is root), None)
            calls = self._steps.setdefault(step, [])
            if at is not None and all(call["root"] != at for call in calls):
                calls.append({"root": at, "args": clone(args, self.torch), "kwargs": clone(kwargs, self.torch), "random": random_state(self.scene),
                              "autocast": self._autocast(), "grads": {}, "open": True})
        except Exception as error:
            self.failure = f"a step of this program cannot be copied ({type(error).__name__}: {str(error)[:120]})"

    def forward_end(self, root: Any, output: Any) -> None:
        call = next((c for c in self._steps.get(self.scene.steps, ()) if c["open"] and self._originals[c["root"]] is root), None)
        if call is None:
            return
        call["open"] = False
        for at, tensor in enumerate(tensors_in(output, self.torch)):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad, at=at, call=call: call["grads"].__setitem__(at, grad.detach().clone()))

    def optimizer_begin(self, optimizer: Any) -> None:
        """An optimizer that never steps while we listen is not asked for an update."""
        at = next((i for i, known in enumerate(self._optimizers) if known is optimizer), None)
        if at is not None:
            self._stepped.add(at)

    def _autocast(self) -> tuple[str, Any, bool]:
        device = self.scene.device_type
        return device, self.torch.get_autocast_dtype(device), self.torch.is_autocast_enabled(device)

    # -- judging ----------------------------------------------------------------------------------------------------

    def judge(self) -> dict[str, Any]:
        """``{"checks": [{name, value, limit, passed, why}], "noise": float}`` or ``{"failure": sentence}``."""
        steps = [calls for _, calls in sorted(self._steps.items()) if any(call["grads"] for call in calls)]
        if not self.failure and len(steps) < 2:
            self.failure = "no module of this program was called as a whole and given a gradient, step after step"
        if self.failure:
            return {"failure": self.failure}
        asleep, self.scene.asleep = self.scene.asleep, True
        state = random_state(self.scene)
        try:
            return self._judge(steps)
        except Exception as error:
            return {"failure": f"the replica of a step failed ({type(error).__name__}: {str(error)[:200]})"}
        finally:
            set_random_state(self.scene, state)
            self.scene.asleep = asleep

    def _judge(self, steps: list[list[dict[str, Any]]]) -> dict[str, Any]:
        replay = Replay(self.scene, self.applier, self._frozen, sorted(self._stepped))
        plain = replay.play(steps)
        levers = replay.play(steps, self.choices)
        if levers.failure:
            return {"checks": [_check("levers", 1.0, 0.0, f"the levers could not be applied to a copy: {levers.failure}")]}
        try:
            double = replay.play(steps[:1], double=True)
        except Exception:  # a dtype written into the forward pass: no float64 reference to be had
            double = Played()
        torch = self.torch
        own = relative_distance(plain.gradients[0], double.gradients[0], torch) if double.gradients else math.inf
        if own > USABLE_REFERENCE:
            double = Played()
        checks = [_output_check(plain, levers, double, torch), *_gradient_checks(plain, levers, double, torch)]
        if plain.updates:
            checks.append(_update_check(plain, levers, double, torch))
        if plain.moves and plain.moves[0]:
            checks.append(_buffer_check(plain, levers, torch))
        return {"checks": checks, "noise": _noise(plain.gradients, torch)}


def _allowed(own: float) -> float:
    """What a lever may add where plain float32 is ``own`` away from float64: a multiple of a small error, little to a large one."""
    return max(FLOOR, min(FLOAT32_FACTOR * own, own + FLOAT32_MORE))


def _noise(gradients: list[list[Any]], torch: Any) -> float:
    """How far the gradient of one batch is from another's, at the same weights: the median over neighbours, over the square root of two."""
    found = sorted(relative_distance(a, b, torch) / math.sqrt(2) for a, b in zip(gradients, gradients[1:], strict=False))
    return found[len(found) // 2]


def _output_check(plain: Played, levers: Played, double: Played, torch: Any) -> dict[str, Any]:
    """What the modules give: the error beside how much the numbers of one output differ among themselves."""
    reference = [*(double.outputs or plain.outputs[:1]), *plain.outputs[1:]]
    own = max((_of_spread(a, b) for a, b in zip(plain.outputs[0], reference[0], strict=True)), default=0.0)
    error = max((_of_spread(a, b) for x, y in zip(levers.outputs, reference, strict=True) for a, b in zip(x, y, strict=True)), default=0.0)
    return _check("outputs", error, max(OUTPUT_FRACTION, _allowed(own)), f"the outputs are {error:.2g} (of their spread) from the reference, plain float32 {own:.2g}")


def _of_spread(x: Any, y: Any) -> float:
    x, y = x.double(), y.double()
    away = float((x - y).square().sum()) ** 0.5
    spread = float((y - y.mean() if y.numel() > 1 else y).square().sum()) ** 0.5
    if not away < math.inf:
        return math.inf
    return away / spread if spread else (0.0 if away == 0 else math.inf)


def _gradient_checks(plain: Played, levers: Played, double: Played, torch: Any) -> list[dict[str, Any]]:
    noise = _noise(plain.gradients, torch)
    reference = [*(double.gradients or plain.gradients[:1]), *plain.gradients[1:]]
    own = relative_distance(plain.gradients[0], reference[0], torch)
    name = "float64" if double.gradients else "the plain step (float64 is not comparable here)"
    error = max(relative_distance(x, y, torch) for x, y in zip(levers.gradients, reference, strict=True))
    limit = max(NOISE_FRACTION * noise, _allowed(own))
    checks = [_check("gradient", error, limit, f"the gradient is {error:.2g} (relative) from {name}; plain float32 is {own:.2g} from it, "
                                               f"and two batches differ by {noise:.2g}")]
    worst = (0.0, 0.0, math.inf, 0.0)
    for at in range(len(reference[0])):
        column = [[grads[at]] for grads in plain.gradients]
        size = _size([c for (c,) in column])
        mine = relative_distance([plain.gradients[0][at]], [reference[0][at]], torch)
        if size == 0.0 or mine > USABLE_REFERENCE:  # a gradient of nothing but rounding (a bias before a normalisation) says nothing
            continue
        apart = _size([_minus(g[at], p[at]) for g, p in zip(levers.gradients, plain.gradients, strict=True)]) / size
        spread = _size([_minus(a[0], b[0]) for a, b in zip(column, column[1:], strict=False)]) / size / math.sqrt(2)
        bound = max(TENSOR_FRACTION * spread, _allowed(mine))
        if not apart / bound <= worst[0]:
            worst = (apart / bound, apart, bound, spread)
    _, apart, bound, spread = worst
    checks.append(_check("parameters", apart, bound, f"the gradient of the parameter that suffers most is {apart:.2g} (relative) from the plain one; "
                                                     f"between batches it differs by {spread:.2g}"))
    return checks


def _update_check(plain: Played, levers: Played, double: Played, torch: Any) -> dict[str, Any]:
    worst = (-1.0, 0.0, FLOOR)
    for at, moved in enumerate(plain.updates):
        if moved is None:
            continue
        reference = double.updates[at] if double.updates else moved
        own = relative_distance([moved], [reference], torch)
        error = relative_distance([levers.updates[at]], [reference], torch)
        if not error / _allowed(own) <= worst[0]:
            worst = (error / _allowed(own), error, _allowed(own))
    return _check("update", worst[1], worst[2], f"from the same gradients the optimizer makes an update {worst[1]:.2g} (relative) from that of "
                                                f"{'float64' if double.updates else 'the plain program'}")


def _buffer_check(plain: Played, levers: Played, torch: Any) -> dict[str, Any]:
    value = max(relative_distance(x, y, torch) for x, y in zip(levers.moves, plain.moves, strict=True))
    limit = max(BUFFER_FRACTION * _noise(plain.moves, torch), FLOOR)
    return _check("buffers", value, limit, f"running statistics moved {value:.2g} (relative) from where the plain step moved them")


def _minus(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return a.double() - b.double()


def _size(tensors: Sequence[Any]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors if t is not None))


def _check(name: str, value: float, limit: float, why: str) -> dict[str, Any]:
    return {"name": name, "value": value if math.isfinite(value) else None, "limit": limit, "passed": value <= limit, "why": why}

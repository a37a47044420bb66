"""The guard's step replica: training steps done again plainly, under the levers, and in float64.

In a running script a few steps are listened to: a copy of the root modules and optimizers, then for each step the inputs of
each root's first forward, the random state, and the gradient that came back to each output. From these the steps can be
done again without the script's code: forward, vector-Jacobian product, optimizer. Compared are (`flatout.engine.rounding`)

    outputs      what the root modules give
    gradient     of all parameters together, beside the script's own gradient noise from batch to batch
    parameters   the same for each parameter tensor alone: a small one may be wrong without being seen in the whole
    update       what the optimizers make of the *same* gradients over some steps
    buffers      how running statistics move

What the script does between forward and backward (its loss) and between backward and optimizer (clipping) is not done
again; the loss curves of the trials answer for that.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from flatout.engine.applier import Applier
from flatout.engine.replay import Played, Replay, clone, random_state, set_random_state
from flatout.engine.rounding import NUDGE, check, compare, same
from flatout.measure.parity import tensors_in
from flatout.plan.plan import Choice

STEPS = 4
STEPS_OF_A_LARGE_MODEL = 2  # or of a slow one
LARGE = 100_000_000  # parameters; the gradients of all steps are held at once
PATIENCE_STEPS = 12


class StepReplica:
    """Listens to a few steps of the script, then judges. ``captured`` is True once it has seen enough."""

    def __init__(self, scene: Any, applier: Applier, choices: Sequence[Choice], slow: bool = False) -> None:
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
        self._reference: tuple[Replay, Played, Played, Played] | None = None
        self._wanted = STEPS_OF_A_LARGE_MODEL if slow or sum(p.numel() for p in scene.parameters) > LARGE else STEPS

    @property
    def captured(self) -> bool:
        """Asked at the end of each step."""
        late = self.scene.steps - self._start >= PATIENCE_STEPS
        return bool(self.failure) or late or (len(self._steps) >= self._wanted and self.scene.steps > max(self._steps))

    # -- capturing --------------------------------------------------------------------------------------------------

    def forward_begin(self, root: Any, args: tuple, kwargs: dict) -> None:
        step = self.scene.steps
        if self.scene.divided is not None and self.scene.divided.sharding is not None:
            self.failure = "each rank has a part of the weights, and none can do a step alone"  # nor copy them: all would have to take part
        if self.failure or (step not in self._steps and len(self._steps) >= self._wanted):
            return
        try:
            if self._frozen is None:
                self._originals, self._optimizers = self.scene.roots, self.scene.optimizers
                self._frozen = copy.deepcopy(([self.scene.without_ranks(root) for root in self._originals], self._optimizers))
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

    def judge(self, choices: Sequence[Choice] | None = None, bitwise: bool = False) -> dict[str, Any]:
        """The answer of `flatout.engine.rounding.compare`, or ``{"failure": sentence}``. ``choices``: of other levers; ``bitwise``: no bit may differ."""
        if choices is not None:
            self.choices = list(choices)
        steps = [calls for _, calls in sorted(self._steps.items()) if any(call["grads"] for call in calls)]
        if not self.failure and len(steps) < 2:
            self.failure = "no module of this program was called as a whole and given a gradient, step after step"
        if self.failure:
            return {"failure": self.failure}
        asleep, self.scene.asleep = self.scene.asleep, True
        state = random_state(self.scene)
        try:
            with self.scene.divided.alone() if self.scene.divided is not None else nullcontext():
                return self._judge(steps, bitwise)
        except Exception as error:
            return {"failure": f"the replica of a step failed ({type(error).__name__}: {str(error)[:200]})"}
        finally:
            set_random_state(self.scene, state)
            self.scene.asleep = asleep

    def _judge(self, steps: list[list[dict[str, Any]]], bitwise: bool) -> dict[str, Any]:
        replay, plain, double, nudged = self._plain_plays(steps)
        try:
            levers = replay.play(steps, self.choices)
        except Exception as error:  # the plain play has just gone through
            levers = Played(failure=f"{type(error).__name__}: {str(error)[:160]}")
        if levers.failure:
            return {"checks": [check("levers", 1.0, 0.0, f"a step of the program does not go through under the levers: {levers.failure}")]}
        return {"checks": [same(plain, levers, self.torch)]} if bitwise else compare(plain, levers, double, nudged, self.torch)

    def _plain_plays(self, steps: list[list[dict[str, Any]]]) -> tuple[Replay, Played, Played, Played]:
        """Plainly, in float64, and with nudged weights: the same for all levers that are judged."""
        if self._reference is None:
            replay = Replay(self.scene, self.applier, self._frozen, sorted(self._stepped))
            plain = replay.play(steps)
            try:
                double = replay.play(steps[:1], double=True)
            except Exception:  # a dtype written into the forward pass: no float64 reference to be had
                double = Played()
            self._reference = replay, plain, double, replay.play(steps[:1], nudge=NUDGE)
        return self._reference

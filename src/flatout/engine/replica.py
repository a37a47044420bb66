"""The guard's step replica: training steps done again plainly, under the levers, and in float64.

In a running script a few steps are listened to: a copy of the root modules and optimizers, then for each step the inputs of
each root's first forward, the random state, and the gradient that came back to each output. From these the steps can be
done again without the script's code: forward, vector-Jacobian product, optimizer. Compared are (`flatout.engine.rounding`)

    outputs      what the root modules give
    gradient     of all parameters together, beside the script's own gradient noise from batch to batch
    parameters   the same for each parameter tensor alone: a small one may be wrong without being seen in the whole
    clipping     what clip_grad_norm_ makes of the same gradients
    update       what the optimizers make of the same gradients over some steps
    buffers      how running statistics move
    resolution   how many significant bits a loss has that a root module computes
    flushed      gradient elements that are zero where the plain ones are not
    bits         gradient elements with fewer bits than half-precision products leave
    saturated    elements of outputs and gradients that are one and the same largest or smallest value
    later ...    gradient and resolution of the first step once more, after the updates of the optimizers

A root module that computes its own loss is trained on one captured step first, so that the later step has a network that is sure
of its samples: a gradient p - 1 that vanishes and a softmax that saturates show only there. For other modules the later step
starts from the weights of the moment, and a replica that is asked late in a training sees what these weights bring about.

What the script does between forward and backward (its loss) and between backward and optimizer is not done
again; the losses of the trials answer for that. So a replica cannot see a loss function outside of the modules whose gradient
vanishes late, nor a lever that breaks after more updates than it makes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from flatout.engine.applier import Applier
from flatout.engine.batch_slices import sliced
from flatout.engine.replay import Played, Replay, clone, random_state, set_random_state
from flatout.engine.rounding import HALF_NUDGE, NUDGE, check, compare, later, same
from flatout.measure.clock import seconds
from flatout.measure.parity import tensors_in
from flatout.plan.plan import Choice

STEPS = 4
MOST_UPDATES = 64  # of sharpening
FEWEST_UPDATES = 32
SHARPENING_S = 4.0  # of updates beyond the fewest
LONGEST_SHARPENING_S = 8.0  # where the fewest take longer there are none
STEPS_OF_A_LARGE_MODEL = 2  # or of a slow one
SLOW_MS = 1000.0
LARGE = 100_000_000  # parameters; the gradients of all steps are held at once
PATIENCE_STEPS = 12


@dataclass
class Reference:
    """The plays without levers: plainly, in float64, and with nudged weights; ``later`` is the later step from weights nudged by half precision's
    last place. ``sure``: the later weights are those of a network that is sure of its samples.
    """

    replay: Replay
    plain: Played
    double: Played
    nudged: Played
    later: Played
    sure: bool


class StepReplica:
    """Listens to a few steps of the script, then judges. ``captured`` is True once it has seen enough."""

    def __init__(self, scene: Any, applier: Applier, choices: Sequence[Choice], step_ms: float = 0.0) -> None:
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
        self._reference: Reference | None = None
        self._step_ms = step_ms
        self._played: list[list[dict[str, Any]]] = []  # the captured steps, with ``_share`` of their samples
        self._share = 1.0
        self._wanted = STEPS_OF_A_LARGE_MODEL if step_ms > SLOW_MS or sum(p.numel() for p in scene.parameters) > LARGE else STEPS

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
        """The answer of `flatout.engine.rounding.compare`, or ``{"failure": sentence}``. ``choices``: of other levers.

        ``bitwise``: no bit may differ, where none does between two plain plays.
        """
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
        if self._reference is None:
            self._played, self._share = sliced(steps, self._step_ms, self.torch)
            try:
                self._reference = self._plain_plays(self._played)
            except Exception:  # a module that cannot do with fewer samples
                if self._share == 1.0:
                    raise
                self._played, self._share = steps, 1.0
                self._reference = self._plain_plays(self._played)
        reference, steps = self._reference, self._played
        try:
            levers = reference.replay.play(steps, self.choices)
        except self.torch.OutOfMemoryError:  # the copies that are compared take memory, too: nothing is known of the levers
            return {"failure": "there was no memory left to do a step again beside the program"}
        except Exception as error:  # the plain play has just gone through
            levers = Played(failure=f"{type(error).__name__}: {str(error)[:160]}")
        if levers.failure:
            return {"checks": [check("levers", 1.0, 0.0, f"a step of the program does not go through under the levers: {levers.failure}")]}
        if bitwise:
            found = same(reference.plain, levers, self.torch)
            if found["passed"] or same(reference.plain, reference.replay.play(steps), self.torch)["passed"]:
                return {"checks": [found]}
            # The plain step does not repeat its own bits (sums by atomic additions): it is left to the comparison that allows for rounding.
        found = compare(reference.plain, levers, reference.double, reference.nudged, self.torch, self._share)
        found["checks"] += later(reference.plain, levers, reference.later, reference.sure, self.torch)
        return found

    def _plain_plays(self, steps: list[list[dict[str, Any]]]) -> Reference:
        """The same for all levers that are judged."""
        replay = Replay(self.scene, self.applier, self._frozen, sorted(self._stepped))
        updates = self._updates(replay, steps)
        if updates:
            replay.sharpen(steps[0], updates)
        plain = replay.play(steps)
        try:
            double = replay.play(steps[:1], double=True)
        except Exception:  # a dtype written into the forward pass: no float64 reference is available
            double = Played()
        nudged = replay.play(steps[:1], nudge=NUDGE)
        return Reference(replay, plain, double, nudged, replay.play_later(None, steps, HALF_NUDGE), updates > 0)

    def _updates(self, replay: Replay, steps: list[list[dict[str, Any]]]) -> int:
        """How many updates of sharpening the time allows; none where the loss is not computed by a root module, and so not known."""
        replay.play_later(None, steps)
        if self._wanted < STEPS or any(grad.dim() for call in steps[0] for grad in call["outside"].values()):
            return 0
        start = seconds()
        replay.play_later(None, steps)
        step_s = max(seconds() - start, 1e-6)
        return 0 if FEWEST_UPDATES * step_s > LONGEST_SHARPENING_S else max(FEWEST_UPDATES, min(MOST_UPDATES, int(SHARPENING_S / step_s)))

"""Forward and backward passes of one module as CUDA graphs, one recording per input shape.

A call with a known shape is replayed: its inputs are copied to the recording's inputs, and its outputs from
the recording's outputs, so the script may keep them. Everything else runs eagerly: evaluation, other shapes,
calls that cannot be recorded.

    first call of a shape    runs eagerly
    second                   runs eagerly and is observed (``PassObservation``)
    third                    is recorded, forward and backward, and replayed
    later ones               are replayed

One recording holds the intermediate results of one pass. While a backward pass may still need them, another
call of the same shape uses another recording. A backward pass that was not recorded (through other outputs, a
second time, or with ``create_graph``) recomputes the forward pass from the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import Module
from torch.utils import _pytree

from flatout.kernels.graph_recording import (
    Arguments,
    NotRecordable,
    brief,
    layout_key,
    tensors_of,
    why_not_copyable,
)
from flatout.kernels.graph_replay import (
    PassObservation,
    RecordedPass,
    generator_state,
    must_run_eagerly,
    nearly_equal,
    observe_pass,
    restore_state,
)

MAX_SHAPES = 8  # recorded shapes per module
MAX_RECORDINGS = 4  # recordings of one shape: passes with a pending backward pass
MAX_UNUSED_PASSES = 8  # eager passes of a shape before its differentiated outputs must be known
MAX_ATTRIBUTE_CHANGES = 3  # attribute changes of a module after which it is still recorded again
CHECKED_REPLAYS = {2, 32, 512, 8192}  # replays that are compared with an eager pass


class ModuleGraphs:
    """Replaces a module's forward. Calls ``report(why)`` once if nothing of this module can be recorded.

    ``operators`` False skips observing each operator, for a forward pass made by a compiler.
    """

    def __init__(
        self,
        module: Module,
        forward: Callable[..., Any],
        report: Callable[[str], None],
        operators: bool,
        untimed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.module, self.forward, self.report, self.operators = module, forward, report, operators
        self.untimed = untimed
        self.device = next(p.device for p in module.parameters())
        self.modules = list(module.modules())
        self.shapes: dict[Any, _ShapeRecord] = {}
        self.changes: list[str] = []
        self.changes_outside = 0
        self.is_running = False  # inside a forward pass of this module
        self.disabled = False

    # -- calls by the script

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self.disabled or not torch.is_grad_enabled() or must_run_eagerly():
            return self.forward(*args, **kwargs)
        inputs: list[Any] = []
        try:
            key = layout_key((args, kwargs), inputs), self._state()
        except NotRecordable:
            return self.forward(*args, **kwargs)
        shape = self.shapes.get(key)
        if shape is None:
            if len(self.shapes) >= MAX_SHAPES:
                return self.forward(*args, **kwargs)
            shape = self.shapes[key] = _ShapeRecord()
        return self._pass(shape, inputs, (args, kwargs))

    def attribute_changed(self, name: str) -> None:
        """The script or the forward pass itself has set an attribute of one of the modules."""
        self.changes.append(name)
        if not self.is_running:
            self.shapes.clear()
            self.changes_outside += 1
            if self.changes_outside > MAX_ATTRIBUTE_CHANGES:
                self._give_up(f"depends on {name}, which the script sets repeatedly")

    def _state(self) -> tuple[Any, ...]:
        autocast = torch.is_autocast_enabled("cuda")
        return (
            tuple(module.training for module in self.modules),
            tuple((p.data_ptr(), p.requires_grad) for p in self.module.parameters()),
            tuple(buffer.data_ptr() for buffer in self.module.buffers()),
            torch.get_autocast_dtype("cuda") if autocast else None,
        )

    # -- the passes of one shape

    def _pass(self, shape: _ShapeRecord, inputs: list[Any], call: Arguments) -> Any:
        shape.calls += 1
        if shape.eager or shape.calls == 1:
            return self.run_eagerly(call)
        if shape.observation is None:
            return self._observe(shape, inputs, call)
        if not shape.used_outputs:
            if shape.calls > MAX_UNUSED_PASSES:
                # An evaluation is no reason to report
                self._stays_eager(shape, "has no output that is differentiated" * self.module.training)
            return _note_used_outputs(shape, self.run_eagerly(call))
        recorded = shape.idle_recording()
        if recorded is None:
            if len(shape.recordings) >= MAX_RECORDINGS:
                return self.run_eagerly(call)
            recorded = self._record(shape, inputs, call)
            if recorded is None:
                return self.run_eagerly(call)
        shape.replays += 1
        if shape.replays in CHECKED_REPLAYS and not self._agrees(recorded, inputs, call):
            self._give_up(
                "does not repeat its recording: it depends on something outside its inputs and modules"
            )
            return self.run_eagerly(call)
        return recorded.run(inputs, call)

    def run_eagerly(self, call: Arguments) -> Any:
        self.is_running = True
        try:
            return self.forward(*call[0], **call[1])
        finally:
            self.is_running = False

    def _observe(self, shape: _ShapeRecord, inputs: list[Any], call: Arguments) -> Any:
        with observe_pass(self.module, inputs, self.device, self.changes, self.operators) as observation:
            outputs = self.run_eagerly(call)
        shape.observation = observation
        leaves, _ = _pytree.tree_flatten(outputs)
        why = observation.why or why_not_copyable(
            leaves, [*inputs, *self.module.parameters(), *self.module.buffers()]
        )
        if why:
            self._stays_eager(shape, why)
            return outputs
        return _note_used_outputs(shape, outputs)

    def _record(self, shape: _ShapeRecord, inputs: list[Any], call: Arguments) -> RecordedPass | None:
        assert shape.observation is not None
        self.is_running = True
        changes = len(self.changes)
        try:
            recorded = RecordedPass(self, shape.observation, frozenset(shape.used_outputs), inputs, call)
            if len(self.changes) > changes:
                raise NotRecordable(f"sets {self.changes[-1]}")
        except (RuntimeError, NotRecordable) as error:  # CUDA errors and out of memory are RuntimeErrors
            failed = not isinstance(error, NotRecordable)
            self._stays_eager(shape, f"cannot be recorded ({brief(error)})" if failed else str(error))
            return None
        finally:
            self.is_running = False
        shape.recordings.append(recorded)
        return recorded

    def _stays_eager(self, shape: _ShapeRecord, why: str) -> None:
        shape.eager, shape.recordings = True, []
        if why and not any(other.recordings for other in self.shapes.values()):
            self.report(why)

    def _give_up(self, why: str) -> None:
        self.discard()
        self.report(why)

    def discard(self) -> None:
        """Free the memory of all recordings; everything is eager from now on."""
        self.disabled = True
        self.shapes.clear()

    def _agrees(self, recorded: RecordedPass, inputs: list[Any], call: Arguments) -> bool:
        """Whether a replay and an eager pass agree, from the same random numbers.

        Restores buffers and the generator.
        """
        with self.untimed():
            generator, written = generator_state(self.device), recorded.observation.written
            saved = [buffer.clone() for buffer in written]
            replayed = recorded.replay_forward(inputs)
            restore_state(self.device, generator, written, saved)
            outputs = tensors_of(self.run_eagerly(call))
            restore_state(self.device, generator, written, saved)
            return len(replayed) == len(outputs) and all(map(nearly_equal, replayed, outputs))


class _ShapeRecord:
    def __init__(self) -> None:
        self.calls = self.replays = 0
        self.eager = False  # permanently
        self.observation: PassObservation | None = None
        self.used_outputs: set[int] = set()  # outputs that a backward pass used
        self.recordings: list[RecordedPass] = []

    def idle_recording(self) -> RecordedPass | None:
        return next((recorded for recorded in self.recordings if not recorded.busy), None)


def _note_used_outputs(shape: _ShapeRecord, outputs: object) -> Any:
    leaves, structure = _pytree.tree_flatten(outputs)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaves[i] = leaf.clone()  # one output may be computed from another
            leaves[i].register_hook(lambda _, i=i: shape.used_outputs.add(i))
    return _pytree.tree_unflatten(leaves, structure)

"""Forward and backward passes of one module as CUDA graphs, one recording per input shape.

A call with a known shape is replayed: its inputs are copied to the recording's inputs, and its outputs from
the recording's outputs, so the script may keep them. Everything else runs eagerly: evaluation, other shapes,
calls that cannot be recorded.

    first call of a shape    runs eagerly
    second                   runs eagerly and is observed (``graph_observation.py``)
    third                    is recorded, forward and backward, and replayed
    later ones               are replayed

One recording holds the intermediate results of one pass. While a backward pass may still need them, another
call of the same shape uses another recording. A backward pass that was not recorded (through other outputs, a
second time, or with ``create_graph``) recomputes the forward pass from the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from flatout.kernels.graph_arguments import (
    NotRecordable,
    layout,
    tensors_of,
    why_not_outputs,
)
from flatout.kernels.graph_observation import PassObservation, observe_pass
from flatout.kernels.graph_replay import RecordedPass, close, elsewhere, generator_of, put_back

if TYPE_CHECKING:
    from torch.nn import Module

MOST_SHAPES = 8  # recorded shapes per module
MOST_AT_ONCE = 4  # recordings of one shape: passes with a pending backward pass
PATIENCE = 8  # eager passes of a shape before its differentiated outputs must be known
MOST_CHANGES = 3  # attribute changes of a module after which it is still recorded again
CHECKED = {2, 32, 512, 8192}  # replays that are compared with an eager pass


class ModuleGraphs:
    """Replaces a module's forward. Calls ``tell(why)`` once if nothing of this module can be recorded.

    ``operators`` False skips observing each operator, for a forward pass made by a compiler.
    """

    def __init__(
        self, module: Module, forward: Callable[..., Any], tell: Callable[[str], None], operators: bool
    ) -> None:
        self.module, self.forward, self.tell, self.operators = module, forward, tell, operators
        self.device = next(p.device for p in module.parameters())
        self.modules = list(module.modules())
        self.shapes: dict[Any, _Shape] = {}
        self.changes: list[str] = []
        self.changed_outside = 0
        self.inside = False  # inside a forward pass of this module
        self.off = False

    # -- calls by the script ---------------------------------------------------------------------------------

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self.off or not torch.is_grad_enabled() or elsewhere():
            return self.forward(*args, **kwargs)
        inputs: list[Any] = []
        try:
            key = layout(args, inputs), layout(kwargs, inputs), self._state()
        except NotRecordable:
            return self.forward(*args, **kwargs)
        shape = self.shapes.get(key)
        if shape is None:
            if len(self.shapes) >= MOST_SHAPES:
                return self.forward(*args, **kwargs)
            shape = self.shapes[key] = _Shape()
        return self._pass(shape, inputs, args, kwargs)

    def attribute_changed(self, name: str) -> None:
        """The script or the forward pass itself has set an attribute of one of the modules."""
        self.changes.append(name)
        if not self.inside:
            self.shapes.clear()
            self.changed_outside += 1
            if self.changed_outside > MOST_CHANGES:
                self._give_up(f"depends on {name}, which the script sets repeatedly")

    def _state(self) -> tuple[Any, ...]:
        """The other inputs of a recording: modes, and addresses of parameters and buffers."""
        autocast = torch.is_autocast_enabled("cuda")
        return (
            tuple(module.training for module in self.modules),
            tuple((p.data_ptr(), p.requires_grad) for p in self.module.parameters()),
            tuple(buffer.data_ptr() for buffer in self.module.buffers()),
            torch.get_autocast_dtype("cuda") if autocast else None,
        )

    # -- the passes of one shape -----------------------------------------------------------------------------

    def _pass(self, shape: _Shape, inputs: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shape.calls += 1
        if shape.eager or shape.calls == 1:
            return self.eagerly(args, kwargs)
        if shape.seen is None:
            return self._watch(shape, inputs, args, kwargs)
        if not shape.used:
            if shape.calls > PATIENCE:
                self._stays_eager(shape, "has no output that is differentiated")
            return _observed(shape, self.eagerly(args, kwargs))
        recorded = shape.free()
        if recorded is None:
            if len(shape.recordings) >= MOST_AT_ONCE:
                return self.eagerly(args, kwargs)
            recorded = self._record(shape, inputs, args, kwargs)
            if recorded is None:
                return self.eagerly(args, kwargs)
        shape.replays += 1
        if shape.replays in CHECKED and not self._agrees(recorded, inputs, args, kwargs):
            self._give_up(
                "does not repeat its recording: it depends on something outside its inputs and modules"
            )
            return self.eagerly(args, kwargs)
        return recorded.passed(inputs, args, kwargs)

    def eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.inside = True
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.inside = False

    def _watch(self, shape: _Shape, inputs: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with observe_pass(self.module, inputs, self.device, self.changes, self.operators) as seen:
            found = self.eagerly(args, kwargs)
        shape.seen = seen
        leaves, _ = _pytree.tree_flatten(found)
        why = seen.why or why_not_outputs(
            leaves, [*inputs, *self.module.parameters(), *self.module.buffers()]
        )
        if why:
            self._stays_eager(shape, why)
            return found
        return _observed(shape, found)

    def _record(
        self, shape: _Shape, inputs: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RecordedPass | None:
        assert shape.seen is not None
        self.inside = True
        changes = len(self.changes)
        try:
            recorded = RecordedPass(self, shape.seen, frozenset(shape.used), inputs, args, kwargs)
            if len(self.changes) > changes:
                raise NotRecordable(f"sets {self.changes[-1]}")
        except (RuntimeError, NotRecordable) as error:  # CUDA errors and out of memory are RuntimeErrors
            first = str(error).strip().splitlines() or [type(error).__name__]
            self._stays_eager(
                shape,
                str(error) if isinstance(error, NotRecordable) else f"cannot be recorded ({first[0][:160]})",
            )
            return None
        finally:
            self.inside = False
        shape.recordings.append(recorded)
        return recorded

    def _stays_eager(self, shape: _Shape, why: str) -> None:
        shape.eager, shape.recordings = True, []
        if not any(other.recordings for other in self.shapes.values()):
            self.tell(why)

    def _give_up(self, why: str) -> None:
        self.forget()
        self.tell(why)

    def forget(self) -> None:
        """Free the memory of all recordings; everything is eager from now on."""
        self.off = True
        self.shapes.clear()

    def _agrees(
        self, recorded: RecordedPass, inputs: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether a replay and an eager pass agree, from the same random numbers.

        Restores buffers and the generator.
        """
        before, written = generator_of(self.device), recorded.seen.written
        kept = [buffer.clone() for buffer in written]
        replayed = recorded.replayed(inputs)
        put_back(self.device, before, written, kept)
        found = self.eagerly(args, kwargs)
        put_back(self.device, before, written, kept)
        return all(close(one, other) for one, other in zip(replayed, tensors_of(found), strict=True))


class _Shape:
    """The record of calls with one input shape, in one mode."""

    def __init__(self) -> None:
        self.calls = self.replays = 0
        self.eager = False  # permanently
        self.seen: PassObservation | None = None
        self.used: set[int] = set()  # outputs that a backward pass used
        self.recordings: list[RecordedPass] = []

    def free(self) -> RecordedPass | None:
        return next((recorded for recorded in self.recordings if not recorded.busy), None)


def _observed(shape: _Shape, found: object) -> Any:
    """The same outputs, with hooks that note which of them a backward pass uses."""
    leaves, structure = _pytree.tree_flatten(found)
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaves[at] = leaf.clone()  # one output may be computed from another
            leaves[at].register_hook(lambda _, at=at: shape.used.add(at))
    return _pytree.tree_unflatten(leaves, structure)

"""Loops that evaluate: they run a model for each batch, with gradients disabled or in evaluation mode."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from flatout.probe.contexts import without_gradients
from flatout.probe.step_loops import LoopVisit, ProgramEvent, StepLoop, loops_over

if TYPE_CHECKING:
    from flatout.probe.program import ScriptProgram

MEASURES = ("bench", "latency", "throughput", "speed", "fps", "profil", "warmup", "warm_up", "timing")


def evaluation_loops(program: ScriptProgram) -> list[StepLoop]:
    """Return the innermost loops that run a model and never train: without gradients, or in evaluation mode."""
    modes = [event for event in program.events if event.kind in ("eval", "train")]
    found = []
    for loop in _not_training(program):
        runs = [event for event in loop.events if _evaluates(program, event, modes)]
        if runs and all(event.loops[-1] is loop.loop for event in runs):
            found.append(loop)
    return found


def without_training(program: ScriptProgram) -> list[StepLoop]:
    """Return the loops in which everything runs with gradients disabled, whatever they call."""
    return [loop for loop in _not_training(program) if all(without_gradients(each) for each in loop.events)]


def _not_training(program: ScriptProgram) -> list[StepLoop]:
    inside: dict[LoopVisit, list[ProgramEvent]] = {}
    for event in program.events:
        for loop in event.loops:
            if isinstance(loop.node, (ast.For, ast.While)):
                inside.setdefault(loop, []).append(event)
    return [
        StepLoop(loop, events[0].loops[: events[0].loops.index(loop)], events)
        for loop, events in inside.items()
        if not any(event.kind in ("backward", "step", "scaler_step") for event in events)
    ]


def over_batches(loop: StepLoop) -> bool:
    """Return whether a loop goes over data, not over a count, and is not there to measure speed."""
    over = loops_over(loop.loop.node)
    counted = over is None or (isinstance(over, ast.Call) and getattr(over.func, "id", "") == "range")
    function = loop.source.function(loop.loop.node)
    names = f"{loop.source.path.rpartition('/')[2]} {function.name if function else ''}".lower()
    return not counted and not any(word in names for word in MEASURES)


def _evaluates(program: ScriptProgram, event: ProgramEvent, modes: list[ProgramEvent]) -> bool:
    """Return whether a call runs a model, surely without gradients or in evaluation mode."""
    if event.kind != "call" or not isinstance(event.node, ast.Call):
        return False
    model = event.node.func
    kinds = program.values.kinds(event.source, model)
    if "Module" not in kinds or "Loss" in kinds:
        return False
    if without_gradients(event):
        return True
    own = [
        mode
        for mode in modes_of_model(program, event, modes)
        if bool(mode.frames) == bool(event.frames)
        and not mode.loops[len(event.loops) - 1 :]
        and mode.place.line < event.place.line
    ]
    return bool(own) and own[-1].kind == "eval"


def modes_of_model(
    program: ScriptProgram, event: ProgramEvent, modes: list[ProgramEvent]
) -> list[ProgramEvent]:
    """Return the calls of ``train()`` and ``eval()`` that act on the model that a call runs, on its way."""
    assert isinstance(event.node, ast.Call)
    return [
        mode
        for mode in modes
        if mode.subject is not None
        and mode.root is event.root
        and mode.frames == event.frames[: len(mode.frames)]
        and program.values.same(mode.source, mode.subject, event.source, event.node.func)
    ]

"""Steps whose loop the program does not show: a framework or another file calls a function for each batch.

``train_step(self, batch)`` of a unit class, or a function that is given to an engine. It runs the backward pass and
the optimizer's step itself, outside any loop. It is a StepLoop whose loop is the function.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from flatout.probe.names import FUNCTIONS
from flatout.probe.step_loops import LoopVisit, ProgramEvent, StepLoop

if TYPE_CHECKING:
    from flatout.probe.program import ScriptProgram


def step_functions(program: ScriptProgram) -> Iterator[StepLoop]:
    """Yield the functions without visible callers that are one training step, as loops."""
    roots: dict[int, list[ProgramEvent]] = {}
    for event in program.events:
        if isinstance(event.root, FUNCTIONS):
            roots.setdefault(id(event.root), []).append(event)
    for events in roots.values():
        root = events[0].root
        source = next((e.source for e in events if e.frames == (root,)), None)
        steps = [e for e in events if e.kind in ("step", "scaler_step") and not e.loops]
        if (
            source is None
            or not steps
            or not any(e.kind == "backward" for e in events)
            or any(loop.events[0].root is root for loop in program.step_loops)
            or any(_made_here(program, step, events) for step in steps)
        ):
            continue
        visit = LoopVisit(source, root, 0, 1)
        found = StepLoop(visit, ())
        found.events = [replace(e, loops=(visit, *e.loops)) for e in events]
        yield found


def _made_here(program: ScriptProgram, step: ProgramEvent, events: list[ProgramEvent]) -> bool:
    """Return whether the same run of the function makes the optimizer: then it runs once, and is no step of many."""
    made = {id(event.node) for event in events}
    return step.subject is None or any(
        id(origin.node) in made for origin in program.origins(step.source, step.subject)
    )

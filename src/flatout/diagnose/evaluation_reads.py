"""Reads of the device for each batch of a validation that the training loop runs now and then."""

import ast
from collections.abc import Callable, Iterator

from flatout.probe.contexts import without_gradients
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent, StepLoop

COLLECTING_METHODS = ("append", "update", "add")
ComesFromStep = Callable[[ProgramEvent, StepLoop, ast.expr], bool]


def evaluation_reads(
    program: ScriptProgram,
    tensor_of: Callable[[ProgramEvent], ast.expr | None],
    comes_from_step: ComesFromStep,
) -> Iterator[tuple[ProgramEvent, ast.expr]]:
    """Yield the calls that fetch a value of each batch only to sum it, or to keep it for a mean."""
    training_loops = {id(loop) for step in program.step_loops for loop in (step.loop, *step.outer)}
    stepping_loops = {
        id(loop) for event in program.events if event.kind in ("backward", "step") for loop in event.loops
    }
    reported: set[int] = set()
    for event in program.events:
        if event.kind != "call" or len(event.loops) < 2 or id(event.node) in reported:
            continue
        loop = event.loops[-1]
        validates = id(loop) not in stepping_loops and any(
            id(outer) in training_loops for outer in event.loops[:-1]
        )
        if not validates or not isinstance(loop.node, (ast.For, ast.While)):
            continue
        tensor = tensor_of(event)
        if (
            tensor is not None
            and getattr(getattr(event.node, "func", None), "attr", "item")
            == "item"  # the others move outputs
            and without_gradients(event)
            and not event.arms[loop.arms :]
            and _only_collects(event.source, event.node)
            and comes_from_step(event, StepLoop(loop, event.loops[:-1]), tensor)
        ):
            reported.add(id(event.node))
            yield event, tensor


def _only_collects(source: SourceFile, call: ast.AST) -> bool:
    """Whether the statement only adds the value to a total, or to the values of the other batches."""
    match source.statement(call):
        case ast.AugAssign() | ast.Assign([ast.Subscript(), *_]):
            return True
        case ast.Expr(ast.Call(ast.Attribute(attr=name))):
            return name in COLLECTING_METHODS
    return False

"""Order of events in the source: the loops that train, and the events of one pass.

walk.py creates the events. Each event knows the loops, the arms, the ``with`` blocks and the functions around
it, through calls as well. That answers "in the same pass, after the backward pass". It does not predict
whether an arm is taken.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from flatout.probe.names import COMPREHENSIONS, FUNCTIONS
from flatout.probe.script import SourceFile
from flatout.probe.value_paths import flat, iterated
from flatout.schema.findings import SourceLocation

if TYPE_CHECKING:
    from flatout.probe.program import ScriptProgram


# Parts of the text of a test that is rarely true, and of one that counts steps.
SWITCHES = ("debug", "verbose", "profil", "trace", "sanity", "dry_run")
COUNTS = ("%", "log", "every", "interval", "period", "frequency")


def mentions(test: ast.expr, parts: tuple[str, ...]) -> bool:
    """Return whether the text of a test has one of these parts."""
    text = ast.unparse(test).lower()
    return any(part in text for part in parts)


@dataclass(eq=False)
class LoopVisit:
    """One visit of a loop. A loop that is reached through two calls has two visits."""

    source: SourceFile
    node: ast.AST
    arms: int = 0  # number of arms around it
    frames: int = 0  # number of functions around it

    def reached(self, event: ProgramEvent) -> tuple[SourceFile, ast.AST]:
        """Return the node in the function of this loop that leads to the event: the event or a call."""
        called = event.calls[self.frames : self.frames + 1]
        return (called[0] if called else None) or (event.source, event.node)


@dataclass(eq=False)
class ProgramEvent:
    """One event.

    ``kind`` is one of: backward, step, zero_grad, clip, unscale, scaler_step, scaler_update, scheduler,
    profiler_step, set_epoch, train, eval, call, assign. ``subject`` is the object it acts on: the loss of a
    backward pass, the optimizer of a step.
    """

    kind: str
    source: SourceFile
    node: ast.AST
    subject: ast.expr | None
    loops: tuple[LoopVisit, ...]
    arms: tuple[tuple[ast.AST, str, SourceFile], ...]
    blocks: tuple[tuple[SourceFile, ast.expr], ...]
    frames: tuple[ast.AST, ...]
    root: ast.AST
    scaled: bool = False
    calls: tuple[tuple[SourceFile, ast.Call] | None, ...] = ()  # the call that entered each frame, if visible

    @property
    def place(self) -> SourceLocation:
        return self.source.place(self.node)

    def within(self, *dotted: str) -> Iterator[tuple[SourceFile, ast.Call]]:
        """Yield the ``with`` blocks and decorators around it that call one of these names."""
        for source, block in self.blocks:
            call = block if isinstance(block, ast.Call) else None
            if source.dotted(call.func if call is not None else block) in dotted and call is not None:
                yield source, call


def together(one: ProgramEvent, other: ProgramEvent) -> bool:
    """Return whether both can happen in one pass: they are not in different arms of one ``if``."""
    arms = {id(node): arm for node, arm, _ in one.arms}
    return all(arms.get(id(node), arm) == arm for node, arm, _ in other.arms)


def implies(one: ProgramEvent, other: ProgramEvent) -> bool:
    """Return whether ``other`` happens in every pass in which ``one`` does.

    Then all arms around it are also around ``one``.
    """
    arms = {(id(node), arm) for node, arm, _ in one.arms}
    return all((id(node), arm) in arms for node, arm, _ in other.arms)


@dataclass(eq=False)
class StepLoop:
    """The innermost loop with a backward pass and an optimizer step, and all events of one pass."""

    loop: LoopVisit
    outer: tuple[LoopVisit, ...]  # the loops around it
    events: list[ProgramEvent] = field(default_factory=list)
    around: list[ProgramEvent] = field(
        default_factory=list
    )  # in the outer loops, without the events of this loop
    apart: list[ProgramEvent] = field(default_factory=list)  # in the same run, outside any loop

    @property
    def source(self) -> SourceFile:
        return self.loop.source

    def of(self, *kinds: str) -> list[ProgramEvent]:
        return [event for event in self.events if event.kind in kinds]

    def zeroes(self, program: ScriptProgram, event: ProgramEvent, step: ProgramEvent) -> bool | None:
        """Return whether ``event`` clears the gradients that ``step`` uses, or None if that is unknown."""
        if event.kind != "zero_grad" or event.subject is None or step.subject is None:
            return None
        known = program.values.same(event.source, event.subject, step.source, step.subject)
        if known is not False:
            return known
        optimizer = program.values.seems(event.source, event.subject, "Optimizer")
        return False if optimizer else None  # a module's zero_grad clears the parameters of any optimizer

    def one_optimizer(self, program: ScriptProgram) -> bool:
        """Return whether all its steps are of one optimizer, as far as known."""
        steps = [step for step in self.of("step", "scaler_step") if step.subject is not None]
        return all(
            program.values.same(steps[0].source, steps[0].subject, step.source, step.subject)  # type: ignore[arg-type]
            for step in steps[1:]
        )

    def always(self, event: ProgramEvent) -> bool:
        """Return whether it happens in every pass.

        Then there is no arm and no further loop between this loop and it.
        """
        return event.loops[-1:] == (self.loop,) and not self.arms(event)

    def arms(self, event: ProgramEvent) -> list[tuple[ast.AST, str, SourceFile]]:
        """Return the arms between this loop and the event."""
        return list(event.arms[self.loop.arms :])

    def steady(self, event: ProgramEvent) -> bool:
        """Return whether it happens in every pass, or in every micro-batch of a pass.

        An arm such as ``if args.amp:`` is allowed, because its test is the same in all passes.
        """
        inside = [each for each in event.loops if each not in (*self.outer, self.loop)]
        batches = any(event.loops == other.loops[: len(event.loops)] for other in self.of("backward"))
        return (
            (not inside or batches)
            and all(
                isinstance(node, ast.If) and self._fixed(source, node.test)
                for node, _, source in self.arms(event)
            )
            and not self._after_a_return(event)
        )

    def _after_a_return(self, event: ProgramEvent) -> bool:
        """Return whether a function on the way returns earlier in most steps: ``if not should_log(step): return``."""
        ways = [each for each in event.calls[self.loop.frames :] if each is not None]
        for source, node in [(event.source, event.node), *ways]:
            function = source.function(node)
            for each in function.body if function is not None else ():
                if each.lineno >= getattr(node, "lineno", 0):
                    break
                if (
                    isinstance(each, ast.If)
                    and isinstance(each.body[-1], ast.Return)
                    and mentions(each.test, COUNTS)
                ):
                    return True
        return False

    def _fixed(self, source: SourceFile, test: ast.expr) -> bool:
        """Return whether a test has the same result in all passes of this loop and of those around it.

        A switch for debugging does not count: nobody leaves it on.
        """
        if any(isinstance(node, (ast.Call, ast.Mod, ast.Subscript)) for node in ast.walk(test)):
            return False
        if mentions(test, SWITCHES):
            return False
        changed = self._changed
        for node in ast.walk(test):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in changed:
                return False
            if isinstance(node, ast.Name):
                top = self.loop.node if isinstance(self.loop.node, FUNCTIONS) else None
                home = top or source.function(self.loop.node)
                inside = source is self.source and source.function(node) is home
                fixed = inside or all(
                    binding.how != "parameter" and source.parent(binding.node) is source.tree
                    for binding in source.names.lookup(node)
                )
                if node.id != "self" and (not fixed or node.id in changed):
                    return False
        return True

    @cached_property
    def _changed(self) -> set[str]:
        """The names and attributes that are assigned in this loop, in those around it, or in what they call."""
        found = set()
        for event in [*self.events, *self.around]:
            if isinstance(event.node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                targets: list[ast.expr] = (
                    event.node.targets if isinstance(event.node, ast.Assign) else [event.node.target]
                )
                found |= {ast.unparse(each) for each in flat(targets) if isinstance(each, ast.Attribute)}
        for visit in (self.loop, *self.outer):
            for node in ast.walk(visit.node):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found.add(node.id)
        return found


def step_loops(events: list[ProgramEvent]) -> list[StepLoop]:
    """Return every visited loop that trains, in order."""
    backward = {loop for event in events if event.kind == "backward" for loop in event.loops}
    found: dict[LoopVisit, StepLoop] = {}
    for event in events:
        if event.kind in ("step", "scaler_step"):
            depth = next(
                (at for at in range(len(event.loops) - 1, -1, -1) if event.loops[at] in backward), None
            )
            if depth is not None and event.loops[depth] not in found:
                found[event.loops[depth]] = StepLoop(event.loops[depth], event.loops[:depth])
    for step_loop in found.values():
        step_loop.events = [event for event in events if step_loop.loop in event.loops]
        step_loop.around = [
            event
            for event in events
            if step_loop.outer[:1] == event.loops[:1] and event.loops and step_loop.loop not in event.loops
        ]
        step_loop.apart = [
            event for event in events if event.root is step_loop.events[0].root and not event.loops
        ]
    return list(found.values())


def loops_over(node: ast.AST) -> ast.expr | None:
    """Return the iterable of a ``for`` or a comprehension, without ``enumerate`` and similar wrappers."""
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return iterated(node.iter)
    return iterated(node.generators[0].iter) if isinstance(node, COMPREHENSIONS) else None

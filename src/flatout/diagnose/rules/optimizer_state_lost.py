"""The optimizer's state is loaded, and then the optimizer is created again.

What:
    `optimizer.load_state_dict(...)` runs before the statement that creates the optimizer for the training. Or one
    method of a trainer loads it, and the method that trains creates a new one at its start.
Why it matters:
    The loaded state is lost without an error: momentum and the statistics of Adam start at zero, and the learning
    rate starts at its first value. After every resume, the loss rises for a while.
How to fix it:
    Load the state after the optimizer is created. If the checkpoint is read earlier, keep its state until then.
Example:
    import torch

    class Trainer:
        def __init__(self, model):
  -         self.model, self.optimizer = model, None
  +         self.model, self.state = model, None

        def setup(self):
            self.optimizer = torch.optim.Adam(self.model.parameters())
  +         if self.state is not None:
  +             self.optimizer.load_state_dict(self.state)

        def resume(self, file):
            saved = torch.load(file, map_location="cpu", weights_only=True)
            self.model.load_state_dict(saved["model"])
  -         if self.optimizer is not None:
  -             self.optimizer.load_state_dict(saved["optimizer"])  # <-
  +         self.state = saved["optimizer"]

        def train(self, batches):
            self.setup()
            for x in batches:
                self.optimizer.zero_grad()
                self.model(x).square().mean().backward()
                self.optimizer.step()
Sources:
    https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent, implies
from flatout.probe.value_paths import flat
from flatout.schema.findings import Finding, Severity

STEPS = ("step", "scaler_step")


def check(program: ScriptProgram) -> Iterator[Finding]:
    by_root: dict[int, list[ProgramEvent]] = {}
    for event in program.events:
        by_root.setdefault(id(event.root), []).append(event)
    runs = list(by_root.values())
    loads = [(run, at, event) for run in runs for at, event in enumerate(run) if _loads(program, event)]
    for run, at, load in loads:
        made = _made_later(program, run, at, load) or _made_by_training(program, runs, run, load)
        if made is not None:
            name = load.source.code(_owner(load))
            yield RULE.finding(
                f"line {made.place.line} creates `{name}` again before the training, so the state that is loaded here is lost",
                load.place,
                f"# load the state after line {made.place.line}",
                others=[made.place],
            )


def _owner(event: ProgramEvent) -> ast.expr:
    assert isinstance(event.node, ast.Call)
    assert isinstance(event.node.func, ast.Attribute)
    return event.node.func.value


def _loads(program: ScriptProgram, event: ProgramEvent) -> bool:
    return (
        event.kind == "call"
        and isinstance(event.node, ast.Call)
        and isinstance(event.node.func, ast.Attribute)
        and event.node.func.attr == "load_state_dict"
        and isinstance(event.node.func.value, (ast.Name, ast.Attribute))
        and program.values.is_a(event.source, event.node.func.value, "Optimizer")
    )


def _makes(program: ScriptProgram, event: ProgramEvent, load: ProgramEvent) -> bool:
    """Return whether a statement sets the same name to a new optimizer, not to a wrapper of the old one."""
    node = event.node
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None or not _shared(event, load):
        return False
    name = ast.unparse(_owner(load))
    targets: list[ast.expr] = node.targets if isinstance(node, ast.Assign) else [node.target]
    return (
        any(ast.unparse(target) == name for target in flat(targets))
        and not any(ast.unparse(each) == name for each in ast.walk(node.value))
        and program.values.is_a(event.source, node.value, "Optimizer")
    )


def _shared(event: ProgramEvent, load: ProgramEvent) -> bool:
    """Return whether a name means the same in both places: an attribute in one class, or a name in one function."""
    if event.source is not load.source:
        return False
    if isinstance(_owner(load), ast.Attribute):
        klass = load.source.klass(load.node)
        return klass is not None and event.source.klass(event.node) is klass
    return event.source.function(event.node) is load.source.function(load.node)


def _made_later(
    program: ScriptProgram, run: list[ProgramEvent], at: int, load: ProgramEvent
) -> ProgramEvent | None:
    """Return what creates the optimizer again in the same run after the load and before a step."""
    for event in run[at + 1 :]:
        if event.kind in STEPS:
            return None
        if _makes(program, event, load) and implies(load, event):
            return None if _loaded_again(run, event) else event
    return None


def _made_by_training(
    program: ScriptProgram, runs: list[list[ProgramEvent]], run: list[ProgramEvent], load: ProgramEvent
) -> ProgramEvent | None:
    """Return what creates the optimizer again at the start of the method that trains, if that does not load it."""
    klass = load.source.klass(load.node)
    if klass is None or any(event.kind in STEPS for event in run):
        return None
    for other in runs:
        if other is run or load.source.klass(other[0].root) is not klass:
            continue
        first = next((number for number, event in enumerate(other) if event.kind in STEPS), 0)
        for event in other[:first]:
            if not event.arms and not event.loops and _makes(program, event, load):
                return None if _loaded_again(other, event) else event
    return None


def _loaded_again(run: list[ProgramEvent], made: ProgramEvent) -> bool:
    """Return whether a run loads a state after it has created the optimizer again, perhaps by another name."""
    return any(
        isinstance(event.node, ast.Call)
        and isinstance(event.node.func, ast.Attribute)
        and event.node.func.attr in ("load_state_dict", "load_state")
        and "optim" in ast.unparse(event.node).lower()
        for event in run[run.index(made) :]
    )


RULE = Rule("FL041", "optimizer_state_lost", Severity.WRONG, __doc__, check)

"""Forward passes build autograd graphs that are never used.

What:
    A line runs the model outside of `torch.no_grad()`, such as an evaluation or the choice of an action, and no backward
    pass goes through any of its outputs.
Why it matters:
    Autograd keeps every activation of the batch for a backward pass that never runs. It needs as much
    memory as a training step, and each operation is slower. If the program keeps an output or a loss,
    its graph is kept too.
How to fix it:
    Put `with torch.no_grad():` or `with torch.inference_mode():` around the loop.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(10, 8, 4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    model.eval()
    total = 0.0
  - for x in torch.randn(10, 8, 4):
  -     total += model(x).square().mean().item()  # <-
  + with torch.no_grad():
  +     for x in torch.randn(10, 8, 4):
  +         total += model(x).square().mean().item()
Sources:
    https://docs.pytorch.org/docs/stable/notes/autograd.html#locally-disabling-gradient-computation
"""

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from flatout.agent.frames import Line, place_of
from flatout.diagnose.gains import event_of
from flatout.diagnose.invariant import Findings, line_here, rule
from flatout.diagnose.running_modules import RunningModules, on_gradient
from flatout.schema.findings import Severity
from flatout.schema.profile import ProfileRecord

MIN_PASSES = 5


class Graph:
    """Lives as long as the graph of a pass. ``counts``: of its line, graphs that are gone, and gradients in them."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def use(self, gradients: Any) -> None:
        self.counts[1] += 1

    def __del__(self) -> None:
        self.counts[0] += 1


class EvalWithoutNoGrad(RunningModules):
    calls = frozenset({"grad"})

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: dict[tuple[Line | None, bool], list[int]] = {}  # line and mode -> counts
        self.differentiating: WeakSet[Any] = WeakSet()  # modules that take gradients in their forward pass

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        for module in self.running:
            self.differentiating.add(module)

    def root_ends(self, module: Any, output: Any) -> None:
        if module in self.differentiating or not self.program.torch.is_grad_enabled():
            return
        if any(parameter.requires_grad for parameter in module.parameters()):
            counts = self.lines.setdefault((line_here(), module.training), [0, 0])
            graph = Graph(counts)
            if not on_gradient(output, graph.use):
                counts[0] -= 1  # it dies here

    def findings(self) -> Findings:
        groups: dict[Any, list[Any]] = {}  # function -> lines
        for (line, training), (unused, used) in self.lines.items():
            if unused >= MIN_PASSES and not used and line is not None:
                groups.setdefault(line[0], []).append((line, training, unused))
        for (line, training, unused), *others in groups.values():
            mode = "training" if training else "evaluation"
            yield RULE.finding(
                f"{unused} passes in {mode} mode built a graph here, and no backward pass went through any of them",
                line,
                "with torch.no_grad():  # around the loop",
                others=[place for other, _, _ in others if (place := place_of(other)) is not None],
            )


def check_profile(profile: ProfileRecord) -> Findings:
    calls, _, places = event_of(profile, "eval_with_grad")
    if calls and places:
        said = f"the model was called {calls:.3g} times per {profile.unit} in evaluation mode with gradients enabled"
        yield RULE.profile_finding(said, places)


RULE = rule(
    EvalWithoutNoGrad,
    "FL201",
    __doc__,
    Severity.MEMORY,
    check_profile=check_profile,
    sort_before=Severity.TIME,
    weight=-1,
    replaced_by=("train_mode_not_restored",),
)

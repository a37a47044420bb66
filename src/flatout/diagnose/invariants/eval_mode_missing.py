"""The model is evaluated in training mode.

What:
    Passes without gradients, or over a loader that training does not use, measure the model while its dropout or
    batch normalisation acts as in training.
Why it matters:
    Dropout stays active, so the results are too poor and change from run to run. Batch normalisation normalises each
    test batch on its own, and updates its running statistics with test data.
How to fix it:
    Call `model.eval()` before the evaluation and `model.train()` after it.
Example:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train, test = torch.randn(10, 8, 4), torch.randn(10, 8, 4)
    for x in train:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    total = 0.0
  + model.eval()
    with torch.no_grad():
        for x in test:
  -         total += model(x).square().mean().item()  # <-
  +         total += model(x).square().mean().item()
  + model.train()
    print(total / 10)
Sources:
    https://docs.pytorch.org/docs/stable/notes/autograd.html#evaluation-mode-nn-module-eval
"""

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

from flatout.diagnose.invariant import Findings, argument, line_here, rule
from flatout.diagnose.running_modules import (
    LOSSES,
    WITH_MODES,
    RunningModules,
    acts_as_in_training,
    fingerprint,
    kind_of,
    on_gradient,
)

IN_A_ROW = 3  # measured passes over different data without a backward pass between them
AGAIN = 2  # evaluations of the same data
MAX_PASSES = 4096


class Pass:
    """A pass of a root module in which layers acted as in training."""

    measured = compared = False  # by a loss or a mean; with labels
    has_graph = learned = False  # learned: a backward pass went through it
    repeats = 0  # passes of the module over the same data directly before it

    def __init__(self, root: Any, kinds: set[str], data: Any, loader: Any, backwards: int) -> None:
        self.root, self.kinds, self.data, self.loader = weakref.ref(root), kinds, data, loader
        self.backwards, self.line = backwards, line_here()

    def learn(self, gradients: Any) -> None:
        self.learned = True


class EvalModeMissing(RunningModules):
    calls = WITH_MODES | LOSSES | {"__eq__", "eq", "mean", "sum"}

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.data: Any = None
        self.loader: Any = None
        self.batch_data: Any = None
        self.kinds: set[str] = set()  # of the running root module
        self.has_loss = False
        self.open: list[Pass] = []  # since the last backward pass
        self.latest: dict[int, Pass] = {}  # of each root module, by its id
        self.closed: list[Pass] = []
        self.trained: set[Any] = set()  # data of training

    def batch(self, loader: Any, batch: Any, indices: Any) -> None:
        self.loader, self.batch_data = weakref.ref(loader), fingerprint(batch)

    def root_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        self.kinds, self.has_loss = set(), False
        self.data = fingerprint(inputs) or self.batch_data

    def root_ends(self, module: Any, output: Any) -> None:
        self.latest.pop(id(module), None)
        if not self.kinds or self.data is None:
            return
        new = Pass(module, self.kinds, self.data, self.loader, self.program.backwards)
        new.has_graph = self.program.torch.is_grad_enabled()
        new.measured = new.compared = self.has_loss
        if new.has_graph and not on_gradient(output, new.learn):
            return
        previous = next((p for p in reversed(self.open) if p.root() is module), None)
        if previous is not None and previous.data == new.data:
            new.repeats = previous.repeats + 1
        self.open = [*self.open[-MAX_PASSES:], new]
        self.latest[id(module)] = new

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if name in WITH_MODES:
            if self.running and self.running[0].training and acts_as_in_training(name, args, kwargs):
                self.kinds.add(kind_of(name))
        elif measures(name, args, kwargs, result):
            self.has_loss = self.has_loss or name in LOSSES
            for p in self.latest.values():
                if p.has_graph == self.program.torch.is_grad_enabled():
                    p.measured, p.compared = True, p.compared or name not in ("mean", "sum")

    def backward_ends(self) -> None:
        self.trained |= {p.data for p in self.open if p.learned}
        self.closed = [*self.closed, *(p for p in self.open if p.measured and not p.learned)][-MAX_PASSES:]
        self.open, self.latest = [], {}

    def findings(self) -> Findings:
        optimized, loaders = self.program.optimized(), self.program.training_loaders
        passes = [p for p in (*self.closed, *self.open) if p.measured and not p.learned]
        sampled = {p.root for p in passes if p.repeats > 1}  # Monte Carlo dropout
        groups: dict[Any, list[Pass]] = {}
        for p in passes:
            root, loader = p.root(), p.loader and p.loader()
            if root is None or p.root in sampled or p.data in self.trained:
                continue
            of_other_data = not p.has_graph or (loader is not None and loader not in loaders)
            if of_other_data and any(id(q) in optimized for q in root.parameters()):
                groups.setdefault(p.line, []).append(p)
        for line, of_line in groups.items():
            in_a_row = Counter(backwards for backwards, _ in {(p.backwards, p.data) for p in of_line})
            again = Counter(data for data, _ in {(p.data, p.backwards) for p in of_line if p.compared})
            if max(in_a_row.values()) >= IN_A_ROW or max(again.values(), default=0) >= AGAIN:
                kinds = " and ".join(sorted({kind for p in of_line for kind in p.kinds}))
                yield RULE.finding(
                    f"{kinds} acted as in training in {len(of_line)} evaluation passes: the data gave no gradients, and "
                    "`eval()` was not called before",
                    line,
                    "model.eval() before the evaluation, and model.train() after it",
                )


def measures(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Whether a call gives a loss, or the mean or the count of what a pass returned."""
    values, others = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "other")
    whole = getattr(result, "ndim", 1) == 0
    if name in LOSSES or not hasattr(values, "numel") or values.numel() < 2:
        return name in LOSSES and whole
    if name in ("eq", "__eq__"):
        return bool(getattr(others, "shape", None) == values.shape and others is not values)
    return whole and (name == "mean" or values.ndim > 1 or not values.is_floating_point())


RULE = rule(EvalModeMissing, "FL015", __doc__)

"""A loss compares each prediction with each label.

What:
    Predictions of shape `(N, 1)` are subtracted from labels of shape `(N,)`, or a loss such as `mse_loss` gets both.
    Broadcasting makes an `(N, N)` matrix of them, larger than either.
Why it matters:
    The loss is the mean over all pairs. Its minimum is the mean of the labels for each input: the model learns to
    ignore its input, and no error says so. An accuracy over such a matrix counts pairs.
How to fix it:
    Give both the same shape: `model(x).squeeze(1)`, or `labels.unsqueeze(1)`.
Example:
    import torch
    import torch.nn.functional as F

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(3, 8, 4):
  -     loss = F.mse_loss(model(x), x.sum(1))  # <-
  +     loss = F.mse_loss(model(x).squeeze(1), x.sum(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/notes/broadcasting.html
"""

from collections.abc import Mapping
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, argument, line_here, rule
from flatout.diagnose.running_modules import graph_numbers
from flatout.diagnose.value_sources import SHAPES, ValueSources

LOSSES = frozenset({"huber_loss", "kl_div", "l1_loss", "mse_loss", "poisson_nll_loss", "smooth_l1_loss"})
EQUAL = frozenset({"eq", "__eq__"})
FROM_OUTPUTS = frozenset(
    {
        "clamp",
        "detach",
        "exp",
        "gather",
        "ge",
        "gt",
        "int",
        "log",
        "log_softmax",
        "long",
        "relu",
        "round",
        "sigmoid",
    }
    | {"softmax", "tanh"}
)
PRODUCTS = frozenset({"__mul__", "mul", "sub"})
KEEPING = frozenset({"amax", "max", "mean", "norm", "sum"})  # with keepdim, for all pairs
WIDENING = frozenset({"__getitem__", "reshape", "unsqueeze", "view"})  # they may ask for all pairs
MIN_CALLS = 2


class LossBroadcast(ValueSources):
    made_by = frozenset({"argmax", "linear"})
    calls = made_by | SHAPES | LOSSES | EQUAL | FROM_OUTPUTS | PRODUCTS | KEEPING

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.widened = program.tensor_map()  # results of ``WIDENING``
        self.differences: dict[int, Any] = {}  # number of a node -> line and shapes
        self.lines: dict[Line | None, list[Any]] = {}  # -> shapes and calls

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        super().called(name, args, kwargs, result)
        first, second = (
            argument(args, kwargs, 0, "input"),
            argument(args, kwargs, 1, "target", kwargs.get("other")),
        )
        if name in FROM_OUTPUTS and first in self.sources:
            self.sources[result] = self.sources[first]
        elif name in WIDENING | KEEPING and isinstance(result, self.program.torch.Tensor):
            if kwargs.get("keepdim") if name in KEEPING else result.ndim > first.ndim:
                self.widened[result] = True
        elif name in PRODUCTS and (source := self._source(first) or self._source(second)) is not None:
            self.sources[result] = source
        if name not in LOSSES | EQUAL | PRODUCTS or not are_pairs(first, second):
            return
        shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
        from_model = (first in self.sources) + (second in self.sources)
        sure = from_model == 1 and first not in self.widened and second not in self.widened
        if name in PRODUCTS:
            learns = first if first.requires_grad else second
            sure = learns in self.sources and first not in self.widened and second not in self.widened
            if not (sure and result.grad_fn is not None and first.requires_grad != second.requires_grad):
                return
            self.differences[result.grad_fn._sequence_nr()] = line_here(), shapes
        elif (name in LOSSES and result.ndim == 0 and result.requires_grad) or (name in EQUAL and sure):
            self.lines.setdefault(line_here(), [shapes, 0])[1] += 1

    def _source(self, value: Any) -> str | None:
        return self.sources.get(value) if isinstance(value, self.program.torch.Tensor) else None

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        for number in graph_numbers(losses) & self.differences.keys() if self.differences else ():
            line, shapes = self.differences[number]
            self.lines.setdefault(line, [shapes, 0])[1] += 1
        self.differences.clear()

    def findings(self) -> Findings:
        for line, (shapes, calls) in self.lines.items():
            if calls >= MIN_CALLS:
                yield RULE.finding(
                    f"in {calls} calls, the shapes {shapes} were broadcast to all pairs of them",
                    line,
                    "give both the same shape: squeeze(1) the predictions, or unsqueeze(1) the labels",
                )


def are_pairs(first: Any, second: Any) -> bool:
    """Whether the elements of two equal tensors meet in all pairs, since one has further dimensions of size 1."""
    one, other = (list(getattr(tensor, "shape", ())) for tensor in (first, second))
    if len(one) == len(other) or [n for n in one if n != 1] != [n for n in other if n != 1]:
        return False
    short, long = sorted((one, other), key=len)
    return any(a != b for a, b in zip(reversed(short), reversed(long), strict=False))


RULE = rule(LossBroadcast, "FL080", __doc__)

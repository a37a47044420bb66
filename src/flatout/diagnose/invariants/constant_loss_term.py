"""A term of the loss was computed from the model, but carries no gradient.

What:
    A value that depends on the model's output is read with `item()` or cut off with `detach()`, and then added to
    the loss.
Why it matters:
    The term is a constant for the backward pass. It changes the printed loss, and contributes nothing to training.
How to fix it:
    Add the tensor itself; call `item()` only to print it.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(3, 8, 4):
        output = model(x)
  -     penalty = output.abs().mean().item()  # <-
  +     penalty = output.abs().mean()
        loss = output.square().mean() + 0.1 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

from collections.abc import Mapping
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule

READS = frozenset({"item", "detach", "__float__"})
SUMS = frozenset(
    {"add", "sub", "rsub", "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "sum"}
)
PRODUCTS = frozenset(
    {"mul", "div", "__mul__", "__rmul__", "__truediv__", "neg", "mean", "float", "to", "tensor"}
)
MAX_NODES = 64  # of the graph, from the loss


class CutNumber(float):
    """A number read from a tensor with a gradient. Its sums and products remember the line that read it."""

    line: Line | None

    def _keep(self, value: Any) -> Any:
        return cut_number(value, self.line) if isinstance(value, float) else value

    def __reduce__(self) -> Any:
        return float, (float(self),)

    def __add__(self, other: Any) -> Any:
        return self._keep(float.__add__(self, other))

    def __radd__(self, other: Any) -> Any:
        return self._keep(float.__radd__(self, other))

    def __sub__(self, other: Any) -> Any:
        return self._keep(float.__sub__(self, other))

    def __mul__(self, other: Any) -> Any:
        return self._keep(float.__mul__(self, other))

    def __rmul__(self, other: Any) -> Any:
        return self._keep(float.__rmul__(self, other))

    def __truediv__(self, other: Any) -> Any:
        return self._keep(float.__truediv__(self, other))

    def __neg__(self) -> Any:
        return self._keep(float.__neg__(self))


def cut_number(value: float, line: Line | None) -> CutNumber:
    number = CutNumber(value)
    number.line = line
    return number


class ConstantLossTerm(Invariant):
    calls = READS | SUMS | PRODUCTS

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.cut = program.tensor_map()  # tensors without a gradient -> line
        self.sums: dict[Any, Any] = {}  # node of the graph -> line of the constant that it adds
        self.lines: dict[Any, int] = {}

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
        tensor = self.program.torch.Tensor
        if name in READS:
            read = args[0]
            if read.requires_grad and read.grad_fn is not None and read.numel() == 1:
                if isinstance(result, float):
                    return cut_number(result, line_here())
                if isinstance(result, tensor):
                    self.cut[result] = line_here()
            return None
        if not isinstance(result, tensor) or result.numel() != 1:
            return None
        lines = [line for value in args for line in [self._line(value)] if line is not None]
        if not lines:
            return None
        if not result.requires_grad:
            self.cut[result] = lines[0]
        elif name in SUMS and result.grad_fn is not None:
            self.sums[result.grad_fn] = lines[0]
        return None

    def _line(self, value: Any) -> Any:
        if isinstance(value, CutNumber):
            return value.line
        return self.cut.get(value) if isinstance(value, self.program.torch.Tensor) else None

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        nodes, seen = [loss.grad_fn for loss in losses if loss.grad_fn is not None], 0
        while nodes and seen < MAX_NODES:
            node, seen = nodes.pop(0), seen + 1
            if node in self.sums:
                self.lines[self.sums[node]] = self.lines.get(self.sums[node], 0) + 1
            if type(node).__name__.startswith(("Add", "Sub", "Mul", "Div", "Mean", "Sum", "Neg", "Rsub")):
                nodes += [following for following, _ in node.next_functions if following is not None]

    def backward_ends(self) -> None:
        self.sums.clear()

    def findings(self) -> Findings:
        for line, times in self.lines.items():
            yield RULE.finding(
                f"this value depends on the model and was added to the loss of {times} backward passes, but it carries "
                "no gradient: the term is a constant and contributes nothing",
                line,
                "add the tensor itself, without item() or detach()",
            )


RULE = rule(ConstantLossTerm, "FL062", __doc__)

"""The loss is NaN or infinite.

What:
    The loss of a backward pass is NaN or infinite. The finding names the first function on its way whose inputs were
    finite and whose result was not.
Why it matters:
    The first such loss reaches every weight in the next step. From then on, training continues at full speed
    but learns nothing.
How to fix it:
    A logarithm or root of a value that becomes negative needs softplus or clamp. Divide by at least a small positive
    number. If the learning rate is too large, reduce it. `torch.autograd.set_detect_anomaly(True)` names the operator
    of a gradient that is not finite.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(3, 8, 4):
  -     loss = torch.log(model(x)).mean()  # <-
  +     loss = torch.log(torch.nn.functional.softplus(model(x))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection
"""

from collections.abc import Mapping
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.gains import event_of
from flatout.diagnose.invariant import Findings, line_here, rule
from flatout.diagnose.running_modules import LOSSES, RunningModules, graph_numbers, has_values, leaves_of
from flatout.schema.profile import ProfileRecord

ARITHMETIC = frozenset({"__rdiv__", "__rpow__", "div", "div_", "mul", "mul_", "pow", "reciprocal", "square"})
ROOTS_AND_LOGARITHMS = frozenset(
    {"acos", "asin", "atanh", "exp", "log", "log1p", "log2", "logit", "rsqrt", "sqrt"}
)
SUMS = frozenset(
    {"cosine_similarity", "logsumexp", "mean", "norm", "normalize", "prod", "softmax", "std", "sum", "var"}
)
ON_MATRICES = frozenset(
    {"bmm", "conv1d", "conv2d", "inv", "layer_norm", "linear", "logdet", "matmul", "slogdet"}
)
MAX_KEPT = 1000


class NotFinite(RunningModules):
    calls = LOSSES | ARITHMETIC | ROOTS_AND_LOGARITHMS | SUMS | ON_MATRICES

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.broken: dict[int, Any] = {}  # number of a node -> line and function
        self.harmless: set[Line | None] = set()  # lines whose results were not finite while the loss was
        self.unscaled = program.tensor_map()
        self.bad_input: Line | None = None
        self.losses = self.infinite = 0
        self.first: Any = None  # message and line

    def is_finite(self, values: Any) -> bool:
        torch = self.program.torch
        for value in leaves_of(values):
            if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not has_values(value):
                continue
            if not bool(value.detach().sum().isfinite()) and not bool(value.detach().isfinite().all()):
                return False
        return True

    def root_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        if self.first is None and self.bad_input is None and not self.is_finite(inputs):
            self.bad_input = line_here()

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if self.first is not None or getattr(result, "grad_fn", None) is None or self.is_finite(result):
            return
        if self.is_finite((args, dict(kwargs))) and len(self.broken) < MAX_KEPT:
            self.broken[result.grad_fn._sequence_nr()] = line_here(), name

    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:
        if isinstance(scaled, self.program.torch.Tensor):
            self.unscaled[scaled] = self.is_finite(loss)

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        self.losses += 1
        if all(self.unscaled.get(loss) or self.is_finite(loss) for loss in losses):
            self.harmless |= {line for line, _ in self.broken.values()}
            self.broken.clear()
            self.bad_input = None
            return
        self.infinite += 1
        if self.first is None:
            self.first = self.cause(losses), self.losses
        self.broken.clear()

    def cause(self, losses: tuple[Any, ...]) -> tuple[str, Line | None]:
        for number in sorted(graph_numbers(losses) & self.broken.keys()):
            line, name = self.broken[number]
            if line not in self.harmless:
                return (
                    f": {name} was the first function whose inputs were finite and whose result was not",
                    line,
                )
        if self.bad_input is not None:
            return ": the input of this module was not finite", self.bad_input
        bad = [p for p in self.program.parameters if not self.is_finite(p)]
        return (
            f": weights had become NaN or infinite before ({self.program.names(bad)})" if bad else ""
        ), line_here()

    def findings(self) -> Findings:
        if self.first is not None:
            (why, line), number = self.first
            yield RULE.finding(
                f"{self.infinite} of {self.losses} losses are NaN or infinite, the first in backward pass {number}{why}",
                line,
                "keep the arguments of logarithms, roots and divisions positive, or reduce the learning rate",
            )


def check_profile(profile: ProfileRecord) -> Findings:
    calls, _, places = event_of(profile, "loss_not_finite")
    if calls > 0:
        share = f"{100 * min(1.0, calls):.0f} % of the losses are NaN or infinite"
        yield RULE.profile_finding(share, places)


RULE = rule(
    NotFinite,
    "FL050",
    __doc__,
    check_profile=check_profile,
    replaced_by=("labels_all_ignored", "row_fully_masked"),
)

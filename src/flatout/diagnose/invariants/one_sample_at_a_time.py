"""The model runs on a batch one sample at a time.

What:
    One line calls a module many times in each step, on inputs of one shape, and no call needs the result of another:
    a loop over the samples of a batch, or over time steps.
Why it matters:
    A call on one sample costs almost as much as a call on many. It launches the same kernels and runs the
    same Python code, and the device is mostly idle. A batch of 64 takes up to 64 times as long.
How to fix it:
    Call the model once on the whole batch. Pad samples of different lengths. For per-sample gradients, use
    `torch.func.vmap`. Move the time dimension into the batch: `layer(x.flatten(0, 1)).unflatten(0, (n, steps))`.

Example:
    import torch
    from torch.utils.data import DataLoader

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(torch.randn(128, 4), batch_size=8):
        optimizer.zero_grad()
  -     loss = 0
  -     for i in range(x.size(0)):
  -         loss = loss + model(x[i]).square().sum()  # <-
  +     loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/func.html
"""

from collections import Counter
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule
from flatout.schema.findings import Severity

MIN_CALLS = 8  # of a module, by one line before one backward pass
MIN_PASSES = 5


class OneSampleAtATime(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        # module, line and shapes -> calls since the last backward pass
        self.calls_of: Counter[tuple[int, Line | None, Any]] = Counter()
        self.passes: Counter[Line | None] = Counter()  # in which the line did so
        self.seen: dict[Line | None, tuple[str, int, Any]] = {}

    def forward_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        if not module.training or not self.program.torch.is_grad_enabled() or module._forward_pre_hooks:
            return
        tensors = [value for value in inputs if isinstance(value, self.program.torch.Tensor)]
        parts = all(t.grad_fn is None and t._base is not None for t in tensors)
        if not tensors or len(tensors) < len(inputs) or not parts:
            return  # what was computed or fetched may depend on the call before
        line = line_here()
        key = id(module), line, tuple((id(t._base), t.shape) for t in tensors)
        self.calls_of[key] += 1
        if self.calls_of[key] >= MIN_CALLS and next(module.parameters(), None) is not None:
            self.seen[line] = type(module).__name__, self.calls_of[key], tuple(tensors[0].shape)

    def backward_ends(self) -> None:
        self.passes.update({line for (_, line, _), calls in self.calls_of.items() if calls >= MIN_CALLS})
        self.calls_of.clear()

    def findings(self) -> Findings:
        for line, passes in self.passes.items():
            if passes >= MIN_PASSES and line in self.seen:
                name, calls, shape = self.seen[line]
                yield RULE.finding(
                    f"{name} is called {calls} times for one loss on inputs of the shape {shape}, and no call needs the "
                    "result of another: one call on all of them does the same work",
                    line,
                    "stack the inputs, and call the module once",
                )


RULE = rule(OneSampleAtATime, "FL118", __doc__, Severity.TIME)

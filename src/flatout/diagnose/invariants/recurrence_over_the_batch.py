"""A recurrent or attention layer runs over the samples of the batch instead of over time.

What:
    A batch with the samples first goes into an `LSTM`, `GRU`, `RNN` or `MultiheadAttention` without `batch_first=True`: its
    first dimension is the number of samples in each batch, and the second one is not.
Why it matters:
    The layer takes the samples for time steps. Each sample's result depends on the samples before it.
How to fix it:
    Make the layer with `batch_first=True`, or transpose the input: `x.transpose(0, 1)`.
Example:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

  - layer = torch.nn.LSTM(4, 8)
  + layer = torch.nn.LSTM(4, 8, batch_first=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for (x,) in DataLoader(TensorDataset(torch.randn(28, 6, 4)), batch_size=8):
        optimizer.zero_grad()
  -     layer(x)[0].square().mean().backward()  # <-
  +     layer(x)[0].square().mean().backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html
"""

from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule

MIN_BATCHES = 4


class RecurrenceOverTheBatch(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.samples = 0  # in the latest batch
        # module -> its line, and the shapes of its inputs; None once another dimension is the batch
        self.seen: dict[int, tuple[Line | None, list[Any]] | None] = {}

    def batch(self, loader: Any, batch: Any, indices: Any) -> None:
        self.samples = len(indices) if isinstance(indices, list) else 0

    def forward_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        layers = self.program.torch.nn.RNNBase, self.program.torch.nn.MultiheadAttention
        if not isinstance(module, layers) or module.batch_first or not self.samples:
            return
        x = inputs[0] if inputs else None
        if not isinstance(x, self.program.torch.Tensor) or x.ndim != 3:
            return
        entry = self.seen.setdefault(id(module), (line_here(), []))
        if entry is not None and (x.shape[0] != self.samples or x.shape[1] == self.samples):
            self.seen[id(module)] = None
        elif entry is not None and len(entry[1]) < MIN_BATCHES:
            entry[1].append(x.shape)

    def findings(self) -> Findings:
        for entry in self.seen.values():
            if entry is not None and len(entry[1]) >= MIN_BATCHES:
                line, shapes = entry
                samples, steps, _ = shapes[0]
                yield RULE.finding(
                    f"the first dimension of the input {tuple(shapes[0])} is the batch of {samples} samples, but without batch_first the "
                    f"layer takes it for time: it runs over the samples, not over {steps} steps",
                    line,
                    "batch_first=True, or x.transpose(0, 1)",
                )


RULE = rule(RecurrenceOverTheBatch, "FL097", __doc__)

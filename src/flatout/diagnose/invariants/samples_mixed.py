"""The output of one sample depends on some other samples of its batch.

What:
    The model returns one output for each sample of the batch. The output of the last sample has a gradient with respect
    to the same few other samples in each look, and batch normalisation does not explain it.
Why it matters:
    A `view` or `reshape` in the wrong order mixes samples. The model trains on scrambled data, and its result for a
    sample changes with the others.
How to fix it:
    Change the order of dimensions with `transpose` or `permute`; `view` only keeps the order of elements.
Example:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    first, last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)

    class Net(torch.nn.Module):
        def forward(self, x):
            h = first(x)
  -         return last(h.view(6, 16, 4).mean(0))
  +         return last(h.transpose(0, 1).mean(0))

    model = Net()
    for (x,) in DataLoader(TensorDataset(torch.randn(128, 6, 4)), batch_size=16):
        optimizer.zero_grad()
  -     model(x).square().mean().backward()  # <-
  +     model(x).square().mean().backward()
        optimizer.step()
"""

from collections.abc import Mapping
from typing import Any

from flatout.diagnose.invariant import Findings, line_here, rule
from flatout.diagnose.running_modules import RunningModules, sensitivity

LAYERS = frozenset({"linear", "conv1d", "conv2d", "conv3d", "embedding"})
MIN_SAMPLES, LOOKS = 5, 3


class SamplesMixed(RunningModules):
    calls = LAYERS | {"batch_norm"}

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.samples, self.first, self.normalised = 0, None, False
        self.seen: dict[
            int, list[Any]
        ] = {}  # root module -> its line, and the samples on which its output depends

    def batch(self, loader: Any, batch: Any, indices: Any) -> None:
        self.samples = len(indices) if isinstance(indices, list) else 0

    def root_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        self.first, self.normalised = None, False

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if name == "batch_norm":
            self.normalised = True
        elif (
            self.running
            and self.first is None
            and result.requires_grad
            and result.shape[:1] == (self.samples,)
        ):
            self.first = result

    def root_ends(self, module: Any, output: Any) -> None:
        first, count, self.first = self.first, self.samples, None
        looks = self.seen.setdefault(id(module), [line_here(), []])[1]
        if (
            first is None
            or self.normalised
            or count < MIN_SAMPLES
            or len(looks) >= LOOKS
            or not module.training
        ):
            return
        if not isinstance(output, self.program.torch.Tensor) or not output.requires_grad:
            return
        if output.shape[:1] != (count,) or count in (*output.shape[1:], *first.shape[1:]):
            return  # another dimension may be the batch
        gradient = sensitivity(output[-1], first)
        if gradient is not None:
            rows = gradient.flatten(1).any(1).nonzero().flatten().tolist()
            looks.append((count, rows))

    def findings(self) -> Findings:
        for line, looks in self.seen.values():
            others = [row for row in looks[0][1] if row != looks[0][0] - 1] if looks else []
            if (
                len(looks) == LOOKS
                and all(look == looks[0] for look in looks)
                and 0 < len(others) < looks[0][0] / 2
            ):
                count = looks[0][0]
                yield RULE.finding(
                    f"the output of sample {count - 1} of {count} depends on {len(others)} other samples "
                    f"({', '.join(map(str, others[:4]))}): a view mixes the samples",
                    line,
                    "transpose or permute in place of view",
                )


RULE = rule(SamplesMixed, "FL090", __doc__)

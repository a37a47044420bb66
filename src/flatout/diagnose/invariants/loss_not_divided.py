"""An accumulated loss is not divided by the number of batches.

What:
    The gradients of several batches are accumulated before the optimizer steps. The loss (a mean over its
    batch) is not divided by the number of batches.
Why it matters:
    The sum of n means is n times the mean over the larger batch. With SGD, the learning rate is effectively n
    times larger. With Adam, clipping and weight decay act at a different ratio than intended. Changing n then
    silently changes the training.
How to fix it:
    Use `loss = loss / n` before `backward()`, where n is the number of accumulated batches.
Example:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(160, 4)), batch_size=8)):
        loss = model(x).square().mean()
  -     loss.backward()  # <-
  +     (loss / 4).backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
Sources:
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from flatout.diagnose.gradient_windows import Window, WindowInvariant
from flatout.diagnose.invariant import Findings, rule

MIN_STEPS = 4
MEANS = ("Nll", "Mse", "SmoothL1", "Huber", "BinaryCrossEntropy", "SoftMargin")


class LossNotDivided(WindowInvariant):
    calls = frozenset({"__getitem__"})

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.sources = program.tensor_map()  # a batch of rows -> the id of the tensor that has them
        self.batches: list[Any] = []  # their loaders or sources, since the latest pass
        self.passes: list[Any] = []  # since the latest step: the source of a batch whose loss is a mean
        # optimizer -> the size of its windows -> how many, line
        self.steps: WeakKeyDictionary[Any, dict[int, list[Any]]] = WeakKeyDictionary()

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        torch, (data, index) = self.program.torch, args
        if isinstance(index, (slice, torch.Tensor)) and isinstance(result, torch.Tensor) and result.ndim:
            self.sources[result] = id(data)

    def batch(self, loader: Any, batch: Any, indices: Any) -> None:
        self.batches.append(None if loader.batch_size == 1 else id(loader))

    def forward_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        super().forward_begins(module, inputs)
        torch = self.program.torch
        single = self.program.forward_depth == 1 and len(inputs) == 1 and isinstance(inputs[0], torch.Tensor)
        if self.batches or not single or not torch.is_grad_enabled() or not inputs[0].ndim:
            return
        rows, base = inputs[0], inputs[0]._base
        part = base is not None and len(rows) < len(base) and not base.requires_grad
        source = self.sources.get(rows) or (id(base) if part else None)
        if source is not None and len(rows) > 1 and next(module.parameters(), None) is not None:
            self.batches.append(source)

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        super().backward_begins(losses)
        certain = len(losses) == 1 and len(self.batches) == 1 and is_mean(self.windows.graph_of(losses[0]))
        self.passes.append(self.batches[0] if certain else None)
        del self.batches[:], self.passes[:-64]

    def stepped(self, optimizer: Any, window: Window) -> None:
        sources, self.passes, summed = self.passes, [], window.passes
        if len(sources) != len(summed) or not summed:
            return
        line, factor = (
            summed[-1].line,
            float(window.gradients.norm() * summed[-1].scale / summed[-1].after.norm()),
        )
        as_computed = window.scaled_copy and abs(factor - 1) < 1e-4
        kept = all(bool((b.before == a.after).all()) for a, b in pairwise(summed))
        one_loop = None not in sources and len(set(sources)) == 1 and all(p.line == line for p in summed)
        sizes = self.steps.setdefault(optimizer, {})
        sizes.setdefault(len(summed) if as_computed and kept and one_loop else 0, [0, None])[0] += 1
        sizes[next(reversed(sizes))][1] = line

    def findings(self) -> Findings:
        for sizes in self.steps.values():
            size, (steps, line) = max(sizes.items(), key=lambda entry: int(entry[1][0]))
            if size > 1 and steps >= MIN_STEPS:
                yield RULE.finding(
                    f"each of {steps} steps summed the gradients of {size} batches, and each loss is a "
                    "mean that was not divided "
                    f"by {size}",
                    line,
                    f"(loss / {size}).backward()",
                )


def is_mean(node: Any, depth: int = 4) -> bool:
    """Whether the last operation of a loss is a mean over the batch, or a sum of such means."""
    name = type(node).__name__
    if name.startswith("Add") and depth and node._saved_alpha == 1:
        return all(is_mean(following, depth - 1) for following, _ in node.next_functions)
    return name.startswith("Mean") or (name.startswith(MEANS) and getattr(node, "_saved_reduction", 0) == 1)


RULE = rule(LossNotDivided, "FL005", __doc__)

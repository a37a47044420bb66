"""A shuffled loader returns its samples in the same order in every epoch.

What:
    The sampler of a training loader draws an order, and it is the same in each pass: a generator is seeded in
    `__iter__`, or `set_epoch` is missing for a `DistributedSampler`.
Why it matters:
    Every epoch has the same batches in the same order. Training generalises worse than with a fresh shuffle.
How to fix it:
    Seed the generator once, outside of `__iter__`. Call `sampler.set_epoch(epoch)` before each pass.
Example:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.randn(32, 4))

    class Shuffled(torch.utils.data.Sampler):
        def __init__(self):
            self.generator = torch.Generator().manual_seed(0)

        def __len__(self):
            return len(data)

        def __iter__(self):
  -         self.generator.manual_seed(0)
            yield from torch.randperm(len(data), generator=self.generator).tolist()

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - loader = DataLoader(data, batch_size=8, sampler=Shuffled())  # <-
  + loader = DataLoader(data, batch_size=8, sampler=Shuffled())
    for epoch in range(3):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
"""

from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from flatout.diagnose.invariant import Findings, Invariant, rule

MAX_BATCHES = 4096
MIN_SAMPLES = 16  # fewer may come in the same order by chance
MIN_PASSES = 2
SHUFFLED = 0.3, 0.7  # share of adjacent indices whose second index is smaller


class SameOrder(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.order: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # of the present pass
        self.passes: WeakKeyDictionary[Any, list[Any]] = (
            WeakKeyDictionary()
        )  # the first pass, equal ones, others

    def pass_begins(self, loader: Any) -> None:
        self.order[loader] = []

    def batch(self, loader: Any, batch: Any, indices: Any) -> None:
        order = self.order.get(loader)
        if order is not None and isinstance(indices, list) and len(order) < MAX_BATCHES:
            order.append(tuple(indices))

    def pass_ends(self, loader: Any) -> None:
        order = self.order.pop(loader, [])
        flat = [index for batch in order for index in batch]
        falls = sum(a > b for a, b in pairwise(flat)) if all(isinstance(index, int) for index in flat) else 0
        if len(flat) < MIN_SAMPLES or not SHUFFLED[0] < falls / len(flat) < SHUFFLED[1]:
            return
        first, *counts = self.passes.setdefault(loader, [flat, 0, 0])
        self.passes[loader] = [first, counts[0] + (flat == first), counts[1] + (flat != first)]

    def findings(self) -> Findings:
        for loader, (first, equal, others) in self.passes.items():
            if equal >= MIN_PASSES and not others and loader in self.program.training_loaders:
                sampler = type(loader.sampler).__name__
                yield RULE.finding(
                    f"all {equal} passes returned the {len(first)} samples in the same order: {sampler} draws the same "
                    "permutation in every epoch",
                    self.program.line_of(loader),
                    "sampler.set_epoch(epoch)"
                    if hasattr(loader.sampler, "set_epoch")
                    else "seed the generator once, outside of __iter__",
                )


RULE = rule(SameOrder, "FL012", __doc__)

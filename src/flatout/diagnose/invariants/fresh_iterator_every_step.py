"""Every batch creates a new iterator.

What:
    Each training step takes one batch from an iterator of its own: `next(iter(loader))`.
Why it matters:
    Each call starts a new epoch for one batch. The workers are started and stopped each time, and the batches
    they prefetched are discarded. Without shuffling, every call returns the first batch, and the rest of the
    data is never used.
How to fix it:
    Iterate over the loader. Or create the iterator once, before the loop, and recreate it when it is
    exhausted.
Example:
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(torch.randn(64, 4), batch_size=8, shuffle=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - for _ in range(20):
  -     x = next(iter(loader))  # <-
  + for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule
from flatout.schema.findings import Severity

MIN_PASSES = 16


@dataclass
class Passes:
    """The passes that one line began over the loaders of one data set."""

    dataset: Any
    batches: int = 0  # of the present pass
    trained: bool = False  # a backward pass followed
    single: int = 0  # passes that were given up after one batch of several
    others: int = 0


class FreshIterator(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: dict[Line | None, Passes] = {}
        self.now: WeakKeyDictionary[Any, Passes] = WeakKeyDictionary()  # loader -> of its present pass
        self.latest: Passes | None = None

    def pass_begins(self, loader: Any) -> None:
        passes = self.lines.get(line_here())
        if passes is None or passes.dataset is not loader.dataset:
            passes = self.lines[line_here()] = Passes(loader.dataset)
        passes.single += passes.batches == 1 and passes.trained
        passes.others += passes.batches > 1 or is_one_batch(loader)
        passes.batches, passes.trained = 0, False
        self.now[loader] = passes

    def batch(self, loader: Any, batch: Any, indices: Any) -> None:
        self.latest = self.now.get(loader)
        if self.latest is not None:
            self.latest.batches += 1

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        if self.latest is not None:
            self.latest.trained = True

    def pass_ends(self, loader: Any) -> None:
        if loader in self.now:
            self.now[loader].others += 1

    def findings(self) -> Findings:
        for line, passes in self.lines.items():
            if passes.single >= MIN_PASSES and not passes.others:
                yield RULE.finding(
                    f"{passes.single} passes over this data began, and each ended after its first batch: every step starts a "
                    "new epoch",
                    line,
                    "batches = iter(loader)  # before the loop\nnext(batches)",
                )


def is_one_batch(loader: Any) -> bool:
    try:
        return len(loader) <= 1
    except TypeError:  # a stream
        return False


RULE = rule(FreshIterator, "FL117", __doc__, Severity.TIME)

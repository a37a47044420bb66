"""An iterator is exhausted after the first epoch.

What:
    `batches = iter(loader)` (or `zip`, `map`, `enumerate`) is created before the loop over epochs, and used inside it.
Why it matters:
    An iterator runs once. From the second epoch on, the inner loop does nothing. The program counts its
    epochs and saves its checkpoints, but trains on the data only once.
How to fix it:
    Iterate over the loader itself, or create the iterator inside the loop over epochs.
Example:
    import torch
    from torch.utils.data import DataLoader

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - batches = enumerate(DataLoader(torch.randn(64, 4), batch_size=8))
  + batches = DataLoader(torch.randn(64, 4), batch_size=8)
    for epoch in range(5):
  -     for i, x in batches:  # <-
  +     for i, x in enumerate(batches):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
"""

from typing import Any
from weakref import WeakKeyDictionary

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule

MIN_EMPTY = 3  # loops


class IteratorExhausted(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.begun: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # -> backward passes before
        # loader whose iterator is exhausted -> backward passes before, loops over it since
        self.ended: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        self.lines: dict[Line | None, int] = {}

    def pass_begins(self, loader: Any) -> None:
        self.begun[loader] = self.program.backwards
        self.ended.pop(loader, None)

    def batch(self, loader: Any, batch: Any, indices: Any) -> None:
        self.ended.pop(loader, None)

    def pass_ends(self, loader: Any) -> None:
        if self.begun.get(loader, self.program.backwards) == self.program.backwards:
            return  # it trains nothing
        backwards, empty = self.ended.get(loader, (-1, 0))
        # others may train meanwhile, and the program may ask until all loaders are exhausted
        empty = empty + 1 if backwards == self.program.backwards else 0
        self.ended[loader] = self.program.backwards, empty
        if empty >= MIN_EMPTY:
            self.lines[line_here()] = empty

    def findings(self) -> Findings:
        for line, empty in self.lines.items():
            yield RULE.finding(
                f"this loop was entered {empty} times with an exhausted iterator: it got no batch, and nothing was trained",
                line,
                "iterate over the loader itself, or call iter() inside the outer loop",
            )


RULE = rule(IteratorExhausted, "FL031", __doc__, weight=-1)

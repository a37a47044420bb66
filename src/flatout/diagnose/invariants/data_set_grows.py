"""A data set keeps something for every sample that it returns.

What:
    A list in the data set gets longer with each sample, and holds more entries than the data set has samples.
Why it matters:
    Memory grows with every epoch, in each worker, until the process is killed.
How to fix it:
    Keep nothing in `__getitem__`, or cache by index in a dictionary, which each sample enters once.
Example:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Tiles(Dataset):
        def __init__(self):
            self.used = []

        def __len__(self):
            return 32

        def __getitem__(self, i):
            tile = torch.randn(4)
  -         self.used.append(tile)
            return tile

  - loader = DataLoader(Tiles(), batch_size=8)  # <-
  + loader = DataLoader(Tiles(), batch_size=8)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
"""

from typing import Any
from weakref import WeakKeyDictionary

from flatout.diagnose.invariant import Findings, Invariant, rule
from flatout.schema.findings import Severity


class DataSetGrows(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.sizes: WeakKeyDictionary[Any, list[dict[str, int]]] = WeakKeyDictionary()  # after each pass

    def pass_ends(self, loader: Any) -> None:
        attributes = getattr(loader.dataset, "__dict__", {})
        lists = {n: len(v) for n, v in attributes.items() if isinstance(v, list)}
        self.sizes.setdefault(loader, []).append(lists)

    def findings(self) -> Findings:
        for loader, sizes in self.sizes.items():
            if len(sizes) < 2 or not hasattr(loader.dataset, "__len__"):
                continue
            samples, first, last = len(loader.dataset), sizes[0], sizes[-1]
            for name, length in last.items():
                grown = (length - first.get(name, 0)) / (len(sizes) - 1)
                if length > samples and grown >= 0.5 * samples:
                    yield RULE.finding(
                        f"self.{name} of {type(loader.dataset).__name__} grows by {grown:,.0f} entries in every epoch and is "
                        f"never cleared: it has {length:,}, for {samples:,} samples",
                        self.program.line_of(loader),
                        f"do not append to self.{name} in __getitem__",
                    )


RULE = rule(DataSetGrows, "FL208", __doc__, Severity.MEMORY)

"""Each worker of a loader reads the whole stream.

What:
    An `IterableDataset` with several workers does not split its samples: the workers return the same batches.
Why it matters:
    Each sample comes once per worker in every epoch. An epoch is longer than it says, and validation counts twice.
How to fix it:
    In `__iter__`, use `torch.utils.data.get_worker_info()` to give each worker its own part.
Example:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Numbers(IterableDataset):
        def __iter__(self):
  -         return iter(torch.arange(64.0).reshape(32, 2))
  +         info = get_worker_info()
  +         return iter(torch.arange(64.0).reshape(32, 2)[info.id :: info.num_workers])

  - loader = DataLoader(Numbers(), batch_size=8, num_workers=2)  # <-
  + loader = DataLoader(Numbers(), batch_size=8, num_workers=2)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset
"""

from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from flatout.diagnose.invariant import Findings, Invariant, digest, rule

MIN_REPEATS = 2  # batches


class StreamNotSplit(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.batches: WeakKeyDictionary[Any, Counter[str]] = (
            WeakKeyDictionary()
        )  # of the first pass of each loader
        self.done: WeakSet[Any] = WeakSet()

    def batch(self, loader: Any, batch: Any, indices: Any) -> None:
        stream = isinstance(loader.dataset, self.program.torch.utils.data.IterableDataset)
        if stream and loader.num_workers > 1 and loader not in self.done:
            self.batches.setdefault(loader, Counter())[digest(batch)] += 1

    def pass_ends(self, loader: Any) -> None:
        self.done.add(loader)

    def findings(self) -> Findings:
        for loader, seen in self.batches.items():
            workers = loader.num_workers
            repeated = [count for count in seen.values() if count == workers]
            if len(repeated) >= MIN_REPEATS and len(repeated) >= len(seen) - 2 * workers:
                yield RULE.finding(
                    f"each of the {workers} workers returned the same batches: {len(repeated)} different batches came "
                    f"{workers} times in one pass. The stream is not split over the workers",
                    self.program.line_of(loader),
                    "in __iter__, let get_worker_info() choose the part of the worker",
                )


RULE = rule(StreamNotSplit, "FL064", __doc__)

"""Fetching samples changes the stored data.

What:
    An array or tensor of the data set has other values after each pass: `__getitem__` or a transform works in place
    on what it should copy.
Why it matters:
    Every epoch reads data that was changed already: normalised twice, flipped back, noised more and more.
How to fix it:
    Copy the sample first: `self.data[i].clone()` or `.copy()`; avoid operations in place, such as `x -= mean`.
Example:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Images(Dataset):
        def __init__(self):
            self.images = torch.rand(32, 4)

        def __len__(self):
            return 32

        def __getitem__(self, i):
  -         image = self.images[i]
  +         image = self.images[i].clone()
            image -= 0.5
            return image

  - loader = DataLoader(Images(), batch_size=8)  # <-
  + loader = DataLoader(Images(), batch_size=8)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
"""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from flatout.diagnose.invariant import Findings, Invariant, digest, rule

MAX_ELEMENTS = 4096  # that are compared, of each array
MIN_PASSES = 2  # each with a change: a cache fills once


class StoredSamplesChange(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.before: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()  # of the present pass
        self.changes: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()
        self.passes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def pass_begins(self, loader: Any) -> None:
        if not loader.num_workers and not isinstance(
            loader.dataset, self.program.torch.utils.data.IterableDataset
        ):
            self.before[loader] = dict(self._digests(loader.dataset))

    def pass_ends(self, loader: Any) -> None:
        before = self.before.pop(loader, {})
        changes = self.changes.setdefault(loader, {})
        self.passes[loader] = self.passes.get(loader, 0) + 1
        for name, value in self._digests(loader.dataset):
            changes[name] = changes.get(name, 0) + (name in before and before[name] != value)

    def _digests(self, dataset: Any) -> Iterator[tuple[str, str]]:
        """Digests of a part of each stored array, with its attribute's name."""
        torch = self.program.torch
        for name, value in getattr(dataset, "__dict__", {}).items():
            first = value[0] if isinstance(value, list) and value else value
            if isinstance(first, torch.Tensor) or (
                type(first).__module__ == "numpy" and hasattr(first, "dtype")
            ):
                values = torch.as_tensor(first) if first.dtype != object else torch.empty(0)
                flat = values.flatten()
                yield name, digest(flat[:: max(1, flat.numel() // MAX_ELEMENTS)])
            elif name == "dataset":
                yield from self._digests(value)

    def findings(self) -> Findings:
        for loader, changes in self.changes.items():
            for name, passes in changes.items():
                if passes >= MIN_PASSES and passes == self.passes[loader]:
                    yield RULE.finding(
                        f"the stored data set changes while it is read: `{name}` had other values after each of {passes} passes, so "
                        "samples are changed in place",
                        self.program.line_of(loader),
                        f"copy the sample before you change it: self.{name}[i].copy()",
                    )


RULE = rule(StoredSamplesChange, "FL093", __doc__)

"""A sampler returns some samples several times, and others never.

What:
    An epoch has as many samples as the data set, but it is no pass over it: some samples come several times and
    others never, the same ones in each epoch. Or most samples of each batch were in the batch before.
Why it matters:
    The model never sees a part of the data. The samples that repeat have a larger weight.
How to fix it:
    Draw one permutation per epoch, and cut it into batches that do not overlap: `order[i : i + size]` with steps of
    `size`. To repeat samples on purpose, use `RandomSampler(replacement=True)` or `WeightedRandomSampler`.
Example:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Batches(torch.utils.data.Sampler):
        def __len__(self):
            return 16

        def __iter__(self):
            order = torch.randperm(128).tolist()
  -         yield from (order[i : i + 8] for i in range(16))
  +         yield from (order[8 * i : 8 * i + 8] for i in range(16))

    data = TensorDataset(torch.randn(128, 4))
  - loader = DataLoader(data, batch_sampler=Batches())  # <-
  + loader = DataLoader(data, batch_sampler=Batches())
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from flatout.agent.frames import place_of
from flatout.diagnose.invariant import Findings, Invariant, rule

MAX_SAMPLES = 1 << 20
MIN_PASSES = 3
MIN_BATCHES = 8  # in a row that overlap
MIN_SAMPLES = 4  # of a batch


@dataclass
class Passes:
    counts: Counter[Any] = field(default_factory=Counter)  # of the present pass, by index
    first: Counter[Any] | None = None  # of the first pass that ended
    equal: int = 0  # passes that returned the same samples as often
    others: int = 0
    last: set[Any] = field(default_factory=set)  # of the last batch
    overlaps: int = 0  # batches in a row that have most samples of the one before
    most: int = 0
    shared: int = 0  # samples, in the last overlap
    batches: int = 0  # in the present pass


class SamplesLeftOut(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.loaders: WeakKeyDictionary[Any, Passes] = WeakKeyDictionary()
        self.weights: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()

    def pass_begins(self, loader: Any) -> None:
        weights = getattr(loader.sampler, "weights", None)
        if weights is not None and hasattr(loader.dataset, "__len__") and len(weights) < len(loader.dataset):
            self.weights[loader] = len(weights), len(loader.dataset)
        if hasattr(loader.dataset, "__len__") and not getattr(loader.sampler, "replacement", False):
            passes = self.loaders.setdefault(loader, Passes())
            passes.counts, passes.last, passes.overlaps, passes.batches = Counter(), set(), 0, 0

    def batch(self, loader: Any, batch: Any, indices: Any) -> None:
        passes = self.loaders.get(loader)
        if passes is None or not isinstance(indices, list) or len(passes.counts) > MAX_SAMPLES:
            return
        own = set(indices)
        passes.shared, passes.batches = len(own & passes.last), passes.batches + 1
        overlaps = (
            2 * passes.shared > len(own) >= MIN_SAMPLES and own != passes.last and not is_window(indices)
        )
        passes.overlaps = passes.overlaps + 1 if overlaps else 0
        passes.most, passes.last = max(passes.most, passes.overlaps), own
        passes.counts.update(indices)

    def pass_ends(self, loader: Any) -> None:
        passes = self.loaders.get(loader)
        if passes is not None and passes.counts:
            if passes.first is None:
                passes.first = passes.counts
            passes.equal += passes.counts == passes.first
            passes.others += passes.counts != passes.first
            passes.counts = Counter()

    def findings(self) -> Findings:
        for loader, (weights, samples) in self.weights.items():
            yield RULE.finding(
                f"the sampler has {weights} weights for {samples} samples: it draws the first {weights} samples alone",
                self.program.line_of(loader),
                "one weight for each sample, such as class_weights[labels]",
            )
        for loader, passes in self.loaders.items():
            if loader not in self.program.training_loaders:
                continue
            place, samples = place_of(self.program.line_of(loader)), len(loader.dataset)
            if passes.most >= MIN_BATCHES:
                yield RULE.finding(
                    f"{passes.most} batches in a row had most of their samples ({passes.shared} of {len(passes.last)}) from "
                    "the batch before: the batches of the sampler overlap",
                    place,
                    "cut one permutation into batches that do not overlap",
                )
            elif passes.first is not None and passes.equal >= MIN_PASSES and not passes.others:
                repeated = sum(count > 1 for count in passes.first.values())
                never = samples - len(passes.first)
                if (
                    repeated
                    and never > 0
                    and passes.first.total() == samples
                    and not self._has_others(loader)
                ):
                    yield RULE.finding(
                        f"each of {passes.equal} passes returned {samples} samples, but {never} of the {samples} samples of "
                        f"the data set never, and {repeated} others several times",
                        place,
                        "draw one permutation of all samples per epoch",
                    )

    def _has_others(self, loader: Any) -> bool:
        """Whether other loaders read this data set, and may get the samples that this one leaves out."""
        kind = self.program.torch.utils.data.DataLoader
        return any(
            isinstance(other, kind)
            and other is not loader
            and root_of(other.dataset) is root_of(loader.dataset)
            for other in list(self.program.made)
        )


def root_of(dataset: Any) -> Any:
    """The data set below subsets."""
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return dataset


def is_window(indices: list[Any]) -> bool:
    """Whether the indices are evenly spaced: windows of a series may overlap."""
    return len({b - a for a, b in pairwise(indices)}) == 1


RULE = rule(SamplesLeftOut, "FL086", __doc__)

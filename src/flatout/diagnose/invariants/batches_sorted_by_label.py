"""Training batches come sorted by label.

What:
    In each epoch, the training loader returns all samples of one class, then all of the next: most batches hold a
    single class.
Why it matters:
    A batch of one class teaches to predict this class always, and the next ones undo it. Batch normalisation sees the
    statistics of one class. Training is unstable, and the model prefers the last class.
How to fix it:
    Shuffle: `DataLoader(data, shuffle=True)`. With a sampler or a stream, shuffle there, in a buffer that is larger
    than a class.
Example:
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset

    labels = torch.arange(96) // 32
    data = TensorDataset(torch.randn(96, 4) + labels[:, None], labels)
  - loader = DataLoader(data, batch_size=8)  # <-
  + loader = DataLoader(data, batch_size=8, shuffle=True)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from flatout.diagnose.invariant import Findings, Invariant, argument, rule

MIN_PASSES = 2
MIN_BATCHES = 6  # of a pass
MIN_LABELS = 4  # in a batch
MAX_CLASSES = 4096


@dataclass
class Pass:
    """The labels of a pass: runs of equal ones, over the borders of batches."""

    runs: list[int] = field(default_factory=list)
    batches: int = 0
    single: int = 0  # batches of one class

    def add(self, labels: list[int]) -> None:
        self.batches += 1
        self.single += len(set(labels)) == 1
        for label in labels:
            if not self.runs or self.runs[-1] != label:
                self.runs.append(label)

    @property
    def is_sorted(self) -> bool:
        each_once = len(self.runs) == len(set(self.runs)) > 1 and all(
            label == int(label) for label in self.runs
        )
        return each_once and self.batches >= MIN_BATCHES and 2 * self.single > self.batches


class BatchesSortedByLabel(Invariant):
    calls = frozenset(
        {"cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"}
    )

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.loader: Any = None  # of the latest batch, until a loss gets its labels
        self.now: WeakKeyDictionary[Any, Pass | None] = WeakKeyDictionary()  # None: no labels of classes
        self.passes: WeakKeyDictionary[Any, list[Pass]] = WeakKeyDictionary()  # sorted ones
        self.others: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def pass_begins(self, loader: Any) -> None:
        self.now[loader] = Pass()

    def batch(self, loader: Any, batch: Any, indices: Any) -> None:
        self.loader = loader

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        labels, loader = argument(args, kwargs, 1, "target"), self.loader
        if loader is None or not self.program.torch.is_grad_enabled() or not result.requires_grad:
            return
        self.loader, now = None, self.now.get(loader)
        if (
            now is None
            or labels.ndim == 0
            or labels.numel() != len(labels)
            or len(now.runs) > now.batches + MAX_CLASSES
        ):
            self.now[loader] = None  # not classes, or not sorted
        elif len(labels) >= MIN_LABELS:
            now.add(labels.flatten().tolist())

    def pass_ends(self, loader: Any) -> None:
        now = self.now.pop(loader, None)
        if now is not None and now.is_sorted and loader in self.program.training_loaders:
            self.passes.setdefault(loader, []).append(now)
        elif now is None or now.batches:
            self.others[loader] = 1

    def findings(self) -> Findings:
        for loader, passes in self.passes.items():
            if len(passes) >= MIN_PASSES and loader not in self.others:
                last = passes[-1]
                yield RULE.finding(
                    f"{last.single} of the {last.batches} batches of each epoch hold one class only: the samples of the "
                    f"{len(last.runs)} classes come sorted by class",
                    self.program.line_of(loader),
                    "DataLoader(..., shuffle=True)",
                )


RULE = rule(BatchesSortedByLabel, "FL088", __doc__)

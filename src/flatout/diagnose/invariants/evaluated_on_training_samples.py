"""The evaluation uses samples that were trained on.

What:
    A loader that only evaluates returns some samples that the training loader returns, too, besides others. Or the
    program trains on a whole data set, and evaluates on a part of it that it split off.
Why it matters:
    The model knows these samples. The accuracy is too high, and choosing by it prefers overfitting.
How to fix it:
    Split once, with `random_split(data, lengths)`, and give each part to its own loader. A second split needs the same
    `generator=torch.Generator().manual_seed(0)` as the first.
Example:
    import torch
    from torch.utils.data import DataLoader, TensorDataset, random_split

    data = TensorDataset(torch.randn(100, 4))
  - train, _ = random_split(data, [80, 20])
  - _, held = random_split(data, [80, 20])
  + train, held = random_split(data, [80, 20])
    loader = DataLoader(train, batch_size=8, shuffle=True)
  - held_loader = DataLoader(held, batch_size=8)  # <-
  + held_loader = DataLoader(held, batch_size=8)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            print(sum(model(x).square().mean() for (x,) in held_loader))
"""

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

from flatout.diagnose.invariant import Findings, Invariant, line_here, rule
from flatout.diagnose.invariants.samples_left_out import root_of

MAX_SAMPLES = 1 << 20
MAX_ROWS = 16384  # whose content is compared
MAX_ELEMENTS = 4096  # of a sample
MIN_COMMON = 8


@dataclass
class Seen:
    """Samples that a loader returned: their indices in the root of the data set, and digests of their content."""

    batch: int = 0  # samples in the largest batch
    indices: set[Any] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)
    repeated: int = 0  # rows with the content of another one
    complete: bool = False
    models: set[int] = field(default_factory=set)  # ids of the first parameters of the models that got them
    begun: int = 0  # backward passes of the program before

    def add(self, indices: list[Any], rows: list[int]) -> None:
        self.batch = max(self.batch, len(indices))
        if len(self.indices) < MAX_SAMPLES:
            new = [(i, row) for i, row in zip(indices, rows, strict=True) if i not in self.indices]
            self.repeated += len(new) - len({row for _, row in new} - self.rows)
            self.indices.update(indices)
            self.rows.update(row for _, row in new)


class EvaluatedOnTrainingSamples(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.trained: WeakKeyDictionary[Any, Seen] = WeakKeyDictionary()
        self.passes: WeakKeyDictionary[Any, Seen] = WeakKeyDictionary()  # of the present pass
        # loader that evaluates -> its samples that were trained on, and all of them
        self.overlaps: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        self.latest: tuple[Any, list[Any], list[int]] | None = (
            None  # loader, indices and rows of the last batch
        )
        self.trainer: Any = lambda: None  # the loader that trained last
        # id of a data set -> line that split it -> the indices of each part, by the id of the subset
        self.splits: dict[int, dict[Any, dict[int, Any]]] = {}
        self.used: set[int] = set()  # ids of the data sets of loaders
        self.whole: WeakKeyDictionary[Any, Any] = (
            WeakKeyDictionary()
        )  # loader that trains -> one that evaluates
        self.current: Seen | None = None  # the pass of the last batch
        self.models: set[int] = set()  # that ran since the last batch

    def subset_made(self, subset: Any) -> None:
        self.splits.setdefault(id(subset.dataset), {}).setdefault(line_here(), {})[id(subset)] = (
            subset.indices
        )

    def forward_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        if self.program.forward_depth == 1 and (first := next(module.parameters(), None)) is not None:
            self.models.add(id(first))

    def pass_begins(self, loader: Any) -> None:
        self.used.add(id(loader.dataset))
        self.passes[loader] = Seen(begun=self.program.backwards)

    def batch(self, loader: Any, batch: Any, indices: Any) -> None:
        self._models_ran(self.current)
        self.current, self.latest = self.passes.get(loader), None
        if isinstance(indices, list) and self.current is not None:
            found = [in_root(loader.dataset, index) for index in indices]
            few = len(self.current.rows) < MAX_ROWS
            rows = row_digests(batch, len(found), self.program.torch) if few else [hash(i) for i in found]
            self.latest = loader, found, rows
            self.current.add(found, rows)

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        if self.latest is not None:
            loader, indices, rows = self.latest
            trained = self.trained.setdefault(loader, Seen())
            trained.add(indices, rows)
            self._models_ran(trained)
            self.trainer, self.latest = ref(loader), None

    def _models_ran(self, seen: Seen | None) -> None:
        if seen is not None:
            seen.models |= self.models
        self.models = set()

    def pass_ends(self, loader: Any) -> None:
        seen, trainer = self.passes.pop(loader, None), self.trainer()
        self._models_ran(self.current)
        if loader in self.trained:
            self.trained[loader].complete = True
        elif seen is not None and trainer is not None and seen.begun == self.program.backwards:
            trained = self.trained[trainer]
            if not seen.models & trained.models:
                return
            if getattr(loader.dataset, "dataset", None) is trainer.dataset:
                self.whole[trainer] = loader
            elif (common := self._common(loader, seen, trainer, trained)) is not None:
                self.overlaps[loader] = common, len(seen.indices)

    def _common(self, loader: Any, seen: Seen, trainer: Any, trained: Seen) -> int | None:
        """How many evaluated samples were trained on, if neither loader returns all samples of the other."""
        if root_of(loader.dataset) is root_of(trainer.dataset):
            common = len(seen.indices & trained.indices)
            if common < MIN_COMMON or seen.indices <= all_of(trainer) or trained.indices <= all_of(loader):
                return (
                    None  # on purpose: the accuracy on the training samples, or predictions for all samples
                )
            return common
        if not trained.complete or max(len(seen.rows), len(trained.rows)) >= MAX_ROWS:
            return None
        common = len(seen.rows & trained.rows)
        only = len(seen.rows - trained.rows), len(trained.rows - seen.rows)
        if common < MIN_COMMON * (1 + seen.repeated + trained.repeated):
            return None  # equal samples are common in this data
        if not (returns_all(loader, only[1] > seen.batch) and returns_all(trainer, only[0] > trained.batch)):
            return None
        return common if only[0] and only[1] else None

    def findings(self) -> Findings:
        for loader, (common, samples) in self.overlaps.items():
            yield RULE.finding(
                f"{common} of the {samples} samples that this loader evaluates were trained on before",
                self.program.line_of(loader),
                "split once, and give each part to its own loader",
            )
        for trainer, loader in self.whole.items():
            for parts in self.splits.get(id(trainer.dataset), {}).values():
                unused = [len(indices) for part, indices in parts.items() if part not in self.used]
                covered = {index for indices in parts.values() for index in indices}
                disjoint = sum(map(len, parts.values())) == len(covered) == len(trainer.dataset)
                if id(loader.dataset) in parts and unused and disjoint:
                    yield RULE.finding(
                        f"this loader trains on all {len(covered)} samples, also on the {len(loader.dataset)} that were split off "
                        f"and evaluate; the other part, of {unused[0]} samples, is never used",
                        self.program.line_of(trainer),
                        "train on the part that was split off for it",
                    )


def in_root(dataset: Any, index: Any) -> Any:
    """The index in the data set below subsets."""
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        dataset, index = dataset.dataset, dataset.indices[index]
    return int(index) if hasattr(index, "__index__") else index


def all_of(loader: Any) -> set[Any]:
    """The indices of all samples that a loader may return."""
    indices = getattr(loader.sampler, "indices", None)
    return {in_root(loader.dataset, i) for i in (range(len(loader.dataset)) if indices is None else indices)}


def returns_all(loader: Any, though_dropping: bool) -> bool:
    """Whether each pass returns all samples of the data set, or all but a last batch, which must not matter."""
    sampler = loader.sampler
    once = type(sampler).__name__ == "SequentialSampler" or getattr(sampler, "replacement", None) is False
    return once and len(sampler) == len(loader.dataset) and (though_dropping or not loader.drop_last)


def row_digests(batch: Any, samples: int, torch: Any) -> list[int]:
    """A digest of each sample: of its part in the largest tensor of the batch."""
    from torch.utils._pytree import tree_leaves

    tensors = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and t.ndim and len(t) == samples]
    if not tensors:
        return [hash(object()) for _ in range(samples)]
    rows = max(tensors, key=torch.numel).detach().reshape(samples, -1)
    rows = rows[:, :: 1 + rows.shape[1] // MAX_ELEMENTS].cpu().contiguous().view(torch.uint8).numpy()
    return [hash(row.tobytes()) for row in rows]


RULE = rule(EvaluatedOnTrainingSamples, "FL087", __doc__)

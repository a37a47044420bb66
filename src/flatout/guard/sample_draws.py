"""Fetches a few training samples repeatedly, through the loader's own data set and collation.

The four statistics of each sample distinguish two pipelines that agree on every population: see
`flatout.guard.distribution`. This moves random generators, so it runs when a trial ends.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from flatout.measure.clock import seconds
from flatout.measure.parity import batch_statistics

SAMPLES = 16
ROUNDS = 32
MIN_ROUNDS = 8
MAX_S = 3.0


class SampleDrawProbe:
    """Observes each iterator over a DataLoader and remembers the source of the first training iterator."""

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self._source: dict[str, Any] | None = None

    def observe(self, iterator: Any) -> None:
        if self._source is None:
            dataset = getattr(iterator, "_dataset", None)
            self._source = {}
            indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
            if indexed and getattr(iterator, "_auto_collation", False):
                self._source = {
                    "dataset": dataset,
                    "collate_fn": iterator._collate_fn,
                    "num_workers": iterator._num_workers,
                }

    def fetch(self) -> list[list[list[float]]]:
        """The four statistics by round and sample.

        Empty if there is nothing to fetch, or if fetching fails or takes too long.
        """
        if not self._source:
            return []
        count = len(self._source["dataset"])
        indices = sorted({i * count // SAMPLES for i in range(SAMPLES)})
        rounds: list[list[list[float]]] = []
        start = seconds()
        try:
            for batch in self._loader(indices):
                rounds.append(batch_statistics(batch, self.torch))
                if seconds() - start > MAX_S:
                    break
        except Exception:  # a second loader cannot read this data set (an open file, a lock)
            return []
        complete = len(rounds) >= MIN_ROUNDS and all(len(row) == len(indices) for row in rounds)
        return rounds if complete else []

    def _loader(self, indices: list[int]) -> Any:
        """A loader whose batches hold each sample once.

        Levers that change loaders already acted when the original was created.
        """
        kind = self.torch.utils.data.DataLoader
        init = getattr(kind.__init__, "__wrapped__", kind.__init__)
        loader = kind.__new__(kind)
        init(loader, batch_size=len(indices), sampler=indices * ROUNDS, **(self._source or {}))
        return loader

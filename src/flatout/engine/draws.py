"""Fetches a few samples of the program's training data again and again, through the loader's own data set and collation.

What comes out (four statistics a sample) tells two pipelines apart that agree on every population: see
`flatout.engine.distribution`. It moves random generators, so it is done when a trial ends.
"""

from __future__ import annotations

from typing import Any

from flatout.measure.clock import seconds
from flatout.measure.parity import batch_statistics

SAMPLES = 16
ROUNDS = 32
FEWEST_ROUNDS = 8
LONGEST_S = 3.0


class Draws:
    """Told of each iterator over a DataLoader; remembers what the first one that trained was made of."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self._source: dict[str, Any] | None = None

    def hear(self, iterator: Any) -> None:
        if self._source is None:
            dataset = getattr(iterator, "_dataset", None)
            self._source = {}
            if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and getattr(iterator, "_auto_collation", False):
                self._source = {"dataset": dataset, "collate_fn": iterator._collate_fn, "num_workers": iterator._num_workers}

    def take(self) -> list[list[list[float]]]:
        """By round, by sample, the four statistics; empty where there is nothing to fetch, or fetching takes too long or fails."""
        if not self._source:
            return []
        count = len(self._source["dataset"])
        indices = sorted({at * count // SAMPLES for at in range(SAMPLES)})
        rounds: list[list[list[float]]] = []
        start = seconds()
        try:
            for batch in self._loader(indices):
                rounds.append(batch_statistics(batch, self.torch))
                if seconds() - start > LONGEST_S:
                    break
        except Exception:  # a data set that a second loader cannot read (an open file, a lock) is left alone
            return []
        complete = len(rounds) >= FEWEST_ROUNDS and all(len(row) == len(indices) for row in rounds)
        return rounds if complete else []

    def _loader(self, indices: list[int]) -> Any:
        """Each batch holds each sample once. Levers that change loaders have had their say when the original was made."""
        kind = self.torch.utils.data.DataLoader
        init = getattr(kind.__init__, "__wrapped__", kind.__init__)
        loader = kind.__new__(kind)
        init(loader, batch_size=len(indices), sampler=indices * ROUNDS, **(self._source or {}))
        return loader

"""A data set draws the same random numbers for every sample.

What:
    `__getitem__` creates a generator from a seed that does not depend on the index and draws from it, or it sets a
    global seed.
Why it matters:
    Every sample gets the same noise, crop or mask, in every epoch. The augmentation adds a constant, and the
    model learns it. If the seed is set globally, dropout and shuffling in this process repeat as well.
How to fix it:
    Draw from torch's global generator, which the loader seeds for each worker and epoch. For a fixed value per
    sample, put the index into the seed.
Example:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Noisy(Dataset):
        def __init__(self):
            self.x = torch.randn(64, 4)

        def __len__(self):
            return 64

        def __getitem__(self, index):
  -         generator = torch.Generator().manual_seed(0)
  -         return self.x[index] + torch.randn(4, generator=generator)  # <-
  +         generator = torch.Generator().manual_seed(index)
  +         return self.x[index] + torch.randn(4, generator=generator)

    loader = DataLoader(Noisy(), batch_size=8, shuffle=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/notes/randomness.html#dataloader
"""

from typing import Any
from weakref import WeakSet

from flatout.agent.frames import place_at
from flatout.diagnose.invariant import Findings, Invariant, counted, rule
from flatout.diagnose.worker_probe import Place, draws_of_samples
from flatout.trial.forked import in_fork


class SameNoise(Invariant):
    """Fetches a few samples of each training loader once, in a fork, from different states of all generators."""

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.asked: WeakSet[Any] = WeakSet()
        self.reset: dict[Place, set[str]] = {}  # -> global generators
        self.redrawn: dict[Place, int] = {}

    def batch(self, loader: Any, batch: Any, indices: Any) -> None:
        if loader not in self.program.training_loaders or loader in self.asked:
            return
        if not isinstance(indices, list) or len(indices) < 2:
            return
        self.asked.add(loader)
        indices = [*indices[:2], indices[0]]
        answer = in_fork(lambda: draws_of_samples(self.program.torch, loader.dataset, indices))
        if answer is not None:
            after, seeds, draws = answer
            for name in after[0]:
                if len({state[name] for state in after}) == 1:
                    place = tuple(seeds.get(name) or place_of_samples(loader.dataset))
                    self.reset.setdefault(place, set()).add(name)
            if draws[0] and draws[0] == draws[1] == draws[2]:
                self.redrawn[tuple(draws[0][0][1])] = len(draws[0])

    def findings(self) -> Findings:
        for place, names in self.reset.items():
            yield RULE.finding(
                f"each sample gives the same seed to the global generator of {' and '.join(sorted(names))}: all samples draw "
                "the same numbers",
                place_at(*place),
                "remove it: the loader seeds the generators of each worker",
            )
        for place, draws in self.redrawn.items():
            yield RULE.finding(
                f"each sample makes a generator with the same seed: {counted(draws, 'draw')} of it gave the same numbers for "
                "different samples",
                place_at(*place),
                "draw from the global generator, or put the index into the seed",
            )


def place_of_samples(dataset: Any) -> Place:
    """Where the class of a data set defines `__getitem__`."""
    code = getattr(type(dataset).__getitem__, "__code__", None)
    return (code.co_filename, code.co_firstlineno, "") if code is not None else ("", 0, "")


RULE = rule(SameNoise, "FL036", __doc__)

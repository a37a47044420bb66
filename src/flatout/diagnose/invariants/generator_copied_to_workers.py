"""All workers of a loader draw the same random numbers.

What:
    A data set with random samples returns the same ones in each of its workers: it keeps a generator from
    `__init__` (`numpy.random.default_rng(0)`, `random.Random`).
Why it matters:
    Each worker gets a copy of the data set with the generator in the same state. With four workers, every
    augmentation is drawn four times. Unless the workers persist, all of them restart from the same state in
    every epoch. PyTorch reseeds the global generators in each worker, but not a generator in an attribute.
How to fix it:
    Draw from the global generators (`torch.rand(())`, `numpy.random`), which differ in each worker. Or create
    the generator in the worker, seeded with `torch.initial_seed()`.
Example:
    import random
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Noisy(Dataset):
        def __init__(self):
            self.generator = random.Random(0)

        def __len__(self):
            return 32

        def __getitem__(self, index):
  -         return torch.ones(4) * self.generator.random()
  +         return torch.ones(4) * random.random()

  - loader = DataLoader(Noisy(), batch_size=8, num_workers=2)  # <-
  + loader = DataLoader(Noisy(), batch_size=8, num_workers=2)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/notes/randomness.html#dataloader
"""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from flatout.diagnose.invariant import Findings, Invariant, rule
from flatout.diagnose.worker_probe import Place, samples_in_worker
from flatout.trial.forked import in_fork

FETCHES = 3  # of one sample


class EqualWorkers(Invariant):
    """Fetches a sample a few times in two forks that start as two workers of the loader do."""

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        # loader -> None if its workers differ; else the places that seeded generators equally at their start
        self.equal: WeakKeyDictionary[Any, list[Place | None] | None] = WeakKeyDictionary()

    def batch(self, loader: Any, batch: Any, indices: Any) -> None:
        if loader not in self.program.training_loaders or loader in self.equal or not loader.num_workers:
            return
        if (
            not isinstance(indices, list)
            or not indices
            or (loader.num_workers == 1 and loader.persistent_workers)
        ):
            return
        self.equal[loader], answers = None, []
        for seed in (1000, 1001):  # one worker is started anew in each epoch
            worker = min(seed - 1000, loader.num_workers - 1)
            ask = partial(samples_in_worker, self.program.torch, loader, worker, seed, indices[0], FETCHES)
            answers.append(in_fork(ask))
        if None not in answers:
            (samples, begun, seeds), (others, other_begun, _) = answers
            if samples == others and len(set(samples)) == FETCHES:
                self.equal[loader] = [seeds.get(name) for name in begun if begun[name] == other_begun[name]]

    def findings(self) -> Findings:
        for loader, places in self.equal.items():
            if places == []:
                yield RULE.finding(
                    f"{who(loader)} the same random samples: the data set's generator is copied in the same state",
                    self.program.line_of(loader),
                    "draw from the global generator of torch or numpy, which differs in each worker",
                )


def who(loader: Any) -> str:
    workers = loader.num_workers
    return f"the {workers} workers return" if workers > 1 else "in each epoch, the worker returns"


RULE = rule(EqualWorkers, "FL014", __doc__)

"""A fixed seed is set in each worker of a loader.

What:
    A `worker_init_fn` seeds a random generator with a constant.
Why it matters:
    All workers draw the same numbers, and draw them again in every epoch. (By default, PyTorch gives each worker
    separate seeds for torch, random and NumPy, new in every epoch.)
How to fix it:
    Remove the line, or derive the seed from `torch.initial_seed()`, which differs between workers and epochs.
Example:
    import random
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Noisy(Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            return torch.ones(4) * random.random()

    def seed_worker(worker):
  -     random.seed(0)  # <-
  +     random.seed(torch.initial_seed() % 2**32)

    loader = DataLoader(Noisy(), batch_size=8, num_workers=2, worker_init_fn=seed_worker)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/notes/randomness.html#dataloader;
    torch/utils/data/_utils/worker.py seeds NumPy too
"""

from flatout.agent.frames import place_at
from flatout.diagnose.invariant import Findings, rule
from flatout.diagnose.invariants.generator_copied_to_workers import EqualWorkers, who


class SameSeedInWorkers(EqualWorkers):
    def findings(self) -> Findings:
        for loader, places in self.equal.items():
            for place in places or ():
                yield RULE.finding(
                    f"{who(loader)} the same random samples: worker_init_fn seeds with the same number in each of them",
                    place_at(*place) if place is not None else self.program.line_of(loader),
                    "remove it, or seed with torch.initial_seed() % 2**32",
                )


RULE = rule(SameSeedInWorkers, "FL013", __doc__)

"""The samples of the evaluation change from pass to pass.

What:
    A loader that only evaluates returned other content for the same samples in each pass, such as after random transforms.
Why it matters:
    The result of an evaluation depends on the draws. Two epochs, or two models, are compared on different data, and
    augmented samples are harder than real ones.
How to fix it:
    Give the evaluation its own data set, with transforms that draw nothing.
Example:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        def __init__(self, noise):
            self.rows, self.noise = torch.randn(32, 4), noise

        def __len__(self):
            return 32

        def __getitem__(self, i):
            return self.rows[i] + self.noise * torch.randn(4)

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = DataLoader(Rows(0.1), batch_size=8, shuffle=True)
  - test = DataLoader(Rows(0.1), batch_size=8)  # <-
  + test = DataLoader(Rows(0.0), batch_size=8)
    for epoch in range(4):
        for x in train:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            model.eval()
            total = sum(model(x).square().mean() for x in test)
            model.train()
"""

from typing import Any
from weakref import WeakKeyDictionary

from flatout.diagnose.invariant import Findings, Invariant, rule
from flatout.diagnose.invariants.evaluated_on_training_samples import row_digests
from flatout.schema.findings import Severity

MAX_SAMPLES, MIN_SAMPLES = 512, 16
MIN_PASSES, MIN_SHARE = 2, 0.9  # passes that differ from the one before, and their samples that do


class EvaluationVaries(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        # loader -> digests of its samples in this pass and in the one before, and passes that differ from the one before
        self.loaders: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()

    def pass_begins(self, loader: Any) -> None:
        now, _, varied = self.loaders.get(loader, ({}, {}, 0))
        self.loaders[loader] = [{}, now, varied]

    def batch(self, loader: Any, batch: Any, indices: Any) -> None:
        entry = self.loaders.get(loader)
        if entry is not None and isinstance(indices, list) and len(entry[0]) < MAX_SAMPLES:
            entry[0].update(zip(indices, row_digests(batch, len(indices), self.program.torch), strict=True))

    def pass_ends(self, loader: Any) -> None:
        entry = self.loaders.get(loader)
        if entry is not None:
            now, before, _ = entry
            common = now.keys() & before.keys()
            differ = sum(now[index] != before[index] for index in common)
            entry[2] += len(common) >= MIN_SAMPLES and differ >= MIN_SHARE * len(common)

    def findings(self) -> Findings:
        for loader, (_, _, varied) in self.loaders.items():
            if varied >= MIN_PASSES and loader not in self.program.training_loaders:
                yield RULE.finding(
                    f"in {varied} passes, this loader of the evaluation returned other content for the same samples than in the pass "
                    "before: its data set draws at random",
                    self.program.line_of(loader),
                    "a data set of its own, with transforms that draw nothing",
                )


RULE = rule(EvaluationVaries, "FL316", __doc__, Severity.FRAGILE)

"""itertools.cycle keeps every batch of a loader.

What:
    The program iterates over `itertools.cycle(loader)` for more than one epoch, and the loader shuffles.
Why it matters:
    `cycle` keeps each item of its first pass, so all batches of an epoch stay in memory. From the second epoch
    on it returns these same batches: in the same order, and with the same random augmentations.
How to fix it:
    Use a generator that starts the loader again: `while True: yield from loader`.
Example:
  - from itertools import cycle
    import torch
    from torch.utils.data import DataLoader

  + def endless(loader):
  +     while True:
  +         yield from loader

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - batches = cycle(DataLoader(torch.randn(64, 4), batch_size=8, shuffle=True))  # <-
  + batches = endless(DataLoader(torch.randn(64, 4), batch_size=8, shuffle=True))
    for _ in range(40):
        optimizer.zero_grad()
        model(next(batches)).square().mean().backward()
        optimizer.step()
Sources:
    https://docs.python.org/3/library/itertools.html#itertools.cycle
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule
from flatout.schema.findings import Severity

MIN_BATCHES = 2
MAX_BATCHES = 1 << 16


@dataclass
class FirstPass:
    line: Line | None
    backwards: int  # before
    batches: int = 0
    ended: bool = False
    trained: bool = False  # on each batch before the next one came
    again: int = 0  # batches of it that were used after its end, in order


class LoaderCycled(Invariant):
    calls = frozenset({"to", "cuda"})

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.passes: WeakKeyDictionary[Any, FirstPass | None] = WeakKeyDictionary()  # None: it began again
        self.numbers = program.tensor_map()  # first tensor of a batch -> its pass and number

    def pass_begins(self, loader: Any) -> None:
        if loader in self.passes or getattr(loader.sampler, "replacement", None) is not False:
            self.passes[loader] = None
        else:
            self.passes[loader] = FirstPass(line_here(), self.program.backwards)

    def batch(self, loader: Any, batch: Any, indices: Any) -> None:
        from torch.utils._pytree import tree_leaves

        now = self.passes.get(loader)
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, self.program.torch.Tensor)]
        if now is not None and tensors and now.batches < MAX_BATCHES:
            self.numbers[tensors[0]] = now, now.batches
            now.batches += 1

    def pass_ends(self, loader: Any) -> None:
        if (now := self.passes.get(loader)) is not None and not now.ended:
            now.ended, now.trained = True, self.program.backwards - now.backwards >= now.batches

    def forward_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        if self.program.forward_depth == 1:
            self._use(inputs)

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        self._use(args[:1])

    def _use(self, values: tuple[Any, ...]) -> None:
        for value in values:
            used = self.numbers.get(value) if isinstance(value, self.program.torch.Tensor) else None
            if used is not None and used[0].ended and used[1] == used[0].again % used[0].batches:
                used[0].again += 1

    def findings(self) -> Findings:
        for now in self.passes.values():
            if now is not None and now.trained and MIN_BATCHES <= now.batches <= now.again:
                yield RULE.finding(
                    f"all {now.batches} batches of the first epoch stay in memory, and come again in the same order "
                    f"({now.again} so far), though the loader shuffles",
                    now.line,
                    "a generator: while True: yield from loader",
                )


RULE = rule(LoaderCycled, "FL206", __doc__, Severity.MEMORY, sort_before=Severity.TIME)

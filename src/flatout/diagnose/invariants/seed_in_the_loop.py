"""The random generator is reset in every pass of the training loop.

What:
    `torch.manual_seed(...)` runs with the same number inside the training loop, or in the loop over epochs.
Why it matters:
    Dropout masks, noise and the order of the data restart from the same point. The "random" numbers are the
    same in every epoch or every step.
How to fix it:
    Seed once, before the loops. To make each pass repeatable on its own, seed with the pass:
    `torch.manual_seed(seed + epoch)`.
Example:
    import torch

  + torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
  -     torch.manual_seed(0)  # <-
        optimizer.zero_grad()
        model(torch.ones(8, 4)).square().mean().backward()
        optimizer.step()
"""

import hashlib
from collections import Counter
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule

MIN_TIMES = 4


class SeedInTheLoop(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.seed: tuple[Line | None, Any] | None = None  # its line and number, until the next backward pass
        self.start: list[Any] = []  # states of the generators after it
        self.iterators = 0  # of loaders, since then: each draws one number
        self.drawn: bytes | None = None  # digest of the states at the backward pass, until the next step
        # line and number of a seed, states at the backward pass after it, the optimizer that stepped next
        self.times: Counter[tuple[Any, ...]] = Counter()
        self.latest: tuple[Any, ...] = ()
        self.numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of optimizers
        self.next_number = count()

    def seeded(self, seed: Any) -> None:
        self.seed, self.start, self.iterators, self.drawn = (line_here(), seed), self._states(), 0, None

    def pass_begins(self, loader: Any) -> None:
        self.iterators += 1

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        if self.seed is None:
            return
        torch, states = self.program.torch, self._states()
        generator = torch.Generator()
        generator.set_state(self.start[0])
        for _ in range(self.iterators):
            torch.empty((), dtype=torch.int64).random_(generator=generator)
        unused = [generator.get_state(), *self.start[1:]]
        if not any(all(map(torch.equal, states, other)) for other in (unused, self.start)):
            digest = hashlib.blake2b(b"".join(state.numpy().tobytes() for state in states)).digest()
            self.latest, self.drawn = self.seed, digest
        self.seed = None

    def step_ends(self, optimizer: Any) -> None:
        if self.drawn is not None:
            number = self.numbers.setdefault(optimizer, next(self.next_number))
            key = (*self.latest, self.drawn, number)
            self.times[key] += 1
            self.drawn = None

    def _states(self) -> list[Any]:
        torch = self.program.torch
        on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
        return [torch.get_rng_state(), *on_gpu]

    def findings(self) -> Findings:
        lines = {line: (times, seed) for (line, seed, *_), times in reversed(self.times.most_common())}
        for line, (times, seed) in lines.items():
            if times >= MIN_TIMES:
                yield RULE.finding(
                    f"the seed was set to {seed} {times} times during one training: each time the same "
                    "random numbers followed",
                    line,
                    "seed once, before the loops",
                )


RULE = rule(SeedInTheLoop, "FL026", __doc__)

"""A cache with tensors as keys never finds an entry.

What:
    A dictionary is used as a cache: `if key not in cache: cache[key] = ...`. The key is a new tensor each time.
Why it matters:
    A dictionary finds a tensor only by its identity, not by its values. So each look-up fails, the value is
    computed again, and one more entry stays in memory.
How to fix it:
    Use numbers as keys: `tuple(key.tolist())`. To keep the keys off the device, take them from `shape`.
Example:
    import torch

    class Positions(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.cache = torch.nn.Linear(4, 1), {}

        def forward(self, x):
  -         size = torch.tensor(x.shape)
  +         size = tuple(x.shape)
            if size not in self.cache:
  -             self.cache[size] = torch.arange(4) / 4  # <-
  +             self.cache[size] = torch.arange(4) / 4
            return self.scale(x + self.cache[size])

    model = Positions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(130, 8, 4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""

import ast
import linecache
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

from flatout.agent.frames import place_at, user_modules, user_sources
from flatout.diagnose.invariant import Findings, Invariant, rule
from flatout.schema.findings import Severity

CHECKS = (32, 64, 128)  # steps
MIN_KEYS = 64


class TensorAsKey(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.sizes: dict[
            tuple[int, str], list[int]
        ] = {}  # of the dicts of an object that have tensors as keys
        self.places: dict[str, Any] = {}

    def step_ends(self, optimizer: Any) -> None:
        if self.program.steps in CHECKS:
            for key, cache in self._caches():
                self.sizes.setdefault(key, []).append(len(cache))
                if self.program.steps == CHECKS[-1]:
                    self.places[key[1]] = place_of_entry(key[1])

    def _caches(self) -> Iterator[tuple[tuple[int, str], Any]]:
        torch = self.program.torch
        modules = {module for root in self.program.roots for module in root.modules()}
        for holder in (*modules, *user_modules()):
            for name, value in list(vars(holder).items()):
                if isinstance(value, dict) and value:
                    key = next(reversed(value))
                    if isinstance(key, torch.Tensor) and not isinstance(key, torch.nn.Parameter):
                        yield (id(holder), name), value

    def findings(self) -> Findings:
        for (_, name), sizes in self.sizes.items():
            grown = [later - size for size, later in pairwise(sizes)]
            # one entry or more in each step
            if (
                len(sizes) == len(CHECKS)
                and sizes[-1] >= MIN_KEYS
                and grown[0] >= CHECKS[0]
                and grown[1] >= CHECKS[1]
            ):
                yield RULE.finding(
                    f"the dictionary `{name}` has {sizes[-1]:,} tensors as keys after {CHECKS[-1]} steps, and had {sizes[-2]:,} "
                    f"after {CHECKS[-2]}: a tensor is found by its identity only",
                    self.places.get(name),
                    "use numbers as keys: tuple(key.tolist())",
                )


def place_of_entry(name: str) -> Any:
    """Where the user's files set an entry of a dictionary of this name."""
    for file in sorted(user_sources()):
        with suppress(SyntaxError):
            for node in ast.walk(ast.parse("".join(linecache.getlines(file)))):
                for target in node.targets if isinstance(node, ast.Assign) else ():
                    if isinstance(target, ast.Subscript) and ast.unparse(target.value).split(".")[-1] == name:
                        return place_at(file, target.lineno)
    return None


RULE = rule(TensorAsKey, "FL207", __doc__, Severity.MEMORY, sort_before=Severity.TIME)

"""A value is summed over the ranks twice.

What:
    `all_reduce` overwrites its tensor with the sum over all ranks. The same tensor is reduced again although it has
    no new content. Or a running total is reduced each time that something is added to it.
Why it matters:
    The second sum multiplies what is already a sum by the number of ranks. A metric becomes too large, by a factor
    that depends on the number of ranks, and a total grows exponentially.
How to fix it:
    Reduce each tensor once: the total after the loop, or the new value of a pass before it is added.
Example:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = torch.zeros(1)
    for x in torch.randn(10, 8, 4):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        total += loss.detach()
  -     dist.all_reduce(total)  # <-
  + dist.all_reduce(total)
    print(total / 10 / dist.get_world_size())
Sources:
    https://docs.pytorch.org/docs/stable/distributed.html#collective-functions
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule

ADDS = frozenset({"add_", "__iadd__", "add", "__add__", "__radd__"})
MAX_ELEMENTS = 4096
MIN_GROWTHS = 3  # in a row


@dataclass
class Sum:
    """A tensor after its sum over the ranks. ``repeats``: sums in a row without new content."""

    line: Line | None
    version: int
    values: Any
    repeats: int = 0
    growths: int = 0


class ReducedTwice(Invariant):
    calls = ADDS

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.sums, self.ranks = program.tensor_map(), 1
        self.twice: dict[Line | None, Line | None] = {}
        self.growing: dict[Line | None, int] = {}

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        tensor = self.program.torch.Tensor
        for value in args[:2]:
            before = self.sums.get(value) if isinstance(value, tensor) else None
            if before is not None and isinstance(result, tensor):
                version = before.version + 1 if result is value else result._version
                self.sums[result] = replace(before, version=version, repeats=-1)

    def reduced(self, name: str, tensor: Any) -> None:
        self.ranks = ranks = self.program.torch.distributed.get_world_size()
        before = self.sums.pop(tensor, None)
        if name == "broadcast" or ranks < 2 or tensor.numel() > MAX_ELEMENTS or not self.program.backwards:
            return
        now, line = tensor.detach().double().cpu().flatten(), line_here()
        after = Sum(line, tensor._version, now)
        if before is not None and before.version == tensor._version and bool(before.values.any()):
            if before.repeats >= 0:
                if self.program.torch.allclose(now, ranks * before.values, rtol=1e-5, atol=0.0):
                    after.repeats = before.repeats + 1
                    self.twice[line] = before.line
                    if after.repeats > 1:  # a measurement, or a warm-up
                        self.twice.pop(line)
            elif float(now.abs().sum()) >= 0.99 * ranks * float(before.values.abs().sum()):
                after.growths = before.growths + 1
                if after.growths >= MIN_GROWTHS:
                    self.growing[line] = after.growths + 1
        self.sums[tensor] = after

    def findings(self) -> Findings:
        for line, first in self.twice.items():
            yield RULE.finding(
                f"line {first[1] if first is not None else '?'} has already summed this tensor over the ranks: this sum "
                f"multiplied it by {self.ranks}, their number",
                line,
                "reduce it once",
            )
        for line, times in self.growing.items():
            yield RULE.finding(
                f"this total was summed over the ranks {times} times while values were added to it: each sum multiplied the sums "
                f"before by {self.ranks}, the number of ranks",
                line,
                "reduce the total once, after the loop",
            )


RULE = rule(ReducedTwice, "FL043", __doc__)

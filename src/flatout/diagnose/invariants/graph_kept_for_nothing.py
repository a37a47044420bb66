"""The graph is kept after its only backward pass.

What:
    `loss.backward(retain_graph=True)` keeps the graph of every step, and no later backward pass goes through it.
Why it matters:
    All activations stay in memory until the loss is reassigned. The forward pass of the next step needs its
    memory in addition.
How to fix it:
    Remove `retain_graph=True`. If PyTorch then raises "Trying to backward through the graph a second time",
    this step uses a tensor of the last one. Find that tensor (a hidden state, a running loss) and detach it.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
  -     loss.backward(retain_graph=True)  # <-
  +     loss.backward()
        optimizer.step()
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, argument, line_here, rule
from flatout.diagnose.running_modules import MAX_NODES, graph_numbers, leaves_of
from flatout.schema.findings import Severity

MIN_TIMES = 5
MAX_GRAPHS = 64  # that are remembered


class GraphKeptForNothing(Invariant):
    calls = frozenset({"backward", "grad"})

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.graphs: deque[tuple[Line | None, set[int]]] = deque(maxlen=MAX_GRAPHS)
        self.times: dict[Line | None, int] = {}  # that a line kept a graph
        self.needed: set[Line | None] = set()

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        if self.graphs:
            numbers = graph_numbers(losses)
            self.needed |= {line for line, graph in self.graphs if not graph.isdisjoint(numbers)}

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        tensors = [each for each in leaves_of(args[0]) if each.grad_fn is not None]
        if name == "grad":
            self.backward_begins(tuple(tensors))
        elif argument(args, kwargs, 2, "retain_graph") and not argument(args, kwargs, 3, "create_graph"):
            line, numbers = line_here(), graph_numbers(tensors)
            self.graphs.append((line, numbers))
            self.times[line] = self.times.get(line, 0) + 1
            if len(numbers) >= MAX_NODES:
                self.needed.add(line)  # unknown

    def findings(self) -> Findings:
        for line, times in self.times.items():
            if times >= MIN_TIMES and line not in self.needed:
                yield RULE.finding(
                    f"this line kept {times} graphs, and no later backward pass went through any of them",
                    line,
                    "loss.backward()",
                )


RULE = rule(GraphKeptForNothing, "FL203", __doc__, Severity.MEMORY)

"""The copies of the model on the ranks drift apart.

What:
    The ranks exchange gradients, so that their models stay equal, but their weights differ, from one check to the next.
Why it matters:
    Gradients of different weights are averaged, and each rank applies them to its own. Only the model of rank 0 is
    saved and evaluated: the work of the others is lost, and it disturbs the training.
How to fix it:
    Let all ranks start from equal weights: `DistributedDataParallel` broadcasts those of rank 0. Call the wrapped
    model, not `model.module`, so that every backward pass exchanges gradients; use `no_sync()` only before the last
    backward pass of a step. Give no rank steps or learning rates of its own.
Example:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(4, 1)
  + for p in model.parameters():
  +     dist.broadcast(p.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(40, 8, 4):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
  -     optimizer.step()  # <-
  +     optimizer.step()
"""

from typing import Any

from flatout.diagnose.invariant import Findings, Invariant, place_here, rule
from flatout.diagnose.rank_notes import RankNotes, replicas_in

CHECKS = {1, 2, 4, 8, 12, 16, 24, 32} | {64 * i for i in range(1, 64)}  # steps of an optimizer
ELEMENTS = 64
TOLERANCE = 1e-4
MIN_DIFFERENT = 3  # checks in a row


class RanksDriftApart(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.notes = RankNotes(program.torch, "weights")
        self.checks: list[tuple[int, float]] = []  # step, the largest difference between ranks
        self.summed: dict[int, int] = {}  # parameter -> how often its gradient was summed over the ranks
        self.gradients: dict[int, int] = {}  # gradient -> parameter, since the last backward pass
        self.exchanges = False  # the last backward pass
        self.alone = 0  # steps without an exchange: the ranks may average their weights now and then
        self.place: Any = None

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        self.exchanges = any(root.require_backward_grad_sync for root in self._replicas())

    def backward_ends(self) -> None:
        self.gradients = {}

    def _replicas(self) -> list[Any]:
        return replicas_in(self.program.torch, self.program.roots)

    def reduced(self, name: str, tensor: Any) -> None:
        # of two ranks, there is no group but the world
        if name == "all_reduce" and self.program.torch.distributed.get_world_size() == 2:
            if not self.gradients:
                held = [p for o in self.program.optimizers for g in o.param_groups for p in g["params"]]
                self.gradients = {id(p.grad): id(p) for p in held if p.grad is not None}
            if (parameter := self.gradients.get(id(tensor))) is not None:
                self.summed[parameter] = self.summed.get(parameter, 0) + 1

    def step_ends(self, optimizer: Any) -> None:
        distributed = self.program.torch.distributed
        if (
            not (distributed.is_available() and distributed.is_initialized())
            or len(self.program.optimizers) != 1
        ):
            return
        step = self.program.steps
        self.alone += bool(self._replicas()) and not self.exchanges
        self.exchanges = False
        if step in CHECKS and (values := self._sampled(optimizer, step)):
            self.place = self.place or place_here()
            self.notes.tell(str(step), values)
        for name, (own, *others) in self.notes.received():
            size = max(map(abs, own)) or 1.0
            apart = max(abs(a - b) for other in others for a, b in zip(own, other, strict=True)) / size
            self.checks.append((int(name), apart))

    def _sampled(self, optimizer: Any, step: int) -> list[float]:
        """A few elements of the weights that the ranks should have in common."""
        common = {id(p) for root in self._replicas() for p in root.parameters()}
        common |= {parameter for parameter, times in self.summed.items() if times >= step}
        held = [p for g in optimizer.param_groups for p in g["params"] if id(p) in common and p.requires_grad]
        chosen = held[:: 1 + len(held) // ELEMENTS]
        return [float(p.detach().flatten()[p.numel() // 2]) for p in chosen if p.numel()]

    def findings(self) -> Findings:
        different = [apart > TOLERANCE for _, apart in self.checks]
        first = different.index(True) if any(different) else len(different)
        if len(different) - first >= MIN_DIFFERENT and all(different[first:]) and not self.alone:
            step, apart = self.checks[-1]
            yield RULE.finding(
                f"the weights of the ranks differ since step {self.checks[first][0]}, at step {step} by {apart:.1%} of the "
                "largest, though the ranks exchange gradients",
                self.place,
                "let every backward pass of a step exchange gradients, from equal weights on",
            )


RULE = rule(RanksDriftApart, "FL089", __doc__)

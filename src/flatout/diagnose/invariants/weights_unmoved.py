"""Optimizer steps are too small for the format of the weights.

What:
    The optimizer steps with gradients that are not 0, but after many steps most elements of the weights are as before.
Why it matters:
    bfloat16 keeps 8 significant bits and float16 11. A step below half of the last bit is rounded away: the weight
    never moves, however long the training lasts.
How to fix it:
    Keep the weights in float32 and compute under `torch.autocast`, or keep float32 master weights in the optimizer.
Example:
    import torch

  - model = torch.nn.Linear(64, 1).to(torch.bfloat16)
  + model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    for x in torch.randn(40, 8, 64):
        optimizer.zero_grad()
        model(x.to(model.weight.dtype)).float().square().mean().backward()
  -     optimizer.step()  # <-
  +     optimizer.step()
Sources:
    https://arxiv.org/abs/2010.06192
"""

import weakref
from typing import Any

from flatout.diagnose.invariant import Findings, Invariant, place_here, rule
from flatout.diagnose.observed_program import parameters_of

MIN_STEPS = 30
MAX_ELEMENTS = 1024  # that are compared, of each weight
MAX_IN_RUN = 4  # weights that are compared in a real run
MIN_SHARE = 0.5  # of the elements with a gradient
MIN_RATE = 0.1  # of the first learning rate: during a warm-up, weights may rest


class WeightsUnmoved(Invariant):
    in_run = True

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.first: dict[
            int, tuple[Any, int, Any]
        ] = {}  # weight -> itself, its version and its values after a step
        self.seen: set[int] = set()  # optimizers
        self.place: Any = None

    def step_ends(self, optimizer: Any) -> None:
        if id(optimizer) not in self.seen:
            self.seen.add(id(optimizer))
            self.place = self.place or place_here()
            weights = [p for p in parameters_of(optimizer) if p.numel() and not p.is_sparse]
            every = max(1, -(-len(weights) // MAX_IN_RUN)) if self.program.in_run else 1
            self.first.update({id(p): (weakref.ref(p), p._version, sample(p)) for p in weights[::every]})

    def findings(self) -> Findings:
        """Compare elements with a gradient: they should have moved."""
        weights = list[Any]()
        for optimizer in self.program.optimizers:
            for group in optimizer.param_groups:
                if float(group["lr"]) > MIN_RATE * float(group.get("initial_lr", 0.0)):
                    weights += [p for p in group["params"] if self._was_updated(p)]
        if not weights:
            return
        cat, size = self.program.torch.cat, len(weights)
        with_gradient = [sample(p.grad).cpu() != 0 for p in weights]
        unmoved = [(sample(p) == self.first[id(p)][2]).cpu() for p in weights]
        still, all_elements = int((cat(unmoved) & cat(with_gradient)).sum()), int(cat(with_gradient).sum())
        if still > MIN_SHARE * all_elements:
            weights = [
                weights[i]
                for i in range(size)
                if (unmoved[i] & with_gradient[i]).sum() > MIN_SHARE * with_gradient[i].sum()
            ]
            kind = str(weights[0].dtype).removeprefix("torch.")
            yield RULE.finding(
                f"{still / all_elements:.0%} of the elements of the weights did not move in {MIN_STEPS} steps or more, though they "
                f"have gradients: each step is rounded away in {kind} ({self.program.names(weights)})",
                self.place,
                "keep float32 weights, and compute under torch.autocast",
            )

    def _was_updated(self, p: Any) -> bool:
        ref, version, _ = self.first.get(id(p), (lambda: None, 0, None))
        return (
            ref() is p and p._version >= version + MIN_STEPS and p.grad is not None and not p.grad.is_sparse
        )


def sample(values: Any) -> Any:
    flat = values.detach().flatten()
    return flat[:: max(1, flat.numel() // MAX_ELEMENTS)].clone()


RULE = rule(WeightsUnmoved, "FL061", __doc__)

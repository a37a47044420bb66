"""The behaviour of two ranks when one fails, case by case in one pair of processes:

``two_ranks.py RANK FOLDER``. Writes FOLDER/RANK.json.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from flatout import Loop
from flatout.schema.errors import LoopError

RANK, FOLDER = int(sys.argv[1]), Path(sys.argv[2])
STEPS, SAMPLES, AT = 3, 8, 1
ENGINE = torch.autograd.Variable._execution_engine
EXCHANGING = {
    torch.ops.aten.mul.out,
    torch.ops.aten.div.out,
    torch.ops.aten.fill_.Scalar,
}  # into a bucket: a failure inside an exchange cannot be fixed


class Injector(TorchDispatchMode):
    """Runs out of memory at the operator of this number, once, while armed."""

    def __init__(self, number=-1):
        super().__init__()
        self.left, self.armed, self.fired = number, False, ""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if self.armed and operator.namespace != "c10d" and operator not in EXCHANGING:
            self.left -= 1
            if self.left == 0:
                self.armed, self.fired = False, str(operator)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return operator(*args, **(kwargs or {}))


class Network(nn.Module):
    def __init__(self, unused):
        super().__init__()
        self.body, self.head = (
            nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU()),
            nn.Linear(16, 3),
        )
        self.register_buffer("scale", torch.ones(()))
        if unused:
            self.idle = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.body(x)) * self.scale


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def by_count(model, batch):
    """The mean over the samples that are not of class 2; the last micro-batches may have none."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], ignore_index=2), (batch[1] != 2).sum()


def data(dtype, steps=STEPS):
    generator = torch.Generator().manual_seed(RANK)
    found = [
        (
            torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(0, 3, (SAMPLES,), generator=generator),
        )
        for _ in range(steps)
    ]
    for _, wanted in found[:2]:
        wanted[-2:] = 2
    return found


def train(
    number=None,
    phase="gradients",
    rank=1,
    at=AT,
    wrapped=True,
    loss=loss_fn,
    dtype=torch.float64,
    unused=False,
    parallel=None,
    steps=STEPS,
    **more,
):
    """Weights, the split of each step, the place of the failure on this rank, and its final message."""
    torch.manual_seed(0)
    model = Network(unused).to(dtype)
    trained = (
        DistributedDataParallel(
            model, **(parallel or {"bucket_cap_mb": 0.001}), find_unused_parameters=unused
        )
        if wrapped
        else model
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    if not wrapped:  # the user's own exchange
        optimizer.register_step_pre_hook(
            lambda *_: [distributed.all_reduce(p.grad) or p.grad.div_(2) for p in model.parameters()] and None
        )
    injector = Injector(number if number is not None and rank == RANK else -1)

    def arm(now):
        return lambda *_: setattr(
            injector, "armed", now and phase == "optimizer" and loop.index == at and not injector.fired
        )

    optimizer.register_step_pre_hook(arm(True))
    optimizer.register_step_post_hook(arm(False))

    def arm_inside(*_):
        injector.armed = phase == "gradients" and loop.index == at and not injector.fired

    def armed(model, batch):
        if number == 1:
            arm_inside()  # before the wrapper is called
        found = loss(model, batch)
        first = found[0] if isinstance(found, tuple) else found
        if first.requires_grad and phase == "gradients":
            first.register_hook(
                lambda _: ENGINE.queue_callback(lambda: setattr(injector, "armed", False))
            )  # when the backward pass has ended
        return found

    model.register_forward_pre_hook(arm_inside)

    loop = Loop(trained, optimizer, armed, data(dtype, steps), **more)
    taken, words = [], ""
    with injector:
        try:
            for step in loop:
                injector.armed = False
                taken.append(step)
        except LoopError as error:
            words = str(error)
    injector.armed = False
    return {
        "weights": [p.detach().double().flatten().tolist() for p in model.parameters()],
        "parts": [step.parts for step in taken],
        "skipped": [bool(step.skipped) for step in taken],
        "fired": injector.fired,
        "words": words,
        "micro_batch": loop.micro_batches.limit,
    }


def at_each(numbers, **how):
    return [train(number, **how) for number in numbers]


def halved(model, batch):
    """A machine with room for two samples at once on rank 1, and for four on rank 0."""
    if len(batch[0]) > (4, 2)[RANK]:
        raise torch.OutOfMemoryError("out of memory")
    return loss_fn(model, batch)


def infinite_once(model, batch):
    calls.append(1)
    return loss_fn(model, batch) * (1e30 if RANK == 1 and len(calls) == 4 else 1.0)


def nan_on_one(model, batch):
    calls.append(1)
    return loss_fn(model, batch) * (float("nan") if RANK == 1 and len(calls) == 6 else 1.0)


def contrastive_on_one(model, batch):
    """On rank 1 the loss of a batch does not follow from the losses of its parts."""
    found = model(batch[0])
    return nn.functional.cross_entropy(found @ found.T if RANK else found, torch.arange(len(found)) % 3)


def user_error(model, batch):
    calls.append(1)
    if RANK == 1 and len(calls) == 3:
        raise LoopError("of the user's own")
    return loss_fn(model, batch)


def gone(model, batch):
    calls.append(1)
    if RANK == 1 and len(calls) == 2:
        os._exit(0)
    return loss_fn(model, batch)


distributed.init_process_group(
    "gloo", init_method=f"file://{FOLDER / 'store'}", rank=RANK, world_size=2, timeout=timedelta(seconds=30)
)
calls = []
VIEWS = {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}
results = {
    "undisturbed": train(),
    "divided": train(micro_batch=4),
    "unused, undisturbed": train(unused=True),
    "counted": train(loss=by_count, micro_batch=2),
    "counted, whole": train(loss=by_count),
    # before the wrapper is called, in forward, in the loss, early and late in backward
    "failing": at_each((1, 5, 14, 24, 44)),
    "of rank 0 in the first step": at_each((1, 5, 44), rank=0, at=0),
    "in a window": at_each((5, 56, 96), micro_batch=4),
    "bucket views": at_each((31, 96), parallel=VIEWS, micro_batch=4),
    "unused": at_each((1, 25, 43), unused=True),
    "own exchange, failing": at_each((5, 40), wrapped=False),
    "optimizer": at_each((1, 9), phase="optimizer"),
    "auto": train(loss=halved, micro_batch="auto", reduction="mean", steps=14),
    "whole, 14": train(steps=14),
    "refused": train(5, loss=contrastive_on_one),
}
calls.clear()
results["fp16"] = train(
    loss=infinite_once, precision="fp16", dtype=torch.float32, micro_batch=4, reduction="mean"
)
calls.clear()
results["nan"] = train(loss=nan_on_one, micro_batch=4, reduction="mean")
calls.clear()
results["ended"] = train(loss=user_error)
distributed.barrier()
(FOLDER / f"{RANK}.json").write_text(json.dumps(results))
# The last case: a rank vanishes without a message in the middle of a step. The other one must not wait for
# it.
calls.clear()
print(train(loss=gone)["words"])

"""One model on several devices, one part behind the other: torch's own pipeline schedules, over the children of an nn.Sequential.

Every rank is given the same batches and has one part (a stage) of the model; micro-batches are the Loop's own and go from stage to stage. Ranks exchange
inside a step, so nobody can leave one that has begun: what a Loop otherwise mends (out of memory) ends the training here, in words.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.loop.reduction import MEAN, SUM, understood
from flatout.loop.tensor_parallel import several_ranks
from flatout.plan.errors import LoopError

SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}


@dataclass(frozen=True)
class Pipeline:
    """``stages``: how many equal parts, or the names of the children with which the second and later stages begin. As many as there are ranks."""

    stages: int | Sequence[str]
    schedule: str = "1f1b"


class _Asked(Exception):
    """Carries what a loss_fn has called its model with."""

    def __init__(self, args: tuple, kwargs: dict) -> None:
        super().__init__()
        self.given = args, kwargs


class PipelineParallel:
    def __init__(self, torch: Any, model: Any, optimizer: Any, asked: Pipeline, device: Any, reduction: str | None, finite: bool) -> None:
        """Leaves this rank its stage (the others' weights go to the meta device) and the optimizer its parameters. ``finite``: a loss must be.

        Raises LoopError, before anything has changed, for what cannot be divided.
        """
        self.torch, self.device, self.reduction, self.finite = torch, device, reduction, finite
        several_ranks(torch)
        from torch.distributed.pipelining import schedules

        distributed = torch.distributed
        self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        if asked.schedule not in SCHEDULES:
            raise LoopError(f"schedule={asked.schedule!r}: it is one of {', '.join(SCHEDULES)}.")
        self._schedule, self._filling = getattr(schedules, SCHEDULES[asked.schedule]), schedules.ScheduleGPipe
        if "arg_mbs" not in inspect.signature(self._schedule.step).parameters:
            raise LoopError(f"torch {torch.__version__} does not take micro-batches that are cut already. Pipelines need torch 2.14 or later.")
        parts = _cut(torch, model, asked.stages, self.ranks)
        _check(torch, model, parts, optimizer)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                distributed.broadcast(tensor.data, src=0)  # what rank 0 has, every rank has
        self.stage = torch.nn.Sequential(OrderedDict((name, child) for name, child in model.named_children() if name in parts[self.rank]))
        own = {id(p) for p in self.stage.parameters()}
        if not own & {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}:
            raise LoopError(f"stage {self.rank} ({', '.join(parts[self.rank])}) has no parameter to train. Let another child begin it.")
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in own]
        for name, child in model.named_children():
            if name not in parts[self.rank]:
                child.to("meta")
        self._made: dict[tuple[int, int], Any] = {}
        self._weight = 1.0
        self._parts: Sequence[Any] = ()
        self._loss_fn: Callable[[Any, Any], Any] | None = None

    def step(self, index: int, parts: Sequence[Any], sizes: Sequence[int], loss_fn: Callable[[Any, Any], Any]) -> Any:
        """Forward and backward of these micro-batches through all stages; the loss of all of them, on every rank. Raises LoopError."""
        if len(set(sizes)) > 1:
            raise LoopError(f"a pipeline passes micro-batches of one size on, and these have {', '.join(map(str, sizes))} samples. Take a micro_batch that "
                            "divides the loader's batch, and a loader with drop_last=True.")
        if len(parts) > 1 and self.reduction not in (MEAN, SUM):
            raise LoopError('whether a loss is a mean or a sum over samples cannot be tried out where nobody has the whole model. Say so: '
                            'reduction="mean" or "sum".')
        self._weight, self._loss_fn = 1.0 / len(parts) if self.reduction != SUM else 1.0, loss_fn
        schedule = self._schedule_of(len(parts), sizes[0])
        losses: list[Any] = []
        first, last = self.rank == 0, self.rank == self.ranks - 1
        self._parts, numbers = parts, [self.torch.tensor(at) for at in range(len(parts))]  # a target is a tensor to torch, and a batch is anything to us
        schedule.step(arg_mbs=[self._input(part) for part in parts] if first else [()] * len(parts), target_mbs=numbers if last else None,
                      losses=losses if last else None, return_outputs=False)
        distributed = self.torch.distributed
        none = self.torch.zeros((), dtype=self.torch.float64, device=self.device)
        loss = sum((each.detach().double() for each in losses), none)  # nothing but on the last stage
        distributed.broadcast(loss, src=self.ranks - 1)
        if self.finite and not math.isfinite(float(loss)):
            raise LoopError(f"the loss of step {index} is {float(loss)}. The weights are those before this step. on_nan=\"ignore\" trains on.")
        return loss

    def _schedule_of(self, count: int, size: int) -> Any:
        """Stages remember the shapes that they pass on."""
        if (count, size) not in self._made:
            from torch.distributed.pipelining import PipelineStage

            stage = PipelineStage(self.stage, self.rank, self.ranks, self.device)
            kind = self._schedule if count >= self.ranks else self._filling  # 1F1B has nothing to interleave in a pipeline that is never full
            self._made[count, size] = kind(stage, count, loss_fn=self._loss, scale_grads=False)
        return self._made[count, size]

    def _call(self, model: Any, part: Any) -> Any:
        assert self._loss_fn is not None  # a step has begun
        return self._loss_fn(model, part)

    def _input(self, part: Any) -> tuple[Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            raise _Asked(args, kwargs)

        try:
            self._call(ask, part)
        except _Asked as asked:
            args, kwargs = asked.given
            if len(args) == 1 and not kwargs:
                return (args[0],)
        raise LoopError("with a pipeline loss_fn calls its model once, with one tensor: loss_fn(model(x), y).")

    def _loss(self, output: Any, number: Any) -> Any:
        answer = understood(self._call(lambda *args, **kwargs: output, self._parts[int(number)]))
        if answer.count is not None or answer.values:
            raise LoopError("with a pipeline loss_fn gives the loss and nothing else: neither (loss, n) nor further values.")
        return answer.loss * self._weight

    def clip(self, parameters: Sequence[Any], limit: float) -> Any:
        """torch's clipping by the norm over all stages; the norm before it."""
        torch = self.torch
        gradients = [p.grad for p in parameters if p.grad is not None]
        square = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).square().sum()
        torch.distributed.all_reduce(square)
        total = square.sqrt()
        for gradient in gradients:
            gradient.mul_(torch.clamp(limit / (total + 1e-6), max=1.0))
        return total

    def local(self, tensor: Any) -> Any:
        return tensor

    def alike(self, index: int, loss: Any) -> None:
        """One rank has computed it for all."""


def _cut(torch: Any, model: Any, stages: int | Sequence[str], ranks: int) -> list[list[str]]:
    """The names of the children of each stage. Raises LoopError."""
    if type(model) is not torch.nn.Sequential:
        raise LoopError(f"a pipeline is cut between the children of an nn.Sequential, and this model is a {type(model).__name__}. Put its blocks into one.")
    names = [name for name, _ in model.named_children()]
    count = stages if isinstance(stages, int) else len(stages) + 1
    if count != ranks:
        raise LoopError(f"{count} stages on {ranks} ranks: each rank has one. Start {count} ranks, or make {ranks} stages.")
    if isinstance(stages, int):
        if count > len(names):
            raise LoopError(f"{count} stages of a model with {len(names)} children: there is none for each.")
        starts = [at * len(names) // count for at in range(count)]
    else:
        strange = [name for name in stages if name not in names]
        if strange:
            raise LoopError(f"no child of the model is called {strange[0]!r}, where a stage was to begin. It has {', '.join(names[:12])}.")
        starts = [0, *(names.index(name) for name in stages)]
        if starts != sorted(set(starts)):
            raise LoopError(f"stages={list(stages)}: the names stand in the model's order, without its first child.")
    return [names[start:end] for start, end in zip(starts, [*starts[1:], len(names)], strict=True)]


def _check(torch: Any, model: Any, parts: list[list[str]], optimizer: Any) -> None:
    owner: dict[int, int] = {}
    for at, part in enumerate(parts):
        for name in part:
            for p in model.get_submodule(name).parameters():
                if owner.setdefault(id(p), at) != at:
                    raise LoopError(f"child {name!r} shares a parameter with another stage, which would need its gradient. Keep both in one stage.")
    kind = torch.nn.modules.batchnorm._BatchNorm
    if any(isinstance(module, kind) for module in model.modules()):
        raise LoopError("this model normalises over the batch, which a pipeline cuts into micro-batches: their statistics are not the batch's.")
    if optimizer.state:
        raise LoopError("the optimizer has begun already, and its state is of the whole model. Divide the model in a new Loop with a new optimizer.")

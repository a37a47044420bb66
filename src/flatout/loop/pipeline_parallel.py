"""Pipeline parallelism with torch's own schedules, over the children of an nn.Sequential.

Every rank gets the same batches and has one stage of the model. The Loop's micro-batches pass from stage to
stage. Ranks communicate inside a step, so none can leave a step that has begun: out of memory ends the
training with an error.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.loop.reduction import MEAN, SUM, understood
from flatout.loop.tensor_parallel import several_ranks
from flatout.schema.errors import LoopError

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device
    from torch.nn import Module
    from torch.optim import Optimizer

SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}


@dataclass(frozen=True)
class Pipeline:
    """Splits an ``nn.Sequential`` into stages, one per rank. Pass it to ``flatout.Loop(parallel=...)``.

        # torchrun --standalone --nproc-per-node 2 train.py
        loop = flatout.Loop(model, optimizer, loss_fn, loader, micro_batch=4, reduction="mean",
                            parallel=flatout.Pipeline(2))

    Args:
        stages: The number of stages with equally many children, or the names of the children that begin the
            second and later stages. There must be as many stages as ranks.
        schedule: ``"1f1b"`` (default) or ``"gpipe"``. With fewer micro-batches than stages, GPipe is used.

    Raises:
        LoopError: Raised by `Loop` if the model cannot be split this way, or if torch is older than 2.14.
    """

    stages: int | Sequence[str]
    schedule: str = "1f1b"


class _Asked(Exception):
    """Carries the arguments that a loss_fn passes to its model."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.given = args, kwargs


class PipelineParallel:
    def __init__(
        self,
        torch: ModuleType,
        model: Module,
        optimizer: Optimizer,
        asked: Pipeline,
        device: Device,
        reduction: str | None,
        finite: bool,
    ) -> None:
        """Keep only this rank's stage of the model, and only its parameters in the optimizer.

        Other weights go to the meta device. ``finite``: a loss must be finite. Raises LoopError, before
        anything has changed, if the model cannot be split.
        """
        self.torch, self.device, self.reduction, self.finite = torch, device, reduction, finite
        several_ranks(torch)
        from torch.distributed.pipelining import schedules

        distributed = torch.distributed
        self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        if asked.schedule not in SCHEDULES:
            raise LoopError(
                f"schedule={asked.schedule!r} is not supported. Use one of {', '.join(SCHEDULES)}."
            )
        self._schedule, self._filling = getattr(schedules, SCHEDULES[asked.schedule]), schedules.ScheduleGPipe
        if "arg_mbs" not in inspect.signature(self._schedule.step).parameters:
            raise LoopError(
                f"torch {torch.__version__} does not accept micro-batches that are already split. Pipelines need torch 2.14 or later."
            )
        parts = _cut(torch, model, asked.stages, self.ranks)
        _check(torch, model, parts, optimizer)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                distributed.broadcast(tensor.data, src=0)
        self.stage = torch.nn.Sequential(
            OrderedDict((name, child) for name, child in model.named_children() if name in parts[self.rank])
        )
        own = {id(p) for p in self.stage.parameters()}
        if not own & {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}:
            raise LoopError(
                f"stage {self.rank} ({', '.join(parts[self.rank])}) has no trainable parameter. Begin it with another child."
            )
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in own]
        for name, child in model.named_children():
            if name not in parts[self.rank]:
                child.to("meta")
        self._made: dict[tuple[int, int], Any] = {}
        self._weight = 1.0
        self._parts: Sequence[Any] = ()
        self._loss_fn: Callable[[Any, Any], Any] | None = None

    def step(
        self, index: int, parts: Sequence[Any], sizes: Sequence[int], loss_fn: Callable[[Any, Any], Any]
    ) -> Any:
        """Run forward and backward of these micro-batches through all stages. Raises LoopError.

        Returns the loss of all micro-batches, on every rank.
        """
        if len(set(sizes)) > 1:
            raise LoopError(
                f"a pipeline needs micro-batches of one size, and these have {', '.join(map(str, sizes))} samples. Use a micro_batch that "
                "divides the loader's batch, and a loader with drop_last=True."
            )
        if len(parts) > 1 and self.reduction not in (MEAN, SUM):
            raise LoopError(
                "a pipeline cannot test whether the loss is a mean or a sum over samples, because no rank has the whole model. Pass "
                'reduction="mean" or "sum".'
            )
        self._weight, self._loss_fn = 1.0 / len(parts) if self.reduction != SUM else 1.0, loss_fn
        schedule = self._schedule_of(len(parts), sizes[0])
        losses: list[Any] = []
        first, last = self.rank == 0, self.rank == self.ranks - 1
        self._parts, numbers = (
            parts,
            [self.torch.tensor(at) for at in range(len(parts))],
        )  # torch expects tensor targets; a batch may be anything
        schedule.step(
            arg_mbs=[self._input(part) for part in parts] if first else [()] * len(parts),
            target_mbs=numbers if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        distributed = self.torch.distributed
        none = self.torch.zeros((), dtype=self.torch.float64, device=self.device)
        loss = sum((each.detach().double() for each in losses), none)  # empty except on the last stage
        distributed.broadcast(loss, src=self.ranks - 1)
        if self.finite and not math.isfinite(float(loss)):
            raise LoopError(
                f'the loss of step {index} is {float(loss)}. The weights are those before this step. on_nan="ignore" continues.'
            )
        return loss

    def _schedule_of(self, count: int, size: int) -> Any:
        """The schedule for this shape, cached: stages remember the shapes that they pass on."""
        if (count, size) not in self._made:
            from torch.distributed.pipelining import PipelineStage

            stage = PipelineStage(self.stage, self.rank, self.ranks, self.device)
            kind = (
                self._schedule if count >= self.ranks else self._filling
            )  # 1F1B cannot interleave if the pipeline is never full
            self._made[count, size] = kind(stage, count, loss_fn=self._loss, scale_grads=False)
        return self._made[count, size]

    def _call(self, model: Module, part: object) -> Any:
        assert self._loss_fn is not None  # a step has begun
        return self._loss_fn(model, part)

    def _input(self, part: object) -> tuple[Any]:
        def ask(*args: object, **kwargs: object) -> Any:
            raise _Asked(args, kwargs)

        try:
            self._call(ask, part)
        except _Asked as asked:
            args, kwargs = asked.given
            if len(args) == 1 and not kwargs:
                return (args[0],)
        raise LoopError(
            "with a pipeline, loss_fn must call its model once, with one tensor: loss(model(x), y)."
        )

    def _loss(self, output: object, number: Any) -> Any:
        answer = understood(self._call(lambda *args, **kwargs: output, self._parts[int(number)]))
        if answer.count is not None or answer.values:
            raise LoopError(
                "with a pipeline, loss_fn must return only the loss, without a count or further values."
            )
        return answer.loss * self._weight

    def clip(self, parameters: Sequence[Any], limit: float) -> Any:
        """Clip by the norm over all stages, as torch does, and return the norm before clipping."""
        torch = self.torch
        gradients = [p.grad for p in parameters if p.grad is not None]
        square = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).square().sum()
        torch.distributed.all_reduce(square)
        total = square.sqrt()
        for gradient in gradients:
            gradient.mul_(torch.clamp(limit / (total + 1e-6), max=1.0))
        return total

    def local(self, tensor: Tensor) -> Any:
        return tensor

    def alike(self, index: int, loss: Tensor) -> None:
        """Nothing to check: one rank computes the loss for all."""


def _cut(torch: ModuleType, model: Module, stages: int | Sequence[str], ranks: int) -> list[list[str]]:
    """The names of the children of each stage. Raises LoopError."""
    if type(model) is not torch.nn.Sequential:
        raise LoopError(
            f"a pipeline splits an nn.Sequential between its children, and this model is a {type(model).__name__}. Put its blocks into one."
        )
    names = [name for name, _ in model.named_children()]
    count = stages if isinstance(stages, int) else len(stages) + 1
    if count != ranks:
        raise LoopError(
            f"{count} stages on {ranks} ranks: each rank has one. Start {count} ranks, or make {ranks} stages."
        )
    if isinstance(stages, int):
        if count > len(names):
            raise LoopError(f"{count} stages need at least as many children; the model has {len(names)}.")
        starts = [at * len(names) // count for at in range(count)]
    else:
        strange = [name for name in stages if name not in names]
        if strange:
            raise LoopError(
                f"the model has no child {strange[0]!r} to begin a stage. It has {', '.join(names[:12])}."
            )
        starts = [0, *(names.index(name) for name in stages)]
        if starts != sorted(set(starts)):
            raise LoopError(
                f"stages={list(stages)} is out of order. List the names in the model's order, without its first child."
            )
    return [names[start:end] for start, end in zip(starts, [*starts[1:], len(names)], strict=True)]


def _check(torch: ModuleType, model: Module, parts: list[list[str]], optimizer: Optimizer) -> None:
    owner: dict[int, int] = {}
    for at, part in enumerate(parts):
        for name in part:
            for p in model.get_submodule(name).parameters():
                if owner.setdefault(id(p), at) != at:
                    raise LoopError(
                        f"child {name!r} shares a parameter with another stage, which would need its gradient. Put both in one stage."
                    )
    kind = torch.nn.modules.batchnorm._BatchNorm
    if any(isinstance(module, kind) for module in model.modules()):
        raise LoopError(
            "this model uses batch normalisation, and the statistics of a pipeline's micro-batches differ from the batch's."
        )
    if optimizer.state:
        raise LoopError(
            "the optimizer already has state, of the whole model. Split the model in a new Loop with a new optimizer."
        )

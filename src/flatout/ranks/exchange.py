"""The exchange of gradients: after a backward pass every rank has the average of what all ranks computed.

What a parameter had accumulated before is the same on every rank, so it passes through the average unchanged; several backward passes may be added
up. Parameters that went unused on some rank count as zero there, and stay without a gradient where nobody used them.

Buckets travel in one order on every rank, whatever order their gradients arrive in. A bucket leaves while the backward pass still runs, as soon as
all its gradients are there and those before it have left. Where several optimizers share a program, one pass touches a part of the parameters; then the
ranks first agree on which buckets there is anything new in, and the others stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

BUCKET_BYTES = 25 * 2**20  # what torch's own DistributedDataParallel takes
WATCHED_PASSES = 2  # none leaves early in these: does any gradient arrive twice?


class CannotExchange(RuntimeError):
    """A sentence: why the gradients of this program cannot be averaged between ranks."""


class Exchange:
    """``parameters`` are in the same order on every rank. ``in_parts``: a backward pass touches some of them, and another pass others."""

    def __init__(self, torch: Any, world: int, parameters: Sequence[Any], in_parts: bool) -> None:
        self.torch, self.world, self.parameters, self.in_parts = torch, world, list(parameters), in_parts
        self.buckets = _buckets(self.parameters)
        self.bucket_of = {at: number for number, bucket in enumerate(self.buckets) for at in bucket}
        self.passes = 0
        self.may_leave_early = not in_parts
        self.arrived: Counter[int] = Counter()
        self.left: list[tuple[Any, Any]] = []  # of this pass: flat gradients, and the exchange under way, bucket by bucket
        self._missing: list[int] = []  # gradients, bucket by bucket
        self.left_early = 0  # buckets, of the last pass
        self.bytes_brought = 0  # by this rank, in the last pass
        self._hooks = [parameter.register_post_accumulate_grad_hook(partial(self._arrives, at)) for at, parameter in enumerate(self.parameters)]

    def close(self) -> None:
        """Hear of no gradient any more."""
        for hook in self._hooks:
            hook.remove()

    # -- while the backward pass runs -------------------------------------------------------------------------------

    def begin(self) -> None:
        self.passes += 1
        self.arrived.clear()
        self.left, self.bytes_brought = [], 0
        self._missing = [len(bucket) for bucket in self.buckets]

    def _arrives(self, at: int, parameter: Any) -> None:
        self.arrived[at] += 1
        number = self.bucket_of[at]
        if self.arrived[at] > 1:
            if number < len(self.left):
                raise CannotExchange("a gradient arrived twice in one backward pass, after it had been sent (a block that is computed again twice?)")
            self.may_leave_early = False
            return
        self._missing[number] -= 1
        if self.may_leave_early and self.passes > WATCHED_PASSES:
            while len(self.left) < len(self.buckets) and not self._missing[len(self.left)]:
                self._leaves(len(self.left))

    def _leaves(self, number: int) -> None:
        flat = self._filled(self.buckets[number])
        self.bytes_brought += flat.numel() * flat.element_size()
        self.left.append((flat, self.torch.distributed.all_reduce(flat, async_op=True)))

    # -- after it ---------------------------------------------------------------------------------------------------

    def average(self, values: Sequence[Any] = ()) -> list[Any]:
        """Average gradients in place, and scalar tensors, which are answered in float32 or better. Raises CannotExchange."""
        self.left_early = len(self.left)
        numbers = self._touched() if self.in_parts else range(len(self.buckets))
        for number in list(numbers)[len(self.left):]:
            self._leaves(number)
        extra = self._extra(values)
        work = self.torch.distributed.all_reduce(extra, async_op=True)
        for _, under_way in self.left:
            under_way.wait()
        work.wait()
        with self.torch.no_grad():
            for number, (flat, _) in zip(numbers, self.left, strict=True):
                self._taken(self.buckets[number], flat.div_(self.world), extra[len(values):])
        return list(extra[:len(values)] / self.world)

    def _touched(self) -> list[int]:
        """The buckets that a gradient arrived in, on any rank."""
        if not self.parameters:
            return []
        mine = {self.bucket_of[at] for at in self.arrived}
        flags = self.torch.tensor([float(number in mine) for number in range(len(self.buckets))], device=self.parameters[0].device)
        self.torch.distributed.all_reduce(flags)
        return [number for number, flag in enumerate(flags.tolist()) if flag]

    def _filled(self, bucket: Sequence[int]) -> Any:
        parts = []
        for at in bucket:
            parameter = self.parameters[at]
            gradient = parameter.grad
            if gradient is None:
                parts.append(parameter.detach().new_zeros(parameter.numel()))
            elif gradient.layout != self.torch.strided:
                raise CannotExchange("its gradients are sparse (an embedding with sparse=True), which are not exchanged between ranks")
            else:
                parts.append(gradient.detach().reshape(-1))
        return self.torch.cat(parts) if len(parts) > 1 else parts[0].clone()

    def _extra(self, values: Sequence[Any]) -> Any:
        """The values, and for each parameter whether this rank has a gradient of it."""
        torch = self.torch
        device = next((tensor.device for tensor in (*self.parameters, *values)), torch.device("cpu"))
        dtype = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
        has = torch.tensor([parameter.grad is not None for parameter in self.parameters], dtype=dtype, device=device)
        return torch.cat([*(value.detach().to(device, dtype).reshape(1) for value in values), has])

    def _taken(self, bucket: Sequence[int], flat: Any, used: Any) -> None:
        begin = 0
        for at in bucket:
            parameter = self.parameters[at]
            part = flat[begin:begin + parameter.numel()].view(parameter.shape)
            begin += parameter.numel()
            if parameter.grad is not None:
                parameter.grad.copy_(part)
            elif float(used[at]) > 0:
                parameter.grad = part.clone()


def _buckets(parameters: Sequence[Any]) -> list[list[int]]:
    """Places of parameters that travel together: of one dtype and device, about ``BUCKET_BYTES`` each, the last layers first."""
    found: list[list[int]] = []
    filling: dict[tuple[Any, Any], tuple[list[int], int]] = {}
    for at in reversed(range(len(parameters))):
        parameter = parameters[at]
        key, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        bucket, held = filling.get(key, ([], BUCKET_BYTES))
        if held + size > BUCKET_BYTES:
            bucket, held = [], 0
            found.append(bucket)
        bucket.append(at)
        filling[key] = (bucket, held + size)
    return found

"""The exchange of gradients: after a backward pass every rank has the average of what all ranks computed.

What a parameter had accumulated before is the same on every rank, so it passes through the average unchanged; several backward passes may be added
up. Parameters that went unused on some rank count as zero there, and stay without a gradient where nobody used them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BUCKET_BYTES = 25 * 2**20  # what torch's own DistributedDataParallel takes


class SparseGradient(Exception):
    """A sentence: gradients of embeddings with sparse=True are not exchanged."""


class Exchange:
    """``parameters`` are in the same order on every rank."""

    def __init__(self, torch: Any, world: int, parameters: Sequence[Any]) -> None:
        self.torch, self.world, self.parameters = torch, world, list(parameters)
        self.buckets = _buckets(self.parameters)
        self.bytes_sent = 0  # of gradients, by this rank's count of what it brings

    def average(self, values: Sequence[Any] = ()) -> list[Any]:
        """Average gradients in place, and scalar tensors, which are answered in float32 or better. Raises SparseGradient."""
        works, flats = [], []
        for bucket in self.buckets:
            flat = self._filled(bucket)
            flats.append(flat)
            works.append(self.torch.distributed.all_reduce(flat, async_op=True))
            self.bytes_sent += flat.numel() * flat.element_size()
        extra = self._extra(values)
        if extra is not None:
            works.append(self.torch.distributed.all_reduce(extra, async_op=True))
        for work in works:
            work.wait()
        used = extra[len(values):] if extra is not None else None
        with self.torch.no_grad():
            for bucket, flat in zip(self.buckets, flats, strict=True):
                self._taken(bucket, flat.div_(self.world), used)
        return list(extra[:len(values)] / self.world) if extra is not None else []

    def _filled(self, bucket: Sequence[int]) -> Any:
        parts = []
        for at in bucket:
            parameter = self.parameters[at]
            gradient = parameter.grad
            if gradient is None:
                parts.append(parameter.new_zeros(parameter.numel()))
            elif gradient.layout != self.torch.strided:
                raise SparseGradient("its gradients are sparse (an embedding with sparse=True), which are not exchanged between ranks")
            else:
                parts.append(gradient.detach().reshape(-1))
        return self.torch.cat(parts) if len(parts) > 1 else parts[0].clone()

    def _extra(self, values: Sequence[Any]) -> Any:
        """The values, and for each parameter whether this rank has a gradient of it."""
        if not self.parameters:
            return None
        torch, device = self.torch, self.parameters[0].device
        dtype = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
        has = torch.tensor([parameter.grad is not None for parameter in self.parameters], dtype=dtype, device=device)
        return torch.cat([*(value.detach().to(device, dtype).reshape(1) for value in values), has])

    def _taken(self, bucket: Sequence[int], flat: Any, used: Any) -> None:
        at_element = 0
        for at in bucket:
            parameter = self.parameters[at]
            part = flat[at_element:at_element + parameter.numel()].view(parameter.shape)
            at_element += parameter.numel()
            if parameter.grad is not None:
                parameter.grad.copy_(part)
            elif used is not None and float(used[at]) > 0:
                parameter.grad = part.clone(memory_format=self.torch.preserve_format)


def _buckets(parameters: Sequence[Any]) -> list[list[int]]:
    """Places of parameters that travel together: of one dtype and device, about ``BUCKET_BYTES`` each, the last layers first."""
    found: list[list[int]] = []
    sizes: dict[tuple[Any, Any], tuple[list[int], int]] = {}
    for at in reversed(range(len(parameters))):
        parameter = parameters[at]
        key, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        bucket, held = sizes.get(key, (None, 0))
        if bucket is None or held + size > BUCKET_BYTES:
            bucket, held = [], 0
            found.append(bucket)
        bucket.append(at)
        sizes[key] = (bucket, held + size)
    return found

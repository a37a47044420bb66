"""Buckets under way: they leave one by one, and all ranks wait for them and take them further in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flatout.ranks.wire import Sending, Wire


class CannotExchange(RuntimeError):
    """A sentence: why the ranks of this program cannot be brought together."""


@dataclass(frozen=True)
class Traffic:
    """What one exchange handed to the backend on this rank. How often a byte crosses a link is the backend's affair: a ring carries each nearly twice.

    ``sent_bytes``: gradients (or the progress of a round of local steps). ``beside_bytes``: losses, which gradients there are, numbers of steps.
    ``left_early``: of the ``buckets``, those that left while the backward pass still ran.
    """

    sent_bytes: int = 0
    beside_bytes: int = 0
    collectives: int = 0
    buckets: int = 0
    left_early: int = 0


class Convoy:
    """One exchange: ``leave`` for each bucket, then ``arrive``. ``group``: of ranks, None for all."""

    def __init__(self, torch: Any, wire: Wire, group: Any = None) -> None:
        self.torch, self.wire, self.group = torch, wire, group
        self.sent_bytes = self.collectives = 0
        self._device = "cpu"
        self._under_way: list[tuple[Sending, Any]] = []

    def __len__(self) -> int:
        return len(self._under_way)

    def leave(self, flat: Any, parameters: Sequence[Any]) -> None:
        sending = self.wire.send(flat, parameters, self._start)
        self._device = flat.device.type
        with self.torch.no_grad(), self.torch.autocast(self._device, enabled=False):  # a backward pass may run under it
            self._under_way.append((sending, next(sending)))

    def arrive(self) -> list[Any]:
        """The means, in the order in which the buckets left."""
        means: list[Any] = [None] * len(self._under_way)
        waiting = list(enumerate(self._under_way))
        with self.torch.no_grad(), self.torch.autocast(self._device, enabled=False):
            while waiting:
                further = []
                for at, (sending, work) in waiting:
                    work.wait()
                    try:
                        further.append((at, (sending, next(sending))))
                    except StopIteration as arrived:
                        means[at] = arrived.value
                waiting = further
        return means

    def _start(self, tensor: Any) -> Any:
        self.sent_bytes += tensor.numel() * tensor.element_size()
        self.collectives += 1
        return self.torch.distributed.all_reduce(tensor, group=self.group, async_op=True)


def buckets_of(parameters: Sequence[Any], most_bytes: int | None) -> list[list[int]]:
    """Places of parameters that travel together: of one dtype and device, about ``most_bytes`` each (all where None), the last layers first."""
    found: list[list[int]] = []
    filling: dict[tuple[Any, Any], tuple[list[int], int]] = {}
    for at in reversed(range(len(parameters))):
        parameter = parameters[at]
        key, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        bucket, held = filling.get(key, ([], 0))
        if not bucket or (most_bytes is not None and held + size > most_bytes):
            bucket, held = [], 0
            found.append(bucket)
        bucket.append(at)
        filling[key] = (bucket, held + size)
    return found


def packed(torch: Any, tensors: Sequence[Any]) -> Any:
    """One flat tensor with a copy of each."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1).clone()


def unpacked(flat: Any, parameters: Sequence[Any]) -> list[Any]:
    """Views of ``flat`` in the shapes of the parameters."""
    return [part.view(p.shape) for part, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)]

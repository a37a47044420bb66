"""A queue of buckets in transit: they leave one by one, and all ranks complete them in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.distributed.wire import GradientCodec, Sending

if TYPE_CHECKING:
    from torch import Tensor


class CannotExchange(RuntimeError):
    """The ranks of this program cannot be synchronised; the message says why."""


@dataclass(frozen=True)
class Traffic:
    """The data that one exchange passed to the backend on this rank.

    How often a byte crosses a link depends on the backend: a ring sends each byte nearly twice.
    ``sent_bytes``: gradients (or the progress of a round of local steps). ``beside_bytes``: losses, flags of
    present gradients, step counts. ``left_early``: of the ``buckets``, those that left during the backward
    pass.
    """

    sent_bytes: int = 0
    beside_bytes: int = 0
    collectives: int = 0
    buckets: int = 0
    left_early: int = 0


class BucketQueue:
    """One exchange: call ``leave`` for each bucket, then ``arrive``. ``group``: of ranks, None for all."""

    def __init__(self, torch: ModuleType, wire: GradientCodec, group: object = None) -> None:
        self.torch, self.wire, self.group = torch, wire, group
        self.sent_bytes = self.collectives = 0
        self._device = "cpu"
        self._under_way: list[tuple[Sending, Any]] = []

    def __len__(self) -> int:
        return len(self._under_way)

    def leave(self, flat: Tensor, parameters: Sequence[Any]) -> None:
        sending = self.wire.send(flat, parameters, self._start)
        self._device = flat.device.type
        with (
            self.torch.no_grad(),
            self.torch.autocast(self._device, enabled=False),
        ):  # a backward pass may run inside autocast
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

    def _start(self, tensor: Tensor) -> Any:
        self.sent_bytes += tensor.numel() * tensor.element_size()
        self.collectives += 1
        return self.torch.distributed.all_reduce(tensor, group=self.group, async_op=True)


def buckets_of(parameters: Sequence[Any], most_bytes: int | None) -> list[list[int]]:
    """Group parameters into buckets of one dtype and device, of about ``most_bytes`` each.

    The last layers come first.

    With ``most_bytes=None`` there is one bucket per dtype and device. Returns indices.
    """
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


def packed(torch: ModuleType, tensors: Sequence[Any]) -> Any:
    """One flat tensor with a copy of each."""
    return (
        torch.cat([tensor.reshape(-1) for tensor in tensors])
        if len(tensors) > 1
        else tensors[0].reshape(-1).clone()
    )


def unpacked(flat: Tensor, parameters: Sequence[Any]) -> list[Any]:
    """Views of ``flat`` in the shapes of the parameters."""
    return [
        part.view(p.shape)
        for part, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)
    ]


def same_objects(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))

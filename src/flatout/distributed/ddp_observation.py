"""Observes a script's DistributedDataParallel."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.distributed.bucket_queue import BucketQueue

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import GradBucket, ProcessGroup
    from torch.nn import Parameter
    from torch.nn.parallel import DistributedDataParallel

    from flatout.distributed.script_ddp import ScriptDdp
    from flatout.distributed.wire import GradientCodec

OBSERVED_PASSES = 4


def buffers_of(ddp: DistributedDataParallel) -> list[tuple[Any, ...]]:
    """The address of each buffer and its number of writes."""
    return [
        (name, buffer.data_ptr(), buffer._version if not buffer.is_inference() else object())
        for name, buffer in ddp.module.named_buffers()
    ]


def device_of(torch: ModuleType, ddp: DistributedDataParallel) -> Any:
    """The device for a flag exchanged by ranks.

    It is the host if the group supports it, to avoid a synchronisation.
    """
    return "cpu" if any(device.type == "cpu" for device in ddp.process_group._device_types) else ddp.device


class Sending:
    """Sends the buckets of successive backward passes. torch waits for the result of ``leave``."""

    def __init__(self, torch: ModuleType, wire: GradientCodec, group: ProcessGroup, parameters: int) -> None:
        self.torch, self.wire, self.group, self.parameters = torch, wire, group, parameters
        self.begin()

    def begin(self) -> None:
        self._bucket_queue, self._futures, self._left = (
            BucketQueue(self.torch, self.wire, self.group),
            list[Any](),
            0,
        )

    def leave(self, bucket: GradBucket) -> Any:
        flat, parameters = bucket.buffer(), bucket.parameters()
        future = self.torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
        self._futures.append(future)
        self._left += len(parameters)
        self._bucket_queue.leave(flat, parameters)
        if self._left == self.parameters:  # with a static graph the index does not identify the last bucket
            bucket_queue, futures = self._bucket_queue, self._futures
            self.begin()
            for each, mean in zip(futures, bucket_queue.arrive(), strict=True):
                each.set_result(mean)
        return future


class Observed:
    """Observations of some passes: ``verdict`` by the setting that it allows, None until there are enough."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self.verdict: dict[str, bool | None] = {"gradient_as_bucket_view": None, "static_graph": None}
        self._parameters, self._keeps = parameters, False
        self._orders: list[list[int]] = []
        self._gradients: list[Any] = []
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._got, at)) for at, p in enumerate(parameters)
        ]

    @property
    def complete(self) -> bool:
        return not self._hooks

    def _got(self, at: int, parameter: Parameter) -> None:
        self._orders[-1].append(at)
        self._gradients.append((at, weakref.ref(parameter.grad)))

    def pass_begins(self) -> None:
        own = [p.grad for p in self._parameters]
        self._keeps |= any(
            (held := gradient()) is not None and held is not own[at] for at, gradient in self._gradients
        )
        self._gradients.clear()
        if len(self._orders) == OBSERVED_PASSES:
            self.verdict = {
                "gradient_as_bucket_view": not self._keeps,
                "static_graph": all(order == self._orders[0] for order in self._orders),
            }
            self.close()
        self._orders.append([])

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


HELD: weakref.WeakKeyDictionary[Any, ScriptDdp] = weakref.WeakKeyDictionary()
_PATCHES: list[Any] = []  # a ledger, while any DistributedDataParallel is changed


def patch(torch: ModuleType, ledgers: Callable[[], Any]) -> None:
    if not _PATCHES:
        _PATCHES.append(ledgers())
        ddp = torch.nn.parallel.DistributedDataParallel
        _PATCHES[0].set(ddp, "_pre_forward", _pre_forward(torch, ddp._pre_forward))
        _PATCHES[0].set(ddp, "register_comm_hook", _register_comm_hook(ddp.register_comm_hook))
        _PATCHES[0].set(torch.Tensor, "detach_", _detach_(torch.Tensor.detach_))


def _pre_forward(torch: ModuleType, really: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(really)
    def pre_forward(ddp: DistributedDataParallel, *inputs: object, **kwargs: object) -> Any:
        own = HELD.get(ddp)
        if own is None or torch.compiler.is_compiling():
            return really(ddp, *inputs, **kwargs)
        own.before_forward(ddp)
        if all(each.rests for each in HELD.values()) and _PATCHES:
            _PATCHES.pop().restore()
        with own.broadcast(ddp):
            return really(ddp, *inputs, **kwargs)

    return pre_forward


def _register_comm_hook(really: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(really)
    def register_comm_hook(ddp: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
        own = HELD.get(ddp)
        if own is not None and hook is not own.hook:
            own.give_way(ddp)
        really(ddp, state, hook)

    return register_comm_hook


def _detach_(really: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(really)
    def detach_(tensor: Tensor) -> Any:
        """A gradient that is a bucket view has nothing to detach, and torch raises an error for views."""
        return tensor if tensor._is_view() and not tensor.requires_grad else really(tensor)

    return detach_

"""The exchange of gradients: after a backward pass every rank has the average over all ranks.

Values accumulated by earlier passes are the same on every rank. A plain wire leaves them unchanged in the
average. A lossy one would round them again in every pass. There they are set aside, only the new part is
sent, and its mean is added. A parameter unused on some rank counts as zero there. If no rank used it, it
stays without a gradient.

Buckets leave in the same order on every rank, whatever order their gradients arrive in. A bucket leaves
during the backward pass, once its gradients are complete and the earlier buckets have left. With several
optimizers, one pass touches only some parameters. The ranks then first agree on the buckets with new
gradients, and send only these.

The transport (``TransportSettings``) may change at run time: each rank reports its preference with every pass. If all
agree, it applies from the next pass on. The formats of all ranks therefore always match, even if ranks learn
of a change at different steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.distributed.bucket_queue import (
    BucketQueue,
    CannotExchange,
    Traffic,
    buckets_of,
    packed,
    unpacked,
)
from flatout.distributed.wire import TransportSettings
from flatout.job.rank_environment import RankEnvironment

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

WATCHED_PASSES = 2  # no bucket leaves early in these: check for gradients that arrive twice


class Exchange:
    """``parameters`` are in the same order on every rank.

    ``in_parts``: each backward pass touches only some of them.
    """

    def __init__(
        self,
        torch: ModuleType,
        here: RankEnvironment,
        parameters: Sequence[Any],
        in_parts: bool,
        terms: TransportSettings,
    ) -> None:
        self.torch, self.here, self.parameters, self.in_parts = torch, here, list(parameters), in_parts
        self.passes = 0
        self.may_leave_early = not in_parts
        self.arrived: Counter[int] = Counter()
        self.aside: dict[int, Any] = {}  # gradients accumulated before this pass
        self.traffic = Traffic()  # of the last pass
        self._missing: list[int] = []  # number of gradients per bucket
        self._travel_under(terms)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrives, at))
            for at, parameter in enumerate(self.parameters)
        ]

    def close(self) -> None:
        """Remove the gradient hooks."""
        for hook in self._hooks:
            hook.remove()

    def _travel_under(self, terms: TransportSettings) -> None:
        self.terms, self.wire = terms, terms.way.make(self.torch, self.here.world_size)
        self.buckets = buckets_of(self.parameters, terms.bucket_bytes)
        self.bucket_of = {at: number for number, bucket in enumerate(self.buckets) for at in bucket}
        self.bucket_queue = BucketQueue(self.torch, self.wire)

    # -- while the backward pass runs ------------------------------------------------------------------------

    def begin(self) -> None:
        self.passes += 1
        self.arrived.clear()
        self.bucket_queue = BucketQueue(self.torch, self.wire)
        self._missing = [len(bucket) for bucket in self.buckets]
        if self.wire.lossy:
            for at, parameter in enumerate(self.parameters):
                if parameter.grad is not None:
                    self.aside[at], parameter.grad = parameter.grad, None

    def give_up(self) -> None:
        """The pass has failed: restore the gradients accumulated before it."""
        for at, gradient in self.aside.items():
            self.parameters[at].grad = gradient
        self.aside.clear()

    def _arrives(self, at: int, parameter: Parameter) -> None:
        self.arrived[at] += 1
        number = self.bucket_of[at]
        if self.arrived[at] > 1:
            if number < len(self.bucket_queue):
                raise CannotExchange(
                    "a gradient arrived twice in one backward pass, after it was sent (a block that is recomputed twice?)"
                )
            self.may_leave_early = False
            return
        self._missing[number] -= 1
        if self.may_leave_early and self.passes > WATCHED_PASSES:
            while len(self.bucket_queue) < len(self.buckets) and not self._missing[len(self.bucket_queue)]:
                self._leaves(len(self.bucket_queue))

    def _leaves(self, number: int) -> None:
        bucket = self.buckets[number]
        self.bucket_queue.leave(self._filled(bucket), [self.parameters[at] for at in bucket])

    # -- after it --------------------------------------------------------------------------------------------

    def average(self, values: Sequence[Any], wanted: TransportSettings) -> list[Any]:
        """Average gradients in place, and scalar tensors, which are returned in float32 or better.

        Raises CannotExchange.

        ``wanted`` applies from the next pass on if every rank requests it now.
        """
        left_early, world = len(self.bucket_queue), self.here.world_size
        numbers = list(self._touched() if self.in_parts else range(len(self.buckets)))
        for number in numbers[left_early:]:
            self._leaves(number)
        extra = self._extra(values, wanted)
        work = self.torch.distributed.all_reduce(extra, async_op=True)
        means = self.bucket_queue.arrive()
        work.wait()
        words, used = extra[len(values) : len(values) + world], extra[len(values) + world :]
        with self.torch.no_grad():
            for number, flat in zip(numbers, means, strict=True):
                self._taken(self.buckets[number], flat, used)
            self.give_up()  # of buckets that stayed
        flags = len(self.buckets) * 4 if self.in_parts else 0
        self.traffic = Traffic(
            self.bucket_queue.sent_bytes,
            extra.numel() * extra.element_size() + flags,
            self.bucket_queue.collectives + 1 + bool(flags),
            len(means),
            left_early,
        )
        if wanted != self.terms and words.tolist() == [wanted.word] * world:
            self._travel_under(wanted)
        return list(extra[: len(values)] / world)

    def _touched(self) -> list[int]:
        """The buckets that received a gradient on any rank."""
        if not self.parameters:
            return []
        mine = {self.bucket_of[at] for at in self.arrived}
        flags = self.torch.tensor(
            [float(number in mine) for number in range(len(self.buckets))], device=self.parameters[0].device
        )
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
                raise CannotExchange(
                    "its gradients are sparse (an embedding with sparse=True), and flatout cannot exchange sparse gradients"
                )
            else:
                parts.append(gradient.detach())
        return packed(self.torch, parts)

    def _extra(self, values: Sequence[Any], wanted: TransportSettings) -> Any:
        """The values, each rank's preference, and for each parameter whether this rank has a gradient."""
        torch = self.torch
        device = next((tensor.device for tensor in (*self.parameters, *values)), torch.device("cpu"))
        dtype = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
        words = [wanted.word if rank == self.here.rank else 0.0 for rank in range(self.here.world_size)]
        has = [float(parameter.grad is not None) for parameter in self.parameters]
        return torch.cat(
            [
                *(value.detach().to(device, dtype).reshape(1) for value in values),
                torch.tensor([*words, *has], dtype=dtype, device=device),
            ]
        )

    def _taken(self, bucket: Sequence[int], flat: Tensor, used: Tensor) -> None:
        for at, part in zip(bucket, unpacked(flat, [self.parameters[at] for at in bucket]), strict=True):
            parameter = self.parameters[at]
            if at in self.aside:
                if parameter.grad is not None or float(used[at]) > 0:
                    self.aside[at].add_(part)
                parameter.grad = self.aside.pop(at)
            elif parameter.grad is not None:
                parameter.grad.copy_(part)
            elif float(used[at]) > 0:
                parameter.grad = part.clone()

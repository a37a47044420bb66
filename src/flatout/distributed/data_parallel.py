"""A single-device script, run data-parallel: every rank runs all of it, on its share of each training batch.

    a batch             each rank computes its own samples (batches.py)
    first forward       parameters and buffers are made equal to rank 0's
    a backward pass     starts with the share's weight and ends with the exchange of gradients (exchange.py);
                        the loss then reads as that of the whole batch
    an evaluation       runs whole on every rank, with rank 0's buffers; split on request (evaluating.py)

Every decision that the script derives from a loss, a gradient or an evaluation is therefore the same on every
rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.distributed.division import ALL, CUT, DIVIDED, DOOR, INDEX, OWN, WHOLE
from flatout.distributed.gradient_exchange import GradientExchange
from flatout.distributed.normalisation import over_all_ranks
from flatout.distributed.rendezvous import join
from flatout.distributed.single_process import must_be_the_rank, one_device, one_process

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

NAME = "data_parallel"
COUNTS = "counts that the script makes of training batches (right answers, samples) cover rank 0's share; with --whole-batches they cover whole batches"
STATISTICS = "batch normalisation uses the statistics of each rank's share; with --sync-batchnorm, those of the whole batch"


class DataParallelScript(GradientExchange):
    """Everything installed on this rank; ``ledger`` removes it."""

    def install(self) -> None:
        self.batches.install(self.ledger)
        one_process(self.torch, self.ledger)
        one_device(self.torch, self.ledger)
        self.ledger.set(self.torch.nn.Module, "train", self._wrap_train(self.torch.nn.Module.train))
        self.ledger.set(self.torch.autograd, "backward", self._wrap_backward(self.torch.autograd.backward))
        self._search()
        if self.division.batches in (INDEX, CUT):
            self.context.report(NAME, COUNTS)

    # -- the model -------------------------------------------------------------------------------------------

    def _search(self) -> None:
        """Find modules that are called with gradients on and outside any other module.

        Their parameters are exchanged.
        """
        divided, torch = self, self.torch
        module_class = torch.nn.Module
        call = module_class.__call__
        open_calls = [0]

        @wraps(call)
        def call_seen(module: Module, *args: object, **kwargs: object) -> Any:
            if not open_calls[0] and torch.is_grad_enabled() and not divided.in_backward:
                divided._meet(module)
            open_calls[0] += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                open_calls[0] -= 1

        self.ledger.set(module_class, "__call__", call_seen)
        self.stop_searching = lambda: self.ledger.set(module_class, "__call__", call)

    def _meet(self, module: Module) -> None:
        """Handle a module's first forward pass; the other ranks are at the same point."""
        if (
            any(root() is module for root in self.roots)
            or not any(p.requires_grad for p in module.parameters())
            or self._in_worker()
        ):
            return
        must_be_the_rank(self.torch)
        parameters = [*module.parameters()]
        if not self.joined:
            self.joined = True
            join(self.torch, self.here, parameters[0].device, self.ledger)
        self.roots.append(weakref.ref(module))
        self._make_equal([*(p for p in parameters if not self._is_sharded(p)), *module.buffers()])
        if self.sharding is not None:
            self.sharding.shard(module)
        if self.division.batchnorm == ALL:
            over_all_ranks(self.torch, module, self.ledger)
        elif any(isinstance(each, self.torch.nn.modules.batchnorm._BatchNorm) for each in module.modules()):
            self.context.report(NAME, STATISTICS)
        self.context.wrap_forward(module, partial(self._wrap_forward, module), self.ledger)

    def _make_equal(self, tensors: Iterable[Any]) -> None:
        """Copy rank 0's values to every rank."""
        for tensor in tensors:
            dense = (
                tensor.data.contiguous()
            )  # a copy only for other memory formats, which some backends reject
            self.torch.distributed.broadcast(dense, src=0)
            if dense.data_ptr() != tensor.data_ptr():
                tensor.data.copy_(dense)

    def _wrap_forward(self, module: Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        divided, torch = self, self.torch

        @wraps(forward)
        def forward_divided(*args: object, **kwargs: object) -> Any:
            if divided.depth:
                return forward(*args, **kwargs)
            at_the_door = (
                divided.division.batches in (DOOR, WHOLE)
                and torch.is_grad_enabled()
                and not divided.in_backward
            )
            if not torch.is_grad_enabled():
                divided._before_evaluation()
                if (
                    divided.division.evaluation == DIVIDED
                    and not divided.in_backward
                    and not divided._in_worker()
                ):
                    return divided._evaluated(module, forward, args, kwargs)
            elif at_the_door:
                args, kwargs = divided._through_the_door(args, kwargs)
            divided.depth += 1
            divided.batches.inside = at_the_door
            try:
                with (
                    divided.batches.streams.own()
                    if at_the_door and divided.division.draws == OWN
                    else nullcontext()
                ):
                    output = forward(*args, **kwargs)
            finally:
                divided.depth -= 1
                divided.batches.inside = False
            return divided._behind_the_door(output) if at_the_door else output

        return forward_divided

    def _evaluated(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.depth += 1
        try:
            return self.evaluating(module, forward, args, kwargs)
        finally:
            self.depth -= 1

    def _in_worker(self) -> bool:
        """Whether this process is a DataLoader worker, which trains nothing."""
        return self.torch.utils.data.get_worker_info() is not None

    def _wrap_train(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Detect evaluations that bypass the roots (``model.module``, an encoder alone).

        They begin with ``eval()``.
        """
        divided = self

        @wraps(train)
        def train_seen(module: Module, mode: bool = True) -> Any:
            if not mode:
                divided._before_evaluation()
            return train(module, mode)

        return train_seen

    def _before_evaluation(self) -> None:
        if self._in_worker():
            return
        if self.local is not None:
            self.local.meet()
        if self.stale_buffers:
            self.stale_buffers = False
            self._make_equal(buffer for root in self._live_roots() for buffer in root.buffers())

    # -- backward --------------------------------------------------------------------------------------------

    def _wrap_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        divided, torch = self, self.torch

        @wraps(backward)
        def backward_divided(
            tensors: list[Tensor], grad_tensors: object = None, *args: object, **kwargs: object
        ) -> Any:
            if divided.in_backward or not divided.joined or divided.batches.share is None:
                return backward(tensors, grad_tensors, *args, **kwargs)
            losses = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
            factor = divided._factor()
            exchange = divided._exchange_of_now()
            divided.in_backward = True
            try:
                result = backward(losses, weighted(torch, losses, grad_tensors, factor), *args, **kwargs)
            except BaseException:
                if exchange is not None:
                    exchange.give_up()
                raise
            finally:
                divided.in_backward = False
            if exchange is not None:
                divided._average(
                    exchange,
                    [divided.context.without_scale(loss) for loss in losses if not loss.dim()],
                    factor,
                )
            divided._has_learned()
            return result

        return backward_divided


def weighted(torch: ModuleType, losses: tuple[Any, ...], given: Any, factor: float) -> Any:
    """The initial gradients of a backward pass, times ``factor``."""
    if factor == 1.0:
        return given
    each = (given,) * len(losses) if given is None or isinstance(given, torch.Tensor) else tuple(given)
    return tuple(
        torch.full_like(loss, factor) if start is None else start * factor
        for loss, start in zip(losses, each, strict=True)
    )

"""A single-device script, run data-parallel: every rank runs all of it, on its share of each training batch.

    a batch             each rank computes its own samples (batches.py)
    first forward       parameters and buffers are made equal to rank 0's
    a backward pass     starts with the share's weight and ends with the exchange of gradients (exchange.py);
                        the loss then reads as that of the whole batch
    an evaluation       runs whole on every rank, with rank 0's buffers

Every decision that the script derives from a loss, a gradient or an evaluation is therefore the same on every
rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.distributed.batches import RankBatches, join_outputs
from flatout.distributed.division import ALL, CUT, INDEX, INPUT, OWN, SUM, WHOLE, SplitSettings
from flatout.distributed.exchange import Exchange, Transport, same_objects
from flatout.distributed.single_process import join, one_device, one_process, reject_child_process
from flatout.job.rank_environment import RankEnvironment

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx
    from torch.nn import Module, Parameter

    from flatout.schema.program import Ledger, TrainingContext


# Batch normalisation over the batch of all ranks, with sums that are exchanged in forward and backward.
#
# torch's SyncBatchNorm supports only CUDA; this one runs on any device with torch's operators, and supports
# uneven shares.


def synchronise_batchnorm(torch: ModuleType, root: Module, ledger: Ledger) -> int:
    """Make every batch normalisation of ``root`` that trains use the statistics of all ranks.

    Returns their number."""
    kind = torch.nn.modules.batchnorm._BatchNorm
    layers = [module for module in root.modules() if isinstance(module, kind)]
    for module in layers:
        ledger.set(module, "forward", _forward_of(torch, module, module.forward), new=True)
    return len(layers)


def _forward_of(torch: ModuleType, module: Module, original: Callable[..., Any]) -> Any:
    sum_ranks = _sum_of_ranks(torch)

    def forward(x: Tensor) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return original(x)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        x32 = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        count = x32.new_tensor([x32.numel() / x32.shape[1]])
        sums = sum_ranks(torch.cat([x32.sum(dims), count]))
        n = sums[-1].detach()
        mean = sums[:-1] / n
        shape = [1, -1] + [1] * (x.dim() - 2)
        centred = x32 - mean.view(shape)
        variance = sum_ranks(centred.square().sum(dims)) / n
        _update_running_statistics(torch, module, mean.detach(), variance.detach() * n / (n - 1))
        normed = centred * torch.rsqrt(variance + module.eps).view(shape)
        if module.affine:
            normed = normed * module.weight.view(shape) + module.bias.view(shape)
        return normed.to(x.dtype)

    return forward


def _update_running_statistics(torch: ModuleType, module: Module, mean: Tensor, variance: Tensor) -> None:
    if not module.track_running_stats or module.running_mean is None:
        return
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        momentum = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
        module.running_mean.mul_(1 - momentum).add_(mean.to(module.running_mean.dtype), alpha=momentum)
        module.running_var.mul_(1 - momentum).add_(variance.to(module.running_var.dtype), alpha=momentum)


def _sum_of_ranks(torch: Any) -> Any:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, x: Tensor) -> Any:
            x = x.clone()
            torch.distributed.all_reduce(x)
            return x

        @staticmethod
        def backward(ctx: FunctionCtx, gradient: Tensor) -> Any:
            gradient = gradient.clone()
            torch.distributed.all_reduce(gradient)
            return gradient

    return Sum.apply


NAME = "data_parallel"
COUNTS_NOTE = "counts that the script makes of training batches (right answers, samples) cover rank 0's share; with --whole-batches they cover whole batches"
BATCHNORM_NOTE = "batch normalisation uses the statistics of each rank's share; with --sync-batchnorm, those of the whole batch"
MODULE_SEARCH_STEPS = 3  # steps in which to look for modules that train


class DataParallelScript:
    """Everything installed on this rank; ``ledger`` removes it."""

    def __init__(
        self,
        torch: ModuleType,
        context: TrainingContext,
        env: RankEnvironment,
        division: SplitSettings,
        ledger: Ledger,
    ) -> None:
        self.torch, self.context, self.env, self.division = torch, context, env, division
        self.ledger = ledger
        self.batches = RankBatches(torch, context, env, division)
        self.has_joined = False
        self.roots: list[weakref.ref[Any]] = []
        self.depth = 0  # of forward passes of the roots
        self.in_backward = False
        self.stale_buffers = False  # buffers differ between ranks
        # all parameters, and a signature to detect changes
        self.parameters_cache: tuple[tuple[int, ...], list[Any]] = ((), [])
        self.exchange: Exchange | None = None
        self.transport = Transport()  # set by the levers `comm_compression` and `gradient_buckets`
        self.sharding: Any = None  # set by the lever `sharding`
        ledger.on_restore("gradient hooks", self.close_exchange)
        self.stop_watching: Callable[[], Any] | None = None

    def install(self) -> None:
        self.batches.install(self.ledger)
        one_process(self.torch, self.ledger)
        one_device(self.torch, self.ledger)
        self.ledger.set(self.torch.nn.Module, "train", self._wrap_train(self.torch.nn.Module.train))
        self.ledger.set(self.torch.autograd, "backward", self._wrap_backward(self.torch.autograd.backward))
        self._watch_modules()
        if self.division.batches in (INDEX, CUT):
            self.context.report(NAME, COUNTS_NOTE)

    # -- the model

    def _watch_modules(self) -> None:
        script, torch = self, self.torch
        module_class = torch.nn.Module
        call = module_class.__call__
        open_calls = [0]

        @wraps(call)
        def call_observed(module: Module, *args: object, **kwargs: object) -> Any:
            if not open_calls[0] and torch.is_grad_enabled() and not script.in_backward:
                script._add_root(module)
            open_calls[0] += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                open_calls[0] -= 1

        self.ledger.set(module_class, "__call__", call_observed)
        self.stop_watching = lambda: self.ledger.set(module_class, "__call__", call)

    def _add_root(self, module: Module) -> None:
        if (
            any(root() is module for root in self.roots)
            or not any(p.requires_grad for p in module.parameters())
            or self._in_worker()
        ):
            return
        reject_child_process(self.torch)
        parameters = [*module.parameters()]
        if not self.has_joined:
            self.has_joined = True
            join(self.torch, self.env, parameters[0].device, self.ledger)
        self.roots.append(weakref.ref(module))
        self._make_equal([*(p for p in parameters if not self._is_sharded(p)), *module.buffers()])
        if self.sharding is not None:
            self.sharding.shard(module)
        if self.division.batchnorm == ALL:
            synchronise_batchnorm(self.torch, module, self.ledger)
        elif any(isinstance(layer, self.torch.nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
            self.context.report(NAME, BATCHNORM_NOTE)
        self.context.wrap_forward(module, partial(self._wrap_forward, module), self.ledger)

    def _make_equal(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            # a copy only for other memory formats, which some backends reject
            dense = tensor.data.contiguous()
            self.torch.distributed.broadcast(dense, src=0)
            if dense.data_ptr() != tensor.data_ptr():
                tensor.data.copy_(dense)

    def _wrap_forward(self, module: Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        script, torch = self, self.torch

        @wraps(forward)
        def forward_split(*args: object, **kwargs: object) -> Any:
            if script.depth:
                return forward(*args, **kwargs)
            splits_input = (
                script.division.batches in (INPUT, WHOLE)
                and torch.is_grad_enabled()
                and not script.in_backward
            )
            if not torch.is_grad_enabled():
                script._before_evaluation()
            elif splits_input:
                args, kwargs = script._scatter_inputs(args, kwargs)
            script.depth += 1
            script.batches.in_forward = splits_input
            try:
                draws_own = splits_input and script.division.draws == OWN
                with script.batches.streams.own() if draws_own else nullcontext():
                    output = forward(*args, **kwargs)
            finally:
                script.depth -= 1
                script.batches.in_forward = False
            return script._gather_outputs(output) if splits_input else output

        return forward_split

    def _in_worker(self) -> bool:
        return self.torch.utils.data.get_worker_info() is not None

    def _wrap_train(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Detect evaluations that bypass the roots (``model.module``, an encoder alone).

        They begin with ``eval()``."""
        script = self

        @wraps(train)
        def train_observed(module: Module, mode: bool = True) -> Any:
            if not mode:
                script._before_evaluation()
            return train(module, mode)

        return train_observed

    def _before_evaluation(self) -> None:
        if self._in_worker():
            return
        if self.stale_buffers:
            self.stale_buffers = False
            self._make_equal(buffer for root in self._live_roots() for buffer in root.buffers())

    # -- backward

    def _wrap_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        script, torch = self, self.torch

        @wraps(backward)
        def backward_exchanged(
            tensors: list[Tensor], grad_tensors: object = None, *args: object, **kwargs: object
        ) -> Any:
            if script.in_backward or not script.has_joined or script.batches.share is None:
                return backward(tensors, grad_tensors, *args, **kwargs)
            losses = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
            factor = script._factor()
            exchange = script._current_exchange()
            script.in_backward = True
            try:
                result = backward(
                    losses, scaled_gradients(torch, losses, grad_tensors, factor), *args, **kwargs
                )
            finally:
                script.in_backward = False
            script._average(
                exchange, [script.context.without_scale(loss) for loss in losses if not loss.dim()], factor
            )
            script._after_update()
            return result

        return backward_exchanged

    # -- the gradients

    @contextmanager
    def single_rank(self) -> Iterator[None]:
        """Let this rank compute by itself for a while: nothing is split, and no other rank takes part."""
        before, self.in_backward = self.in_backward, True
        try:
            yield
        finally:
            self.in_backward = before

    def _scatter_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, self.torch.Tensor)]
        samples = next((tensor.shape[0] for tensor in tensors if tensor.dim()), None)
        if samples is None:
            return args, kwargs
        cut = partial(self.batches.cut, samples=samples)
        return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}

    def _gather_outputs(self, output: object) -> Any:
        part = self.batches.share
        if self.division.batches != WHOLE or part is None or part.size == part.samples:
            return output
        return join_outputs(self.torch, output, part, self.env.world_size)

    def _live_roots(self) -> list[Any]:
        return [root for ref in self.roots if (root := ref()) is not None]

    @property
    def whole_batch_ratio(self) -> float:
        """The size of a whole batch relative to the part that the script sees."""
        part = self.batches.share
        if part is None or not part.size or self.division.batches not in (INDEX, CUT):
            return 1.0
        return part.samples / part.size

    def _factor(self) -> float:
        """The factor for the share's loss that makes the average over ranks the whole batch's loss."""
        assert self.batches.share is not None
        weight = self.batches.share.weight
        if self.division.batches == WHOLE or self.division.reduction == SUM:
            return float(self.env.world_size) if weight else 0.0
        return weight * self.env.world_size

    def _current_exchange(self) -> Exchange:
        parameters = self.trained_parameters()
        exchange, transport = self.exchange, self.transport
        if (
            exchange is None
            or exchange.transport != transport
            or not same_objects(exchange.parameters, parameters)
        ):
            self.close_exchange()
            by_optimizer = len(self.context.optimizers) > 1
            exchange = self.exchange = Exchange(self.torch, self.env, parameters, by_optimizer, transport)
            exchange.may_leave_early &= self.sharding is None  # its own exchanges run at that time
        exchange.begin()
        return exchange

    def trained_parameters(self) -> list[Any]:
        """The parameters that train.

        They may change while the script runs, as it freezes or unfreezes layers."""
        return [p for p in self._all_parameters() if p.requires_grad]

    def close_exchange(self) -> None:
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None

    def _average(self, exchange: Exchange, losses: list[Any], factor: float) -> None:
        if self.division.batches == WHOLE:  # every rank already has the whole batch's loss
            losses = []
        self.context.listener.exchange_begin()
        averages = exchange.average([loss.detach() * factor for loss in losses])
        self.context.listener.exchange_end(exchange.traffic)
        for loss, average in zip(losses, averages, strict=True):
            loss.data.copy_(average)  # the script prints it and decides by it

    def _after_update(self) -> None:
        self.stale_buffers = True
        if self.stop_watching is not None and self.context.steps >= MODULE_SEARCH_STEPS:
            self.stop_watching()
            self.stop_watching = None

    def _all_parameters(self) -> list[Any]:
        groups = [group["params"] for o in self.context.optimizers for group in o.param_groups]
        signature = (len(self.roots), *map(len, groups))
        if signature != self.parameters_cache[0]:
            parameters = [p for group in groups for p in group]
            parameters += [p for root in self._live_roots() for p in root.parameters()]
            unique = {id(p): p for p in parameters if not self._is_sharded(p)}
            self.parameters_cache = signature, list(unique.values())
        return self.parameters_cache[1]

    def _is_sharded(self, parameter: Parameter) -> bool:
        return self.sharding is not None and bool(self.sharding.holds(parameter))


def scaled_gradients(torch: ModuleType, losses: tuple[Any, ...], gradients: Any, factor: float) -> Any:
    """The initial gradients of a backward pass, times ``factor``."""
    if factor == 1.0:
        return gradients
    is_one = gradients is None or isinstance(gradients, torch.Tensor)
    initial = (gradients,) * len(losses) if is_one else tuple(gradients)
    return tuple(
        torch.full_like(loss, factor) if gradient is None else gradient * factor
        for loss, gradient in zip(losses, initial, strict=True)
    )

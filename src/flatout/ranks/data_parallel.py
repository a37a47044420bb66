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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

from flatout.plan.rank_environment import RankEnvironment
from flatout.ranks.batches import RankBatches
from flatout.ranks.division import ALL, CUT, DIVIDED, DOOR, INDEX, OWN, SUM, WHOLE, SplitSettings
from flatout.ranks.evaluating import Evaluating
from flatout.ranks.exchange import Exchange
from flatout.ranks.gathering import put_together
from flatout.ranks.normalisation import over_all_ranks
from flatout.ranks.rendezvous import join
from flatout.ranks.single_process import must_be_the_rank, one_device, one_process
from flatout.ranks.wire import TransportSettings

NAME = "data_parallel"
COUNTS = "counts that the script makes of training batches (right answers, samples) cover rank 0's share; with --whole-batches they cover whole batches"
STATISTICS = "batch normalisation uses the statistics of each rank's share; with --sync-batchnorm, those of the whole batch"
SEARCHING_STEPS = 3  # steps in which to look for modules that train


class DataParallelScript:
    """Everything installed on this rank; ``ledger`` removes it."""

    def __init__(
        self, torch: Any, context: Any, here: RankEnvironment, division: SplitSettings, ledger: Any
    ) -> None:
        self.torch, self.context, self.here, self.division, self.ledger = (
            torch,
            context,
            here,
            division,
            ledger,
        )
        self.batches = RankBatches(torch, context, here, division)
        self.evaluating = Evaluating(torch, context, here)
        self.joined = False
        self.roots: list[weakref.ref[Any]] = []
        self.depth = 0  # of forward passes of the roots
        self.in_backward = False
        self.stale_buffers = False  # buffers differ between ranks
        self.everything: tuple[tuple[int, ...], list[Any]] = (
            (),
            [],
        )  # all parameters, and a signature to detect changes
        self.exchange: Exchange | None = None
        self.terms = self.wanted = (
            TransportSettings()
        )  # the present transport of gradients, and the requested one
        self.local: Any = None  # set by the lever `local_sgd`
        self.sharding: Any = None  # set by the lever `sharding`
        ledger.call("gradient hooks", self.close_exchange)
        self.stop_searching: Callable[[], Any] | None = None

    def install(self) -> None:
        self.batches.install(self.ledger)
        one_process(self.torch, self.ledger)
        one_device(self.torch, self.ledger)
        self.ledger.set(self.torch.nn.Module, "train", self._wrap_train(self.torch.nn.Module.train))
        self.ledger.set(self.torch.autograd, "backward", self._wrap_backward(self.torch.autograd.backward))
        self._search()
        if self.division.batches in (INDEX, CUT):
            self.context.report(NAME, COUNTS)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let this rank compute by itself for a while: nothing is split, and no other rank takes part."""
        before, self.in_backward = self.in_backward, True
        try:
            yield
        finally:
            self.in_backward = before

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
        def call_seen(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not open_calls[0] and torch.is_grad_enabled() and not divided.in_backward:
                divided._meet(module)
            open_calls[0] += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                open_calls[0] -= 1

        self.ledger.set(module_class, "__call__", call_seen)
        self.stop_searching = lambda: self.ledger.set(module_class, "__call__", call)

    def _meet(self, module: Any) -> None:
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

    def _wrap_forward(self, module: Any, forward: Callable) -> Callable:
        divided, torch = self, self.torch

        @wraps(forward)
        def forward_divided(*args: Any, **kwargs: Any) -> Any:
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

    def _evaluated(self, module: Any, forward: Callable, args: tuple, kwargs: dict) -> Any:
        self.depth += 1
        try:
            return self.evaluating(module, forward, args, kwargs)
        finally:
            self.depth -= 1

    def _in_worker(self) -> bool:
        """Whether this process is a DataLoader worker, which trains nothing."""
        return self.torch.utils.data.get_worker_info() is not None

    def _wrap_train(self, train: Callable) -> Callable:
        """Detect evaluations that bypass the roots (``model.module``, an encoder alone).

        They begin with ``eval()``.
        """
        divided = self

        @wraps(train)
        def train_seen(module: Any, mode: bool = True) -> Any:
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

    def _through_the_door(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        samples = next(
            (
                each.shape[0]
                for each in (*args, *kwargs.values())
                if isinstance(each, self.torch.Tensor) and each.dim()
            ),
            None,
        )
        if samples is None:
            return args, kwargs
        cut = self.batches.cut
        return tuple(cut(each, samples) for each in args), {
            name: cut(each, samples) for name, each in kwargs.items()
        }

    def _behind_the_door(self, output: Any) -> Any:
        part = self.batches.share
        if self.division.batches != WHOLE or part is None or part.size == part.samples:
            return output
        return put_together(self.torch, output, part, self.here.world_size)

    def _live_roots(self) -> list[Any]:
        return [root for ref in self.roots if (root := ref()) is not None]

    @property
    def part_of_inputs(self) -> float:
        """The fraction of the model's input that this rank computes."""
        part = self.batches.share
        return (
            part.size / part.samples if part is not None and self.division.batches in (DOOR, WHOLE) else 1.0
        )

    @property
    def whole_of_seen(self) -> float:
        """The size of a whole batch relative to the part that the script sees."""
        part = self.batches.share
        return (
            part.samples / part.size
            if part is not None and part.size and self.division.batches in (INDEX, CUT)
            else 1.0
        )

    # -- backward --------------------------------------------------------------------------------------------

    def _wrap_backward(self, backward: Callable) -> Callable:
        divided, torch = self, self.torch

        @wraps(backward)
        def backward_divided(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
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

    def _factor(self) -> float:
        """The factor for the share's loss that makes the average over ranks the whole batch's loss."""
        assert self.batches.share is not None
        weight = self.batches.share.weight
        if self.division.batches == WHOLE:
            return float(self.here.world_size) if weight else 0.0
        return (
            (float(self.here.world_size) if weight else 0.0)
            if self.division.reduction == SUM
            else weight * self.here.world_size
        )

    def _exchange_of_now(self) -> Exchange | None:
        """The exchange for the coming backward pass; None if its gradients stay on this rank."""
        if self.local is not None and self.local.alone():
            return None
        parameters = self.that_train()
        if self.exchange is None or not _the_same(self.exchange.parameters, parameters):
            self.close_exchange()
            self.exchange = Exchange(
                self.torch, self.here, parameters, len(self.context.optimizers) > 1, self.terms
            )
            self.exchange.may_leave_early &= self.sharding is None  # its own exchanges run at that time
        self.exchange.begin()
        return self.exchange

    def that_train(self) -> list[Any]:
        """The parameters that train.

        They may change while the script runs, as it freezes or unfreezes layers.
        """
        return [p for p in self._all_parameters() if p.requires_grad]

    def close_exchange(self) -> None:
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None

    def _average(self, exchange: Exchange, losses: list[Any], factor: float) -> None:
        if self.division.batches == WHOLE:  # every rank already has the whole batch's loss
            losses = []
        self.context.listener.exchange_begin()
        averages = exchange.average([loss.detach() * factor for loss in losses], self.wanted)
        self.context.listener.exchange_end(exchange.traffic)
        self.terms = exchange.terms
        for loss, average in zip(losses, averages, strict=True):
            loss.data.copy_(average)  # the script prints it and decides by it

    def _has_learned(self) -> None:
        self.stale_buffers = True
        if self.stop_searching is not None and self.context.steps >= SEARCHING_STEPS:
            self.stop_searching()
            self.stop_searching = None

    def _all_parameters(self) -> list[Any]:
        """The parameters of the optimizers and of the modules that train, in the same order on every rank."""
        optimizers = self.context.optimizers
        shows = (
            len(self.roots),
            *(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups),
        )
        if shows != self.everything[0]:
            found = [
                p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
            ]
            found += [p for root in self._live_roots() for p in root.parameters()]
            self.everything = shows, list({id(p): p for p in found if not self._is_sharded(p)}.values())
        return self.everything[1]

    def _is_sharded(self, parameter: Any) -> bool:
        """Whether sharding averages its gradient."""
        return self.sharding is not None and bool(self.sharding.holds(parameter))


def weighted(torch: Any, losses: tuple, given: Any, factor: float) -> Any:
    """The initial gradients of a backward pass, times ``factor``."""
    if factor == 1.0:
        return given
    each = (given,) * len(losses) if given is None or isinstance(given, torch.Tensor) else tuple(given)
    return tuple(
        torch.full_like(loss, factor) if start is None else start * factor
        for loss, start in zip(losses, each, strict=True)
    )


def _the_same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))

"""Exchanges the gradients of a script's ranks after a backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.distributed.batches import RankBatches
from flatout.distributed.bucket_queue import same_objects
from flatout.distributed.division import CUT, DOOR, INDEX, SUM, WHOLE, SplitSettings
from flatout.distributed.evaluating import Evaluating
from flatout.distributed.exchange import Exchange
from flatout.distributed.gathering import put_together
from flatout.distributed.wire import TransportSettings
from flatout.job.rank_environment import RankEnvironment

if TYPE_CHECKING:
    from torch.nn import Parameter

    from flatout.schema.program import Ledger, TrainingContext

SEARCHING_STEPS = 3  # steps in which to look for modules that train


class GradientExchange:
    """Decides which gradients travel after a backward pass, how losses are averaged, and who communicates."""

    def __init__(
        self,
        torch: ModuleType,
        context: TrainingContext,
        here: RankEnvironment,
        division: SplitSettings,
        ledger: Ledger,
    ) -> None:
        self.torch, self.context, self.here, self.division = torch, context, here, division
        self.ledger = ledger
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

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let this rank compute by itself for a while: nothing is split, and no other rank takes part."""
        before, self.in_backward = self.in_backward, True
        try:
            yield
        finally:
            self.in_backward = before

    def _through_the_door(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
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

    def _behind_the_door(self, output: object) -> Any:
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
        if self.exchange is None or not same_objects(self.exchange.parameters, parameters):
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

    def _is_sharded(self, parameter: Parameter) -> bool:
        """Whether sharding averages its gradient."""
        return self.sharding is not None and bool(self.sharding.holds(parameter))

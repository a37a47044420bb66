"""Local steps: ranks step independently for a while, each on its share, and are then synchronised.

See rounds.py for the settings and the update.

    end of a round   each rank sends its *progress*: its initial weights minus its present ones. The mean
                     updates the *shared* weights, which are the same on every rank; all continue from them
    with overlap     progress is sent while the next round trains. At the end of that round the shared weights
                     are updated. A rank continues from them minus its newest progress, which is still unsent
    rendezvous       before anything that must be the same everywhere (an evaluation, state_dict, torch.save,
                     load_state_dict, the end of the program) the round ends early, and nothing stays in
                     transit: all ranks then hold the shared weights
    losing count     each round also sends the step counts. If they differ, all ranks raise an error

All exchanges have the same form, so that ranks out of step still pair up and detect it. The optimizer's state
stays local to each rank.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.distributed.bucket_queue import (
    BucketQueue,
    CannotExchange,
    Traffic,
    buckets_of,
    packed,
    same_objects,
    unpacked,
)
from flatout.distributed.rounds import OUTER, LocalSgdSettings, Outer

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from flatout.schema.program import Ledger, TrainingContext

NAME = "local_sgd"
SYNCHRONOUS = 2  # steps: the first runs without levers, the second agrees on the transport
SCALED = (
    "the script scales its loss, and a single rank might skip a step; gradients are exchanged in every step"
)


class LocalSteps:
    """``divided``: the installed `data_parallel`. ``apart``: whether each rank is stepping independently."""

    def __init__(self, divided: Any, rounds: LocalSgdSettings) -> None:
        self.divided, self.rounds, self.torch = divided, rounds, divided.torch
        self.rate, self.momentum = OUTER[rounds.outer]
        self.cycles = StepBoundaryTracker(divided.context)
        self.steps = self.since = self.held = 0  # steps of this rank; steps since the last round; rounds
        self.apart = self.moved = self.never = False
        self.traffic = Traffic()  # of the last round
        self.parameters: list[Any] = []
        self.shared: list[Any] = []
        self.begun: list[
            Any
        ] = []  # this rank's weights at the start of its round; with overlap not the shared ones
        self._under_way: tuple[BucketQueue, Any, Any] | None = None
        self._mine = (
            os.getpid(),
            threading.get_ident(),
        )  # loader workers and saving threads must not communicate

    def install(self, ledger: Ledger) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        torch, module = self.torch, self.torch.nn.Module
        ledger.call("optimizer step hook", register_optimizer_step_post_hook(self._stepped).remove)
        ledger.set(module, "state_dict", self._met_before(module.state_dict))
        ledger.set(torch, "save", self._met_before(torch.save))
        ledger.set(module, "load_state_dict", self._again_after(module.load_state_dict))
        atexit.register(self._end)
        ledger.call("end of the program", lambda: atexit.unregister(self._end))

    # -- steps -----------------------------------------------------------------------------------------------

    def alone(self) -> bool:
        """Whether the gradients of the coming backward pass stay on this rank."""
        if self.apart and not same_objects(
            self.parameters, self.divided.that_train()
        ):  # layers were frozen or unfrozen
            self.meet()
            self._begin_again()
        return self.apart

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._elsewhere() or not self.divided.joined:
            return
        self.moved = True
        if not self.cycles.ended(optimizer):
            return
        self.steps += 1
        if not self.apart:
            self._perhaps_part()
            return
        self.since += 1
        if self.since >= self.rounds.every:
            self._round(stay=self.rounds.overlap)

    def _perhaps_part(self) -> None:
        if self.steps == SYNCHRONOUS and self.divided.context.scalers:
            self.never = True
            self.divided.context.report(NAME, SCALED)
        if not self.never and self.steps >= max(SYNCHRONOUS, self.rounds.warmup):
            self.apart = True
            self.divided.close_exchange()
            self._begin_again()

    def _begin_again(self) -> None:
        """Take the present weights, equal on all ranks, as the shared ones."""
        torch, terms = self.torch, self.divided.terms
        self.parameters = self.divided.that_train()
        self.buckets, self.wire = (
            buckets_of(self.parameters, terms.bucket_bytes),
            terms.way.make(torch, self.divided.here.world_size),
        )
        self.outer = Outer(torch, self.rate, self.momentum)
        self.shared = [_wide(torch, p).clone() for p in self.parameters]
        self.begun = [each.clone() for each in self.shared] if self.rounds.overlap else self.shared
        self.since, self.moved = 0, False

    # -- rounds ----------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Synchronise the weights of all ranks until the next step. The other ranks are at the same point."""
        if self.apart and not self._elsewhere() and (self.moved or self._under_way is not None):
            self._round(stay=False)

    def _round(self, stay: bool, ends: bool = False) -> None:
        """``stay``: send the progress in the background and continue without the result.

        Raises CannotExchange if the ranks are not at the same step.
        """
        with (
            self.torch.inference_mode(False),
            self.torch.no_grad(),
        ):  # an evaluation may be in inference mode, but these tensors outlive it
            progress = self.torch._foreach_sub(self.begun, [_wide(self.torch, p) for p in self.parameters])
            self._arrive(apply=True)
            if self.moved or ends:
                self._leave(progress, ends)
            if not stay:
                self._arrive(apply=self.moved)
            now = self.torch._foreach_sub(self.shared, progress) if stay else self.shared
            if self.rounds.overlap:
                self.torch._foreach_copy_(self.begun, now)
            self.torch._foreach_copy_([p.data for p in self.parameters], now)
        self.since, self.moved, self.held = 0, False, self.held + 1

    def _leave(self, progress: list[Any], ends: bool) -> None:
        torch, here = self.torch, self.divided.here
        bucket_queue = BucketQueue(torch, self.wire)
        for bucket in self.buckets:
            bucket_queue.leave(
                packed(torch, [progress[at] for at in bucket]), [self.parameters[at] for at in bucket]
            )
        count = torch.zeros(2, here.world_size, dtype=torch.float64, device=progress[0].device)
        count[0, here.rank], count[1, here.rank] = self.steps, float(ends)
        self._under_way = bucket_queue, count, torch.distributed.all_reduce(count, async_op=True)

    def _arrive(self, apply: bool) -> None:
        if self._under_way is None:
            return
        (bucket_queue, count, work), self._under_way = self._under_way, None
        means = bucket_queue.arrive()
        work.wait()
        self.traffic = Traffic(
            bucket_queue.sent_bytes,
            count.numel() * count.element_size(),
            bucket_queue.collectives + 1,
            len(means),
        )
        steps, ended = count.tolist()
        if len(set(steps)) > 1 or len(set(ended)) > 1:
            raise CannotExchange(_apart(steps, ended))
        if apply:
            progress: list[Any] = [None] * len(self.parameters)
            for bucket, flat in zip(self.buckets, means, strict=True):
                for at, part in zip(
                    bucket, unpacked(flat, [self.parameters[at] for at in bucket]), strict=True
                ):
                    progress[at] = part
            self.outer.step(self.shared, progress)

    # -- synchronised calls ----------------------------------------------------------------------------------

    def _met_before(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def when_met(*args: object, **kwargs: object) -> Any:
            self.meet()
            return really(*args, **kwargs)

        return when_met

    def _again_after(self, really: Callable[..., Any]) -> Callable[..., Any]:
        """Loaded weights do not count as progress of a round."""

        @wraps(really)
        def put_back(*args: object, **kwargs: object) -> Any:
            self.meet()
            try:
                return really(*args, **kwargs)
            finally:
                if self.apart and not self._elsewhere():
                    self._begin_again()

        return put_back

    def _end(self) -> None:
        """The end of the program: tell the ranks that are still training.

        A failed rank is reported in another way.
        """
        if not self.apart or self._elsewhere() or getattr(sys, "last_value", None) is not None:
            return
        try:
            self._round(stay=False, ends=True)
        except CannotExchange as error:  # at exit an exception does not change the exit code
            sys.excepthook(type(error), error, None)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _elsewhere(self) -> bool:
        return self._mine != (os.getpid(), threading.get_ident())


class StepBoundaryTracker:
    """Which of several optimizers ends a step.

    Used because the hooks of `TrainingContext` stop after the first steps.
    """

    def __init__(self, context: TrainingContext) -> None:
        self.context, self.boundaries = context, type(context.boundaries)()
        self._known: dict[int, Any] = {}

    def ended(self, optimizer: Optimizer) -> bool:
        for each in (*self.context.optimizers, optimizer):
            if id(each) not in self._known:
                self._meet(each)
        return bool(self.boundaries.optimizer_stepped(id(optimizer)))

    def _meet(self, optimizer: Optimizer) -> None:
        key, known, boundaries = id(optimizer), self._known, self.boundaries

        def gone(_: object) -> None:
            boundaries.optimizer_gone(key)
            known.pop(key, None)

        known[key] = weakref.ref(optimizer, gone)
        boundaries.optimizer_made(key)


def _wide(torch: ModuleType, parameter: Parameter) -> Any:
    """The parameter in a precision that keeps small progress."""
    return (
        parameter.detach().float()
        if parameter.dtype in (torch.float16, torch.bfloat16)
        else parameter.detach()
    )


def _apart(steps: list[float], ended: list[float]) -> str:
    said = ", ".join(
        f"rank {rank} {int(done)}{' and has ended' * bool(end)}"
        for rank, (done, end) in enumerate(zip(steps, ended, strict=True))
    )
    return (
        f"the ranks did different numbers of steps ({said}). With local_sgd each rank reads the loss of its own share, so decisions based on it "
        "(early stopping, a plateau schedule) or on the clock differ between ranks. Base them on an evaluation, or remove local_sgd"
    )

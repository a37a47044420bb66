"""Local steps: ranks step independently for a while, each on its share, and are then synchronised.

    end of a round   each rank sends its *progress*: its weights at the start of the round minus its present
                     ones. The mean updates the *shared* weights, the same on every rank; all continue from them
    rendezvous       before anything that must be the same everywhere (an evaluation, state_dict, torch.save,
                     load_state_dict, the end of the program) the round ends early
    losing count     each round also sends the step counts. If they differ, all ranks raise an error

All exchanges have the same form, so that ranks out of step still pair up and detect it. The optimizer's state
stays local to each rank. torch's PeriodicModelAverager computes the same mean, but it knows neither momentum
nor evaluations, and waits forever for a rank that has ended.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.distributed.exchange import CannotExchange, Sender, Traffic, buckets_of, same_objects, unpacked

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from flatout.schema.program import Ledger, TrainingContext

NAME = "local_sgd"
AVERAGE, NESTEROV = "average", "nesterov"
OUTER = {
    AVERAGE: (1.0, 0.0),
    NESTEROV: (0.7, 0.9),
}  # learning rate and momentum; NESTEROV: DiLoCo's (Douillard et al. 2023, section 3.2)
SYNCHRONOUS = 2  # steps: levers that change the transport act after the first
SCALED = (
    "the script scales its loss, and a single rank might skip a step; gradients are exchanged in every step"
)


@dataclass(frozen=True)
class LocalSgdSettings:
    """``every``: steps per round. ``warmup``: steps that exchange gradients before the first round.

    ``outer``: average the weights, or apply Nesterov momentum to the average progress.
    """

    every: int = 8
    outer: str = AVERAGE
    warmup: int = 0


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
        self._trains = (
            os.getpid(),
            threading.get_ident(),
        )  # loader workers and saving threads must not communicate

    def install(self, ledger: Ledger) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        torch, module = self.torch, self.torch.nn.Module
        ledger.call("optimizer step hook", register_optimizer_step_post_hook(self._stepped).remove)
        ledger.set(module, "state_dict", self._after_a_round(module.state_dict))
        ledger.set(torch, "save", self._after_a_round(torch.save))
        ledger.set(module, "load_state_dict", self._after_a_round(module.load_state_dict, loads=True))
        atexit.register(self._end)
        ledger.call("end of the program", lambda: atexit.unregister(self._end))

    # -- steps -----------------------------------------------------------------------------------------------

    def alone(self) -> bool:
        """Whether the gradients of the coming backward pass stay on this rank."""
        frozen = self.apart and not same_objects(self.parameters, self.divided.that_train())
        if frozen:  # or unfrozen
            self.meet()
            self._begin()
        return self.apart

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._elsewhere() or not self.divided.joined:
            return
        self.moved = True
        if not self.cycles.ended(optimizer):
            return
        self.steps += 1
        self.since += self.apart
        if not self.apart:
            self._perhaps_part()
        elif self.since >= self.rounds.every:
            self._round()

    def _perhaps_part(self) -> None:
        if self.steps == SYNCHRONOUS and self.divided.context.scalers:
            self.never = True
            self.divided.context.report(NAME, SCALED)
        if not self.never and self.steps >= max(SYNCHRONOUS, self.rounds.warmup):
            self.apart = True
            self.divided.close_exchange()
            self._begin()

    def _begin(self) -> None:
        """Take the present weights, equal on all ranks, as the shared ones."""
        self.parameters = self.divided.that_train()
        self.buckets = buckets_of(self.parameters, self.divided.transport.bucket_bytes)
        self.sender = Sender(self.torch, self.divided.transport)
        self.shared = self._wide()
        self.speed = [self.torch.zeros_like(weight) for weight in self.shared] if self.momentum else []
        self.since, self.moved = 0, False

    def _wide(self) -> list[Any]:
        """Copies of the weights, in a precision that keeps small progress."""
        narrow = (self.torch.float16, self.torch.bfloat16)
        return [p.detach().float() if p.dtype in narrow else p.detach().clone() for p in self.parameters]

    # -- rounds ----------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Synchronise the weights of all ranks until the next step. The other ranks are at the same point."""
        if self.apart and not self._elsewhere() and self.moved:
            self._round()

    def _round(self, ends: bool = False) -> None:
        """Raises CannotExchange if the ranks are not at the same step."""
        with (
            self.torch.inference_mode(False),
            self.torch.no_grad(),
        ):  # an evaluation may be in inference mode, but these tensors outlive it
            mean = self._mean(list(self.torch._foreach_sub(self.shared, self._wide())), ends)
            outer_step(self.torch, self.shared, mean, self.speed, self.rate, self.momentum)
            self.torch._foreach_copy_([p.data for p in self.parameters], self.shared)
        self.since, self.moved, self.held = 0, False, self.held + 1

    def _mean(self, progress: list[Any], ends: bool) -> list[Any]:
        torch, here = self.torch, self.divided.here
        self.sender.begin()
        for number, bucket in enumerate(self.buckets):
            self.sender.send(number, [progress[index] for index in bucket], number + 1 == len(self.buckets))
        count = torch.zeros(2, here.world_size, dtype=torch.float64, device=progress[0].device)
        count[0, here.rank], count[1, here.rank] = self.steps, float(ends)
        torch.distributed.all_reduce(count)
        means = self.sender.means()
        steps, ended = count.tolist()
        if len(set(steps)) > 1 or len(set(ended)) > 1:
            raise CannotExchange(_out_of_step(steps, ended))
        for bucket, flat in zip(self.buckets, means, strict=True):
            for index, part in zip(
                bucket, unpacked(flat, [progress[index] for index in bucket]), strict=True
            ):
                progress[index] = part
        self.traffic = Traffic(self.sender.sent_bytes, len(means))
        return progress

    # -- synchronised calls ----------------------------------------------------------------------------------

    def _after_a_round(self, really: Callable[..., Any], loads: bool = False) -> Callable[..., Any]:
        """``loads``: loaded weights do not count as progress of a round."""

        @wraps(really)
        def after_a_round(*args: object, **kwargs: object) -> Any:
            self.meet()
            try:
                return really(*args, **kwargs)
            finally:
                if loads and self.apart and not self._elsewhere():
                    self._begin()

        return after_a_round

    def _end(self) -> None:
        """The end of the program: tell the ranks that are still training.

        A failed rank is reported in another way.
        """
        if not self.apart or self._elsewhere() or getattr(sys, "last_value", None) is not None:
            return
        try:
            self._round(ends=True)
        except CannotExchange as error:  # at exit an exception does not change the exit code
            sys.excepthook(type(error), error, None)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _elsewhere(self) -> bool:
        return self._trains != (os.getpid(), threading.get_ident())


def outer_step(
    torch: ModuleType,
    weights: list[Any],
    progress: Sequence[Any],
    speed: list[Any],
    rate: float,
    momentum: float,
) -> None:
    """Update the shared weights in place, as torch.optim.SGD(nesterov=True) does with the progress as gradient.

    With rate 1 and momentum 0 the weights become the mean of the ranks' weights.
    """
    if momentum:
        torch._foreach_mul_(speed, momentum)
        torch._foreach_add_(speed, progress)
        progress = torch._foreach_add(progress, speed, alpha=momentum)
    torch._foreach_add_(weights, progress, alpha=-rate)


class StepBoundaryTracker:
    """Which of several optimizers ends a step.

    Used because the hooks of `TrainingContext` stop after the first steps.
    """

    def __init__(self, context: TrainingContext) -> None:
        self.context, self.boundaries = context, type(context.boundaries)()
        self._known: dict[int, Any] = {}

    def ended(self, optimizer: Optimizer) -> bool:
        for known in (*self.context.optimizers, optimizer):
            if id(known) not in self._known:
                self._meet(known)
        return bool(self.boundaries.optimizer_stepped(id(optimizer)))

    def _meet(self, optimizer: Optimizer) -> None:
        key, known, boundaries = id(optimizer), self._known, self.boundaries

        def gone(_: object) -> None:
            boundaries.optimizer_gone(key)
            known.pop(key, None)

        known[key] = weakref.ref(optimizer, gone)
        boundaries.optimizer_made(key)


def _out_of_step(steps: list[float], ended: list[float]) -> str:
    counts = ", ".join(
        f"rank {rank} {int(done)}{' and has ended' * bool(end)}"
        for rank, (done, end) in enumerate(zip(steps, ended, strict=True))
    )
    return (
        f"the ranks did different numbers of steps ({counts}). With local_sgd each rank reads the loss of its own share, so decisions based on it "
        "(early stopping, a plateau schedule) or on the clock differ between ranks. Base them on an evaluation, or remove local_sgd"
    )

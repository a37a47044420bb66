"""Ranks that step by themselves for a while, each on its share, and are then brought together (rounds.py says how).

    a round's end       each rank sends its *progress*, the weights it began with less those it has. The mean of it moves the *shared* weights, which are
                        the same on every rank, and every rank goes on from there
    with overlap        progress travels while the next round trains. When that has ended the shared weights move, and a rank goes on from them less its own
                        newest progress, which the others have not got yet
    meeting             before anything that must be the same everywhere (an evaluation, state_dict, torch.save, load_state_dict, the end of the program)
                        the round ends early, and nothing stays under way: all ranks then hold the shared weights
    losing count        with each round travels how many steps each rank has done. A rank that is not where the others are is an error in words, on all of them

Every exchange has the same form, so that ranks which have lost each other still meet in one, and find out. The optimizer's own state stays each rank's.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

from flatout.ranks.convoy import CannotExchange, Convoy, Traffic, buckets_of, packed, unpacked
from flatout.ranks.rounds import OUTER, Outer, Rounds

NAME = "local_sgd"
SYNCHRONOUS = 2  # steps: the first is the plain one, and what later levers want of the exchange is agreed in the second
SCALED = "the script scales its loss, and a rank alone would leave a step out; gradients are exchanged in every step"


class LocalSteps:
    """``divided`` is what `data_parallel` has in place. ``apart``: each rank steps by itself at the moment."""

    def __init__(self, divided: Any, rounds: Rounds, rate: float | None = None) -> None:
        self.divided, self.rounds, self.torch = divided, rounds, divided.torch
        usual, self.momentum = OUTER[rounds.outer]
        self.rate = usual if rate is None else rate
        self.cycles = Cycles(divided.scene)
        self.steps = self.since = self.held = 0  # of this rank; since the last round; rounds
        self.apart = self.moved = self.never = False
        self.traffic = Traffic()  # of the last round
        self.parameters: list[Any] = []
        self.shared: list[Any] = []
        self.begun: list[Any] = []  # where this rank began its round; with overlap these are not the shared weights
        self._under_way: tuple[Convoy, Any, Any] | None = None
        self._mine = os.getpid(), threading.get_ident()  # neither a loader's worker nor a thread that saves may exchange anything

    def install(self, ledger: Any) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        torch, module = self.torch, self.torch.nn.Module
        ledger.call("optimizer step hook", register_optimizer_step_post_hook(self._stepped).remove)
        ledger.set(module, "state_dict", self._met_before(module.state_dict))
        ledger.set(torch, "save", self._met_before(torch.save))
        ledger.set(module, "load_state_dict", self._anew_after(module.load_state_dict))
        atexit.register(self._end)
        ledger.call("end of the program", lambda: atexit.unregister(self._end))

    # -- steps ------------------------------------------------------------------------------------------------------

    def alone(self) -> bool:
        """Asked before a backward pass: whether its gradients stay here."""
        if self.apart and not _the_same(self.parameters, self.divided.that_train()):  # layers were frozen, or are not any more
            self.meet()
            self._begin_anew()
        return self.apart

    def _stepped(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
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
        if self.steps == SYNCHRONOUS and self.divided.scene.scalers:
            self.never = True
            self.divided.scene.report(NAME, SCALED)
        if not self.never and self.steps >= max(SYNCHRONOUS, self.rounds.warmup):
            self.apart = True
            self.divided.close_exchange()
            self._begin_anew()

    def _begin_anew(self) -> None:
        """All ranks have the same weights: they are the shared ones."""
        torch, terms = self.torch, self.divided.terms
        self.parameters = self.divided.that_train()
        self.buckets, self.wire = buckets_of(self.parameters, terms.bucket_bytes), terms.way.make(torch, self.divided.here.world_size)
        self.outer = Outer(torch, self.rate, self.momentum)
        self.shared = [_wide(torch, p).clone() for p in self.parameters]
        self.begun = [each.clone() for each in self.shared] if self.rounds.overlap else self.shared
        self.since, self.moved = 0, False

    # -- rounds -----------------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """From here on every rank has the same weights, until the next step. The other ranks are at the same place."""
        if self.apart and not self._elsewhere() and (self.moved or self._under_way is not None):
            self._round(stay=False)

    def _round(self, stay: bool, ends: bool = False) -> None:
        """``stay``: what it brought goes under way, and this rank goes on without it. Raises CannotExchange where ranks are not at the same place."""
        with self.torch.inference_mode(False), self.torch.no_grad():  # an evaluation may be in inference mode; what is made here lives on
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
        convoy = Convoy(torch, self.wire)
        for bucket in self.buckets:
            convoy.leave(packed(torch, [progress[at] for at in bucket]), [self.parameters[at] for at in bucket])
        count = torch.zeros(2, here.world_size, dtype=torch.float64, device=progress[0].device)
        count[0, here.rank], count[1, here.rank] = self.steps, float(ends)
        self._under_way = convoy, count, torch.distributed.all_reduce(count, async_op=True)

    def _arrive(self, apply: bool) -> None:
        if self._under_way is None:
            return
        (convoy, count, work), self._under_way = self._under_way, None
        means = convoy.arrive()
        work.wait()
        self.traffic = Traffic(convoy.sent_bytes, count.numel() * count.element_size(), convoy.collectives + 1, len(means))
        steps, ended = count.tolist()
        if len(set(steps)) > 1 or len(set(ended)) > 1:
            raise CannotExchange(_apart(steps, ended))
        if apply:
            progress: list[Any] = [None] * len(self.parameters)
            for bucket, flat in zip(self.buckets, means, strict=True):
                for at, part in zip(bucket, unpacked(flat, [self.parameters[at] for at in bucket]), strict=True):
                    progress[at] = part
            self.outer.step(self.shared, progress)

    # -- where the program must be one ------------------------------------------------------------------------------

    def _met_before(self, really: Callable) -> Callable:
        @wraps(really)
        def when_met(*args: Any, **kwargs: Any) -> Any:
            self.meet()
            return really(*args, **kwargs)

        return when_met

    def _anew_after(self, really: Callable) -> Callable:
        """Weights that are put back are no progress of a round."""
        @wraps(really)
        def put_back(*args: Any, **kwargs: Any) -> Any:
            self.meet()
            try:
                return really(*args, **kwargs)
            finally:
                if self.apart and not self._elsewhere():
                    self._begin_anew()

        return put_back

    def _end(self) -> None:
        """The end of the program: a rank that comes here while others train on tells them so. One that failed is heard of in another way."""
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


class Cycles:
    """Which optimizer ends a step, where several take part: as the Scene finds it, whose own hooks rest after the first steps."""

    def __init__(self, scene: Any) -> None:
        self.scene, self.boundaries = scene, type(scene.boundaries)()
        self._known: dict[int, Any] = {}

    def ended(self, optimizer: Any) -> bool:
        for each in (*self.scene.optimizers, optimizer):
            if id(each) not in self._known:
                self._meet(each)
        return bool(self.boundaries.optimizer_stepped(id(optimizer)))

    def _meet(self, optimizer: Any) -> None:
        key, known, boundaries = id(optimizer), self._known, self.boundaries

        def gone(_: Any) -> None:
            boundaries.optimizer_gone(key)
            known.pop(key, None)

        known[key] = weakref.ref(optimizer, gone)
        boundaries.optimizer_made(key)


def _wide(torch: Any, parameter: Any) -> Any:
    """In a precision in which small progress is not lost."""
    return parameter.detach().float() if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.detach()


def _apart(steps: list[float], ended: list[float]) -> str:
    said = ", ".join(f"rank {rank} {int(done)}{' and has ended' * bool(end)}" for rank, (done, end) in enumerate(zip(steps, ended, strict=True)))
    return (f"the ranks did different numbers of steps ({said}). With local_sgd each of them reads the loss of its own share, and what the script decides by "
            "that (stopping early, a schedule on a plateau), or by the clock, it decides differently. Decide by an evaluation, or leave local_sgd out")


def _the_same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))

"""``plan="auto"``: a Loop tunes itself in its first steps, which all count as training.

    first step    plain, as always
    next steps    plain, recorded by the guard's step replica
    then          for each live lever: the guard repeats the recorded steps on copies, with the lever. Only
                  levers that pass are switched on and off between real steps (`flatout.loop.tuning`)

The guard runs before the comparison because the steps of the comparison count. It is the part of the guard
that one process can run: gradients against float64, updates and outputs, bit by bit for exact levers.
`flatout tune` also compares loss curves of other seeds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flatout.agent.applier import Applier, Outcome
from flatout.agent.ledger import Ledger
from flatout.agent.pickles import keep_out_of_pickles
from flatout.guard.replica import StepReplica
from flatout.loop.levers import BEFORE_THE_PROGRAM
from flatout.loop.randomness import kept_random_state
from flatout.loop.tuning import NEEDS_MEMORY, Search, Tried, Tuned, TuningSample, bound, search
from flatout.measure.clock import clock_for
from flatout.schema.enums import Effect, Moment, Origin
from flatout.schema.errors import LoopError
from flatout.schema.lever import Lever, Options, Skip
from flatout.schema.plan import Choice, Plan
from flatout.trial.blocks import SLOW_TICK_MS

if TYPE_CHECKING:
    from torch import device as Device
    from torch.nn import Module
    from torch.optim import Optimizer

    from flatout.agent.training_context import TrainingContext

LOGGER = logging.getLogger("flatout")
VALUES = 2  # per lever: the most promising ones


def effects_of(asked: str) -> frozenset[Effect]:
    """The effects that a tuned plan may have.

    Raises LoopError for effects that a Loop cannot check by itself.
    """
    if asked not in (Effect.EXACT, Effect.ROUNDING, Effect.PRECISION):
        raise LoopError(
            f'effects={asked!r} is not supported. Use "exact" (no bit changes), "rounding" (the same maths, rounded '
            'differently) or "precision" (also products in half precision).'
        )
    return frozenset(effect for effect in Effect if effect.rank <= Effect(asked).rank)


class Autoplan:
    """``step_begins`` activates the levers of a step, ``step_ends`` reports its result.

    ``found`` is None until tuning ends.
    """

    def __init__(
        self,
        context: TrainingContext,
        applier: Applier,
        model: Module,
        optimizer: Optimizer,
        device: Device,
        effects: frozenset[Effect],
    ) -> None:
        self.context, self.applier, self.model, self.optimizer = context, applier, model, optimizer
        self.device, self.effects = device, effects
        self.found: Tuned | None = None
        self._clock = clock_for(context.torch, device)
        self._ledger = Ledger()
        self._replica: StepReplica | None = None
        self._search: Search | None = None
        self._left_out: list[Tried] = []
        self._holds: tuple[Choice, ...] = ()
        self._failed = ""
        self._inside = False
        self._budget = self._used = 0
        self._start: Any = None

    # -- the steps -------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        self._inside = True
        self._start = self._clock.mark()

    def step_ends(self, parts: int, ran_out: bool, coming: int | None) -> None:
        """``coming``: the number of steps after this one, or None if unknown."""
        self._inside = False
        end = self._clock.mark()
        if self._replica is None:
            self._budget = bound(coming)
            self._listen(parts)
        elif self._search is None:
            self.context.steps += 1
            self._used += 1
            self._replica.optimizer_begin(self.optimizer)
            if self._replica.captured:
                self._ledger.restore()
                self._search = search(self._candidates(), self._budget - self._used, self._refused)
                self._go_on(None)
        else:
            self._used += 1
            self._clock.settle()
            failed = self._failed or (NEEDS_MEMORY if ran_out else "")
            self._go_on(TuningSample(self._clock.elapsed_ms(self._start, end), failed))

    def _go_on(self, seen: TuningSample | None) -> None:
        assert self._search is not None
        try:
            wanted = next(self._search) if seen is None else self._search.send(seen)
        except StopIteration as over:
            self._end(over.value)
            return
        self._switch(wanted)

    def _switch(self, wanted: tuple[Choice, ...]) -> None:
        if wanted != self._holds or self._failed:
            self._failed = "; ".join(
                outcome.reason for outcome in self.applier.switch(wanted) if not outcome.applied
            )
            self._holds = wanted

    def _end(self, tried: list[Tried]) -> None:
        kept = tuple(
            Choice(each.choice.name, each.choice.value, Origin.TUNER, each.evidence)
            for each in tried
            if each.kept
        )
        self._switch(tuple(each.choice for each in tried if each.kept))
        self._replica = None  # frees its copies of the model
        self.found = Tuned(Plan(kept), (*tried, *self._left_out), self._used)
        for each in tried:
            LOGGER.info(each.sentence())
        LOGGER.info(self.found.sentence())

    @property
    def outcomes(self) -> list[Outcome]:
        """One outcome per lever, or one per measured value."""
        return (
            [Outcome(each.choice, each.kept, "" if each.kept else each.reason) for each in self.found.tried]
            if self.found is not None
            else []
        )

    def take_off(self) -> None:
        self._ledger.restore()
        self._switch(())
        if self.found is None:
            self.found = Tuned(Plan(), (), self._used)

    # -- the guard -------------------------------------------------------------------------------------------

    def _listen(self, parts: int) -> None:
        self.context.first_step_done(parts)
        slow = self._clock.elapsed_ms(self._start, self._clock.mark()) > SLOW_TICK_MS
        self._replica = StepReplica(self.context, self.applier, (), slow)
        keep_out_of_pickles(self.context.torch, self._ledger, Autoplan)
        hooked = self.context.torch.nn.Module
        self._ledger.call(
            "forward pre-hook",
            hooked.register_forward_pre_hook(
                self.model, self._forward_begins, with_kwargs=True, prepend=True
            ).remove,
        )
        self._ledger.call(
            "forward hook", hooked.register_forward_hook(self.model, self._forward_ended).remove
        )

    def _forward_begins(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inside and self._replica is not None and self.context.torch.is_grad_enabled():
            self._replica.forward_begin(model, args, kwargs)

    def _forward_ended(self, model: Module, args: tuple[Any, ...], output: object) -> None:
        if self._inside and self._replica is not None and self.context.torch.is_grad_enabled():
            self._replica.forward_end(model, output)

    def _refused(self, choices: Sequence[Choice], effect: Effect) -> str:
        """Why the guard rejects these levers together, or "".

        Levers are off meanwhile: some act on the whole process.
        """
        assert self._replica is not None
        self._switch(())
        with kept_random_state(self.context.torch, self.device):
            metadata = self._replica.judge(choices, bitwise=effect is Effect.EXACT)
        if "failure" in metadata:
            return f"the guard could not check it: {metadata['failure']}"
        failed = [each["why"] for each in metadata["checks"] if not each["passed"]]
        return f"the guard rejected it: {'; '.join(failed)}" if failed else ""

    # -- the levers ------------------------------------------------------------------------------------------

    def _candidates(self) -> list[tuple[Choice, Effect]]:
        found = []
        for name, options in self.applier.options().items():
            lever = self.applier.table[name]
            effect = (options.effect or lever.effect) if isinstance(options, Options) else lever.effect
            reason = options.reason if isinstance(options, Skip) else self._left_alone(lever, effect)
            if reason or isinstance(options, Skip):
                self._left_out.append(
                    Tried(
                        Choice(name, True if isinstance(options, Skip) else options.values[0], Origin.TUNER),
                        effect,
                        False,
                        reason,
                    )
                )
            else:
                found += [(Choice(name, value, Origin.TUNER), effect) for value in options.values[:VALUES]]
        return found

    def _left_alone(self, lever: Lever, effect: Effect) -> str:
        if lever.moment is Moment.PROCESS:
            return BEFORE_THE_PROGRAM
        if lever.moment is Moment.LOADER:
            return "it acts before the first batch is fetched: run `flatout tune`, and use its plan"
        if lever.warms_up:
            return "its first steps are slow: `flatout tune` measures whether it pays off"
        if not lever.live:
            return "it cannot be switched between two steps: `flatout tune` measures it"
        if lever.saves_memory:
            return "it costs time and saves memory: choose it in a plan"
        if effect not in self.effects:
            return f"its effect here is {effect}, which was not requested"
        return ""

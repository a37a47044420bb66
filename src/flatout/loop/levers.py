"""Apply the levers of a Plan to the objects of a Loop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.applier import AFTER_FIRST_STEP, BEFORE_FIRST_STEP, Applier, Outcome, one_line
from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.job.plan_file import read_plan
from flatout.levers import TABLE, checked
from flatout.probe.machine import look
from flatout.schema.enums import Moment
from flatout.schema.errors import LoopError
from flatout.schema.plan import Plan

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

LOGGER = logging.getLogger("flatout")
PROCESS_LEVER = "it acts before the program starts: run `flatout run python train.py` with this plan"


def plan_of(source: object) -> Plan:
    """A Plan, from a Plan or the path of one. Raises LoopError, PlanError."""
    if source is None:
        return Plan()
    if isinstance(source, Plan):
        return checked(source)
    if isinstance(source, (str, Path)):
        return checked(read_plan(Path(source)), source)
    raise LoopError(
        f"plan is a {type(source).__name__}. Pass a flatout.Plan, the path of a flatout.toml, or None."
    )


class Levers:
    """Applies a Plan at two moments: before the first batch, and after the first step.

    The first step runs without the late levers.
    """

    def __init__(
        self,
        torch: ModuleType,
        plan: Plan,
        model: Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        loader: DataLoader,
    ) -> None:
        self.plan = plan
        self.outcomes: list[Outcome] = []
        self._ledger = Ledger()
        self.context = TrainingContext(torch, Listener(), self._ledger)
        self.context.register_objects(
            [model], [optimizer], [loader], [loss_fn] if isinstance(loss_fn, torch.nn.Module) else []
        )
        self.applier = Applier(TABLE, look(), self.context)

    def apply_early(self, loader: DataLoader) -> Any:
        """Apply the early levers and return the loader to iterate over."""
        self.outcomes = [
            Outcome(choice, False, PROCESS_LEVER)
            for choice in self.plan
            if (lever := self.applier.lever(choice)) is not None and lever.moment is Moment.PROCESS
        ]
        self.applier.start(self.plan, BEFORE_FIRST_STEP)
        return self.context.rebuild_loader(loader, self._ledger)

    def apply_late(self, backward_passes: int) -> None:
        self.context.first_step_done(backward_passes)
        self.applier.start(self.plan, AFTER_FIRST_STEP)
        self.outcomes += self.applier.outcomes
        LOGGER.info(one_line(self.outcomes))
        for outcome in self.outcomes:
            if not outcome.applied:
                LOGGER.warning("%s is not applied: %s", outcome.choice.name, outcome.reason)

    def undo(self) -> None:
        """Undo all levers that act while the program runs."""
        self.applier.switch(())
        self._ledger.restore()

"""The invariants that watch the first steps of a real run: they say once what will ruin it, and leave.

Only what costs nothing measurable is observed: optimizers as they are made and step, parameters as they are made, and
loaded states. After the last look all hooks are gone.
"""

from __future__ import annotations

import os
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flatout.agent.bootstrap import notify
from flatout.agent.run_summary import FINDINGS
from flatout.diagnose.observer import Observer
from flatout.job.rank_environment import rank_number

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from flatout.schema.findings import Finding

INVARIANTS = ("copy_is_the_model", "no_gradient", "nothing_loaded", "weights_unmoved")
LOOKS = (60, 200)  # optimizer steps


def attach(job: dict[str, Any]) -> None:
    """Called right after ``import torch`` and the entry of the run."""
    import torch

    rules = [import_module(f"flatout.diagnose.invariants.{name}").RULE for name in INVARIANTS]
    silenced = job.get("silenced", ())
    RunObserver(torch, [rule.invariant for rule in rules if rule.code not in silenced])


class RunObserver(Observer):
    def _install(self) -> None:
        self.program.in_run = True
        self._install_on_objects()

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._emit("step_begins", optimizer)

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.program.steps += 1
        self._emit("step_ends", optimizer)
        if self.program.steps in LOOKS:
            self._look()

    def _look(self) -> None:
        told = {finding.rule for finding in FINDINGS}
        for finding in self.findings():
            if finding.rule not in told and not rank_number():
                told.add(finding.rule)
                FINDINGS.append(finding)
                notify(sentence(finding))
        if self.program.steps == LOOKS[-1]:
            self._leave()

    def _leave(self) -> None:
        """Remove all hooks at the next backward pass: torch is iterating over those of optimizers now."""
        self.active = False
        backward = self.torch.autograd.backward

        @wraps(backward)
        def last(*args: Any, **kwargs: Any) -> Any:
            self.restore()
            return backward(*args, **kwargs)

        self.ledger.set(self.torch.autograd, "backward", last)


def sentence(finding: Finding) -> str:
    place = finding.place
    where = f" ({os.path.relpath(place.file)}:{place.line})" if place is not None else ""
    return f"{finding.rule}: {finding.message}{where}. Why: flatout check --explain {finding.rule}"

"""The invariants that watch the first steps of a real run: they say once what will ruin it, and leave.

Only what costs nothing measurable is observed: optimizers as they are made and step, parameters as they are made, and
loaded states. After the last look all hooks are gone.
"""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flatout.agent.bootstrap import notify
from flatout.agent.heartbeat import AT_STEP
from flatout.agent.run_summary import FINDINGS
from flatout.diagnose.observer import Observer
from flatout.job.rank_environment import rank_number

if TYPE_CHECKING:
    from flatout.schema.findings import Finding

INVARIANTS = ("copy_is_the_model", "no_gradient", "nothing_loaded", "weights_unmoved")
FIRST_LOOK, LOOKS = 5, (65, 200)  # steps, as the run's own counter counts them


def attach(job: dict[str, Any]) -> None:
    """Called right after ``import torch`` and the entry of the run."""
    import torch

    rules = [import_module(f"flatout.diagnose.invariants.{name}").RULE for name in INVARIANTS]
    silenced = job.get("silenced", ())
    RunObserver(torch, [rule.invariant for rule in rules if rule.code not in silenced])


class RunObserver(Observer):
    """Looks at the optimizers three times. It adds no hook to a step: a compiler would trace it."""

    def _install(self) -> None:
        self.program.in_run = True
        self._install_on_objects()
        AT_STEP.update({FIRST_LOOK: self._begin, **{steps: partial(self._look, steps) for steps in LOOKS}})

    def _begin(self) -> None:
        self.program.steps = FIRST_LOOK
        for optimizer in self.program.optimizers:
            self._emit("step_ends", optimizer)

    def _look(self, steps: int) -> None:
        self.program.steps = steps
        told = {finding.rule for finding in FINDINGS}
        for finding in self.findings():
            if finding.rule not in told and not rank_number():
                told.add(finding.rule)
                FINDINGS.append(finding)
                notify(sentence(finding))
        if steps == LOOKS[-1]:
            self.restore()


def sentence(finding: Finding) -> str:
    place = finding.place
    where = f" ({os.path.relpath(place.file)}:{place.line})" if place is not None else ""
    return f"{finding.rule}: {finding.message}{where}. Why: flatout check --explain {finding.rule}"

"""Makes all ranks of a program switch levers after the same step.

The measured rank writes each switch and its step; the others look for it after each step. A lever active in
one rank alone would show no gain, and a lever that changes messages between ranks would break the exchange.
So a switch takes effect one step later: no rank reaches the end of that step before the measured one has
written, because all exchange gradients in it. On a GPU the host runs ahead of the exchange. There it
takes effect two steps later, and each other rank waits at the end of a step until the step before it is
computed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from flatout.job.folder import TrialFolder, read_json, write_json
from flatout.job.rank_environment import this_rank
from flatout.measure.clock import Clock
from flatout.schema.enums import Origin
from flatout.schema.plan import Choice


class RankSync:
    """The place of this process: ``rank`` of ``world``, with ``local_world`` ranks on this machine.

    ``measurable``: only the first rank of a machine may be measured, so that two programs show the same
    batches. ``outside()`` lets us read and write where the program may not. ``due``: in the measured rank,
    what all do at the end of the current step.
    """

    def __init__(self, folder: TrialFolder, outside: Callable[[], AbstractContextManager[Any]]) -> None:
        here = this_rank()
        of_torchrun = [
            int(os.environ.get(name, default))
            for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"))
        ]
        self.rank, self.world, self.local_world = (
            (here.rank, here.world_size, here.local_world_size) if here is not None else of_torchrun
        )
        self.measurable = self.rank == 0 if here is not None else os.environ.get("LOCAL_RANK", "0") == "0"
        self.due: dict[str, Any] | None = None
        self._folder, self._outside = folder, outside
        self._known = 0
        self.lead_steps = 1
        self._clock: Clock | None = None  # of a GPU
        self._step_before: Any = None
        self._next: dict[str, Any] | None = None

    @property
    def several(self) -> bool:
        return self.world > 1

    def on_gpu(self, clock: Clock) -> None:
        self.lead_steps, self._clock = 2, clock

    # -- the measured rank ------------------------------------------------------------------------------------------

    def concerns_all(self, command: dict[str, Any]) -> bool:
        return self.several and bool(command["do"] == "switch")

    def tell(self, command: dict[str, Any], step: int) -> None:
        """Announce what all ranks do after ``step``."""
        self.due = command
        with self._outside():
            write_json(self._folder.info, {**command, "step": step})

    def take_due(self) -> dict[str, Any] | None:
        due, self.due = self.due, None
        return due

    # -- the other ranks ---------------------------------------------------------------------------------------------

    def follow(self, step: int, switch: Callable[[Sequence[Choice]], Any]) -> None:
        """At the end of each step: switch the levers that are due."""
        if self._clock is not None:
            if self._step_before is not None:
                self._clock.wait_for(self._step_before)
            self._step_before = self._clock.mark()
        command = self._due_after(step)
        if command is not None:
            switch(choices_of(command["choices"]))

    def _due_after(self, step: int) -> dict[str, Any] | None:
        with self._outside():
            try:
                changed = os.stat(self._folder.info).st_mtime_ns
            except OSError:
                return None
            if changed != self._known:
                self._known, self._next = changed, read_json(self._folder.info)
        if self._next is None or step < self._next["step"]:
            return None
        due, self._next = self._next, None
        return due


def choices_of(data: list[dict[str, Any]]) -> list[Choice]:
    return [Choice(c["name"], c["value"], Origin.TUNER) for c in data]

"""The ranks of one program do the same thing after the same step: the measured one writes down what, and after which; the others look after each step.

A lever that only one of them had would show no gain, and one that acts on what travels between them would break the exchange. So what is written is due
one step later: no rank comes to the end of that step before the measured one has written, for they meet in it to exchange gradients.
"""

from __future__ import annotations

import os
from typing import Any

from flatout.plan.folder import TrialFolder, read_json, write_json
from flatout.plan.plan import Choice
from flatout.plan.standing import standing
from flatout.plan.words import Origin


class Ranks:
    """``rank`` of ``world``; ``local_world`` of them are on this machine. ``measurable``: of ours only rank 0 may be the one that is measured."""

    def __init__(self, folder: TrialFolder) -> None:
        here = standing()
        of_torchrun = [int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"))]
        self.rank, self.world, self.local_world = (here.rank, here.world_size, here.local_world_size) if here is not None else of_torchrun
        self.measurable = here is None or here.rank == 0
        self._folder = folder
        self._known = 0
        self._next: dict[str, Any] | None = None

    @property
    def several(self) -> bool:
        return self.world > 1

    def tell(self, command: dict[str, Any], step: int) -> None:
        """Said by the measured rank: what all ranks do when ``step`` has ended."""
        write_json(self._folder.told, {**command, "step": step})

    def heard(self, step: int) -> dict[str, Any] | None:
        """What is due now that ``step`` has ended, for a rank that is not measured."""
        try:
            changed = os.stat(self._folder.told).st_mtime_ns
        except OSError:
            return None
        if changed != self._known:
            self._known, self._next = changed, read_json(self._folder.told)
        if self._next is None or step < self._next["step"]:
            return None
        due, self._next = self._next, None
        return due

    def report(self, step: int, heard: dict[str, Any]) -> None:
        """What this rank has heard since ``step``, for the measured one."""
        write_json(self._folder.of_rank(self.rank), {"since": step, **heard})

    def reports(self, step: int) -> list[dict[str, Any]] | None:
        """What the other ranks have heard since ``step``; None as long as one of them has not reported."""
        found = [read_json(self._folder.of_rank(rank)) for rank in range(self.world) if rank != self.rank]
        return found if all(each is not None and each["since"] == step for each in found) else None


def choices_of(data: list[dict[str, Any]]) -> list[Choice]:
    return [Choice(c["name"], c["value"], Origin.TUNER) for c in data]

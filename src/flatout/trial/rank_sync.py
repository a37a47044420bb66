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
    batches. ``real_files()`` lets it read and write where the program may not. ``pending``: in the measured rank,
    what all do at the end of the current step.
    """

    def __init__(self, folder: TrialFolder, real_files: Callable[[], AbstractContextManager[Any]]) -> None:
        rank_env = this_rank()
        torchrun_values = [
            int(os.environ.get(name, default))
            for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"))
        ]
        self.rank, self.world, self.local_world = (
            (rank_env.rank, rank_env.world_size, rank_env.local_world_size)
            if rank_env is not None
            else torchrun_values
        )
        self.measurable = self.rank == 0 if rank_env is not None else os.environ.get("LOCAL_RANK", "0") == "0"
        self.pending: dict[str, Any] | None = None
        self._folder, self._real_files = folder, real_files
        self._last_change = 0
        self.announce_ahead_steps = 1
        self._clock: Clock | None = None  # of a GPU
        self._step_before: Any = None
        self._announced: dict[str, Any] | None = None

    @property
    def multi_rank(self) -> bool:
        return self.world > 1

    def use_gpu_clock(self, clock: Clock) -> None:
        self.announce_ahead_steps, self._clock = 2, clock

    # -- the measured rank

    def is_for_all(self, command: dict[str, Any]) -> bool:
        return self.multi_rank and bool(command["do"] == "switch")

    def announce(self, command: dict[str, Any], step: int) -> None:
        """Announce what all ranks do after ``step``."""
        self.pending = command
        with self._real_files():
            write_json(self._folder.rank_command_file, {**command, "step": step})

    def take_pending(self) -> dict[str, Any] | None:
        pending, self.pending = self.pending, None
        return pending

    # -- the other ranks

    def apply_due(self, step: int, switch: Callable[[Sequence[Choice]], Any]) -> None:
        """At the end of each step: switch the levers that are due."""
        if self._clock is not None:
            if self._step_before is not None:
                self._clock.wait_for(self._step_before)
            self._step_before = self._clock.mark()
        command = self._pending_after(step)
        if command is not None:
            switch(choices_of(command["choices"]))

    def _pending_after(self, step: int) -> dict[str, Any] | None:
        with self._real_files():
            try:
                changed = os.stat(self._folder.rank_command_file).st_mtime_ns
            except OSError:
                return None
            if changed != self._last_change:
                self._last_change, self._announced = changed, read_json(self._folder.rank_command_file)
        if self._announced is None or step < self._announced["step"]:
            return None
        pending, self._announced = self._announced, None
        return pending


def choices_of(data: list[dict[str, Any]]) -> list[Choice]:
    return [Choice(c["name"], c["value"], Origin.TUNER) for c in data]

"""The ranks of one program switch live levers together: the measured one writes down what holds, the others look after each step.

A step under several ranks is as slow as its slowest, so a lever that only one of them had would show no gain.
"""

from __future__ import annotations

import os
from typing import Any

from flatout.plan.folder import TrialFolder, read_json, write_json
from flatout.plan.plan import Choice
from flatout.plan.words import Origin


class Ranks:
    def __init__(self, folder: TrialFolder) -> None:
        self._file = folder.switched
        self._known = 0

    def tell(self, choices: list[dict[str, Any]]) -> None:
        """Said by the measured rank, before it switches itself; the others are at most a step behind."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            write_json(self._file, choices)

    def heard(self) -> list[Choice] | None:
        """What holds from now on, where that has changed since it was last asked."""
        try:
            changed = os.stat(self._file).st_mtime_ns
        except OSError:
            return None
        if changed == self._known:
            return None
        self._known = changed
        return choices_of(read_json(self._file) or [])


def choices_of(data: list[dict[str, Any]]) -> list[Choice]:
    return [Choice(c["name"], c["value"], Origin.TUNER) for c in data]

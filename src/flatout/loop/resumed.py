"""The report of a Loop that resumed from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Resumed:
    """Result of resuming, as ``loop.resumed``.

    ``step``: optimizer steps already done. ``epoch``: from 0. ``path``: the checkpoint. ``differs``:
    differences in the environment since. ``inexact``: state that was not, or could not be, restored exactly.
    ``damaged``: the new paths of newer, corrupt checkpoints.
    """

    step: int
    epoch: int
    path: Path
    differs: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()
    damaged: tuple[Path, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the training will end bitwise identical to an uninterrupted one."""
        return not self.differs and not self.inexact

    def sentences(self) -> list[str]:
        found = [f"{path} is a newer, corrupt checkpoint; it was moved there" for path in self.damaged]
        found.append(
            f"resuming after step {self.step}, in epoch {self.epoch}, from {self.path}: "
            + ("bitwise exact" if self.exact else "not bitwise identical to an uninterrupted run")
        )
        return [
            *found,
            *(f"differs: {each}" for each in self.differs),
            *(f"not exact: {each}" for each in self.inexact),
        ]

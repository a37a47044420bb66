"""What a Loop says of having gone on from a save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Resumed:
    """``step``: optimizer steps that were done. ``differs``: what differs since, in words. ``inexact``: what was not, or could not be, as it was. ``damaged``:
    newer saves that could not be believed, where they are now."""

    step: int
    epoch: int
    path: Path
    differs: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()
    damaged: tuple[Path, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the training is to end with the very bits of one that was never interrupted."""
        return not self.differs and not self.inexact

    def sentences(self) -> list[str]:
        found = [f"{path} is a newer save that cannot be believed; it was put there" for path in self.damaged]
        found.append(f"going on after step {self.step}, in epoch {self.epoch}, from {self.path}: "
                     + ("exactly" if self.exact else "not bit for bit as if it had not been interrupted"))
        return [*found, *(f"differs: {each}" for each in self.differs), *(f"not exactly resumable: {each}" for each in self.inexact)]

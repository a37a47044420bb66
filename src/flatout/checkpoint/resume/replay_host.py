"""What a replay is asked, and what it needs from its process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol


@dataclass(frozen=True)
class ResumeRequest:
    """How a script starts: from scratch or from a checkpoint.

    ``journal``: path of the journal. ``state``: what `ScriptReplay.beside` added to the checkpoint to resume from;
    None to start from scratch. ``several``: the script has ranks, which communicate. ``shows``: output is
    shown during the replay. ``fetches``: batches of this process are loaded during the replay.
    """

    journal: Path
    state: dict[str, Any] | None
    several: bool = False
    shows: bool = False
    fetches: bool = False


class ReplayHost(Protocol):
    """What a replay needs from the process that it runs in."""

    def say(self, sentence: str) -> None:
        """Inform the user."""

    def refuse(self, why: str) -> NoReturn:
        """End the process with an error."""

    def diverged(self, why: str) -> NoReturn:
        """End the replay, which differs from the first run; perhaps because it skipped data."""

    def begins(self) -> None:
        """Called before anything is written."""

    def at_resume_point(self, through_s: float, trained_s: float) -> None:
        """Called when the saved state is restored.

        ``through_s``: seconds of the replay; ``trained_s``: seconds of training that the first run took to here.
        """

    def left_alone(self, sentence: str) -> None:
        """Called where the script resumes by itself; ``sentence`` says how."""

    def seconds(self) -> float:
        """Return the time of a clock."""

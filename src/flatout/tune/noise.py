"""What other programs do to the measurements of a search: looked at while all programs of the search are stopped, and said at once.

A search waits a little for them to end. What was measured beside them is kept, for the comparison takes turns; but a figure that does not stand out from
what they may have done to it is not shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flatout.measure.clock import seconds, sleep
from flatout.measure.load import Busy, busy_programs
from flatout.measure.statistics import median

DISTURBING = 0.3  # cores that others keep busy, from where on it is said
LOOK_S = 0.25
LONGEST_WAIT_S = 15.0
WAIT_SHARE = 0.1  # of the budget
PAUSE_S = 2.0


@dataclass
class Disturbance:
    """Every look at the machine during one search: how many cores others kept busy, and who they were."""

    cores: int
    seen: list[Busy] = field(default_factory=list)

    def look(self) -> Busy | None:
        """One look; None where the kernel does not tell. All programs of the search must be stopped."""
        busy = busy_programs(LOOK_S)
        if busy is not None:
            self.seen.append(busy)
        return busy

    def wait(self, budget_s: float, tell: Callable[[str], None]) -> None:
        """Wait a little until others are done; ``tell`` gets a sentence on what keeps the machine busy."""
        until_s = seconds() + min(LONGEST_WAIT_S, WAIT_SHARE * budget_s)
        busy = self.look()
        if busy is None or busy.cores < DISTURBING:
            return
        tell(f"{self.sentence()}; waiting a little for them")
        while busy is not None and busy.cores >= DISTURBING:
            if seconds() + PAUSE_S > until_s:
                tell(f"{self.sentence()}: what is measured beside them is less certain")
                return
            sleep(PAUSE_S)
            busy = self.look()
        self.seen = self.seen[-1:]  # they are gone, and do not count

    @property
    def busy_cores(self) -> float:
        """The median over all looks; 0 where nothing is known."""
        return median([busy.cores for busy in self.seen]) if self.seen else 0.0

    @property
    def disturbed(self) -> bool:
        return self.busy_cores >= DISTURBING

    def sentence(self) -> str:
        """Who keeps how much of the machine busy."""
        named = next((busy.names for busy in reversed(self.seen) if busy.names), ())
        who = f" ({', '.join(named)})" if named else ""
        return f"other programs keep {self.busy_cores:.1f} of {self.cores} cores busy{who}"

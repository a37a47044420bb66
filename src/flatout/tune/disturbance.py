"""Detects disturbance by other processes while all programs of the search are stopped, and reports it.

A search waits a little for them to end. A result within their possible influence is not shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flatout.measure.clock import seconds, sleep
from flatout.measure.load import MachineLoad, machine_load

DISTURBING_CORES = 0.3  # cores kept busy by other processes; above this it is reported
SAMPLE_S = 0.25
LONGEST_WAIT_S = 15.0
WAIT_SHARE = 0.1  # of the budget
PAUSE_S = 2.0


@dataclass
class Disturbance:
    """The load of other processes during one search: every sample of their busy cores and names."""

    cores: int
    samples: list[MachineLoad] = field(default_factory=list)

    def sample(self) -> MachineLoad | None:
        """Take one sample; None if the kernel gives no figures.

        All programs of the search must be stopped.
        """
        busy = machine_load(SAMPLE_S)
        if busy is not None:
            self.samples.append(busy)
        return busy

    def wait(self, budget_s: float, report: Callable[[str], None]) -> None:
        """Wait a little until other processes are done; ``report`` gets a sentence about the load."""
        until_s = seconds() + min(LONGEST_WAIT_S, WAIT_SHARE * budget_s)
        busy = self.sample()
        if busy is None or busy.cores < DISTURBING_CORES:
            return
        report(f"{self.sentence()}; waiting briefly for them to finish")
        while busy is not None and busy.cores >= DISTURBING_CORES:
            if seconds() + PAUSE_S > until_s:
                report(f"{self.sentence()}; results are less certain")
                return
            sleep(PAUSE_S)
            busy = self.sample()
        self.samples = self.samples[-1:]  # they have ended and no longer count

    @property
    def busy_cores(self) -> float:
        """The upper quartile of all samples, rounded down; 0 if nothing is known.

        A load that begins halfway counts. One busy sample of four may be a coincidence.
        """
        cores = sorted(busy.cores for busy in self.samples)
        return cores[3 * (len(cores) - 1) // 4] if cores else 0.0

    @property
    def disturbed(self) -> bool:
        return self.busy_cores >= DISTURBING_CORES

    def sentence(self) -> str:
        """Say which processes keep how many cores busy."""
        process_names = next((busy.names for busy in reversed(self.samples) if busy.names), ())
        names = f" ({', '.join(process_names)})" if process_names else ""
        return f"other processes keep {self.busy_cores:.1f} of {self.cores} cores busy{names}"

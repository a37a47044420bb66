"""Detects disturbance by other processes while all programs of the search are stopped, and reports it.

A search waits a little for them to end. Threads that share a core with another process wait for each other, so a
speed-up beside it is no property of the plan: such blocks count only if most are, and no figure is claimed then.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.measure.clock import seconds, sleep
from flatout.measure.cores import usable_cores
from flatout.measure.load import MachineLoad, machine_load

DISTURBING_CORES = 0.3  # cores kept busy by other processes; above this it is reported
SAMPLE_S = 0.25
LONGEST_WAIT_S = 15.0
WAIT_SHARE = 0.1  # of the budget
PAUSE_S = 2.0


@dataclass
class Disturbance:
    """The load of other processes: every sample of their busy cores and names.

    ``needed``: the cores of one program, once observed.
    """

    cores: int
    samples: list[MachineLoad] = field(default_factory=list)
    needed: int = 0

    def observe(self, context: Mapping[str, Any], processes: int = 1) -> None:
        """Learn how many cores a program computes on."""
        threads = context["threads"] if context["device"] == "cpu" else 1
        workers = max((loader["num_workers"] for loader in context["loaders"]), default=0)
        self.needed = max(self.needed, processes * (threads + workers))

    @property
    def limit(self) -> float:
        """The busy cores that disturb. Those that the program leaves idle do not."""
        return DISTURBING_CORES + (max(0, usable_cores() - self.needed) if self.needed else 0)

    def add(self, loads: Iterable[float]) -> None:
        self.samples += map(MachineLoad, loads)

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
        if busy is None or busy.cores < self.limit:
            return
        report(f"{self.sentence()}; waiting briefly for them to finish")
        while busy is not None and busy.cores >= self.limit:
            if seconds() + PAUSE_S > until_s:
                report(f"{self.sentence()}; results are less certain")
                return
            sleep(PAUSE_S)
            busy = self.sample()
        self.samples = self.samples[-1:]  # they have ended and no longer count

    @property
    def busy_cores(self) -> float:
        """The lower median of all samples; 0 if nothing is known."""
        cores = sorted(busy.cores for busy in self.samples)
        return cores[(len(cores) - 1) // 2] if cores else 0.0

    @property
    def disturbed(self) -> bool:
        return self.busy_cores >= self.limit

    @property
    def beside(self) -> str:
        """The sentence, or "" if others did not disturb."""
        return self.sentence() if self.disturbed else ""

    def sentence(self) -> str:
        """Say which processes keep how many cores busy."""
        process_names = next((busy.names for busy in reversed(self.samples) if busy.names), ())
        names = f" ({', '.join(process_names)})" if process_names else ""
        return f"other processes keep {self.busy_cores:.1f} of {self.cores} cores busy{names}"

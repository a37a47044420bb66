"""The stall limit of a process, learned from its own steps. This module is pure: the caller passes the times.

Processes are polled every 0.5 s, so stalls are known to 0.5 s, and short ones are only counted. That is
enough: the limit is

    max(floor, 5 x the 99th percentile of the pauses between its steps)

and the floor is 10 s. Known activities other than training have their own floors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flatout.job import heartbeat

LOOK_S = 0.5
TIMES, SHARE = 5.0, 0.01
LONGEST_KEPT = 2000
# Activities; docs/supervision.md says how each is recognised.
COMPILING, READING_CODE, AT_WORK = "compiles", "imports", "works elsewhere"
WAITS_FOR_DEBUGGER = "is held by a debugger"
FLOORS_S: dict[int | str, float] = {
    heartbeat.TRAINING: 10.0,
    heartbeat.LOADING: 10.0,
    heartbeat.OPENING: 60.0,
    heartbeat.EVALUATING: 300.0,
    heartbeat.BETWEEN: 300.0,
    heartbeat.SAVING: 600.0,
    heartbeat.ENDING: 300.0,
    heartbeat.STARTING: 1800.0,
    heartbeat.IMPORTED: 1800.0,
    COMPILING: 1800.0,
    READING_CODE: 1800.0,
    AT_WORK: 600.0,
    WAITS_FOR_DEBUGGER: float("inf"),
}
IN_WORDS: dict[int | str, str] = {
    heartbeat.TRAINING: "in a step",
    heartbeat.LOADING: "waiting for data",
    heartbeat.OPENING: "waiting for the first batch of a loader",
    heartbeat.EVALUATING: "evaluating",
    heartbeat.BETWEEN: "between two epochs",
    heartbeat.SAVING: "in torch.save",
    heartbeat.ENDING: "exiting",
    heartbeat.STARTING: "before torch was imported",
    heartbeat.IMPORTED: "before the first step",
    COMPILING: "compiling",
    READING_CODE: "importing",
    AT_WORK: "working without steps",
}


@dataclass
class PauseStatistics:
    """The pauses during one kind of activity: their number, and the longest."""

    count: int = 0
    long: list[float] = field(default_factory=list)  # longer than LOOK_S, longest first

    def add(self, silence_s: float, steps: int) -> None:
        self.count += max(steps, 1)
        if silence_s > LOOK_S:
            self.long = sorted([*self.long, silence_s], reverse=True)[:LONGEST_KEPT]

    @property
    def percentile_s(self) -> float:
        """The 99th percentile; the longest pause if there are fewer than 100."""
        beyond = int(self.count * SHARE)
        return self.long[beyond] if beyond < len(self.long) else LOOK_S


class StallTimer:
    """The stall of one process. Call ``observe`` at each poll.

    ``doing`` may be set to an activity observed from outside; the next heartbeat resets it."""

    def __init__(self, now: float, floor_s: float | None = None) -> None:
        self.floor_s, self.since = floor_s, now
        self.doing: str | None = None
        self._heartbeats = self._steps = 0
        self._phase: int = heartbeat.STARTING
        self.kinds: dict[int | str, PauseStatistics] = {}

    def observe(self, now: float, heartbeats: int, steps: int, phase: int) -> bool:
        """Record a poll, and return whether there was a heartbeat since the last one."""
        if heartbeats == self._heartbeats and phase == self._phase:
            return False
        self.kinds.setdefault(self.kind, PauseStatistics()).add(now - self.since, steps - self._steps)
        self._heartbeats, self._steps, self._phase, self.since = heartbeats, steps, phase, now
        self.doing = None
        return True

    @property
    def kind(self) -> int | str:
        return self._phase if self.doing is None else self.doing

    def lasts_s(self, now: float) -> float:
        return now - self.since

    @property
    def limit_s(self) -> float:
        floor_s = FLOORS_S[self.kind]
        if self.floor_s is not None and floor_s <= FLOORS_S[heartbeat.OPENING]:
            floor_s = self.floor_s
        known = self.kinds.get(self.kind)
        return max(floor_s, TIMES * known.percentile_s) if known is not None else floor_s

    def pass_over(self, seconds: float) -> None:
        """Exclude time in which no heartbeat was possible: the machine slept, or everything was stopped."""
        self.since += seconds

"""Phases of a step: data wait, copy to the device, forward, backward, exchange between ranks, optimizer,
other.

Phases are marked as they begin and end, and converted to milliseconds later. On CUDA a mark is an event, and
reading it at once would stop the device.
"""

from typing import Any

from flatout.measure.clock import Clock, HostClock
from flatout.measure.statistics import quantile
from flatout.schema.records import PHASES, PhaseTime

MAX_STEPS = 512  # only the last steps are kept


class PhaseRecorder:
    """Collects the spans of each step.

    ``data`` is host time, because the host waits for the loader. Work of the device in the meantime is not
    part of it.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._host = HostClock()
        self._started: dict[str, Any] = {}
        self._spans: list[tuple[str, Any, Any]] = []
        self._steps: list[tuple[Any, Any, list[tuple[str, Any, Any]]]] = []

    def begin(self, phase: str) -> None:
        self._started[phase] = self._host.mark() if phase == "data" else self.clock.mark()

    def end(self, phase: str) -> None:
        start = self._started.pop(phase, None)
        if start is not None:
            self._spans.append((phase, start, self._host.mark() if phase == "data" else self.clock.mark()))

    def step(self, start: Any, end: Any) -> None:
        """Close a step that ran between two marks of the clock."""
        self._steps.append((start, end, self._spans))
        self._spans = []
        if len(self._steps) > MAX_STEPS:
            del self._steps[0]

    def discard_spans(self) -> None:
        """Drop the spans of the step that ends here, because the step was disturbed."""
        self._spans = []

    def waited_ms(self) -> float:
        """How long the program has waited for data in the current step."""
        return float(
            sum(self._host.elapsed_ms(start, end) for phase, start, end in self._spans if phase == "data")
        )

    def reset(self) -> None:
        """Drop everything collected so far (the warm-up, or the turn of another process)."""
        self._steps.clear()
        self._spans = []
        self._started.clear()

    def summary(self) -> dict[str, PhaseTime]:
        """Return median, quartiles and share of each phase over the kept steps. Waits for the device."""
        self.clock.synchronize()
        rows: list[dict[str, float]] = []
        total_ms = 0.0
        for start, end, spans in self._steps:
            step_ms = self.clock.elapsed_ms(start, end)
            row = dict.fromkeys(PHASES, 0.0)
            for phase, a, b in spans:
                row[phase] += self._host.elapsed_ms(a, b) if phase == "data" else self.clock.elapsed_ms(a, b)
            row["backward"] -= row["exchange"]  # the exchange is part of backward
            inner_ms = row["forward"] + row["backward"] + row["exchange"]
            # A closure runs forward and backward inside the optimizer's step; subtract their time.
            if row["optimizer"] >= inner_ms > 0 and sum(row.values()) > 1.02 * step_ms:
                row["optimizer"] -= inner_ms
            row["data"] = min(row["data"], max(0.0, step_ms - (sum(row.values()) - row["data"])))
            row["other"] = max(0.0, step_ms - sum(row.values()))
            rows.append(row)
            total_ms += step_ms
        if not rows or total_ms <= 0:
            return {}
        return {
            phase: PhaseTime(
                quantile(times, 0.5), quantile(times, 0.25), quantile(times, 0.75), sum(times) / total_ms
            )
            for phase in PHASES
            if (times := [row[phase] for row in rows]) and (phase != "exchange" or any(times))
        }

"""Finds the fastest plan that fits into memory, by switching memory-saving levers in a running program.

Each point is a plan with its time relative to the first point, from interleaved blocks, and the peak memory
of its tensors in a steady step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flatout.measure.clock import seconds
from flatout.schema.enums import Origin, Status
from flatout.schema.plan import Choice
from flatout.schema.session import TimeMemoryPoint
from flatout.trial.blocks import LeverFailed
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.candidates import LIVE, Candidate, plan_of
from flatout.tune.endings import end_reason
from flatout.tune.limits import COMPILE_S
from flatout.tune.tuning import Tuning

# A tick is one step, or one backward pass if a step is a closure that lasts seconds.
PEAK_TICKS = 4
MAX_LIVE_S = 12.0  # of one comparison
SETTLING_TICKS = 2  # the first observes or tests the lever; the second is like all later ticks
MAX_PEAK_RATIO = 0.99  # a saving of less than one hundredth does not count

Parts = tuple[tuple[Candidate, Choice], ...]


@dataclass
class FrontierPoint:
    """A point: its memory-saving levers, and whether the search's live levers are on."""

    record: TimeMemoryPoint
    parts: Parts
    with_live_levers: bool

    @property
    def time(self) -> float:
        """Step time relative to the first point."""
        return 1.0 / self.record.ratio.median if self.record.ratio is not None else 1.0


def fit_memory(tuning: Tuning, tuned: list[Candidate]) -> list[Candidate]:
    """The candidates of the fastest plan that fits; without a limit, ``tuned`` unchanged.

    The session records what does not fit.
    """
    limit = tuning.goal.memory_limit_bytes
    if limit is None:
        return tuned
    fixed = [c for c in tuned if not c.lever.live]
    try:
        program = _start_program(tuning, fixed)
    except (ProgramGone, LeverFailed) as error:
        tuning.record_comparison(plan_of(fixed).describe(), LIVE, None, end_reason(error), seconds())
        return tuned
    tuning.session.frontier = []
    points = _Frontier(tuning, program, fixed, [c for c in tuned if c.lever.live], limit).measure_all()
    if program is not tuning.plain_trial:
        tuning.interleaver.dismiss(program)
    return _choose_point(tuning, tuned, points)


def _start_program(tuning: Tuning, fixed: Sequence[Candidate]) -> Trial:
    """A program with the levers that cannot be switched; without such levers, the observed program."""
    if not fixed and tuning.plain_trial is not None and tuning.plain_trial in tuning.interleaver.running:
        return tuning.plain_trial
    return tuning.start_paused(plan_of(fixed)).trial


class _Frontier:
    def __init__(
        self, tuning: Tuning, program: Trial, fixed: list[Candidate], live: list[Candidate], limit: int
    ) -> None:
        self.tuning, self.program, self.fixed, self.live, self.limit = tuning, program, fixed, live, limit
        self.points: list[FrontierPoint] = []

    def measure_all(self) -> list[FrontierPoint]:
        """Measure without live levers, with them, and with every value of every memory-saving lever.

        If none fits, also measure the smallest values together.
        """
        try:
            self._measure((), with_live_levers=False)
            if self.live:
                self._measure((), with_live_levers=True)
            plans = list(self._single_levers())
            for i, parts in enumerate(plans):
                self._measure(parts, with_live_levers=True, plans_left=len(plans) - i + 1)
            if not any(point.record.fits for point in self.points):
                smallest = self._smallest_of_each()
                if len(smallest) > 1:
                    self._measure(smallest, with_live_levers=True)
        except ProgramGone as gone:  # it finished, or failed with a lever: the measurements so far stay
            self.tuning.interleaver.dismiss(self.program)
            self.points[-1].record.note = self.points[-1].record.note or end_reason(gone)
        return self.points

    def _single_levers(self) -> Iterator[Parts]:
        search_levers = {c.lever.name for c in (*self.fixed, *self.live)}
        for candidate in self.tuning.candidates.values():
            if not candidate.saves_memory:
                continue
            conflict = next((name for name in candidate.lever.excludes if name in search_levers), None)
            missing = next((name for name in candidate.lever.needs if name not in search_levers), None)
            if conflict or missing:
                candidate.reason = (
                    f"cannot be combined with {conflict}"
                    if conflict
                    else f"needs {missing}, which was not faster here"
                )
                continue
            for value in candidate.values:
                yield ((candidate, Choice(candidate.lever.name, value, Origin.TUNER)),)

    def _smallest_of_each(self) -> Parts:
        """The value of each lever with the lowest peak, if it saves memory."""
        without = (
            point for point in self.points if point.with_live_levers == bool(self.live) and not point.parts
        )
        max_peak = MAX_PEAK_RATIO * next((point.record.peak_bytes or 0 for point in without), 0)
        best: dict[str, tuple[int, Parts]] = {}
        for point in self.points:
            peak = point.record.peak_bytes
            if len(point.parts) == 1 and peak is not None and peak < max_peak:
                name = point.parts[0][1].name
                if name not in best or peak < best[name][0]:
                    best[name] = peak, point.parts
        return tuple(part for _, parts in best.values() for part in parts)

    def _measure(self, parts: Parts, with_live_levers: bool, plans_left: int = 1) -> None:
        tuning, interleaver, start_s = self.tuning, self.tuning.interleaver, seconds()
        left_s = tuning.memory_fit_until_s - start_s
        compiles = any(candidate.lever.warms_up for candidate, _ in parts)
        if parts and left_s < 4 * interleaver.block_s + (COMPILE_S if compiles else 0):
            return
        choices = ([c.choice for c in self.live] if with_live_levers else []) + [
            choice for _, choice in parts
        ]
        name = ", ".join(c.text for c in [*plan_of(self.fixed), *choices]) or "plain"
        tuning.stage("fitting", f"{name}: time and peak memory")
        record = TimeMemoryPoint(name)
        self.points.append(FrontierPoint(record, parts, with_live_levers))
        tuning.session.frontier.append(record)
        try:
            interleaver.switch(self.program, choices, COMPILE_S if compiles else 0.0)
            interleaver.run(self.program, SETTLING_TICKS)
            if choices:
                until_s = seconds() + max(0.0, min(MAX_LIVE_S, left_s / plans_left))
                record.ratio = interleaver.compare_live(
                    self.program,
                    (),
                    choices,
                    until_s,
                    settle_ticks=SETTLING_TICKS,
                    on_ratio=lambda ratio: tuning.watcher.comparison(name, ratio),
                )
                interleaver.switch(self.program, choices)
                interleaver.run(self.program, SETTLING_TICKS)
            peak_result = self.program.run_probe("peak", interleaver.deadline(PEAK_TICKS), ticks=PEAK_TICKS)
            interleaver.switch(self.program, ())
        except LeverFailed as error:
            record.note = error.reason
            interleaver.switch(self.program, ())
            for candidate, _ in parts:
                candidate.reason = candidate.reason if candidate.ratio else error.reason
            return
        record.peak_bytes, record.note = peak_result.get("peak_bytes"), peak_result.get("why_not", "")
        record.fits = record.peak_bytes is not None and record.peak_bytes <= self.limit
        if choices:
            tuning.record_comparison(
                name, LIVE, record.ratio, "", start_s, against=plan_of(self.fixed).describe()
            )
        for candidate, choice in parts if len(parts) == 1 else ():
            if record.ratio is not None:
                candidate.value, candidate.ratio, candidate.method = choice.value, record.ratio, LIVE
                candidate.status, candidate.reason = (
                    Status.REJECTED,
                    "another plan that fits is faster"
                    if record.fits
                    else "does not fit into the memory limit",
                )


def _choose_point(tuning: Tuning, tuned: list[Candidate], points: Sequence[FrontierPoint]) -> list[Candidate]:
    """The candidates of the frontier to confirm. Ties go to the smaller plan."""
    if not points or points[0].record.peak_bytes is None:
        return tuned
    fitting = sorted(
        (point for point in points if point.record.fits), key=lambda point: (point.time, len(point.parts))
    )
    if not fitting:
        for candidate in tuned:
            candidate.reject("no plan fits into the memory limit")
        return []
    best = fitting[0]
    best.record.chosen = True
    tuning.must_fit = not points[0].record.fits
    if not best.parts and best.with_live_levers == bool([c for c in tuned if c.lever.live]):
        return tuned
    chosen = [c for c in tuned if not c.lever.live or best.with_live_levers]
    for candidate in tuned:
        if candidate not in chosen:
            candidate.reject("the plan with it does not fit into the memory limit")
    for candidate, choice in best.parts:
        candidate.value, candidate.ratio, candidate.method = choice.value, best.record.ratio, LIVE
        candidate.status = Status.SKIPPED
        candidate.reason = "fastest plan that fits; the search ended before it was confirmed"
    return [*chosen, *(candidate for candidate, _ in best.parts)]

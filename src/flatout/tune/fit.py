"""Finds the fastest plan that fits into memory, by switching memory-saving levers in a running program.

Each point is a plan with its time relative to the first point, from interleaved blocks, and the peak memory
of its tensors in a steady step. No saving is assumed: the effect of a compiler's memory budget is not even
monotonic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flatout.measure.clock import seconds
from flatout.schema.enums import Origin, Status
from flatout.schema.plan import Choice, spell
from flatout.schema.session import TimeMemoryPoint
from flatout.trial.blocks import LeverFailed
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.candidates import LIVE, Candidate, plan_of
from flatout.tune.gone import why_gone
from flatout.tune.limits import COMPILE_S
from flatout.tune.tuning import Tuning

PEAK_TICKS = 4
LONGEST_LIVE_S = 12.0  # of one comparison
SETTLING_TICKS = 2  # the first observes or tests the lever; the second is like all later ticks
SAME_PEAK = 0.99  # a saving of less than one hundredth does not count

Parts = tuple[tuple[Candidate, Choice], ...]


@dataclass
class FrontierPoint:
    """A point and its parts: the fastest levers of the search or none of them, and memory-saving levers."""

    point: TimeMemoryPoint
    parts: Parts
    winners: bool

    @property
    def time(self) -> float:
        """Step time relative to the first point."""
        return 1.0 / self.point.ratio.median if self.point.ratio is not None else 1.0


def fit(tuning: Tuning, tuned: list[Candidate]) -> list[Candidate]:
    """Return the candidates of the fastest plan that fits; without a limit, ``tuned`` unchanged.

    The session records what does not fit.
    """
    limit = tuning.goal.memory_limit_bytes
    if limit is None:
        return tuned
    early = [c for c in tuned if not c.lever.live]
    try:
        program = _program(tuning, early)
    except (ProgramGone, LeverFailed) as error:
        tuning.note(plan_of(early).describe(), LIVE, None, why_gone(error), seconds())
        return tuned
    tuning.session.frontier = []
    found = _Frontier(tuning, program, early, [c for c in tuned if c.lever.live], limit).measured()
    if program is not tuning.observed:
        tuning.interleaver.dismiss(program)
    return _chosen(tuning, tuned, found)


def _program(tuning: Tuning, early: Sequence[Candidate]) -> Trial:
    """Return a program with the levers that cannot be switched; without such levers, the observed program."""
    if not early and tuning.observed is not None and tuning.observed in tuning.interleaver.running:
        return tuning.observed
    return tuning.enter(plan_of(early)).trial


class _Frontier:
    def __init__(
        self, tuning: Tuning, program: Trial, early: list[Candidate], live: list[Candidate], limit: int
    ) -> None:
        self.tuning, self.program, self.early, self.live, self.limit = tuning, program, early, live, limit
        self.found: list[FrontierPoint] = []

    def measured(self) -> list[FrontierPoint]:
        """Measure no live levers, the fastest levers, and every value of every memory-saving lever.

        If none fits, also measure the smallest values together.
        """
        try:
            self._measure((), winners=False)
            if self.live:
                self._measure((), winners=True)
            todo = list(self._single())
            for at, parts in enumerate(todo):
                self._measure(parts, winners=True, left=len(todo) - at + 1)
            if not any(one.point.fits for one in self.found):
                together = self._smallest_of_each()
                if len(together) > 1:
                    self._measure(together, winners=True)
        except ProgramGone as gone:  # it finished, or failed with a lever: the measurements so far stay
            self.tuning.interleaver.dismiss(self.program)
            self.found[-1].point.note = self.found[-1].point.note or why_gone(gone)
        return self.found

    def _single(self) -> Iterator[Parts]:
        winners = {c.lever.name for c in (*self.early, *self.live)}
        for candidate in self.tuning.candidates.values():
            if not candidate.for_memory:
                continue
            clash = next((name for name in candidate.lever.excludes if name in winners), None)
            missing = next((name for name in candidate.lever.needs if name not in winners), None)
            if clash or missing:
                candidate.reason = (
                    f"cannot be combined with {clash}"
                    if clash
                    else f"needs {missing}, which was not faster here"
                )
                continue
            for value in candidate.values:
                yield ((candidate, Choice(candidate.lever.name, value, Origin.TUNER)),)

    def _smallest_of_each(self) -> Parts:
        """Return the value of each lever with the lowest peak, if it saves memory."""
        whole = next(
            (one.point.peak_bytes for one in self.found if one.winners == bool(self.live) and not one.parts),
            None,
        )
        best: dict[str, tuple[int, Parts]] = {}
        for one in self.found:
            peak = one.point.peak_bytes
            if len(one.parts) == 1 and peak is not None and whole is not None and peak < SAME_PEAK * whole:
                name = one.parts[0][1].name
                if name not in best or peak < best[name][0]:
                    best[name] = peak, one.parts
        return tuple(part for _, parts in best.values() for part in parts)

    def _measure(self, parts: Parts, winners: bool, left: int = 1) -> None:
        tuning, interleaver, start_s = self.tuning, self.tuning.interleaver, seconds()
        left_s = tuning.fit_until_s - start_s
        compiles = any(candidate.lever.warms_up for candidate, _ in parts)
        if parts and left_s < 4 * interleaver.block_s + (COMPILE_S if compiles else 0):
            return
        choices = ([c.choice for c in self.live] if winners else []) + [choice for _, choice in parts]
        name = ", ".join(spell(c.name, c.value) for c in [*plan_of(self.early), *choices]) or "plain"
        tuning.stage("fitting", f"{name}: time and peak memory")
        point = TimeMemoryPoint(name)
        one = FrontierPoint(point, parts, winners)
        self.found.append(one)
        tuning.session.frontier.append(point)
        try:
            interleaver.switch(self.program, choices, COMPILE_S if compiles else 0.0)
            interleaver.run(self.program, SETTLING_TICKS)
            if choices:
                until_s = seconds() + max(0.0, min(LONGEST_LIVE_S, left_s / left))
                point.ratio = interleaver.live(
                    self.program,
                    (),
                    choices,
                    until_s,
                    settle_ticks=SETTLING_TICKS,
                    recorded=lambda ratio: tuning.watcher.comparison(name, ratio),
                )
                interleaver.switch(self.program, choices)
                interleaver.run(self.program, SETTLING_TICKS)
            recorded = self.program.listen("peak", interleaver.deadline(PEAK_TICKS), ticks=PEAK_TICKS)
            interleaver.switch(self.program, ())
        except LeverFailed as error:
            point.note = error.reason
            interleaver.switch(self.program, ())
            for candidate, _ in parts:
                candidate.reason = candidate.reason if candidate.ratio else error.reason
            return
        point.peak_bytes, point.note = recorded.get("peak_bytes"), recorded.get("why_not", "")
        point.fits = point.peak_bytes is not None and point.peak_bytes <= self.limit
        if choices:
            tuning.note(name, LIVE, point.ratio, "", start_s, against=plan_of(self.early).describe())
        for candidate, choice in parts if len(parts) == 1 else ():
            if point.ratio is not None:
                candidate.value, candidate.ratio, candidate.how = choice.value, point.ratio, LIVE
                candidate.status, candidate.reason = (
                    Status.REJECTED,
                    "another plan that fits is faster"
                    if point.fits
                    else "does not fit into the memory limit",
                )


def _chosen(tuning: Tuning, tuned: list[Candidate], found: Sequence[FrontierPoint]) -> list[Candidate]:
    """Return the candidates of the frontier to confirm. Ties go to the smaller plan."""
    if not found or found[0].point.peak_bytes is None:
        return tuned
    fitting = sorted((one for one in found if one.point.fits), key=lambda one: (one.time, len(one.parts)))
    if not fitting:
        for candidate in tuned:
            candidate.reject("no plan fits into the memory limit")
        return []
    best = fitting[0]
    best.point.chosen = True
    tuning.must_fit = not found[0].point.fits
    if not best.parts and best.winners == bool([c for c in tuned if c.lever.live]):
        return tuned
    chosen = [c for c in tuned if not c.lever.live or best.winners]
    for candidate in tuned:
        if candidate not in chosen:
            candidate.reject("the plan with it does not fit into the memory limit")
    for candidate, choice in best.parts:
        candidate.value, candidate.ratio, candidate.how = choice.value, best.point.ratio, LIVE
        candidate.status, candidate.reason = (
            Status.SKIPPED,
            "fastest plan that fits; the search ended before it was confirmed",
        )
    return [*chosen, *(candidate for candidate, _ in best.parts)]

"""The search: observe, explore, check a step, confirm in fresh processes.

observe    run one plain program until its steps are steady; every lever says whether it applies
ranks      with several ranks: compare them with one process
by name    measure levers that you named although they change training: speed and both loss curves
explore    measure all levers by an experimental design: live ones by block, others across processes
fit        if memory is limited: add memory-saving levers one after another, by time and peak memory
guard      replay one step plainly, with the levers, and in float64
confirm    run two or three fresh pairs of processes, plain and tuned, each with its own seed; more if the
           result is unclear. They alone decide the speed, and provide the loss curves of the guard
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flatout.measure.clock import seconds
from flatout.schema.enums import Origin, Status
from flatout.schema.errors import NothingMeasured
from flatout.schema.plan import Choice, Plan
from flatout.schema.session import NamedLeverRecord, ProgramFigures, SessionRecord, TimeMemoryPoint
from flatout.trial.blocks import PREFETCHED_BATCHES, LeverFailed
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.budget import LONGER_BUDGET_S
from flatout.tune.candidates import LIVE, Candidate, drop_slow_fetches, make_candidates, plan_of
from flatout.tune.card import CardSearch
from flatout.tune.card_process import suits
from flatout.tune.comparison import compare_running
from flatout.tune.conclude import noise_floor
from flatout.tune.confirm import confirm_plan
from flatout.tune.endings import end_reason, unmeasured_error
from flatout.tune.explore import explore
from flatout.tune.interleaver import RunningCandidate, ask_options
from flatout.tune.limits import COMPILE_S
from flatout.tune.narrow import check_step
from flatout.tune.plan_files import sources_key
from flatout.tune.ranks import compare_with_one_process, why_incompatible
from flatout.tune.tuning import Tuning

# Finds the fastest plan that fits into memory, by switching memory-saving levers in a running program.
#
# Each point is a plan with its time relative to the first point, from interleaved blocks, and the peak memory
# of its tensors in a steady step.

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


# Measures levers that you name and the tuner never selects, because they change training.
#
# It records the speed and both loss curves. Both programs start from the same seed and alternate block by
# block, so speed and losses come from the same steps.

BUDGET_SHARE = 0.4  # of the budget, for all of them
SEED = 0


def measure_named(tuning: Tuning) -> None:
    """Fill ``session.named``. A lever that fails gets a sentence there, and the search continues."""
    measured_plans = {record.plan for record in tuning.session.named_levers}
    pending = [choice for choice in tuning.goal.named if choice.text not in measured_plans]
    for choice in pending:
        plan, start_s = Plan((choice,)), seconds()
        record = NamedLeverRecord(plan.describe())
        tuning.stage("by name", f"{record.plan} against the plain program")
        candidates: list[RunningCandidate] = []
        try:
            for side_plan in (Plan(), plan):
                candidates.append(tuning.start_paused(side_plan, SEED))
            plain, named = (candidate.trial for candidate in candidates)
            until_s = seconds() + max(
                BUDGET_SHARE * tuning.budget_s / len(pending) - (seconds() - start_s),
                4 * tuning.interleaver.block_s,
            )
            record.ratio = compare_running(tuning.interleaver, plain, named, until_s)
            records = plain.finish(), named.finish()
            record.plain_losses, record.losses = (
                [float.fromhex(loss) for loss in record.losses] for record in records
            )
        except (ProgramGone, LeverFailed) as error:
            record.why_not = end_reason(error)
        finally:
            for candidate in candidates:
                tuning.interleaver.dismiss(candidate.trial)
        tuning.session.named_levers.append(record)
        tuning.record_comparison(record.plan, "by name", record.ratio, record.why_not, start_s)


MIN_TICKS = 12  # a program with fewer steps cannot be compared
MAX_FETCH_SHARE = 0.15  # of the budget, for fetching a whole data set first


def search(tuning: Tuning) -> SessionRecord:
    """Run the whole search.

    Raises ProgramFailed if the plain program is seen to fail, before or after it trained, and NothingMeasured
    if it does not train.
    """
    try:
        tuning.disturbance.wait(tuning.budget_s, tuning.watcher.report)
        card = CardSearch(tuning) if suits(tuning) else None
        if card is not None:
            card.start_first()
        observe(tuning)
        plain = tuning.plain_trial
        if card is not None and plain is not None and plain.ready["device"] == "cuda":
            card.run(plain)
        else:
            if card is not None:
                card.close()
            compare_with_one_process(tuning)
            measure_named(tuning)
            tuned, replica = check_step(tuning, fit_memory(tuning, explore(tuning)))
            tuning.finish_plain_trial()
            confirm_plan(tuning, tuned, replica)
        if tuning.counted_blocks:
            tuning.session.noise_floor = noise_floor(tuning)
        tuning.session.disturbance = tuning.disturbance.beside
    finally:
        tuning.interleaver.close()
        tuning.explain_overrun()
        tuning.save()
    return tuning.session


def observe(tuning: Tuning) -> None:
    """Bring the plain program to its steady state and query every lever. Raises what ``search`` raises."""
    tuning.stage("observing", "the plain program, until its steps are steady")
    try:
        budget_s = tuning.goal.budget_s or LONGER_BUDGET_S
        timeout_s = max(min(60.0, 3 * budget_s), 0.8 * budget_s)
        plain = tuning.interleaver.start_paused(Plan(), 0, timeout_s)
        answer = ask_options(plain.trial)
    except ProgramGone as gone:
        remedy = f"Let it train {MIN_TICKS} steps or more, or increase --budget; the logs are in {tuning.job.trials}"
        raise unmeasured_error(gone.record, "nothing to tune", remedy) from None
    ready, interleaver = plain.trial.ready, tuning.interleaver
    for skipped in ready["skipped"]:  # levers that every program of the search needs
        raise NothingMeasured(f"{skipped['name']} could not be applied: {skipped['reason']}")
    tuning.plain_trial, tuning.start_cost_s, tuning.warmup_ticks = (
        plain.trial,
        plain.startup_s,
        ready["ticks"],
    )
    interleaver.tick_ms, interleaver.unit = max(ready["tick_ms"], 1e-3), ready["unit"]
    tuning.max_copies = ready["max_copies"]
    tuning.session.context = context = answer["context"]
    tuning.session.key["sources"] = sources_key(context.pop("sources"))
    interleaver.prefetched_ticks = PREFETCHED_BATCHES * max(
        (loader["num_workers"] for loader in answer["context"]["loaders"]), default=0
    )
    tuning.candidates = make_candidates(
        answer["options"],
        tuning.goal.effects,
        tuning.goal.only_levers,
        tuning.goal.memory_limit_bytes is not None,
        tuning.base,
        why_incompatible,
    )
    ranks = tuning.session.ranks
    tuning.disturbance.observe(context, ranks.procs if ranks else 1)
    tuning.choose_budget()
    drop_slow_fetches(
        tuning.candidates, answer["context"]["loaders"], ready, MAX_FETCH_SHARE * tuning.budget_s
    )
    tuning.session.baseline = ProgramFigures(
        step_ms=ready["tick_ms"], unit=ready["unit"], warmup_ms=ready["warmup_ms"]
    )
    tuning.save()

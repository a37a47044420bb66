"""Confirmation: fresh pairs of processes, plain and tuned, each pair with its own seed.

Speed and guard use the same runs.

The blocks of the pairs join all others in the regression, so the verdict uses every measurement. If the guard
rejects a plan, the levers responsible are found and left out (`flatout.tune.narrow`), and the rest is
confirmed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flatout.guard.loss_curves import START_STEPS
from flatout.guard.replica import SLOW_MS
from flatout.guard.verdict import judge, needs_perturbed_runs, perturbation_for
from flatout.measure.clock import seconds
from flatout.measure.statistics import compare, median
from flatout.schema.enums import Origin, Status
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import MIN_RATIO_LOW, Ratio, TrialRecord
from flatout.schema.session import GuardRecord, ProgramFigures
from flatout.tune.candidates import Candidate, fetches_all, plan_of, widest
from flatout.tune.conclude import obstacle
from flatout.tune.limits import FEWEST_PAIRS, PAIRS
from flatout.tune.narrow import without_the_culprits
from flatout.tune.pairs import Pairs, keys_of, more_pairs
from flatout.tune.tuning import Tuning

WORTH_KEEPING = 1.01  # a smaller speed-up does not justify a plan file
WORTH_ANOTHER_TRY = 1.03  # for the rest of a plan that the guard rejected
MORE_FOR_THE_REST = 0.5  # of the budget, for confirming that rest
START_NOISE = 0.25  # normal variation between two starts of one program


@dataclass(frozen=True)
class Refused:
    """Why a plan was not kept.

    ``by_guard`` holds the guard's verdict if the guard rejected it. ``undecided``: with more time it might
    have been kept.
    """

    reason: str
    by_guard: GuardRecord | None = None
    undecided: bool = False


def settle(tuning: Tuning, tuned: list[Candidate], replica: dict[str, Any] | None) -> None:
    """Confirm the plan.

    If the guard rejects it, confirm the rest without the levers responsible; else keep the plain program.
    """
    attempt, pairs = list(tuned), Pairs()
    while attempt:
        refused = _confirm(tuning, attempt, replica, pairs)
        if refused is None:
            break
        for candidate in attempt:
            candidate.reason = refused.reason
        tuning.session.undecided, tuning.session.obstacle = refused.undecided, refused.reason
        rest = []
        if refused.by_guard is not None and not tuning.must_fit and len(attempt) > 1:
            rest = without_the_culprits(tuning, attempt, refused.by_guard, pairs.plain)
            gain = tuning.gain(keys_of(rest)).median
            if rest and (
                gain < WORTH_ANOTHER_TRY
                or tuning.allowed_s() + MORE_FOR_THE_REST * tuning.budget_s < FEWEST_PAIRS * tuning.pair_s
            ):
                for candidate in rest:
                    candidate.reason = f"without the levers that the guard rejected, the plan gives {gain:.2f}x; it was not confirmed"
                rest = []
        attempt, replica = rest, None
        pairs = Pairs(plain=pairs.plain, plain_ms=pairs.plain_ms)
    for candidate in tuned:
        if candidate not in attempt:
            candidate.status = Status.REJECTED
    if attempt:
        tuning.session.undecided, tuning.session.obstacle = False, obstacle(tuning)
    else:
        _stay_plain(tuning, tuned)


def _confirm(
    tuning: Tuning, tuned: list[Candidate], replica: dict[str, Any] | None, pairs: Pairs
) -> Refused | None:
    """Confirm a plan; None if the plan is kept, and the session then holds it."""
    plan, session, start_s, known = plan_of(tuned), tuning.session, seconds(), len(pairs.plain)
    while _time_for_another(tuning, tuned, pairs, known):
        tuning.stage(
            "confirming",
            f"pair {len(pairs.tuned) + 1}: {plan.describe()} against the plain program, in fresh processes",
        )
        tuning.disturbance.look()
        more_pairs(tuning, tuned, pairs)
        if pairs.failure:
            tuning.note(plan.describe(), "fresh pairs", None, pairs.failure, start_s)
            return Refused(f"failed in fresh processes: {pairs.failure}")
        tuning.watcher.comparison(plan.describe(), _ratio(tuning, tuned, pairs), f"pair {len(pairs.tuned)}")
        if (
            FEWEST_PAIRS <= len(pairs.tuned) < PAIRS
            and _judged(tuning, tuned, replica, pairs).verdict == "failed"
        ):
            break  # the remaining time is for the plan without the levers responsible
    plain_records, tuned_records = pairs.both()
    if not tuned_records:
        return Refused(
            f"not confirmed: the budget ran out; give --budget {tuning.enough_m(PAIRS * tuning.pair_s)}m",
            undecided=True,
        )
    ratio = _ratio(tuning, tuned, pairs)
    tuning.note(
        plan.describe(),
        "fresh pairs",
        compare(pairs.rounds) if pairs.rounds else ratio,
        "",
        start_s,
        host="; ".join(dict.fromkeys(pairs.hosts)),
    )
    session.guard = _judged(tuning, tuned, replica, pairs)
    _fill(session.baseline, Plan(), plain_records, pairs.plain_ms)
    _fill(session.best, plan, tuned_records, pairs.tuned_ms)
    # The fresh programs reused the samples; the real run will not
    if any(fetches_all(choice.value) for choice in plan):
        session.best.warmup_ms += 1000 * tuning.once_s
    session.payback_steps = _payback(session.baseline, session.best, any(c.lever.warms_up for c in tuned))
    if len(tuned_records) < FEWEST_PAIRS:
        more = f"give --budget {tuning.enough_m(PAIRS * tuning.pair_s)}m"
        return Refused(
            f"one pair of processes ({ratio.sentence()}) does not confirm a speed-up, and the budget ran out; {more}",
            undecided=True,
        )
    if session.guard.verdict == "failed":
        return Refused(f"the guard: {session.guard.why}", session.guard)
    if session.guard.verdict == "not checked":
        return Refused(f"not kept, because its results could not be checked: {session.guard.why}")
    if not tuning.must_fit and (ratio.low < MIN_RATIO_LOW or ratio.median < WORTH_KEEPING):
        return _not_shown(tuning, ratio)
    if not tuning.must_fit and not _repaid(tuning):
        return Refused(
            f"the warm-up pays off after {session.payback_steps} steps, beyond the horizon (--horizon)"
        )
    session.speedup = ratio
    for candidate in tuned:
        candidate.status, candidate.reason = Status.APPLIED, _remarks(candidate, tuned_records[0])
    session.best.plan = _with_evidence(tuned, ratio, session.key).to_json()
    return None


def _not_shown(tuning: Tuning, ratio: Ratio) -> Refused:
    """Refuse a plan whose speed-up is within the noise."""
    shown = f"{ratio.sentence()} in fresh processes"
    if not tuning.disturbance.disturbed or ratio.high < WORTH_KEEPING:
        return Refused(f"together {shown}: no speed-up beyond the noise")
    more = f"stop them, or give --budget {tuning.enough_m(2 * tuning.budget_s)}m"
    return Refused(
        f"{tuning.disturbance.sentence()}, which may hide the speed-up ({shown}); {more}", undecided=True
    )


def _ratio(tuning: Tuning, tuned: Sequence[Candidate], pairs: Pairs) -> Ratio:
    """Return the ratio from all blocks.

    If there was no time to explore, or a memory limit chose the plan, use the pairs alone.
    """
    keys = keys_of(tuned)
    if keys <= tuning.choices.keys() or not pairs.rounds:
        tuning.refit()
        return tuning.gain(keys & tuning.choices.keys())
    return compare(pairs.rounds)


def _remarks(candidate: Candidate, record: TrialRecord) -> str:
    """Return the remarks of an applied lever: which part of the program it left alone, and why."""
    return "; ".join(
        dict.fromkeys(left["reason"] for left in record.skipped if left["name"] == candidate.lever.name)
    )


def _time_for_another(tuning: Tuning, tuned: Sequence[Candidate], pairs: Pairs, known: int) -> bool:
    """Whether there is time for another pair: three pairs within the budget.

    The first two may exceed it a little, and further pairs may if the result is undecided. ``known`` plain
    runs are reused.
    """
    done = len(pairs.tuned)
    more_s = MORE_FOR_THE_REST * tuning.budget_s if known else 0.0
    if not done:
        return tuning.allowed_s(overrun=True) + more_s > 0
    ratio = _ratio(tuning, tuned, pairs)
    undecided = not ratio.significant and ratio.median > WORTH_KEEPING
    time_s = tuning.allowed_s(overrun=undecided or done < FEWEST_PAIRS) + more_s
    # The second pair may have few blocks: one pair decides nothing
    least_s = tuning.starts_s(2) if done < FEWEST_PAIRS else max(tuning.pair_s, pairs.longest_s)
    return (undecided or done < PAIRS) and done < 2 * PAIRS and time_s > least_s


def _judged(
    tuning: Tuning, tuned: Sequence[Candidate], replica: dict[str, Any] | None, pairs: Pairs
) -> GuardRecord:
    effect, (plain, others) = widest(tuned), pairs.both()
    perturbation = perturbation_for(effect)
    found = judge(
        effect, plain, others, replica, tuning.first_plain, tuning.perturbed.get(perturbation, ()), pairs.late
    )
    if perturbation not in tuning.perturbed and needs_perturbed_runs(found):
        tuning.stage(
            "guard",
            "the plain program with weights perturbed in the last place, to see how far rounding spreads",
        )
        seeds = [
            record.seed or 0
            for record in plain[: FEWEST_PAIRS if tuning.interleaver.tick_ms < SLOW_MS else 1]
        ]
        tuning.perturbed[perturbation] = perturbed(
            tuning, seeds, perturbation, max(len(record.losses) for record in plain)
        )
        found = judge(
            effect, plain, others, replica, tuning.first_plain, tuning.perturbed[perturbation], pairs.late
        )
    return found


def perturbed(
    tuning: Tuning, seeds: Sequence[int], perturbation: float, known: int = START_STEPS
) -> list[TrialRecord]:
    """Return perturbed plain runs that cover the first of ``known`` losses; empty if one of them fails."""
    interleaver, steps = tuning.interleaver, min(START_STEPS, known)
    trials = [interleaver.start(Plan(), seed, perturbation) for seed in seeds]
    try:
        if any(gone is not None for gone in interleaver.ready(trials, tuning.timeout_s)):
            return []
        records = []
        for trial in trials:
            if trial.ticks_done < steps:
                interleaver.run(trial, steps - trial.ticks_done)
            records.append(trial.finish())
        return records
    finally:
        for trial in trials:
            interleaver.dismiss(trial)


def _fill(
    side: ProgramFigures, plan: Plan, records: Sequence[TrialRecord], times_ms: Sequence[float]
) -> None:
    side.plan = plan.to_json()
    side.step_ms = median(times_ms)
    side.unit = records[0].unit
    per_step = [r.samples_per_step for r in records if r.samples_per_step]
    side.samples_per_s = per_step[0] / side.step_ms * 1000 if per_step else None
    side.phases = records[0].phases
    side.peak_memory_bytes = max((r.peak_memory_bytes or 0 for r in records), default=0) or None
    side.warmup_ms = median([r.warmup_ms for r in records])
    side.steps = sum(r.steps for r in records)


def _payback(plain: ProgramFigures, tuned: ProgramFigures, warms_up: bool) -> int | None:
    """Return after how many steps a longer start pays off: 0 if it is not longer, None if never."""
    if plain.step_ms is None or tuned.step_ms is None or tuned.step_ms >= plain.step_ms:
        return None
    extra = tuned.warmup_ms - plain.warmup_ms
    if extra <= (0.05 if warms_up else START_NOISE) * plain.warmup_ms:
        return 0
    return math.ceil(extra / (plain.step_ms - tuned.step_ms))


def _repaid(tuning: Tuning) -> bool:
    steps = tuning.session.payback_steps
    return (
        steps is not None and steps * (tuning.session.baseline.step_ms or 0.0) / 1000 <= tuning.goal.horizon_s
    )


def _with_evidence(tuned: Sequence[Candidate], ratio: Ratio, key: dict[str, Any]) -> Plan:
    choices = []
    for choice in plan_of(tuned):
        beside = next(c.ratio for c in tuned if c.lever.name == choice.name)
        said = (
            f"with the other levers {beside.sentence()}"
            if beside
            else "measured only together with the other levers"
        )
        choices.append(
            Choice(choice.name, choice.value, Origin.TUNER, f"{said}; the whole plan {ratio.sentence()}")
        )
    return Plan(tuple(choices), key)


def _stay_plain(tuning: Tuning, tuned: Sequence[Candidate]) -> None:
    session = tuning.session
    for candidate in tuned:
        candidate.status = Status.REJECTED
    session.best = ProgramFigures(**{**session.baseline.__dict__, "plan": Plan((), session.key).to_json()})
    session.speedup = session.payback_steps = None
    for point in session.frontier:
        point.chosen = False
    if session.guard.verdict != "failed":
        session.guard = GuardRecord("same", "the plain program is kept")

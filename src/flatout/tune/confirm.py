"""Confirmation: fresh pairs of processes, plain and tuned, each pair with its own seed.

Only these pairs decide the speed (`flatout.tune.effects.plan_speed`): the search chose the plan for its luck, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flatout.guard.loss_curves import START_STEPS
from flatout.guard.replica import SLOW_STEP_MS
from flatout.guard.verdict import judge, needs_perturbed_runs, perturbation_for, repeats_itself
from flatout.job.sanitize import portable
from flatout.measure.clock import seconds
from flatout.measure.statistics import median
from flatout.schema.enums import Effect, Origin, Status
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import MIN_RATIO_LOW, Ratio, TrialRecord
from flatout.schema.session import FASTER_BESIDE, CertificateRecord, CertifiedRun, GuardRecord, ProgramFigures
from flatout.tune.candidates import Candidate, fetches_all, plan_of, widest_effect
from flatout.tune.conclude import conclude, limiting_factor
from flatout.tune.limits import MIN_PAIRS, USUAL_PAIRS
from flatout.tune.narrow import check_step, without_culprits
from flatout.tune.pairs import Pairs, keys_of, measure_pairs
from flatout.tune.tuning import Tuning

MIN_SPEEDUP = 1.01  # a smaller speed-up does not justify a plan file
MIN_OF_EXPECTED = 0.9  # of what the search expected; less contradicts it
MAX_OF_EXPECTED = 1.5  # more contradicts it, too: the first steps of fresh processes are not like later ones
MIN_REST_SPEEDUP = 1.03  # for the rest of a plan that the guard rejected
REST_OVERRUN_SHARE = 0.5  # of the budget, for confirming that rest
START_VARIATION = 0.25  # normal variation between two starts of one program


@dataclass(frozen=True)
class Rejection:
    """Why a plan was not kept.

    ``guard_record`` holds the guard's verdict if the guard rejected it, ``ratio`` the speed if that did.
    ``undecided``: with more time it might have been kept.
    """

    reason: str
    guard_record: GuardRecord | None = None
    undecided: bool = False
    ratio: Ratio | None = None


def confirm_plan(tuning: Tuning, tuned: list[Candidate], replica: dict[str, Any] | None) -> None:
    """Confirm the plan.

    If the guard rejects it, confirm the rest without the levers responsible (`flatout.tune.narrow`). If its speed
    does, and contradicts the search, fit again with the blocks of the pairs, and confirm what is best then.
    """
    attempt, pairs, tried, extra_s = list(tuned), Pairs(), set[frozenset[str]](), 0.0
    while attempt:
        tried.add(keys_of(attempt))
        expected = tuning.gain(keys_of(attempt) & tuning.choices.keys())
        rejection = _confirm_once(tuning, attempt, replica, pairs, extra_s)
        ratio = rejection.ratio if rejection else tuning.session.speedup
        text = ""
        share = ratio.median / expected.median if ratio is not None else 1.0
        if ratio is not None and not MIN_OF_EXPECTED <= share <= MAX_OF_EXPECTED:
            text = f"{plan_of(attempt).describe()} was expected at {expected.median:.2f}x, and gives {ratio.median:.2f}x in fresh processes"
            if share > MAX_OF_EXPECTED:
                text += ": their first steps gain more than later ones (a cache that fills?)"
            tuning.watcher.report(f"{text}: fitting again, with their blocks" if rejection else text)
        if rejection is None:
            break
        for candidate in attempt:
            candidate.reason = rejection.reason
        tuning.session.undecided, tuning.session.obstacle = rejection.undecided, rejection.reason
        remaining = []
        if rejection.guard_record is not None and not tuning.must_fit and len(attempt) > 1:
            remaining = without_culprits(tuning, attempt, rejection.guard_record, pairs.plain)
            gain, extra_s = tuning.gain(keys_of(remaining)).median, REST_OVERRUN_SHARE * tuning.budget_s
            if remaining and (
                gain < MIN_REST_SPEEDUP or tuning.remaining_s() + extra_s < MIN_PAIRS * tuning.pair_s
            ):
                for candidate in remaining:
                    candidate.reason = f"without the levers that the guard rejected, the plan gives {gain:.2f}x{tuning.beside}; it was not confirmed"
                remaining = []
        replica = None
        if text:
            remaining, replica = _best_now(tuning, tried)
            for candidate in () if remaining else attempt:
                candidate.reason = rejection.reason
        attempt, pairs = remaining, pairs.without_plan()
        tuned = [*tuned, *(candidate for candidate in attempt if candidate not in tuned)]
    for candidate in tuned:
        if candidate not in attempt:
            candidate.status = Status.REJECTED
    if tuning.disturbance.disturbed:
        for candidate in tuning.candidates.values():
            candidate.ratio = None
    if attempt:
        tuning.session.undecided, tuning.session.obstacle = False, limiting_factor(tuning) or text
    else:
        keep_plain(tuning, tuned)


def _best_now(tuning: Tuning, tried: set[frozenset[str]]) -> tuple[list[Candidate], dict[str, Any] | None]:
    """The best plan by all blocks, and its replica; empty if it was tried or if time is short."""
    if tuning.must_fit or tuning.remaining_s(overrun=True) < tuning.joint_start_s(2):
        return [], None
    tuning.drop_cold_blocks()
    tuned, replica = check_step(tuning, conclude(tuning))
    tuning.finish_plain_trial()
    return ([], None) if keys_of(tuned) in tried else (tuned, replica)


def _confirm_once(
    tuning: Tuning, tuned: list[Candidate], replica: dict[str, Any] | None, pairs: Pairs, extra_s: float
) -> Rejection | None:
    """Confirm a plan; None if the plan is kept, and the session then holds it. ``extra_s``: beyond the budget."""
    plan, start_s = plan_of(tuned), seconds()
    ratio: Ratio | None = None
    while _time_for_pair(tuning, pairs, extra_s, ratio):
        tuning.stage(
            "confirming",
            f"pair {len(pairs.tuned) + 1}: {plan.describe()} against the plain program, in fresh processes",
        )
        tuning.disturbance.sample()
        measure_pairs(tuning, tuned, pairs)
        if pairs.failure:
            tuning.record_comparison(plan.describe(), "fresh pairs", None, pairs.failure, start_s)
            return Rejection(f"failed in fresh processes: {pairs.failure}")
        ratio = pairs.speed(tuning)
        tuning.watcher.comparison(plan.describe(), ratio, f"pair {len(pairs.tuned)}")
        early = MIN_PAIRS <= len(pairs.tuned) < USUAL_PAIRS
        if early and judge_pairs(tuning, tuned, replica, pairs).verdict == "failed":
            break  # the remaining time is for the plan without the levers responsible
    if ratio is None or not pairs.common_runs()[1]:
        return Rejection(
            f"not confirmed: the budget ran out; {tuning.budget_hint(USUAL_PAIRS * tuning.pair_s)}",
            undecided=True,
        )
    return conclude_pairs(tuning, tuned, replica, pairs, ratio, start_s)


def conclude_pairs(
    tuning: Tuning,
    tuned: list[Candidate],
    replica: dict[str, Any] | None,
    pairs: Pairs,
    ratio: Ratio,
    start_s: float,
) -> Rejection | None:
    """Judge a plan by its pairs; None if the plan is kept, and the session then holds it."""
    plan, session, (plain_records, tuned_records) = plan_of(tuned), tuning.session, pairs.common_runs()
    tuning.record_comparison(
        plan.describe(),
        "fresh pairs",
        ratio,
        "",
        start_s,
        host="; ".join(dict.fromkeys(pairs.hosts)),
    )
    session.guard = judge_pairs(tuning, tuned, replica, pairs)
    _fill_figures(session.baseline, Plan(), plain_records, pairs.plain_ms)
    _fill_figures(session.best, plan, tuned_records, pairs.tuned_ms)
    # The fresh programs reused the samples; the real run will not
    if any(fetches_all(choice.value) for choice in plan):
        session.best.warmup_ms += 1000 * tuning.dataset_fetch_s
    session.payback_steps = _payback_steps(
        session.baseline, session.best, any(c.lever.warms_up for c in tuned)
    )
    if len(tuned_records) < MIN_PAIRS:
        hint = tuning.budget_hint(USUAL_PAIRS * tuning.pair_s)
        return Rejection(
            f"one pair of processes ({ratio.sentence()}{tuning.beside}) does not confirm a speed-up, and the budget ran out; {hint}",
            undecided=True,
        )
    if rejection := _rejected_by_guard(tuning) or _rejected_by_speed(tuning, tuned, ratio):
        return rejection
    beside = tuning.disturbance.beside
    session.speedup = None if beside else ratio
    for candidate in tuned:
        candidate.status, candidate.reason = Status.APPLIED, _limits_of(candidate, tuned_records)
    session.memory_reason = "; ".join(
        f"{c.lever.name}: {c.lever.takes_memory}" for c in tuned if c.lever.takes_memory
    )
    session.best.plan = _with_evidence(tuned, ratio, session.key, beside).to_json()
    if tuning.base is None:  # ranks need more than a command and a plan
        session.certificate = certify(tuning, plan, session.guard, pairs, session.speedup)
    return None


def _rejected_by_guard(tuning: Tuning) -> Rejection | None:
    guard, hint = tuning.session.guard, tuning.budget_hint(2 * tuning.budget_s)
    if guard.verdict == "failed":
        return Rejection(f"the guard: {guard.why}", guard)
    if guard.verdict == "not checked":
        return Rejection(f"not kept, because its results could not be checked: {guard.why}; {hint}")
    return None


def _rejected_by_speed(tuning: Tuning, tuned: Sequence[Candidate], ratio: Ratio) -> Rejection | None:
    steps, beside = tuning.session.payback_steps, tuning.disturbance.beside
    if tuning.must_fit:
        return None
    sure = ratio.low >= MIN_RATIO_LOW
    if beside:
        sure = ratio.significant and not any(candidate.lever.sets_threads for candidate in tuned)
    if steps is not None and sure and ratio.median >= MIN_SPEEDUP:
        if steps * (tuning.session.baseline.step_ms or 0.0) / 1000 <= tuning.goal.horizon_s:
            return None
        return Rejection(f"the warm-up pays off after {steps} steps, beyond the horizon (--horizon)")
    if not beside or ratio.high < MIN_SPEEDUP:
        why = f"together {ratio.sentence()} in fresh processes: no speed-up beyond the noise"
        return Rejection(why, ratio=ratio)
    hint = f"stop them, or {tuning.budget_hint(2 * tuning.budget_s)}"
    return Rejection(f"{beside}, which may hide the speed-up; {hint}", undecided=True, ratio=ratio)


def _limits_of(candidate: Candidate, records: Sequence[TrialRecord]) -> str:
    """What an applied lever could not do in the confirming programs."""
    skipped = (skip for record in records for skip in record.skipped)
    reasons = dict.fromkeys(s["reason"] for s in skipped if s["name"] == candidate.lever.name)
    return f"in part: {'; '.join(reasons)}" if reasons else ""


def _time_for_pair(tuning: Tuning, pairs: Pairs, extra_s: float, ratio: Ratio | None) -> bool:
    """Whether there is time for another pair: three pairs within the budget and ``extra_s``.

    The first two may exceed it a little, and further pairs may if the result is undecided. ``ratio``: the speed in
    the pairs so far, None before the first.
    """
    pairs_done = len(pairs.tuned)
    if ratio is None:
        return tuning.remaining_s(overrun=True) + extra_s > 0
    if pairs_done >= MIN_PAIRS and ratio.high < 1.0:
        return False
    undecided = not ratio.significant and ratio.median > MIN_SPEEDUP
    time_s = tuning.remaining_s(overrun=undecided or pairs_done < MIN_PAIRS) + extra_s
    # The second pair may have few blocks: one pair decides nothing
    min_s = tuning.joint_start_s(2) if pairs_done < MIN_PAIRS else max(tuning.pair_s, pairs.longest_s)
    return (undecided or pairs_done < USUAL_PAIRS) and pairs_done < 2 * USUAL_PAIRS and time_s > min_s


def judge_pairs(
    tuning: Tuning, tuned: Sequence[Candidate], replica: dict[str, Any] | None, pairs: Pairs
) -> GuardRecord:
    """The guard's verdict on these pairs. Raises ValueError without a pair."""
    effect, (plain, tuned_records) = widest_effect(tuned), pairs.common_runs()
    perturbation, known = perturbation_for(effect), tuning.perturbed_runs

    def verdict() -> GuardRecord:
        perturbed = known.get(perturbation, ())
        return judge(
            effect, plain, tuned_records, replica, _repeats(tuning, pairs), perturbed, pairs.late_replica
        )

    record = verdict()
    if effect is Effect.EXACT and record.verdict == "failed":
        unlike = [p for p, t in zip(plain, tuned_records, strict=True) if not repeats_itself(p, t)]
        if unlike and unlike[0].seed not in pairs.repeats:
            tuning.stage("guard", "the plain program once more, to see whether it repeats its own bits")
            for run in run_again(tuning, [unlike[0].seed or 0], 0.0, len(unlike[0].losses)):
                pairs.repeats[run.seed] = run
            return verdict()
    if perturbation in known or not needs_perturbed_runs(record):
        return record
    what = "the plain program with weights perturbed in the last place, to see how far rounding spreads"
    tuning.stage("guard", what)
    count = MIN_PAIRS if tuning.interleaver.tick_ms < SLOW_STEP_MS else 1
    seeds, losses = [run.seed or 0 for run in plain[:count]], max(len(run.losses) for run in plain)
    known[perturbation] = run_again(tuning, seeds, perturbation, min(START_STEPS, losses))
    return verdict()


def certify(
    tuning: Tuning, plan: Plan, guard: GuardRecord, pairs: Pairs, ratio: Ratio | None
) -> CertificateRecord:
    """What the verdict on these pairs was made from. ``ratio``: None beside other programs."""
    facts, (plain, tuned) = tuning.facts, pairs.common_runs()
    versions = ", ".join(f"{name} {v}" for name, v in {"python": facts.python, **facts.versions}.items())
    key = {**tuning.session.key, "versions": versions}
    return CertificateRecord(
        tuning.command.portable,
        {name: portable(text) for name, text in key.items() if name != "command"},
        Plan(plan.choices).to_json(),
        guard.verdict,
        guard.why,
        all(
            repeats_itself(run, again)
            for run in plain
            for again in _repeats(tuning, pairs)
            if again.seed == run.seed
        ),
        ratio,
        [CertifiedRun.from_json(run.to_json()) for run in plain],
        [CertifiedRun.from_json(run.to_json()) for run in tuned],
    )


def _repeats(tuning: Tuning, pairs: Pairs) -> list[TrialRecord]:
    """Second plain runs of seeds of the pairs."""
    return [run for run in (tuning.first_record, *pairs.repeats.values()) if run is not None]


def run_again(tuning: Tuning, seeds: Sequence[int], perturbation: float, steps: int) -> list[TrialRecord]:
    """Return plain runs of ``steps`` steps, perturbed from the first; empty if one of them fails."""
    interleaver = tuning.interleaver
    trials = [interleaver.start(Plan(), seed, perturbation) for seed in seeds]
    try:
        if any(gone is not None for gone in interleaver.wait_all_ready(trials, tuning.timeout_s)):
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


def _fill_figures(
    figures: ProgramFigures, plan: Plan, records: Sequence[TrialRecord], times_ms: Sequence[float]
) -> None:
    figures.plan = plan.to_json()
    figures.step_ms = median(times_ms)
    figures.unit = records[0].unit
    samples_per_step = [r.samples_per_step for r in records if r.samples_per_step]
    figures.samples_per_s = samples_per_step[0] / figures.step_ms * 1000 if samples_per_step else None
    figures.phases = records[0].phases
    figures.peak_memory_bytes = max((r.peak_memory_bytes or 0 for r in records), default=0) or None
    figures.warmup_ms = median([r.warmup_ms for r in records])
    figures.steps = sum(r.steps for r in records)


def _payback_steps(plain: ProgramFigures, tuned: ProgramFigures, warms_up: bool) -> int | None:
    """After how many steps a longer start pays off: 0 if it is not longer, None if never."""
    if plain.step_ms is None or tuned.step_ms is None or tuned.step_ms >= plain.step_ms:
        return None
    extra_ms = tuned.warmup_ms - plain.warmup_ms
    if extra_ms <= (0.05 if warms_up else START_VARIATION) * plain.warmup_ms:
        return 0
    return math.ceil(extra_ms / (plain.step_ms - tuned.step_ms))


def _with_evidence(tuned: Sequence[Candidate], ratio: Ratio, key: dict[str, Any], beside: str) -> Plan:
    choices = []
    for choice in plan_of(tuned):
        others_ratio = next(c.ratio for c in tuned if c.lever.name == choice.name)
        evidence = (
            f"with the other levers {others_ratio.sentence()}"
            if others_ratio
            else "measured only together with the other levers"
        )
        evidence += f"; the whole plan {ratio.sentence()}"
        evidence = f"the plan is {FASTER_BESIDE}: {beside}" if beside else evidence
        choices.append(Choice(choice.name, choice.value, Origin.TUNER, evidence))
    return Plan(tuple(choices), key)


def keep_plain(tuning: Tuning, tuned: Sequence[Candidate]) -> None:
    """Make the plain program the result."""
    session = tuning.session
    for candidate in tuned:
        candidate.status = Status.REJECTED
    session.best = ProgramFigures(**{**session.baseline.__dict__, "plan": Plan((), session.key).to_json()})
    session.speedup = session.payback_steps = session.certificate = None
    for point in session.frontier:
        point.chosen = False
    if session.guard.verdict != "failed":
        session.guard = GuardRecord("same", "the plain program is kept")

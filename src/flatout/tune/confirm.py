"""Confirmation: fresh pairs of processes, plain and tuned, each pair with a seed of its own. Speed and guard come from the same runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flatout.engine.guard import SHAKE, START_STEPS, judge, wants_shaken
from flatout.measure.clock import seconds
from flatout.measure.statistics import Round, compare, median
from flatout.plan.plan import Choice, Plan
from flatout.plan.records import NOT_SLOWER, GuardRecord, Ratio, Side, TrialRecord
from flatout.plan.words import Effect, Origin, Status
from flatout.trial.blocks import LeverFailed
from flatout.trial.parent import ProgramGone
from flatout.tune.arena import Entrant, ask_replica
from flatout.tune.candidates import Candidate, plan_of, widest
from flatout.tune.elsewhere import PATIENCE_S
from flatout.tune.orders import pair_in, pair_order
from flatout.tune.tuning import COMPILE_S, PAIRS, Tuning, why_gone

FEWEST_PAIRS = 2  # where the clock leaves no time for three
FLOOR_CAP = 0.02  # an unlucky A/A must not hide a gain that three pairs agree on
Pair = tuple[list[Round], TrialRecord, TrialRecord]
START_NOISE = 0.25  # two starts of one program differ by this without any reason


def replica(tuning: Tuning, tuned: list[Candidate]) -> dict[str, Any] | None:
    """One step of the observed program done again under the live levers, beside float64. Levers that fail are rejected."""
    checked = [c for c in tuned if c.effect is not Effect.EXACT and c.lever.live]
    plain = tuning.observed
    if not checked or tuning.arena.unit != "step":
        return None
    wanted_s = tuning.replica_s + FEWEST_PAIRS * tuning.pair_s
    if len(checked) < len(tuned) and tuning.allowed_s(overrun=True) < wanted_s:  # what needs no check can still be confirmed
        for candidate in checked:
            candidate.reject(f"there was no time left to check its numerics and confirm it; give --budget {tuning.enough_m(wanted_s)}m")
        return None
    if plain is None or plain not in tuning.arena.running:
        try:
            plain = tuning.observed = tuning.enter(Plan()).trial
        except (ProgramGone, LeverFailed) as error:
            return {"failure": why_gone(error)}
    tuning.watcher.stage("guard", "one step done again plainly, under the levers, and in float64")
    patience_s = 60 + 40 * tuning.arena.tick_ms / 1000 + (COMPILE_S if any(c.lever.warms_up for c in checked) else 0)

    def failing(candidates: Sequence[Candidate]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        answer = ask_replica(plain, [c.choice for c in candidates], patience_s)
        return answer, [check for check in answer.get("checks", ()) if not check["passed"]]

    try:
        tuning.arena.switch(plain, ())
        answer, wrong = failing(checked)
        if wrong and len(checked) > 1 and tuning.allowed_s() > PAIRS * tuning.pair_s:
            for candidate in checked:
                _, alone = failing([candidate])
                if alone:
                    candidate.reject(f"the guard: {alone[0]['why']}")
            checked = [c for c in checked if c.won]
            answer, wrong = failing(checked) if checked else ({"checks": []}, [])
        if wrong:
            for candidate in checked:
                candidate.reject(f"the guard: {wrong[0]['why']}")
            return None
        return answer
    except ProgramGone as gone:
        return {"failure": f"the program did not survive the replica of a step ({why_gone(gone)})"}


def keep_first_record(tuning: Tuning) -> None:
    """The observed program had seed 0 and was plain until the races: its first losses tell whether the script repeats itself."""
    plain = tuning.observed
    if plain is not None and plain in tuning.arena.running:
        record = plain.finish()
        record.losses = record.losses[:record.warmup_steps]
        tuning.first_plain = record
        tuning.arena.dismiss(plain)


def settle(tuning: Tuning, tuned: list[Candidate], replica_answer: dict[str, Any] | None) -> None:
    """Confirm the combination; where it fails, what is exact of it; where that fails too, the plain program stays."""
    attempts = [(tuned, replica_answer)]
    exact = [c for c in tuned if c.effect is Effect.EXACT]
    if exact and len(exact) < len(tuned) and not tuning.must_fit:  # a part of what fits need not fit
        attempts.append((exact, None))
    for at, (attempt, answer) in enumerate(attempts):
        if not attempt or (at and tuning.allowed_s(overrun=True) < FEWEST_PAIRS * tuning.pair_s):
            continue
        if _confirm(tuning, attempt, answer):
            for candidate in tuned:
                if candidate not in attempt:
                    candidate.status = Status.REJECTED
            return
    _stay_plain(tuning, tuned)


def _confirm(tuning: Tuning, tuned: list[Candidate], replica_answer: dict[str, Any] | None) -> bool:
    plan, session, start_s = plan_of(tuned), tuning.session, seconds()
    pairs: list[list[Round]] = []
    records: list[tuple[TrialRecord, TrialRecord]] = []
    hosts: list[str] = []
    while _time_for_another(tuning, pairs):
        pair_start_s = seconds()
        tuning.watcher.stage("confirming", f"pair {len(pairs) + 1}: {plan.describe()} against the plain program, fresh processes")
        try:
            found = _some_pairs(tuning, plan, len(pairs), widest(tuned) is Effect.RESAMPLED, hosts)
        except (ProgramGone, LeverFailed) as error:
            tuning.note(plan.describe(), "fresh pairs", None, why_gone(error), start_s)
            return _refuse(tuned, f"in fresh processes: {why_gone(error)}")
        tuning.longest_pair_s = max(tuning.longest_pair_s, seconds() - pair_start_s)
        for rounds, plain_record, tuned_record in found:
            pairs.append(rounds)
            records.append((plain_record, tuned_record))
        tuning.watcher.contest(plan.describe(), compare(pairs), f"pair {len(pairs)}")
        if FEWEST_PAIRS <= len(pairs) < PAIRS and _judged(tuning, tuned, records, replica_answer).verdict == "failed":
            break  # the rest of the time is for what is exact
    ratio = compare(pairs)
    tuning.note(plan.describe(), "fresh pairs", ratio, "", start_s, host="; ".join(dict.fromkeys(hosts)))
    session.guard = _judged(tuning, tuned, records, replica_answer)
    _fill(session.baseline, Plan(), [p for p, _ in records], [r.a_ms for pair in pairs for r in pair])
    _fill(session.best, plan, [t for _, t in records], [r.b_ms for pair in pairs for r in pair])
    session.payback_steps = _payback(session.baseline, session.best, any(c.lever.warms_up for c in tuned))
    if len(pairs) < FEWEST_PAIRS:
        more = f"give --budget {tuning.enough_m(PAIRS * tuning.longest_pair_s)}m"
        return _refuse(tuned, f"one pair of processes ({ratio.sentence()}) confirms nothing, and there was no time for more; {more}")
    if session.guard.verdict == "failed":
        return _refuse(tuned, f"the guard: {session.guard.why}")
    if session.guard.verdict == "not checked":
        return _refuse(tuned, f"not kept unproven: {session.guard.why}")
    if not tuning.must_fit and (ratio.low < NOT_SLOWER or ratio.median <= 1 + min(tuning.floor, FLOOR_CAP)):
        return _refuse(tuned, f"together {ratio.sentence()} in fresh processes: no gain that stands out from the noise")
    if not tuning.must_fit and not _repaid(tuning):
        return _refuse([c for c in tuned if c.lever.warms_up], f"its warm-up is repaid after {session.payback_steps} steps, beyond the horizon")
    session.speedup = ratio
    for candidate in tuned:
        candidate.status, candidate.reason = Status.APPLIED, _remarks(candidate, records[0][1])
    session.best.plan = _with_evidence(tuned, ratio, session.key).to_json()
    return True


def _remarks(candidate: Candidate, record: TrialRecord) -> str:
    """What a lever that was applied had to say: which part of the program it left alone, and why."""
    return "; ".join(dict.fromkeys(left["reason"] for left in record.skipped if left["name"] == candidate.lever.name))


def _time_for_another(tuning: Tuning, pairs: list[list[Round]]) -> bool:
    """Three pairs, and more where they cannot decide, for which the budget may be overrun a little; up to six where it has time left."""
    if not pairs:
        return True
    ratio = compare(pairs)
    needed = len(pairs) < PAIRS or (not ratio.certain and ratio.median > 1.0)
    return len(pairs) < 2 * PAIRS and tuning.allowed_s(overrun=needed) > tuning.pair_s


def _judged(tuning: Tuning, tuned: Sequence[Candidate], records: Sequence[tuple[TrialRecord, TrialRecord]],
            replica_answer: dict[str, Any] | None) -> GuardRecord:
    plain, others = [plain for plain, _ in records], [other for _, other in records]
    found = judge(widest(tuned), plain, others, replica_answer, tuning.first_plain, tuning.shaken)
    if not tuning.shaken and wants_shaken(found):
        tuning.watcher.stage("guard", "the plain program, shaken in the last place of its weights: how far does it carry rounding?")
        tuning.shaken = _shaken(tuning, [record.seed or 0 for record in plain[:FEWEST_PAIRS]])
        found = judge(widest(tuned), plain, others, replica_answer, tuning.first_plain, tuning.shaken)
    return found


def _shaken(tuning: Tuning, seeds: Sequence[int]) -> list[TrialRecord]:
    """Plain runs that were shaken, long enough for the first losses; none where one of them does not come through."""
    records = []
    try:
        for seed in seeds:
            trial = tuning.enter(Plan(), seed, shake=SHAKE).trial
            try:
                if trial.ticks_done < START_STEPS:
                    tuning.arena.run(trial, START_STEPS - trial.ticks_done)
                records.append(trial.finish())
            finally:
                tuning.arena.dismiss(trial)
    except (ProgramGone, LeverFailed):
        return []
    return records


def _refuse(tuned: Sequence[Candidate], reason: str) -> bool:
    for candidate in tuned:
        candidate.reason = reason
    return False


def _some_pairs(tuning: Tuning, plan: Plan, done: int, draws: bool, hosts: list[str]) -> list[Pair]:
    """The next pair; on other machines one a node, as far as they are wanted. ``hosts`` are told which. Raises ProgramGone or LeverFailed."""
    elsewhere = tuning.elsewhere
    if elsewhere is not None and elsewhere.ready:
        wanted = min(len(elsewhere.ready), PAIRS - done if done < PAIRS else 2 * PAIRS - done)
        orders = [pair_order(tuning, plan, done + at, draws) for at in range(wanted)]
        held = [each for each in elsewhere.held(orders, PATIENCE_S + 2 * tuning.pair_s) if each.answer is not None]
        hosts += [each.host for each in held]
        if held:
            return [pair_in(each.answer) for each in sorted(held, key=lambda each: each.number) if each.answer is not None]
    return [pair_here(tuning, plan, done, draws)]


def pair_here(tuning: Tuning, plan: Plan, seed: int, draws: bool) -> Pair:
    """One pair on this machine. Raises ProgramGone or LeverFailed."""
    if tuning.copies < 2:
        return _pair_in_turn(tuning, plan, seed, draws)
    entrants: list[Entrant] = []
    try:
        # Who starts first changes from pair to pair: the machine may warm up, or tire, in between.
        for mine in (Plan(), plan) if seed % 2 == 0 else (plan, Plan()):
            entrants.append(tuning.enter(mine, seed))
        plain, tuned = entrants if seed % 2 == 0 else reversed(entrants)
        rounds = tuning.arena.pair(plain.trial, tuned.trial, tuning.rounds, seconds() + 2 * tuning.pair_s)
        return rounds, plain.trial.finish(draws=draws), tuned.trial.finish(draws=draws)
    finally:
        for entrant in entrants:
            tuning.arena.dismiss(entrant.trial)


def _pair_in_turn(tuning: Tuning, plan: Plan, seed: int, draws: bool) -> Pair:
    """Where two programs do not fit into memory at once: one after the other, so that the machine's moods do not cancel out."""
    times: dict[str, list[float]] = {}
    records: dict[str, TrialRecord] = {}
    for mine in (Plan(), plan) if seed % 2 == 0 else (plan, Plan()):
        entrant = tuning.enter(mine, seed)
        try:
            times[mine.describe()] = [tuning.arena.block(entrant.trial) for _ in range(tuning.rounds)]
            records[mine.describe()] = entrant.trial.finish(draws=draws)
        finally:
            tuning.arena.dismiss(entrant.trial)
    plain, tuned = Plan().describe(), plan.describe()
    return [Round(a, b) for a, b in zip(times[plain], times[tuned], strict=True)], records[plain], records[tuned]


def _fill(side: Side, plan: Plan, records: Sequence[TrialRecord], times_ms: Sequence[float]) -> None:
    side.plan = plan.to_json()
    side.step_ms = median(times_ms)
    side.unit = records[0].unit
    per_step = [r.samples_per_step for r in records if r.samples_per_step]
    side.samples_per_s = per_step[0] / side.step_ms * 1000 if per_step else None
    side.phases = records[0].phases
    side.peak_memory_bytes = max((r.peak_memory_bytes or 0 for r in records), default=0) or None
    side.warmup_ms = median([r.warmup_ms for r in records])
    side.steps = sum(r.steps for r in records)


def _payback(plain: Side, tuned: Side, warms_up: bool) -> int | None:
    """After how many steps a longer start is repaid: 0 where there is nothing to repay, None where it never is."""
    if plain.step_ms is None or tuned.step_ms is None or tuned.step_ms >= plain.step_ms:
        return None
    extra = tuned.warmup_ms - plain.warmup_ms
    if extra <= (0.05 if warms_up else START_NOISE) * plain.warmup_ms:
        return 0
    return math.ceil(extra / (plain.step_ms - tuned.step_ms))


def _repaid(tuning: Tuning) -> bool:
    steps = tuning.session.payback_steps
    return steps is not None and steps * (tuning.session.baseline.step_ms or 0.0) / 1000 <= tuning.goal.horizon_s


def _with_evidence(tuned: Sequence[Candidate], ratio: Ratio, key: dict[str, Any]) -> Plan:
    choices = []
    for choice in plan_of(tuned):
        alone = next(c.ratio for c in tuned if c.lever.name == choice.name)
        said = f"alone {alone.sentence()}" if alone else "measured only together with the others"
        choices.append(Choice(choice.name, choice.value, Origin.TUNER, f"{said}; the whole plan {ratio.sentence()}"))
    return Plan(tuple(choices), key)


def _stay_plain(tuning: Tuning, tuned: Sequence[Candidate]) -> None:
    session = tuning.session
    for candidate in tuned:
        candidate.status = Status.REJECTED
    session.best = Side(**{**session.baseline.__dict__, "plan": Plan((), session.key).to_json()})
    session.speedup = session.payback_steps = None
    for point in session.frontier:
        point.chosen = False
    if session.guard.verdict != "failed":
        session.guard = GuardRecord("same", "the plain program stays as it is")

"""Finds the levers that make the guard reject a plan, so that the rest of the plan can be kept.

step      replay one step of the plain program with all live levers; if that fails, with each lever alone,
          then with ever fewer of them
start     compare the first losses with one lever alone against the plain program's
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flatout.guard.verdict import perturbation_for, repeats_itself, start_agrees
from flatout.schema.enums import Effect, Status
from flatout.schema.records import TrialRecord
from flatout.schema.session import GuardRecord
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.candidates import Candidate, plan_of
from flatout.tune.comparison import ProgramRequest, measure_together, replay_step
from flatout.tune.endings import end_reason
from flatout.tune.limits import COMPILE_S, MIN_PAIRS
from flatout.tune.tuning import Tuning

PROGRAMS_AT_ONCE = 2


def check_step(tuning: Tuning, tuned: list[Candidate]) -> tuple[list[Candidate], dict[str, Any] | None]:
    """Remove the candidates that the replica of a step rejects.

    Returns the rest and the replica's findings about it; None if there was nothing to check.
    """
    checked = [c for c in tuned if c.effect is not Effect.EXACT and c.lever.live]
    checked.sort(key=lambda c: c.ratio.median if c.ratio is not None else 1.0, reverse=True)
    if not checked:
        return tuned, None
    expected_s = tuning.replica_s + MIN_PAIRS * tuning.pair_s
    # Levers that need no check can still be confirmed
    if len(checked) < len(tuned) and tuning.remaining_s(overrun=True) < expected_s:
        return _without(tuned, checked, f"the budget ran out; {tuning.budget_hint(expected_s)}")
    plain = tuning.ensure_plain_trial()
    if plain is None:
        return _without(tuned, checked, "there was no time to start the plain program")
    try:
        replica = replay_levers(tuning, plain, checked)
    except ProgramGone as gone:
        ending = (
            "ended before the guard could replay a step"
            if gone.record.status == "ended"
            else f"failed while the guard replayed a step ({end_reason(gone)})"
        )
        return _without(tuned, checked, f"the program {ending}")
    if "failure" in replica:
        return _without(tuned, checked, replica["failure"])
    remaining = [c for c in tuned if c.status is not Status.REJECTED]
    return remaining, replica if any(c in remaining for c in checked) else None


def replay_levers(tuning: Tuning, trial: Trial, checked: Sequence[Candidate]) -> dict[str, Any]:
    """Let a running program replay a step; reject the candidates that fail, and return the findings about the rest.

    Raises ProgramGone.
    """
    tuning.stage("guard", "replaying one step plainly, with the levers, and in float64")
    timeout_s = (
        60
        + 40 * tuning.interleaver.tick_ms / 1000
        + (COMPILE_S if any(c.lever.warms_up for c in checked) else 0)
    )
    replica = replay_step(tuning.interleaver, trial, [c.choice for c in checked], timeout_s)
    failing = replica.get("failing", {})
    for candidate in checked:
        if candidate.lever.name in failing:
            candidate.reject(f"the guard: {failing[candidate.lever.name]}")
    remaining: dict[str, Any] = replica.get("remaining") or replica
    return remaining


def _without(
    tuned: list[Candidate], unchecked: Sequence[Candidate], why: str
) -> tuple[list[Candidate], None]:
    """The rest: what could not be checked is left out."""
    for candidate in unchecked:
        candidate.reject(f"not kept, because its gradient could not be checked: {why}")
    return [c for c in tuned if c not in unchecked], None


def without_culprits(
    tuning: Tuning, attempt: Sequence[Candidate], verdict: GuardRecord, plain: Mapping[int, TrialRecord]
) -> list[Candidate]:
    """The rest of a rejected plan.

    Levers that fail alone are left out; if none does, the levers with the widest effect are.
    """
    failures = [check.why for check in verdict.checks if check.passed is False]
    named = {c.lever.name for c in attempt if any(f"under {c.lever.name} alone" in why for why in failures)}
    culprits = [c for c in attempt if c.lever.name in named] or _failing_alone(tuning, attempt, plain)
    if not culprits:
        widest = max(c.effect.rank for c in attempt)
        culprits = [c for c in attempt if c.effect.rank == widest]
    for candidate in culprits:
        candidate.reject(
            candidate.reason if candidate.reason.startswith("the guard: ") else f"the guard: {verdict.why}"
        )
    return [c for c in attempt if c not in culprits]


def _failing_alone(
    tuning: Tuning, attempt: Sequence[Candidate], plain: Mapping[int, TrialRecord]
) -> list[Candidate]:
    seed, first_record = min(plain, default=0), tuning.first_record
    if seed not in plain or (
        first_record is not None
        and first_record.seed == seed
        and not repeats_itself(plain[seed], first_record)
    ):
        return []  # the plain program's own first losses differ between runs
    suspects: list[Candidate] = [c for c in attempt if c.effect is not Effect.EXACT] or list(attempt)
    rejected = []
    for start in range(0, len(suspects), PROGRAMS_AT_ONCE):
        group = suspects[start : start + PROGRAMS_AT_ONCE]
        plans = " and with ".join(plan_of([c]).describe() for c in group)
        tuning.stage("guard", f"the first losses with {plans} alone")
        requests = [ProgramRequest(plan_of([c]), (), seed, "record") for c in group]
        for candidate, result in zip(
            group, measure_together(tuning.interleaver, requests, 0.0, tuning.timeout_s), strict=True
        ):
            perturbed_runs = tuning.perturbed_runs.get(perturbation_for(candidate.effect), ())
            check = (
                start_agrees(candidate.effect, plain[seed], result.record, perturbed_runs)
                if result.record is not None
                else None
            )
            if check is not None and check.passed is False:
                candidate.reject(f"the guard: under {candidate.lever.name} alone, {check.why}")
                rejected.append(candidate)
    return rejected

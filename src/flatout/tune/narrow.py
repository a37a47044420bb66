"""Finds the levers that make the guard reject a plan, so that the rest of the plan can be kept.

step      replay one step of the plain program with all live levers; if that fails, with each lever alone,
          then with ever fewer of them
start     compare the first losses with one lever alone against the plain program's
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flatout.guard.verdict import perturbation_for, repeats_itself, start_agrees
from flatout.schema.enums import Effect
from flatout.schema.records import TrialRecord
from flatout.schema.session import GuardRecord
from flatout.trial.parent import ProgramGone
from flatout.tune.candidates import Candidate, plan_of
from flatout.tune.comparison import ProgramRequest, measure_together, step_again
from flatout.tune.gone import why_gone
from flatout.tune.limits import COMPILE_S, FEWEST_PAIRS
from flatout.tune.tuning import Tuning

AT_ONCE = 2


def check_a_step(tuning: Tuning, tuned: list[Candidate]) -> tuple[list[Candidate], dict[str, Any] | None]:
    """Remove the candidates that the replica of a step rejects.

    Returns the rest and the replica's findings about it; None if there was nothing to check.
    """
    checked = [c for c in tuned if c.effect is not Effect.EXACT and c.lever.live]
    checked.sort(key=lambda c: c.ratio.median if c.ratio is not None else 1.0, reverse=True)
    if not checked or tuning.interleaver.unit != "step":
        return tuned, None
    expected_s = tuning.replica_s + FEWEST_PAIRS * tuning.pair_s
    # Levers that need no check can still be confirmed
    if len(checked) < len(tuned) and tuning.allowed_s(overrun=True) < expected_s:
        for candidate in checked:
            candidate.reject(
                f"not checked numerically and not confirmed: the budget ran out; give --budget {tuning.enough_m(expected_s)}m"
            )
        return [c for c in tuned if c not in checked], None
    plain = tuning.plain_again()
    if plain is None:
        return tuned, {"failure": "there was no time to start the plain program"}
    tuning.stage("guard", "replaying one step plainly, with the levers, and in float64")
    timeout_s = (
        60
        + 40 * tuning.interleaver.tick_ms / 1000
        + (COMPILE_S if any(c.lever.warms_up for c in checked) else 0)
    )
    try:
        answer = step_again(tuning.interleaver, plain, [c.choice for c in checked], timeout_s)
        rejected = _reject(tuned, answer)
        answer = answer.get("rest") or answer
    except ProgramGone as gone:
        how = (
            "ended before the guard could replay a step"
            if gone.record.status == "ended"
            else f"failed while the guard replayed a step ({why_gone(gone)})"
        )
        return tuned, {"failure": f"the program {how}"}
    left = [c for c in tuned if c not in rejected]
    return left, answer if any(c in left for c in checked) else None


def _reject(tuned: Sequence[Candidate], answer: Mapping[str, Any]) -> list[Candidate]:
    """Reject the candidates that fail this replica, with its reason, and return them."""
    found = []
    for candidate in tuned:
        why = answer.get("wrong", {}).get(candidate.lever.name)
        if why:
            candidate.reject(f"the guard: {why}")
            found.append(candidate)
    return found


def without_the_culprits(
    tuning: Tuning, attempt: Sequence[Candidate], verdict: GuardRecord, plain: Mapping[int, TrialRecord]
) -> list[Candidate]:
    """Return the rest of a rejected plan.

    Levers that fail alone are left out; if none does, the levers with the widest effect are.
    """
    named = {name for check in verdict.checks if not check.passed for name in _levers_in(check.why, attempt)}
    culprits = [c for c in attempt if c.lever.name in named] or _failing_alone(tuning, attempt, plain)
    if not culprits:
        widest = max(c.effect.rank for c in attempt)
        culprits = [c for c in attempt if c.effect.rank == widest]
    for candidate in culprits:
        candidate.reject(
            candidate.reason if candidate.reason.startswith("the guard: ") else f"the guard: {verdict.why}"
        )
    return [c for c in attempt if c not in culprits]


def _levers_in(why: str, attempt: Sequence[Candidate]) -> list[str]:
    """Return the levers that a check names itself, as ``under NAME alone``."""
    return [c.lever.name for c in attempt if f"under {c.lever.name} alone" in why]


def _failing_alone(
    tuning: Tuning, attempt: Sequence[Candidate], plain: Mapping[int, TrialRecord]
) -> list[Candidate]:
    """Reject and return the levers that, each alone, change the program's first losses."""
    seed, again = min(plain, default=0), tuning.first_plain
    if seed not in plain or (
        again is not None and again.seed == seed and not repeats_itself(plain[seed], again)
    ):
        return []  # the plain program's own first losses differ between runs
    suspects: list[Candidate] = [c for c in attempt if c.effect is not Effect.EXACT] or list(attempt)
    found = []
    for at in range(0, len(suspects), AT_ONCE):
        some = suspects[at : at + AT_ONCE]
        tuning.stage(
            "guard", f"the first losses with {' and with '.join(plan_of([c]).describe() for c in some)} alone"
        )
        asked = [ProgramRequest(plan_of([c]), (), seed, "record") for c in some]
        for candidate, seen in zip(
            some, measure_together(tuning.interleaver, asked, 0.0, tuning.timeout_s), strict=True
        ):
            perturbed = tuning.perturbed.get(perturbation_for(candidate.effect), ())
            check = (
                start_agrees(candidate.effect, plain[seed], seen.record, perturbed)
                if seen.record is not None
                else None
            )
            if check is not None and not check.passed:
                candidate.reject(f"the guard: under {candidate.lever.name} alone, {check.why}")
                found.append(candidate)
    return found

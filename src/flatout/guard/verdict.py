"""The guard's verdict: do these records show the same training?

Pure functions over records; nothing runs here.

    EXACT      losses and weights equal those of the plain run with the same seed, bit for bit
    ROUNDING   the step replica passes (flatout.guard.replica). The first losses equal those of the plain run
               up to rounding, or diverge no faster than those of the plain program with weights perturbed in
               the last place. The loss curves stay within the spread of the script's own runs with other seeds
    PRECISION  the same, with the last place of half precision
    RESAMPLED  the batches have the same distribution (flatout.guard.distribution), and the loss curves stay
               within that spread

For every effect, the losses must have the resolution of the plain program's: a loss in half precision has
only 8 or 11 significant bits. A script that is not repeatable is judged by the loss curves alone, and the
verdict says so.

A check passes, fails, or could not be made. The weakest of the checks that an effect needs (``NEEDED``) decides.
"""

import math
from collections.abc import Sequence
from typing import Any

from flatout.guard.distribution import same_distribution
from flatout.guard.loss_curves import (
    START_STEPS,
    Curves,
    common_length,
    common_losses,
    curves_within_spread,
    finite_count,
    finite_losses,
    smallest_harm,
    start_check,
)
from flatout.guard.resolution import SHORT_SHARE, coarse_share
from flatout.schema.enums import Effect
from flatout.schema.records import TrialRecord
from flatout.schema.session import GuardCheck, GuardRecord

# Effect -> the checks without which nothing is claimed. Live levers that round also need the replica's.
NEEDED = {
    Effect.EXACT: ("losses", "weights"),
    Effect.ROUNDING: ("start", "curve"),
    Effect.PRECISION: ("start", "curve"),
    Effect.RESAMPLED: ("distribution", "curve"),
}
NEEDED_IF_UNREPEATABLE = ("curve",)
# Bits are claimed from so many losses, and weights after so many steps, the last of them at least this step
MIN_EXACT_LOSSES, MIN_EXACT_WEIGHTS, MIN_EXACT_STEP = 32, 3, 16
MIN_LOSSES = 2
MIN_FIRST_LOSSES = 8
LATE = "late "  # prefix of the checks of the later replica, which are made where there is time
# Share of every weight: four units in float32's last place, about the total rounding of one step.
PERTURBATION = 2.0**-21
HALF_PERTURBATION = 2.0**-9  # bfloat16 rounds by up to this share, in every product (flatout.guard.perturb)
# How much further than the perturbed plain program a sound lever may diverge, over all seeds and over one
# seed, where chance counts. Sound: up to 7.7 times (channels_last, ResNet-18 with a large step); broken: from
# 60.
PERTURBED_GROWTH, PERTURBED_GROWTH_ONE_RUN = 10.0, 30.0
# Sound: up to 2.9 times (bfloat16, Adadelta with a rate of 1.0); broken: from 12.
HALF_GROWTH, HALF_GROWTH_ONE_RUN = 6.0, 10.0


def judge(
    effect: Effect,
    plain: Sequence[TrialRecord],
    tuned: Sequence[TrialRecord],
    replica: dict[str, Any] | None = None,
    repeats: Sequence[TrialRecord] = (),
    perturbed: Sequence[TrialRecord] = (),
    late_replica: dict[str, Any] | None = None,
) -> GuardRecord:
    """Compare runs seed by seed: ``plain[i]`` and ``tuned[i]`` had the same seed.

    ``effect`` is the widest of the Plan's levers. ``replica`` is the answer of a step replica, and ``late_replica``
    that of one after a stretch of training. ``repeats`` are second plain runs with seeds of ``plain``, which show
    whether the script is repeatable. ``perturbed`` are plain runs perturbed by ``perturbation_for(effect)`` from the
    first step (flatout.guard.perturb). They show how fast this program amplifies rounding. Raises ValueError
    on empty input.
    """
    if not plain or len(plain) != len(tuned):
        raise ValueError("the guard needs as many tuned runs as plain ones, and at least one")
    curves = [common_losses(p, t) for p, t in zip(plain, tuned, strict=True)]
    record = GuardRecord(
        "not checked",
        "",
        seeds=[p.seed or 0 for p in plain],
        plain_losses=[p for p, _ in curves],
        tuned_losses=[t for _, t in curves],
    )
    checks = record.checks
    unrepeated = [why for r in repeats for p in plain if p.seed == r.seed and (why := _unlike_bits(p, r))]
    repeatable = not unrepeated
    exact = effect is Effect.EXACT and repeatable
    # Two losses that are NaN are equal, and show nothing
    lengths = [min(finite_count(p.losses), len(c)) for p, (c, _) in zip(plain, curves, strict=True)]
    shortest = min(lengths) if exact else min(*lengths, common_length([(p, p) for p, _ in curves]))
    if shortest < MIN_LOSSES:
        record.why = f"only {shortest} finite losses were recorded, too few to compare"
        return record
    checks += [finite_losses(curves), _resolution(curves)]
    if exact:
        checks += [_bitwise_losses(plain, tuned), _bitwise_weights(plain, tuned)]
    else:
        if effect.rank < Effect.RESAMPLED.rank and repeatable:
            checks += _same_batches(plain, tuned)
        if effect is Effect.RESAMPLED:
            checks += same_distribution(list(zip(plain, tuned, strict=True)))
        elif repeatable:
            growth = _max_growth(effect, one_run=len(perturbed) == 1)
            checks += start_check(plain, tuned, replica or {}, perturbed, growth)
        checks += _replica_checks(replica)
        checks += _replica_checks(late_replica, LATE, "after a stretch of training ")
        checks.append(curves_within_spread(curves))
    if undone := _weakest(checks, NEEDED[effect] if repeatable else NEEDED_IF_UNREPEATABLE):
        record.verdict, record.why = undone
        return record
    seeds = _count(len(plain), "seed")
    if exact:
        losses, weights = checks[-2], checks[-1]
        record.verdict = "same"
        record.why = f"bit for bit: {losses.value:.0f} losses, and {weights.why.removesuffix(', are bitwise equal')} ({seeds})"
        return record
    record.verdict = "equivalent"
    record.why = f"the loss stays within the spread of the program's own seeds ({shortest} losses, {seeds}); {smallest_harm(curves)}"
    if not repeatable:
        record.why += f"; the program is not repeatable even with one seed ({unrepeated[0]}), so only this weaker comparison is possible"
    elif replica is not None:
        record.why = next((c.why for c in checks if c.name == "gradient"), "") + "; " + record.why
    return record


def _weakest(checks: Sequence[GuardCheck], needed: Sequence[str]) -> tuple[str, str] | None:
    """The verdict, and why, if a check failed, or if one that is needed could not be made."""
    if failed := [c for c in checks if c.passed is False]:
        equal = [c for c in checks if c.passed and c.name == "weights" and failed[0].name == "losses"]
        return "failed", "; ".join(c.why for c in [*failed, *equal])
    undone = [c.why for c in checks if c.passed is None and not c.name.startswith(LATE)]
    names = {c.name for c in checks}
    undone += [f"nothing was recorded for the check of the {name}" for name in needed if name not in names]
    return ("not checked", "; ".join(undone)) if undone else None


def needs_perturbed_runs(record: GuardRecord) -> bool:
    """Whether only the first losses fail: perturbed runs of the plain program then decide."""
    return [check.name for check in record.checks if check.passed is False] == ["start"]


def perturbation_for(effect: Effect) -> float:
    """How far to perturb a plain run to show how this program amplifies a lever's rounding."""
    return HALF_PERTURBATION if effect is Effect.PRECISION else PERTURBATION


def start_agrees(
    effect: Effect, plain: TrialRecord, lever_run: TrialRecord, perturbed: Sequence[TrialRecord] = ()
) -> GuardCheck | None:
    """Whether the first losses of one lever agree with the plain run of the same seed.

    This narrows down which lever of a rejected plan is to blame. ``perturbed``: plain runs moved by
    ``perturbation_for(effect)``; one with this seed is enough. Returns None if nothing can be decided: fewer than
    ``MIN_FIRST_LOSSES`` losses, no perturbed run, losses of the plain run that are not finite, or a lever
    that draws other batches.
    """
    curve = common_losses(plain, lever_run)
    length = min(sum(step <= START_STEPS for step in plain.loss_steps), len(curve[0]))
    first = (curve[0][:length], curve[1][:length])
    perturbed = [run for run in perturbed if run.seed == plain.seed]
    same_batches = effect.rank < Effect.RESAMPLED.rank
    if length < MIN_FIRST_LOSSES or not same_batches or not all(map(math.isfinite, first[0])):
        return None
    for check in (finite_losses([first]), _resolution([first])):
        if check.passed is False:
            return check
    if effect is Effect.EXACT:
        return _bitwise_losses([plain], [lever_run])
    if not perturbed:
        return None
    growth = _max_growth(effect, one_run=True)
    return next(iter(start_check([plain], [lever_run], {}, perturbed, growth)), None)


def _max_growth(effect: Effect, one_run: bool = False) -> float:
    if effect is Effect.PRECISION:
        return HALF_GROWTH_ONE_RUN if one_run else HALF_GROWTH
    return PERTURBED_GROWTH_ONE_RUN if one_run else PERTURBED_GROWTH


def _replica_checks(replica: dict[str, Any] | None, prefix: str = "", when: str = "") -> list[GuardCheck]:
    if replica is None:
        return []
    if not replica.get("checks"):
        why = f"{when}the gradient could not be checked: {replica.get('failure', 'no answer')}"
        return [GuardCheck(f"{prefix}gradient", None, why)]
    return [
        GuardCheck(prefix + c["name"], c["passed"], when + c["why"], c["value"], c["limit"])
        for c in replica["checks"]
    ]


def _count(n: int, noun: str, nouns: str = "") -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {nouns or noun + 's'}"


def repeats_itself(plain: TrialRecord, repeat: TrialRecord) -> bool:
    """Whether a second plain run with the same seed has the same losses and weights, as far as both ran."""
    return not _unlike_bits(plain, repeat)


def _unlike_bits(plain: TrialRecord, other: TrialRecord) -> str:
    checks = [_bitwise_losses([plain], [other]), _bitwise_weights([plain], [other])]
    return "; ".join(c.why for c in checks if c.passed is False)


def _resolution(curves: Curves) -> GuardCheck:
    plain, tuned = (coarse_share(side) for side in zip(*curves, strict=True))
    why = f"{tuned:.0%} of the losses have only the digits of half precision or repeat another loss; {plain:.0%} of the plain program's"
    return GuardCheck("resolution", tuned - plain <= SHORT_SHARE, why, max(0.0, tuned - plain), SHORT_SHARE)


def _bitwise_losses(plain: Sequence[TrialRecord], tuned: Sequence[TrialRecord]) -> GuardCheck:
    compared = 0
    for p, t in zip(plain, tuned, strict=True):
        pairs = list(zip(p.losses, t.losses, strict=False))
        if unlike := [i for i, (x, y) in enumerate(pairs) if x != y]:
            x, y = map(float.fromhex, pairs[unlike[0]])
            why = f"loss {unlike[0]} is {y:.12g}, and {x:.12g} in the plain program (seed {p.seed}; {len(unlike)} of {len(pairs)} differ)"
            return GuardCheck("losses", False, why)
        compared += min(finite_count(p.losses), len(t.losses))
    if compared < MIN_EXACT_LOSSES:
        why = f"{_count(compared, 'loss', 'losses')} could be compared; equal bits are claimed from {MIN_EXACT_LOSSES}"
        return GuardCheck("losses", None, why)
    return GuardCheck("losses", True, "every loss is bitwise equal", float(compared))


def _bitwise_weights(plain: Sequence[TrialRecord], tuned: Sequence[TrialRecord]) -> GuardCheck:
    compared: set[int] = set()
    for p, t in zip(plain, tuned, strict=True):
        steps = p.loss_steps[finite_count(p.losses) :]  # the weights after these are NaN
        for step, digest in p.weights_digests.items():
            if step in t.weights_digests and not (steps and int(step) > steps[0]):
                compared.add(int(step))
                if t.weights_digests[step] != digest:
                    why = f"the weights after step {step} differ from the plain program's (seed {p.seed})"
                    return GuardCheck("weights", False, why)
    after = (
        f"the weights after {_count(len(compared), 'step')}, the last of them step {max(compared, default=0)}"
    )
    if len(compared) < MIN_EXACT_WEIGHTS or max(compared) < MIN_EXACT_STEP:
        why = f"{after}, could be compared; equal bits are claimed from {MIN_EXACT_WEIGHTS} and step {MIN_EXACT_STEP}"
        return GuardCheck("weights", None, why)
    return GuardCheck("weights", True, f"{after}, are bitwise equal", float(len(compared)))


def _same_batches(plain: Sequence[TrialRecord], tuned: Sequence[TrialRecord]) -> list[GuardCheck]:
    if not plain[0].context.get("loaders"):
        return []  # without a loader, inputs may depend on the model (a GAN, a policy)
    for p, t in zip(plain, tuned, strict=True):
        for i, (x, y) in enumerate(zip(p.batch_hashes, t.batch_hashes, strict=False)):
            if x != y:
                why = f"batch {i} differs from the plain program's (seed {p.seed})"
                return [GuardCheck("batches", False, why)]
    return [GuardCheck("batches", True, "every batch is bitwise equal")]

"""Verifies a certificate: plain and tuned run again as they were confirmed, and each claim gets a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from flatout.schema.errors import NothingMeasured
from flatout.schema.plan import Plan
from flatout.schema.records import MIN_RATIO_LOW, Ratio
from flatout.schema.session import CertificateRecord, CertifiedRun, GuardRecord, VerifiedLine
from flatout.tune.confirm import certify, judge_pairs
from flatout.tune.limits import USUAL_PAIRS
from flatout.tune.narrow import check_step
from flatout.tune.pairs import Pairs, measure_pairs
from flatout.tune.search import observe
from flatout.tune.tuning import Tuning

HOLDS, FAILED, NOT_CHECKED = "holds", "FAILED", "not checked"
DIFFERS, NOT_CLAIMED = "differs", "not claimed"  # these do not fail
MACHINE = ("machine", "device", "versions", "python")  # bits and speed are claimed for these alone
BATCHES = "batch_hashes"  # of the warm-up, whose length differs from run to run


def verify(tuning: Tuning, plan: Plan, old: CertificateRecord) -> list[VerifiedLine]:
    """Run the seeds and steps of the certificate again under ``plan``. Raises what `observe` raises."""
    try:
        tuning.disturbance.wait(tuning.budget_s, tuning.watcher.report)
        observe(tuning)
        tuned = [tuning.candidates[choice.name] for choice in plan]
        for candidate, choice in zip(tuned, plan, strict=True):
            candidate.value = choice.value
            if not candidate.values:
                raise NothingMeasured(
                    f"nothing was verified: {choice.text} cannot run here: {candidate.reason}. Run `flatout tune` here."
                )
        tuning.min_ticks = max(run.warmup_steps + run.steps for run in [*old.plain, *old.tuned])
        kept, replica = check_step(tuning, tuned)
        tuning.finish_plain_trial()
        pairs, seeds = Pairs(), len(old.plain)
        while len(pairs.tuned) < seeds or (
            old.speedup is not None
            and len(pairs.tuned) < 2 * USUAL_PAIRS
            and _too_wide(old.speedup, pairs.speed(tuning))
        ):
            tuning.stage("verifying", f"pair {len(pairs.tuned) + 1}")
            measure_pairs(tuning, tuned, pairs)
            if pairs.failure:
                raise NothingMeasured(f"the plan was not verified, because it fails here: {pairs.failure}")
        guard = judge_pairs(tuning, tuned, replica, pairs)
        if dropped := [c.reason for c in tuned if c not in kept]:
            failed = dropped[0].startswith("the guard: ")
            guard = GuardRecord("failed" if failed else NOT_CHECKED, dropped[0])
        beside = tuning.disturbance.beside
        now = certify(tuning, plan, guard, pairs, None if beside else pairs.speed(tuning))
        return list(compare_certificates(old, now))
    finally:
        tuning.interleaver.close()


def compare_certificates(old: CertificateRecord, now: CertificateRecord) -> Iterator[VerifiedLine]:
    """A line for each claim of ``old``, from what ran ``now``."""
    alone = ""
    claims = [_texts(record) for record in (old, now)]
    for name in {**claims[0], **claims[1]}:
        a, b = (side.get(name, "").split(", ") for side in claims)
        if a == b:
            yield VerifiedLine(name, HOLDS, ", ".join(b))
            continue
        alone = "of that machine alone" if name in MACHINE else alone
        why = f"{', '.join(x for x in b if x not in a)}; in the certificate: {', '.join(x for x in a if x not in b)}"
        yield VerifiedLine(name, DIFFERS if name in MACHINE else FAILED, why)
    for side in ("plain", "tuned"):
        for bits in ("losses", "weights_digests", BATCHES):
            status, why = _same_bits(getattr(old, side), getattr(now, side), bits)
            if unclaimed := alone or ("" if old.repeatable else "plain runs did not repeat their losses"):
                status, why = NOT_CLAIMED, f"{unclaimed}; here: {why}"
            yield VerifiedLine(f"{side} {bits.replace('_', ' ')}", status, why)
    status = HOLDS if now.verdict in (old.verdict, "same") else FAILED
    why = f"{now.verdict}: {now.why}; in the certificate: {old.verdict}"
    if now.verdict == NOT_CHECKED:
        status, why = NOT_CHECKED, f"because {now.why}"
    yield VerifiedLine("guard", status, why)
    yield _speed_line(old.speedup, now.speedup, alone)


def _speed_line(there: Ratio | None, here: Ratio | None, alone: str) -> VerifiedLine:
    if there is None:
        return VerifiedLine("speed", NOT_CLAIMED, "the certificate was made beside other programs")
    if here is None:
        return VerifiedLine("speed", NOT_CHECKED, "because other programs run; stop them and verify again")
    status = HOLDS if here.low <= there.high and there.low <= here.high else FAILED
    why = f"{here.sentence()}; in the certificate: {there.sentence()}"
    if alone:
        status, why = NOT_CLAIMED, f"{alone}; here: {why}"
    elif _too_wide(there, here):
        status, why = NOT_CHECKED, f"because the interval is too wide: {why}"
    return VerifiedLine("speed", status, why)


def _texts(record: CertificateRecord) -> dict[str, str]:
    plan = ", ".join(sorted(choice.text for choice in Plan.from_json(record.plan)))
    return {"plan": plan, "command": " ".join(record.command), **record.key}


def _same_bits(old: list[CertifiedRun], now: list[CertifiedRun], field: str) -> tuple[str, str]:
    again = {run.seed: dict(_numbered(getattr(run, field))) for run in now}
    claimed = equal = 0
    for run in old:
        for number, bits in _numbered(getattr(run, field)):
            value = again.get(run.seed, {}).get(number)
            if value not in (None, bits):
                return FAILED, f"number {number} of seed {run.seed} is {value}; in the certificate: {bits}"
            claimed, equal = claimed + 1, equal + (value is not None)
    if equal and (equal == claimed or field == BATCHES):
        return HOLDS, f"{equal} equal, bit for bit, in {len(old)} seeds"
    status = NOT_CHECKED if claimed or field != BATCHES else NOT_CLAIMED
    return status, f"because {equal} of {claimed} ran again"


def _numbered(values: Any) -> Iterable[tuple[object, str]]:
    return values.items() if isinstance(values, dict) else enumerate(values)


def _too_wide(old: Ratio, now: Ratio) -> bool:
    """Whether the interval does not show that the plan is no slower, and the old one does."""
    return now.low < MIN_RATIO_LOW <= min(old.low, now.high)

"""Whether two programs learn the same: the verdict of `flatout compare --same-training`.

    same         every batch, loss and weight is equal, bit by bit
    equivalent   batches are equal, losses pass the guard as those of a lever that rounds, and at every step the
                 weights of each parameter differ by no more than rounding would make them differ
    different    one of these checks fails
    cannot tell  one could not be made, or A does not repeat itself

How far rounding spreads is measured: runs of A that round every product to fewer bits (`flatout.guard.perturb`).
"""

import math
from collections.abc import Callable, Sequence

from flatout.compare.pairs import PairTimer
from flatout.guard.verdict import judge, perturbation_for, repeats_itself
from flatout.schema.compare import TrainingVerdict
from flatout.schema.enums import Effect
from flatout.schema.records import TrialRecord

# Harmful edits: from 42 (bench/same_training.py)
MAX_GROWTH = 12.0
RESOLUTION = 2.0**-22  # share of a tensor: float32's last place
MIN_STEPS, PERTURBED_SEEDS = 3, 2
Sketches = dict[str, list[float]]
Runs = Sequence[TrialRecord]


def training_verdict(timer: PairTimer, repeat: TrialRecord | None, half: bool) -> TrainingVerdict:
    """Compare the pairs. ``repeat``: a second run of A's first seed. ``half``: B may use half precision."""
    if repeat is None:
        return TrainingVerdict("cannot tell", "A failed when it ran again")
    effect = Effect.PRECISION if half else Effect.ROUNDING

    def perturbed() -> Runs:
        seeds = [pair.seed for pair in timer.pairs[:PERTURBED_SEEDS]]
        runs = [timer.repeat(seed, perturbation_for(effect)) for seed in seeds]
        return [run for run in runs if run is not None]

    a = [pair.a.record for pair in timer.pairs]
    b = [pair.b.record for pair in timer.pairs if pair.b is not None]
    return judge_training(a, b, [repeat], perturbed, effect)


def judge_training(
    a: Runs, b: Runs, repeats: Runs, perturb: Callable[[], Runs], effect: Effect = Effect.ROUNDING
) -> TrainingVerdict:
    """Compare runs with the same seeds, ``a[i]`` and ``b[i]``.

    ``repeats``: second runs of A. ``perturb``: returns runs of A perturbed by ``perturbation_for(effect)``, and is
    called if bits differ. ``effect``: what B may change, ROUNDING or PRECISION. Records have sketches of the weights."""
    exact = judge(Effect.EXACT, a, b, repeats=repeats)
    batches = sum(min(len(x.batch_hashes), len(y.batch_hashes)) for x, y in zip(a, b, strict=True))
    if exact.verdict == "same" and all(_same_batches(x, y) for x, y in zip(a, b, strict=True)):
        return TrainingVerdict("same", f"{exact.why}, and {batches} batches")
    seeds = {run.seed: run for run in a}
    if not all(repeats_itself(seeds[run.seed], run) for run in repeats):
        verdict = "different" if exact.verdict == "failed" else "cannot tell"
        return TrainingVerdict(verdict, exact.why)
    perturbed = perturb()
    rounded = judge(effect, a, b, None, repeats, perturbed)
    step, tensor, why = _beyond_rounding(a, b, perturbed)
    failed = [why] if step is not None else []
    failed += [rounded.why] if rounded.verdict == "failed" else []
    if failed:
        return TrainingVerdict("different", "; ".join(failed), step, tensor)
    if why or rounded.verdict != "equivalent":
        return TrainingVerdict("cannot tell", why or rounded.why)
    steps = sorted({int(step) for run in perturbed for step in run.weights_sketches})
    compared = (
        f"each weight after {len(steps)} steps, the last of them step {steps[-1]}, and {batches} batches"
    )
    kind = "up to half precision" if effect is Effect.PRECISION else "up to rounding"
    return TrainingVerdict("equivalent", f"{kind}: {compared}; {rounded.why}")


def _same_batches(a: TrialRecord, b: TrialRecord) -> bool:
    return all(x == y for x, y in zip(a.batch_hashes, b.batch_hashes, strict=False))


def _beyond_rounding(a: Runs, b: Runs, perturbed: Runs) -> tuple[int | None, str, str]:
    """The first step and tensor whose difference rounding does not explain, and why; or why it is unknown."""
    sides, steps = {x.seed: (x, y) for x, y in zip(a, b, strict=True)}, set[str]()
    for run in perturbed:
        plain, other = (side.weights_sketches for side in sides[run.seed])
        common = sorted(plain.keys() & other.keys() & run.weights_sketches.keys(), key=int)
        steps.update(common)
        for step in common:
            pairs = _matched(plain[step], other[step])
            if pairs is None:
                counts = (
                    f"{len(plain[step])} and {len(other[step])} parameters and buffers, or others in shape"
                )
                return int(step), "", f"the programs have {counts}"
            growth, name = max(
                (_growth(x, y, run.weights_sketches[step][name]), name) for name, x, y in pairs
            )
            if not growth <= MAX_GROWTH:
                times = (
                    f"{growth:.2g} times as far as rounding moves it"
                    if math.isfinite(growth)
                    else "NaN or infinite"
                )
                return int(step), name, f"after step {step}, {name} differs: {times} (seed {run.seed})"
    if len(steps) < MIN_STEPS:
        return None, "", f"the weights of {len(steps)} steps could be compared, of at least {MIN_STEPS}"
    return None, "", ""


def _matched(a: Sketches, b: Sketches) -> list[tuple[str, list[float], list[float]]] | None:
    """Pairs of sketches, by name, or in order if names differ; None if they do not match."""
    if a.keys() != b.keys():
        b = dict(zip(a, b.values(), strict=False))
    if a.keys() != b.keys() or any(len(a[name]) != len(b[name]) for name in a):
        return None
    return [(name, a[name], b[name]) for name in a]


def _growth(a: list[float], b: list[float], perturbed: list[float]) -> float:
    """The distance of B from A, relative to that of the perturbed run. Infinite if it is not a number."""
    scale = math.dist(a, perturbed) + RESOLUTION * math.hypot(*a)
    distance = math.dist(a, b)
    growth = distance / scale if scale else math.inf if distance else 0.0
    return growth if growth == growth else math.inf

"""Check whether two runs train on the same distribution of samples.

Pure functions over records; nothing runs here.

    distribution   the samples of all batches, as two populations
    shift          sample by sample: with one seed, both runs see the same samples in the same order, apart
                   from other random draws
    draws          a few samples that both runs fetch repeatedly: a missing random flip does not move a
                   symmetric population, but it shows in one image

Each gives a p-value that must stay above a limit, after correction for the number of comparisons.
"""

import math
from collections.abc import Sequence

from flatout.measure.statistics import two_sample_ks
from flatout.schema.records import TrialRecord
from flatout.schema.session import GuardCheck

LIMIT_P = 1e-4  # for each of the three; sound levers gave at least 0.17, broken ones at most 1e-8
STATISTICS = (
    "mean",
    "deviation",
    "left against right",
    "top against bottom",
)  # of measure.parity.batch_statistics
BLOCK_ROWS = 64  # rows averaged before the paired test, so effects of a whole batch (mixing) count once
MIN_BLOCKS = 6
MIN_SHIFT = 1e-3  # share of the population's deviation: rounding may be systematic

Pairs = Sequence[tuple[TrialRecord, TrialRecord]]


def same_distribution(pairs: Pairs) -> list[GuardCheck]:
    """The checks; an empty list if the runs have recorded no batches."""
    rows = [(p.batch_statistics, t.batch_statistics) for p, t in pairs]
    plain, tuned = [row for a, _ in rows for row in a], [row for _, b in rows for row in b]
    checks = []
    if _finite(plain) and not _finite(tuned):
        return [
            GuardCheck(
                "distribution", False, "a batch has values that are NaN or infinite, and no plain one has"
            )
        ]
    if plain and tuned:
        p, name = min(
            (two_sample_ks([r[i] for r in plain], [r[i] for r in tuned]), name)
            for i, name in enumerate(STATISTICS)
        )
        sizes = f"{len(plain)} and {len(tuned)} samples"
        checks.append(
            _check(
                "distribution",
                p * len(STATISTICS),
                f"over {sizes}, the {name} of a sample has the plain program's distribution",
            )
        )
        checks += _shift(rows, plain)
    return checks + _draws(pairs)


def _finite(rows: Sequence[list[float]]) -> bool:
    return all(math.isfinite(x) for row in rows for x in row)


def _shift(
    rows: Sequence[tuple[list[list[float]], list[list[float]]]], population: list[list[float]]
) -> list[GuardCheck]:
    worst, statistic = 1.0, STATISTICS[0]
    for i, name in enumerate(STATISTICS):
        blocks = []
        for plain, tuned in rows:
            differences = [b[i] - a[i] for a, b in zip(plain, tuned, strict=False)]
            blocks += [
                math.fsum(differences[i : i + BLOCK_ROWS]) / BLOCK_ROWS
                for i in range(0, len(differences) - BLOCK_ROWS + 1, BLOCK_ROWS)
            ]
        if len(blocks) < MIN_BLOCKS:
            return []
        mean, deviation = _moments(blocks)
        if abs(mean) > MIN_SHIFT * _moments([row[i] for row in population])[1]:
            p = _student_p(mean / deviation * math.sqrt(len(blocks)), len(blocks) - 1) if deviation else 0.0
            worst, statistic = min((worst, statistic), (p, name))
    return [
        _check(
            "shift", worst * len(STATISTICS), f"sample by sample, the {statistic} equals the plain program's"
        )
    ]


def _draws(pairs: Pairs) -> list[GuardCheck]:
    worst, tests, rounds = 1.0, 0, 0
    draws = [
        (p.fetched_samples[:n], t.fetched_samples[:n])
        for p, t in pairs
        if (n := min(len(p.fetched_samples), len(t.fetched_samples)))
    ]
    for sample in range(min((len(row) for a, b in draws for row in (*a, *b)), default=0)):
        for i in range(len(STATISTICS)):
            plain, tuned = ([row[sample][i] for pair in draws for row in pair[side]] for side in (0, 1))
            worst, tests, rounds = min(worst, two_sample_ks(plain, tuned)), tests + 1, len(plain)
    if not tests:
        return []
    return [
        _check(
            "draws",
            worst * tests,
            f"{tests // len(STATISTICS)} samples, fetched {rounds} times each, are drawn as in the plain program",
        )
    ]


def _check(name: str, p: float, why: str) -> GuardCheck:
    p = min(p, 1.0)
    passed = p >= LIMIT_P
    return GuardCheck(
        name, passed, f"{why}, with p = {p:.2g}" if passed else f"rejected: {why} (p = {p:.2g})", p, LIMIT_P
    )


def _moments(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(1, len(values) - 1))


def _student_p(t: float, degrees: int) -> float:
    """Two-sided p-value, by Wallace's approximation of Student's t by a normal variate.

    Source: Annals of Mathematical Statistics 30, 1959.
    """
    z = (8 * degrees + 1) / (8 * degrees + 3) * math.sqrt(degrees * math.log1p(t * t / degrees))
    return math.erfc(z / math.sqrt(2))

"""Rules of ratios: equal sides give one, units do not matter, swapping sides inverts, and the interval holds
the median.
"""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.measure.statistics import (
    OUTLIER_FACTOR,
    Round,
    block_ms,
    compare,
    median,
    quantile,
    two_sample_ks,
)

times = st.floats(1e-3, 1e5)
rounds = st.builds(Round, times, times)
pairs = st.lists(st.lists(rounds, min_size=1, max_size=6), min_size=1, max_size=4)
numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)
close = {"rel": 1e-6, "abs": 1e-9}


@given(pairs)
def test_the_interval_holds_the_median(found):
    ratio = compare(found)
    assert 0 < ratio.low <= ratio.median <= ratio.high < math.inf


@given(pairs, st.floats(1e-2, 1e2))
def test_a_faster_b_is_a_larger_ratio_in_proportion(found, factor):
    faster = [[Round(r.a_ms, r.b_ms / factor) for r in pair] for pair in found]
    one, other = compare(found), compare(faster)
    assert (other.median, other.low, other.high) == pytest.approx(
        (one.median * factor, one.low * factor, one.high * factor), **close
    )


@given(pairs)
def test_swapping_the_sides_inverts(found):
    swapped = compare([[Round(r.b_ms, r.a_ms) for r in pair] for pair in found])
    assert swapped.median == pytest.approx(1 / compare(found).median, **close)


@given(pairs)
def test_slowing_one_round_of_b_never_raises_the_ratio(found):
    slower = [list(pair) for pair in found]
    slower[0][0] = Round(found[0][0].a_ms, found[0][0].b_ms * 2)
    assert compare(slower).median <= compare(found).median * (1 + 1e-9)


@given(st.lists(rounds, min_size=1, max_size=2))
def test_two_rounds_are_never_a_narrow_interval(found):
    """One round, or two equal ones, give little information; the interval must be wide."""
    ratio = compare([found])
    assert ratio.high > ratio.low or len(found) == 2
    if len(found) == 1:
        assert ratio.high / ratio.low >= 1.1


def test_nothing_measured_is_an_error():
    with pytest.raises(ValueError, match="nothing was measured"):
        compare([])
    with pytest.raises(ValueError, match="nothing was measured"):
        compare([[], []])


def test_n_counts_pairs_or_the_rounds_of_one_pair():
    one = Round(2.0, 1.0)
    assert compare([[one] * 5]).n == 5
    assert compare([[one] * 5, [one] * 2, [one]]).n == 3


@pytest.mark.parametrize(("processes", "rounds"), [(1, 2), (1, 3), (1, 8), (2, 6), (3, 6), (6, 6)])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(processes, rounds):
    """2,000 experiments with a true ratio of 1.2, on machines of 3 to 7 % spread."""
    rng = random.Random(1)
    covered = 0
    for _ in range(2000):
        luck, noise = (rng.uniform(0.03, 0.07) if processes > 1 else 0.0), rng.uniform(0.03, 0.07)
        pairs = []
        for _ in range(processes):
            life = math.log(1.2) + rng.gauss(0, luck)
            pairs.append([Round(math.exp(life + rng.gauss(0, noise)), 1.0) for _ in range(rounds)])
        ratio = compare(pairs)
        covered += ratio.low <= 1.2 <= ratio.high
    assert 1860 <= covered <= 1980  # 93 to 99 %


# -- blocks and order


@given(st.lists(st.floats(1.0, 2.0), min_size=5, max_size=40), st.floats(50, 1e6))
def test_an_evaluation_inside_a_block_is_not_a_step(ticks, pause):
    assert pause > OUTLIER_FACTOR * 2.0
    assert block_ms([*ticks, pause]) == pytest.approx(block_ms(ticks))


@given(numbers, st.floats(0, 1), st.floats(0, 1))
def test_quantiles_are_monotone_and_within(values, p, q):
    p, q = min(p, q), max(p, q)
    assert min(values) - 1e-6 <= quantile(values, p) <= quantile(values, q) + 1e-6
    assert quantile(values, q) <= max(values) + 1e-6
    assert quantile(values, 0) == min(values)
    assert quantile(values, 1) == max(values)


@pytest.mark.parametrize("empty", [median, lambda v: quantile(v, 0.5)])
def test_the_median_of_nothing_is_an_error(empty):
    with pytest.raises(ValueError, match="of nothing"):
        empty([])


# -- two samples


def test_agrees_with_scipy():
    scipy = pytest.importorskip("scipy.stats")
    rng = random.Random(2)
    for shift in (0.0, 0.2, 0.5):
        a, b = [rng.gauss(0, 1) for _ in range(300)], [rng.gauss(shift, 1) for _ in range(200)]
        assert two_sample_ks(a, b) == pytest.approx(
            scipy.ks_2samp(a, b, method="asymp").pvalue, rel=0.25, abs=0.01
        )

"""Intervals of means: quantiles against a table, and coverage of intervals that stop when they are narrow."""

import math
import random

import pytest

from flatout.compare.evaluate import LEVEL, MAX_HALF_WIDTH, MIN_PAIRS
from flatout.measure.statistics import difference, estimate, t_quantile


# Source: Abramowitz and Stegun, table 26.10.
@pytest.mark.parametrize(
    ("probability", "degrees", "value"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 5, 2.571),
        (0.995, 4, 4.604),
        (0.995, 9, 3.250),
        (0.95, 30, 1.697),
    ],
)
def test_quantiles(probability, degrees, value):
    assert t_quantile(probability, degrees) == pytest.approx(value, abs=6e-4)


def test_one_value_has_no_interval_and_none_is_an_error():
    assert estimate([3.0], 0.95).half_width == math.inf
    with pytest.raises(ValueError, match="nothing was measured"):
        estimate([], 0.95)
    with pytest.raises(ValueError, match="two values"):
        difference([1.0], [1.0, 2.0], 0.95)


def test_a_difference_of_two_groups_is_that_of_welch():
    stats = pytest.importorskip("scipy.stats")
    draw = random.Random(2)
    a, b = [draw.gauss(0, 1) for _ in range(12)], [draw.gauss(1, 3) for _ in range(9)]
    interval = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    assert difference(a, b, 0.95).low == pytest.approx(
        interval.low, abs=0.02 * (interval.high - interval.low)
    )
    assert difference(a, b, 0.95).high == pytest.approx(
        interval.high, abs=0.02 * (interval.high - interval.low)
    )


def test_a_difference_of_equal_constants_is_exactly_zero():
    seen = difference([2.0, 2.0, 2.0], [2.0, 2.0], 0.95)
    assert (seen.mean, seen.half_width) == (0.0, 0.0)


@pytest.mark.parametrize("spread", [0.01, 0.02, 0.03])
def test_intervals_that_stop_when_they_are_narrow_cover_the_truth(spread):
    draw, covered, runs = random.Random(5), 0, 1000
    for _ in range(runs):
        values = []
        while len(values) < 60:
            values.append(draw.gauss(0.05, spread))
            if len(values) >= MIN_PAIRS and estimate(values, LEVEL).half_width <= MAX_HALF_WIDTH:
                break
        seen = estimate(values, LEVEL)
        covered += seen.low <= 0.05 <= seen.high
    assert 0.93 <= covered / runs <= 0.98

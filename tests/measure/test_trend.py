"""Growth that is a trend, and growth by chance."""

import random
from statistics import NormalDist

import pytest

from flatout.measure.statistics import grows_evenly, growth_p_value, keeps_growing, slope


def test_a_steady_rise_is_no_accident():
    series = [1000.0 * step for step in range(20)]
    assert growth_p_value(series) < 1e-6
    assert slope(series) == 1000.0
    assert keeps_growing(series, 0.001)


def test_the_p_value_is_that_of_mann_and_kendall():
    """S = 45 of variance 125; with one tie, S = 14 of 82/3. The continuity correction is 1."""
    normal = NormalDist()
    assert growth_p_value([*map(float, range(10))]) == pytest.approx(normal.cdf(-44 / 125**0.5))
    assert growth_p_value([1.0, 1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(normal.cdf(-13 / (82 / 3) ** 0.5))
    assert growth_p_value([1.0, 2.0, 3.0]) == 1.0


def test_a_few_even_steps_show_a_rise():
    series = [1000.0 * step for step in range(6)]
    assert grows_evenly(series, 1000)
    assert not grows_evenly(series, 1001)
    assert grows_evenly(series[:5], 1000)
    assert not grows_evenly(series[:4], 1000)
    assert not grows_evenly([*series, series[-1]], 1000)
    assert not grows_evenly([0.0, 1000.0, 9000.0, 10000.0, 11000.0, 12000.0], 1000)


def test_chance_is_a_p_value():
    """Among series without a trend, one in twenty is below 0.05."""
    rng = random.Random(0)
    below = sum(growth_p_value([rng.random() for _ in range(24)]) < 0.05 for _ in range(2000))
    assert 60 < below < 140


@pytest.mark.parametrize(
    "series", [[5.0] * 20, [], [1.0, 2.0, 3.0], [9.0, 8.0, 7.0, 6.0, 5.0, 4.0], [0.0, 1.0] * 12]
)
def test_series_that_do_not_grow(series):
    assert not keeps_growing(series, 0.001)
    assert slope(series) <= 1.0


def test_a_warm_up_that_levels_off_is_no_leak():
    series = [min(step, 8) * 1000.0 for step in range(24)]
    assert growth_p_value(series) < 0.001
    assert not keeps_growing(series, 0.001)


def test_a_rise_in_noise_is_detected_and_an_outlier_is_not():
    rng = random.Random(1)
    assert keeps_growing([step + 3 * rng.random() for step in range(24)], 0.001)
    assert not keeps_growing([rng.random() + (100 if step == 12 else 0) for step in range(24)], 0.001)

"""The gradient noise scale: unbiased compared with the closed form, and undefined where there is nothing to
measure.
"""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.measure.noise_scale import noise_scale

SIZE = 24  # numbers in a gradient


def gradients(seed, groups, batch, length, sigma, a_group=1, scale=1.0):
    """Products and squares of gradients of ``batch`` samples: |G|^2 = length^2, tr(Sigma) = SIZE sigma^2."""
    draw = random.Random(seed)
    sums, squares = [], []
    for _ in range(groups):
        each = [
            [
                scale * (length / math.sqrt(SIZE) + draw.gauss(0, sigma / math.sqrt(batch)))
                for _ in range(SIZE)
            ]
            for _ in range(a_group)
        ]
        squares.append(sum(x * x for gradient in each for x in gradient) / a_group)
        sums.append([sum(column) / a_group for column in zip(*each, strict=True)])
    return [[sum(map(float.__mul__, a, b)) for b in sums] for a in sums], squares


@pytest.mark.parametrize(("batch", "sigma", "a_group"), [(8, 1.0, 4), (32, 1.0, 1), (4, 0.5, 2)])
def test_it_matches_the_closed_form(batch, sigma, a_group):
    """B = tr(Sigma) / |G|^2, within 20 % each time and 5 % on the mean, and inside the interval as often as
    stated.
    """
    truth, found = (
        SIZE * sigma**2,
        [noise_scale(*gradients(seed, 48, batch, 1.0, sigma, a_group), batch) for seed in range(8)],
    )
    assert all(abs(each.value - truth) < 0.2 * truth for each in found)
    assert sum(each.value for each in found) / len(found) == pytest.approx(truth, rel=0.05)
    assert sum(each.low <= truth <= each.high for each in found) >= 6


@given(st.integers(0, 10**6), st.floats(1e-6, 1e6))
def test_a_factor_on_every_gradient_changes_nothing(seed, scale):
    """A loss that is a sum over its batch, or was scaled, has the noise scale of its mean."""
    plain, scaled = (
        noise_scale(*gradients(seed, 8, 4, 1.0, 1.0, scale=factor), 4, draws=40) for factor in (1.0, scale)
    )
    assert (scaled.value, scaled.low) == (pytest.approx(plain.value), pytest.approx(plain.low))
    assert (plain.high is None) == (scaled.high is None)
    assert plain.low <= (plain.value if plain.value is not None else math.inf)


def test_no_noise_and_nothing_but_noise():
    none = noise_scale(*gradients(0, 12, 4, 1.0, 0.0), 4)
    assert (none.value, none.high) == (pytest.approx(0, abs=1e-9), pytest.approx(0, abs=1e-9))
    lost = [noise_scale(*gradients(seed, 12, 4, 0.0, 1.0), 4) for seed in range(6)]
    assert all(each.high is None and each.low > 4 for each in lost)
    assert any(each.value is None for each in lost)


def test_too_few_gradients_are_rejected():
    with pytest.raises(ValueError, match="at least 8"):
        noise_scale(*gradients(0, 7, 4, 1.0, 1.0), 4)

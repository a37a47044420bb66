"""The error of a whole batch, estimated from a part of its samples and half of that part."""

import math
from types import SimpleNamespace

import pytest
import torch

from flatout.guard.batch_slices import whole_batch_factor

SAMPLES, PLAYED, ELEMENTS, STEPS = 64, 16, 4000, 2
SHARE = PLAYED / SAMPLES


def estimates(own, once, elements=ELEMENTS, seed=0):
    """The estimated and the true ratio of the errors of the whole batch and of the part.

    Each sample's gradient has an error of its own (``own``); each step adds one to the mean (``once``), as
    rounding the gradient does. Gradients are sums over samples.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    plain, levers, half, half_levers = [], [], [], []
    for _ in range(STEPS):
        true, errors = 1.0 + draw(SAMPLES, elements), own * draw(SAMPLES, elements)
        for n, exact, wrong in ((PLAYED, plain, levers), (PLAYED // 2, half, half_levers)):
            total = true[:n].sum(0)
            exact.append([total])
            wrong.append([total + errors[:n].sum(0) + n * once * draw(elements)])
    results = [SimpleNamespace(gradients=each) for each in (plain, levers, half, half_levers)]
    found = whole_batch_factor((results[0], results[1]), (results[2], results[3]), SHARE, summed=True)
    part, whole = own**2 / PLAYED + once**2, own**2 / SAMPLES + once**2
    return found, math.sqrt(whole / part)


@pytest.mark.parametrize(("own", "once"), [(1.0, 0.0), (0.0, 1.0), (1.0, 0.25), (1.0, 0.5), (0.3, 1.0)])
def test_the_estimate_is_that_of_the_whole_batch(own, once):
    for seed in range(3):
        found, true = estimates(own, once, seed=seed)
        assert found == pytest.approx(true, abs=0.08)


def test_every_parameter_counts_alike_and_means_are_not_scaled():
    steps = [[torch.full((3,), 8.0), torch.full((500,), 0.8), None] for _ in range(STEPS)]
    wrong = [[a * 1.1 if a is not None else None for a in step] for step in steps]
    plain, levers = SimpleNamespace(gradients=steps), SimpleNamespace(gradients=wrong)
    assert whole_batch_factor((plain, levers), (plain, levers), SHARE, summed=False) == pytest.approx(1.0)


def test_nothing_to_compare_changes_nothing():
    zero = SimpleNamespace(gradients=[[torch.zeros(5), None]] * STEPS)
    assert whole_batch_factor((zero, zero), (zero, zero), SHARE, summed=False) == 1.0

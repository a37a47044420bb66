"""The error of a whole batch, estimated from the errors of a share of its samples in two steps."""

from __future__ import annotations

import math

import pytest
import torch

from flatout.guard.whole_batch import in_whole_batch

SAMPLES, PLAYED, ELEMENTS = 64, 8, 4000
SHARE = PLAYED / SAMPLES


def errors_of(common: float, seed: int) -> tuple[list[list[torch.Tensor]], float]:
    """Errors of two steps, each over the played samples, and the true ratio of whole to played.

    A sample's error has one part that all samples share, and one of its own. Of the error of a mean over n
    samples, the second part is 1/n in square.
    """
    generator = torch.Generator().manual_seed(seed)
    shared = common * torch.randn(ELEMENTS, generator=generator)
    steps = [
        [shared + torch.randn(PLAYED, ELEMENTS, generator=generator).mean(0)[:ELEMENTS]] for _ in range(2)
    ]
    true = math.sqrt((common**2 + 1 / SAMPLES) / (common**2 + 1 / PLAYED))
    return steps, true


@pytest.mark.parametrize("common", [0.0, 0.1, 0.3, 1.0, 10.0])
def test_the_estimate_is_that_of_the_whole_batch(common):
    for seed in range(5):
        steps, true = errors_of(common, seed)
        assert in_whole_batch(steps, SHARE) == pytest.approx(true, abs=0.08)


def test_few_elements_agree_by_chance():
    """A tensor of one element: two signs agree half of the time, which shows nothing."""
    alike = [[torch.tensor([1.0])], [torch.tensor([1.0])]]
    assert in_whole_batch(alike, SHARE) == pytest.approx(math.sqrt(SHARE))


def test_the_same_error_in_both_steps_stays():
    same = [[torch.ones(100_000), None], [torch.ones(100_000), None]]
    assert in_whole_batch(same, SHARE) == pytest.approx(1.0, abs=0.01)


def test_whole_batches_are_taken_as_they_are():
    steps, _ = errors_of(0.0, 0)
    assert in_whole_batch(steps, 1.0) == 1.0
    assert in_whole_batch([[torch.zeros(3)], [torch.zeros(3)]], SHARE) == 1.0

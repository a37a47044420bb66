"""Captured steps reduced to fewer samples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.guard.batch_slices import (
    MAX_REPLICA_S,
    MIN_SAMPLES,
    STEPS_PER_REPLICA,
    replica_samples,
    take_samples,
)
from flatout.guard.captured_steps import CapturedCall

SLOW_MS = 12_000.0


def step(size, **more):
    return [
        CapturedCall(
            **{
                "root": 0,
                "args": (
                    torch.arange(size * 3.0).reshape(size, 3),
                    {"mask": torch.ones(size, dtype=torch.bool)},
                ),
                "kwargs": {"scale": torch.tensor(2.0)},
                "random": (None, None),
                "autocast": ("cpu", torch.bfloat16, False),
                "grads": {0: torch.ones(size, 5)},
                **more,
            }
        )
    ]


@given(size=st.integers(1, 300), step_ms=st.floats(0.1, 60_000.0))
def test_the_first_samples_of_everything_are_kept(size, step_ms):
    whole = [step(size), step(size)]
    part, taken = take_samples(whole, step_ms, 10**9)
    kept = len(part[0][0].args[0])
    assert kept == round(taken * size) == replica_samples(size, step_ms)
    if taken == 1.0:
        assert part == whole
        return
    assert MIN_SAMPLES <= kept <= size / 2
    assert kept == MIN_SAMPLES or STEPS_PER_REPLICA * step_ms * (kept - 1) / size <= 1000 * MAX_REPLICA_S
    for calls in part:
        assert calls[0].args[0].equal(whole[0][0].args[0][:kept])
        assert calls[0].args[1]["mask"].shape == (kept,)
        assert calls[0].grads[0].shape == (kept, 5)
        assert calls[0].kwargs["scale"] == 2.0
        assert calls[0].root == 0


@pytest.mark.parametrize("other", [{"grads": {0: torch.ones(7, 5)}}, {"kwargs": {"weights": torch.ones(40)}}])
def test_steps_whose_sizes_differ_stay_whole(other):
    whole = [step(64), step(64, **other)]
    assert take_samples(whole, SLOW_MS, 10**9) == (whole, 1.0)


def test_a_loss_computed_by_the_module_is_no_batch():
    part, taken = take_samples([step(64, grads={0: torch.tensor(1.0)})], SLOW_MS, 10**9)
    assert taken == 0.25
    assert part[0][0].grads[0] == 1.0

"""When a program counts as warm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.measure.steady import LONGEST_WARMUP_S, LONGEST_WARMUP_TICKS, WINDOW, is_steady


def test_nothing_is_not_steady():
    assert not is_steady([], 0.0)
    assert not is_steady([], 1e9)


@given(st.floats(0.01, 900), st.integers(1, 50))
def test_even_steps_are_steady_after_two_windows(ms, count):
    assert is_steady([ms] * count, 1.0) == (count >= 2 * WINDOW)


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=40))
def test_the_timeout_ends_the_wait(found):
    """A program that never settles is still measured."""
    assert is_steady(found, LONGEST_WARMUP_S)
    assert is_steady((found * LONGEST_WARMUP_TICKS)[:LONGEST_WARMUP_TICKS], 0.0)


@pytest.mark.parametrize(
    ("found", "steady"),
    [
        ([100, 90, 60, 50, 40, 30, 20, 15], False),  # still falling
        ([900, 10, 10, 10, 10, 10, 10, 10], True),  # one slow start
        ([10, 10, 10, 10, 12, 12, 12, 12], False),  # 17 % apart
        ([10, 10, 10, 10, 11, 11, 11, 11], True),
        ([10, 10, 10, 500, 10, 10, 10, 11], True),  # an evaluation in between
        ([1500.0], False),
        ([1500.0, 1550.0], True),  # a step of a second is taken early
        ([1900.0, 1200.0], False),
        ([1900.0, 1200.0, 1250.0], True),
        ([5000.0], True),  # a longer one is taken at once
    ],
)
def test_examples(found, steady):
    assert is_steady(found, 1.0) is steady

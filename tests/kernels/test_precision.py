"""The error bound: one rounding passes, a mistake does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from flatout.kernels.gate import distance  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@given(st.sampled_from(DTYPES), st.integers(1, 50), st.integers(0, 2**20))
def test_one_rounding_passes_and_a_hundred_do_not(dtype, size, seed):
    draw = torch.Generator().manual_seed(seed)
    right = torch.randn(size, generator=draw, dtype=torch.float64)
    assert distance(right.to(dtype), right, terms=1).error_ratio <= 1
    at = int(right.abs().argmax())
    wrong = right.to(dtype).double().clone()
    wrong[at] *= 1 + 100 * torch.finfo(dtype).eps
    found = distance(wrong.to(dtype), right, terms=1)
    assert found.error_ratio > 1
    assert found.position == (at,)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_longer_sums_are_allowed_more(a, b):
    got, right = torch.tensor([1.0 + 1e-5]), torch.tensor([1.0], dtype=torch.float64)
    shares = [distance(got, right, terms).error_ratio for terms in sorted((a, b))]
    assert shares[0] >= shares[1]


@pytest.mark.parametrize(
    ("got", "right", "passes"),
    [
        (float("nan"), float("nan"), True),
        (float("inf"), float("inf"), True),
        (float("inf"), float("-inf"), False),
        (float("nan"), 1.0, False),
        (1.0, float("nan"), False),
        (3e38, float("inf"), False),
        (0.0, 0.0, True),
        (-0.0, 0.0, True),
        (1e-3, 0.0, False),
    ],
)
def test_nan(got, right, passes):
    assert (
        distance(torch.tensor([got, 1.0]), torch.tensor([right, 1.0], dtype=torch.float64), 1).error_ratio
        <= 1
    ) is passes


def test_an_empty_result_passes():
    assert distance(torch.empty(0, 3), torch.empty(0, 3, dtype=torch.float64), 1).error_ratio == 0

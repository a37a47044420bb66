"""A recorded step is compared with the plain one before it replaces it, also where losses are no numbers."""

import math

import pytest

torch = pytest.importorskip("torch")

from flatout.kernels.graph_replay import nearly_equal  # noqa: E402

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("recorded", "plain", "equal"),
    [
        ([NAN], [NAN], True),
        ([NAN, 1.0], [NAN, 1.0], True),
        ([NAN, 1.0], [1.0, 1.0], False),
        ([1.0, 1.0], [1.0, NAN], False),
        ([INF, 1.0], [-INF, 1.0], False),
        ([-INF, 1.0 + 1e-12], [-INF, 1.0], True),
        ([0.0, 1.0], [0.0, 2.0], False),
        ([], [], True),
    ],
)
def test_values_are_compared_and_what_is_no_number_by_its_kind(recorded, plain, equal):
    assert nearly_equal(*(torch.tensor(side, dtype=torch.float64) for side in (recorded, plain))) is equal

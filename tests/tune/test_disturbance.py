"""Which loads of other processes a search reports."""

import pytest

from flatout.measure.load import MachineLoad
from flatout.tune.disturbance import Disturbance


@pytest.mark.parametrize(
    ("cores", "disturbed"),
    [
        ([], False),
        ([0.0], False),
        ([1.0], True),
        ([0.0, 0.0, 0.1, 1.0], False),  # one sample may be a coincidence
        ([0.0, 0.0, 0.1, 1.0, 0.9], True),  # it began halfway
        ([1.0, 0.0, 0.0, 0.0, 0.0], False),  # it has ended
    ],
)
def test_a_load_counts_from_its_second_sample_on(cores, disturbed):
    watched = Disturbance(2, [MachineLoad(each, ("python (pid 1)",) if each > 0.5 else ()) for each in cores])
    assert watched.disturbed is disturbed
    if disturbed:
        assert watched.sentence().startswith("other processes keep")
        assert watched.sentence().endswith("of 2 cores busy (python (pid 1))")

"""Which loads of other processes a search reports."""

import pytest

from flatout.measure.disturbance import Disturbance
from flatout.measure.load import MachineLoad


@pytest.mark.parametrize(
    ("cores", "disturbed"),
    [
        ([], False),
        ([0.0], False),
        ([1.0], True),
        ([0.0, 0.0, 0.1, 1.0], False),  # one sample may be a coincidence
        ([0.0, 0.0, 0.1, 1.0, 0.9], False),  # blocks before it are the most, and they alone count
        ([0.0, 0.1, 1.0, 0.9, 1.0], True),
        ([1.0, 0.0, 0.0, 0.0, 0.0], False),  # it has ended
    ],
)
def test_a_load_counts_if_most_samples_have_it(cores, disturbed):
    watched = Disturbance(2, [MachineLoad(each, ("python (pid 1)",) if each > 0.5 else ()) for each in cores])
    assert watched.disturbed is disturbed
    if disturbed:
        assert watched.sentence().startswith("other processes keep")
        assert watched.sentence().endswith("of 2 cores busy (python (pid 1))")


@pytest.mark.parametrize(
    ("device", "threads", "disturbed"), [("cpu", 1, False), ("cpu", 2, True), ("cuda", 2, False)]
)
def test_others_may_use_the_cores_that_the_program_leaves_idle(monkeypatch, device, threads, disturbed):
    monkeypatch.setattr("flatout.measure.disturbance.usable_cores", lambda: 2)
    watched = Disturbance(2, [MachineLoad(1.0)])
    watched.observe({"device": device, "threads": threads, "loaders": []})
    assert watched.disturbed is disturbed

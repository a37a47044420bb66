"""Models parallelised over ranks: each rank's state is saved and resumed.

As many ranks continue to the last bit; more or fewer continue the same training.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import hang_s

pytest.importorskip("torch")

pytestmark = pytest.mark.processes

LIVES = Path(__file__).with_name("divided_lives.py")


@pytest.fixture(scope="module")
def lives(chosen):
    done = subprocess.run(
        [sys.executable, str(LIVES), *chosen("kind")],
        capture_output=True,
        text=True,
        timeout=hang_s(280),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.sampled(1)
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["fsdp"])
def test_interrupted_twice_and_resumed_it_ends_with_the_same_bits(lives, kind):
    """The interruptions are in the middle of the second and fourth epoch; compared are each rank's weights,
    optimizers, rate and random numbers.
    """
    for whole, again in zip(lives[kind]["whole"], lives[kind]["gone on"], strict=True):
        assert again["said"][0].startswith("resuming after step 6"), again["said"]
        assert again["exact"], again["said"]
        assert again["digest"] == whole["digest"]
        assert again["index"] == whole["index"] == 10
    assert lives[kind]["whole"][0]["digest"] != lives[kind]["whole"][1]["digest"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["fsdp turns", "ddp turns"])
def test_other_numbers_of_ranks_continue_the_same_training(lives, kind):
    """Two, three, one, two ranks, where sizes do not divide evenly; and two, one, two.

    Samples, losses and weights are the same, and equal bits are not claimed.
    """
    turns, whole = lives[kind]["lives"], lives[kind]["whole"]
    losses = {}
    for ranks in turns:
        of_each = [rank["losses"] for rank in ranks]
        losses |= {at: sum(each[at] for each in of_each) / len(of_each) for at in of_each[0]}
    expected = {at: sum(each["losses"][at] for each in whole) / len(whole) for at in whole[0]["losses"]}
    assert list(losses) == list(expected)
    assert losses == pytest.approx(expected, rel=1e-12)
    for ranks in turns[1:]:
        for rank in ranks:
            assert rank["exact"] is False
            assert "ranks" in " ".join(rank["said"])
    for rank in turns[-1]:
        for mine, theirs in zip(rank["weights"], whole[0]["weights"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("kind", ["spoiled"])
def test_one_invalid_slice_prevents_the_whole_checkpoint(lives, kind):
    """A NaN in a slice that only the second rank has."""
    assert lives[kind] == ["step-00000001", "step-00000002"]

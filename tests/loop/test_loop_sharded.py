"""Models parallelised over ranks: each rank's state is saved and resumed.

As many ranks continue to the last bit; another number is rejected.
"""

from __future__ import annotations

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


@pytest.mark.parametrize("kind", ["other ranks"])
def test_another_number_of_ranks_is_rejected(lives, kind):
    (process,) = lives[kind]
    assert "is of 2 ranks, and 1 would resume from it" in process["refused"]
    assert "Start 2 again, or use from_scratch=True" in process["refused"]


@pytest.mark.parametrize("kind", ["spoiled"])
def test_one_invalid_slice_prevents_the_whole_checkpoint(lives, kind):
    """A NaN in a slice that only the second rank has."""
    assert lives[kind] == ["step-00000001", "step-00000002"]

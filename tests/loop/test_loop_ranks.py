"""Two ranks of one training, one of which fails: all repeat the step, or all end with an error.

No rank hangs, and no weight differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import hang_s

pytestmark = pytest.mark.processes

pytest.importorskip("torch")

PROGRAM = Path(__file__).with_name("two_ranks.py")
TIMEOUT_S = 150


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The record of each rank, case by case, and the final message of the rank that was left."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pair = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=hang_s(TIMEOUT_S)) for process in pair]
    finally:
        for process in pair:
            process.kill()
    for (_, err), process in zip(said, pair, strict=True):
        assert process.returncode == 0, err[-3000:]
    zero, one = (json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1))
    return zero, one, said[0][0]


def distance(one, other):
    return max(
        abs(a - b)
        for x, y in zip(one["weights"], other["weights"], strict=True)
        for a, b in zip(x, y, strict=True)
    )


def both(ranks, name):
    zero, one, _ = ranks
    return (
        list(zip(zero[name], one[name], strict=True))
        if isinstance(zero[name], list)
        else [(zero[name], one[name])]
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "reference", "parts"),
    [
        ("divided", "undisturbed", [2, 2, 2]),
        ("counted", "counted, whole", [4, 4, 4]),
        ("failing", "undisturbed", [1, 2, 2]),
        ("of rank 0 in the first step", "undisturbed", [2, 2, 2]),
        ("in a window", "undisturbed", [2, 4, 4]),
        ("bucket views", "undisturbed", [2, 4, 4]),
        ("unused", "unused, undisturbed", [1, 2, 2]),
        ("own exchange, failing", "undisturbed", [1, 2, 2]),
    ],
)
def test_all_ranks_repeat_the_step_and_learn_the_same(ranks, name, reference, parts):
    """One rank fails before the rank wrapper is called, in forward, in the loss, or early or late in
    backward.
    """
    for zero, one in both(ranks, name):
        assert zero["words"] == one["words"] == ""
        assert zero["parts"] == one["parts"] == parts
        assert distance(zero, one) == 0.0
        assert distance(zero, ranks[0][reference]) < 1e-14
        if name not in ("divided", "counted"):
            assert sorted([bool(zero["fired"]), bool(one["fired"])]) == [False, True]


def test_one_size_of_micro_batches_for_all(ranks):
    """Two samples fit on one rank, four on the other."""
    [(zero, one)] = both(ranks, "auto")
    assert zero["parts"] == one["parts"]
    assert min(zero["parts"]) >= 4
    assert zero["micro_batch"] == one["micro_batch"] <= 2
    assert distance(zero, one) == 0.0
    assert distance(zero, ranks[0]["whole, 14"]) < 1e-13


@pytest.mark.parametrize("at", [0, 1], ids=["before any weight", "after some"])
def test_a_failing_optimizer_on_one_rank_ends_all_ranks(ranks, at):
    zero, one = both(ranks, "optimizer")[at]
    assert "the optimizer ran out of memory" in one["words"]
    assert zero["words"].startswith("rank 1 has ended the training, so all ranks do")
    assert one["words"] in zero["words"]


@pytest.mark.parametrize(
    ("name", "words"), [("nan", "the loss of step 2 is nan"), ("ended", "of the user's own")]
)
def test_an_error_on_one_rank_ends_all(ranks, name, words):
    [(zero, one)] = both(ranks, name)
    assert words in one["words"]
    assert zero["words"].startswith("rank 1 has ended the training")
    assert words in zero["words"]
    assert distance(zero, one) == 0.0  # no rank has completed the step


def test_a_batch_that_one_rank_cannot_split_is_split_on_none(ranks):
    [(zero, one)] = both(ranks, "refused")
    assert "would change the gradient" in zero["words"]
    assert "would change the gradient" in one["words"]
    assert distance(zero, one) == 0.0


def test_an_infinite_gradient_of_one_rank_is_skipped_by_all(ranks):
    [(zero, one)] = both(ranks, "fp16")
    assert zero["skipped"] == one["skipped"] == [False, True, False]
    assert distance(zero, one) == 0.0


def test_the_other_rank_does_not_wait_for_one_that_vanishes(ranks):
    assert "could not complete the exchange" in ranks[2] or "the ranks have lost each other" in ranks[2]

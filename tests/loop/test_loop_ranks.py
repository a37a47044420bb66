"""Two ranks of one training learn what whole batches would teach them; no rank goes on without the other."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import run_python

pytestmark = pytest.mark.processes

pytest.importorskip("torch")

PROGRAM = Path(__file__).with_name("two_ranks.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of each rank, case by case."""
    folder = tmp_path_factory.mktemp("ranks")
    with ThreadPoolExecutor() as both:
        list(both.map(lambda rank: run_python(PROGRAM, rank, folder), (0, 1)))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def distance(one, other):
    return max(
        abs(a - b)
        for x, y in zip(one["weights"], other["weights"], strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "reference", "parts"),
    [("divided", "whole", 2), ("counted", "counted, whole", 4), ("sharded", "whole", 1)],
)
def test_micro_batches_learn_what_whole_batches_do(ranks, name, reference, parts):
    """In "counted", the last micro-batch counts nothing, and its rank still takes part in the exchange."""
    zero, one = (rank[name] for rank in ranks)
    assert zero["error"] == one["error"] == ""
    assert zero["parts"] == one["parts"] == [parts] * 3
    assert distance(zero, one) == 0.0
    assert distance(zero, ranks[0][reference]) < 1e-14


def test_an_infinite_gradient_of_one_rank_is_skipped_by_all(ranks):
    zero, one = (rank["fp16"] for rank in ranks)
    assert zero["skipped"] == one["skipped"] == [False, True, False]
    assert distance(zero, one) == 0.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("counted, unused", "the last micro-batch of a step counts nothing"),
        ("auto", 'micro_batch="auto" tries sizes that may not fit'),
        ("sharded, stored", "save with torch.distributed.checkpoint"),
    ],
)
def test_what_several_ranks_cannot_do_is_rejected(ranks, name, words):
    for rank in ranks:
        assert words in rank[name]["error"]


def test_out_of_memory_on_one_rank_ends_all(ranks):
    zero, one = (rank["memory"]["error"] for rank in ranks)
    assert "out of memory with 8 samples" in one
    assert "micro_batch=4" in one
    assert zero.startswith("lost: ")

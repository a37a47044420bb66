"""Two ranks with shared layers or one stage each learn what one process learns: ten steps, clipped and
accumulated. Everything else is rejected with an error.
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

import pipelines

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).with_name("two_parallel_ranks.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pair = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(folder)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=hang_s(200))[1] for process in pair]
    finally:
        for process in pair:
            process.kill()
    for err, process in zip(said, pair, strict=True):
        assert process.returncode == 0, err[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def furthest(one, other):
    return max(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "near"), [("float64", 1e-12), ("float32", 1e-6), ("accumulated", 1e-12)])
def test_ranks_that_share_layers_learn_what_one_process_learns(ranks, name, near):
    for rank in ranks:
        raw, parallel = rank[name]
        assert len(raw["losses"]) == len(parallel["losses"]) == 10
        assert furthest([raw["losses"], raw["norms"]], [parallel["losses"], parallel["norms"]]) <= near
        assert furthest(raw["weights"], parallel["weights"]) <= near
        assert raw["names"] == parallel["names"]
        assert min(raw["norms"]) > 0.5  # it was clipped
        assert parallel["parts"] == (4 if name == "accumulated" else 1)
    assert ranks[0][name][1]["losses"] == ranks[1][name][1]["losses"]


def test_a_rank_holds_only_its_slice(ranks):
    for rank in ranks:
        parallel = rank["float64"][1]
        assert parallel["sliced"] == ["DTensor"] * 4
        shared = 2 * (
            16 * 32 + 32 + 32 * 16
        )  # of two blocks: weights and the wide bias; the narrow bias is whole
        assert parallel["own"] == parallel["all"] - shared // 2
        assert parallel["state"] == ["DTensor", "Tensor"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("alone", "torchrun --standalone"),
        ("no such module", "blocks.*.sideways"),
        ("no style", "is a str"),
        ("nothing", "is not a dict"),
        ("begun", "the optimizer already has state"),
        ("auto", "plan='auto' does not work with parallel="),
        ("sizes", "micro_batch='auto' does not work"),
        ("masters", "precision='bf16-master' does not work"),
        ("fused", "fused=True"),
        ("memory", "cannot repeat a step. Use smaller micro-batches"),
        ("batches", "every rank must train on the same batches"),
    ],
)
def test_incompatible_options_are_explained(ranks, name, said):
    for rank in ranks:
        assert said in rank["words"][name]


@pipelines.need_them
@pytest.mark.parametrize(
    ("name", "near", "parts", "ends"),
    [
        ("float64", 1e-12, 4, "first"),
        ("float32", 1e-6, 2, "first"),
        ("window", 1e-12, 4, "second"),
        ("whole", 1e-12, 1, "first"),
    ],
)
def test_stages_learn_what_one_process_learns(ranks, name, near, parts, ends):
    """This covers both schedules, splits by count and by name, and a loss that is a mean or a sum.

    Each rank holds only its own stage's weights.
    """
    kept = [{entry.split(".")[0]: None for entry in rank["piped"][name]["kept"]} for rank in ranks]
    assert list(kept[0])[-1] == ends
    assert [*kept[0], *kept[1]] == ["body", "first", "second", "head"]
    for rank in ranks:
        found = rank["piped"][name]
        for raw, piped in (found["losses"], found["norms"]):
            assert len(raw) == len(piped) == 10
            assert furthest([raw], [piped]) <= near
        assert found["apart"] <= near
        assert found["parts"] == parts
    assert ranks[0]["piped"][name]["losses"][1] == ranks[1]["piped"][name]["losses"][1]


@pipelines.need_them
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("three", "3 stages on 2 ranks"),
        ("no child", "'third'"),
        ("order", "without its first child"),
        ("schedule", "gpipe, 1f1b"),
        ("no sequence", "this model is a ModuleList"),
        ("tied", "shares a parameter"),
        ("auto", "plan='auto' does not work"),
        ("bf16", "precision='bf16' does not work"),
        ("reduction", 'reduction="mean" or "sum"'),
        ("uneven", "these have 3, 3, 2 samples"),
        ("nan", "the loss of step 0 is nan"),
    ],
)
def test_unsupported_pipelines_are_explained(ranks, name, said):
    for rank in ranks:
        assert said in rank["piped words"][name]


@pytest.mark.skipif(pipelines.THERE_ARE, reason="this torch has pipelines")
def test_older_torch_is_explained(ranks):
    for rank in ranks:
        assert "Pipelines need torch 2.14" in rank["piped words"]["older"]

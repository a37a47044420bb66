"""A script's own DistributedDataParallel under levers, as two and three ranks; and a real run under torchrun.

These tests read the results of ddp_cases.py.
"""

import json
import sys
from pathlib import Path

import pytest
from processes import run_python
from vectors import distance

pytest.importorskip("torch")
PROGRAM = Path(__file__).with_name("ddp_cases.py")
pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(sys.platform != "linux", reason="not run: the programs need Linux"),
    pytest.mark.processes,
]


def as_ranks(folder, number):
    """The output of each rank."""
    run_python(PROGRAM, folder, number)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(number)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return as_ranks(tmp_path_factory.mktemp("two"), 2)


def test_arguments_change_no_bit(two):
    """They hold for modules that the script makes after the lever has acted, and for no longer."""
    for rank in two:
        for name in ("plain", "kept gradients", "accumulated", "batch norm", "all used"):
            plain, views, static = rank["flags"][name]
            assert views["steps"] == static["steps"] == plain["steps"], name
            assert [life["flags"] for life in (plain, views, static)] == [
                [False, False],
                [True, False],
                [False, True],
            ]
    bad, plain = ([rank["flags"][name][0]["steps"][-1] for rank in two] for name in ("bad", "plain"))
    assert plain[0] == plain[1]
    assert bad[0] != bad[1]


@pytest.mark.full
def test_three_ranks_round_otherwise(tmp_path):
    for rank in as_ranks(tmp_path, 3):
        assert rank["offered"]["plain"][0][1] == "rounding"
        assert distance(rank["views"]["steps"][-1:], rank["plain"]["steps"][-1:]) < 1e-6


def test_offered_values(two):
    hook = "the script has registered its own communication hook, which stays"
    single = "the program's DistributedDataParallel has one rank, so nothing is exchanged"
    views = [[{"gradient_as_bucket_view": True}], "exact"]
    for rank in two:
        assert rank["offered"] == {
            "plain": [views, [["bf16"], None]],
            "own views": ["the script already sets gradient_as_bucket_view", [["bf16"], None]],
            "hooked": [views, hook],
            "single": [single, single],
        }


@pytest.mark.parametrize(("kind", "rounding"), [("bf16", 2.0**-7), ("fp16", 2.0**-10), ("powersgd", 1.0)])
def test_fewer_bytes_within_rounding(two, kind, rounding):
    """PowerSGD was told to leave two passes uncompressed."""
    for rank in two:
        case = rank["compression"][kind]
        distances = [distance([gradient], [case["plain"]]) for gradient in case["gradients"]]
        assert [value > 0 for value in distances] == [kind != "powersgd"] * 2 + [True] * 2
        assert max(distances) < rounding
        assert len(case["reports"]) == (kind == "powersgd")
        assert case["loaded"]
        assert distance(rank["compression"]["bad"]["gradients"][:1], [case["plain"]]) > 0.9
    assert two[0]["compression"][kind]["gradients"] == two[1]["compression"][kind]["gradients"]


def test_the_lines_of_the_guide_step_alone(two):
    """Gradients are exchanged in four steps; later the weights are equal after every eighth step."""
    first, second = (rank["guide"] for rank in two)
    same = [a == b for a, b in zip(first, second, strict=True)]
    assert same == [True] * 5 + [False] * 7


@pytest.mark.full
def test_levers_of_a_real_run_under_torchrun(flatout):
    """After each step both ranks have the same weights: both act at the same step of each rank."""
    program = PROGRAM.with_name("ddp_training.py")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = ("run", "--plan", "none", "--with", "ddp_flags", "--with", "comm_compression")
    under = flatout(*words, "python", *torchrun, str(program), ".", "12")
    assert under.code == 0, under.err
    assert "ddp_flags(gradient_as_bucket_view=True), comm_compression=bf16" in under.err
    steps = [(flatout.folder / f"seen.{rank}").read_text().split() for rank in (0, 1)]
    assert len(steps[0]) == 12
    assert steps[0] == steps[1]

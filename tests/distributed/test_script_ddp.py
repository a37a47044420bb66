"""A script's own DistributedDataParallel under levers, as two ranks started by torchrun, and as three.

These tests read the results of ddp_cases.py.
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
PROGRAM = Path(__file__).with_name("ddp_cases.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ON, OFF, END, OBSERVED = 2, 9, 12, 4
KEEPS = "the script keeps gradients of earlier passes, which the next pass would overwrite"
pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(sys.platform != "linux", reason="not run: the programs need Linux"),
    pytest.mark.processes,
]


def as_ranks(folder, ranks, *words):
    """The output of each rank."""
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=hang_s(150),
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return as_ranks(folder, 2, *TORCHRUN, str(PROGRAM), str(folder))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    return as_ranks(folder, 3, str(PROGRAM), str(folder), "3", "three")


def apart(a, b):
    """The length of the difference, relative to that of the second."""
    return (sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / sum(y * y for y in b)) ** 0.5


def during(life, flag):
    """Whether it held in each step from the end of the observation until the lever was off, and
    in no other.
    """
    held = [each[flag] for each in life["held"]]
    return held == [ON + OBSERVED <= step < OFF for step in range(END)]


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "kept gradients",
        "accumulated",
        "accumulated and kept",
        "all used",
        "batch norm",
        "checkpointing",
        "static",
        "changing graph",
        "detaches",
        "replaces",
    ],
)
def test_arguments_change_no_bit(two, name):
    for rank in two:
        case = rank["flags"][name]
        for life in (case["views"], case["both"]):
            assert life["digests"] == case["plain"]["digests"]
            assert during(life, "views")
            assert life["reports"] == []
            assert (life["left"], life["flags"], life["gradients are views"]) == (
                True,
                [False, name == "static", True],
                False,
            )


@pytest.mark.full
@pytest.mark.processes
def test_three_ranks_sum_in_the_same_order(three):
    """Buckets stay the same.

    A gradient in its bucket is divided by three, any other is multiplied by a third; a message says so.
    """
    for rank in three:
        case = rank["three"]
        assert all(plain["digests"] == views["digests"] for plain, views in case["lives"])
        assert case["same gradient again"] == [True] * 3
        assert case["offered"][1] == "rounding"
        assert case["kept"][0]["digests"] != case["kept"][1]["digests"]


def test_a_script_that_keeps_gradients_is_left_alone(two):
    for rank in two:
        life = rank["keeps"]["views"]
        assert life["digests"] == rank["keeps"]["plain"]["digests"]
        assert not any(each["views"] for each in life["held"])
        assert not any(
            each["views"] for each in rank["keeps"]["one rank"]["held"]
        )  # the observation of one rank holds for all
        assert (
            life["reports"]
            == rank["keeps"]["one rank"]["reports"]
            == [["ddp_flags", f"gradient_as_bucket_view is not used: {KEEPS}"]]
        )


def test_a_static_graph_is_observed_first(two):
    for rank in two:
        case = rank["static"]
        for plain, life in (
            (case["plain"], case["static"]),
            (case["plain"], case["and views"]),
            case["checkpointing"],
            case["accumulated"],
        ):
            assert life["digests"] == plain["digests"]
            assert during(life, "static")
        plain, life = case["changing"]
        assert life["digests"] == plain["digests"]
        assert not any(each["static"] for each in life["held"])
        assert life["reports"] == [
            [
                "ddp_flags",
                "static_graph is not used: the order in which parameters get their gradients differs between passes",
            ]
        ]
        assert "the script does not set find_unused_parameters" in case["needless"]
        assert case["and bf16"] == two[0]["static"]["and bf16"]
        assert [each[:2] for each in case["and bf16"]] == [["gradients sent by flatout", True]] * 2


def test_buffers_are_sent_where_a_rank_has_changed_one(two):
    for rank in two:
        case = rank["buffers"]
        for name in ("still", "moves", "batch norm"):
            assert case[f"{name} quiet"]["digests"] == case[name]["digests"]
            assert case[f"{name} quiet"]["flags"] == [False, False, True]
        assert case["moves"]["digests"] != case["still"]["digests"]
        always, under = END, OFF - ON  # once as the module is created is left out
        assert [case[name]["sent"] for name in ("still", "moves", "batch norm")] == [always] * 3
        assert case["still quiet"]["sent"] == always - under + 1  # the first one under the lever
        assert case["moves quiet"]["sent"] == always - under + 1 + 3
        assert case["batch norm quiet"]["sent"] == always
    assert two[0]["buffers"]["moves"]["digests"][-1] == two[1]["buffers"]["moves"]["digests"][-1]


def test_offered_values(two):
    for rank in two:
        case = rank["offered"]
        views, quiet = {"gradient_as_bucket_view": True}, {"broadcast_buffers": False}
        assert case["flags"] == [[{**views, **quiet}, views, quiet], "exact"]
        assert case["batch norm"] == [[views], "exact"]
        assert case["own views"] == [
            [[quiet], "exact"],
            "the script already sets gradient_as_bucket_view, and no buffer broadcast can be skipped",
        ]
        assert case["compression"] == [["bf16", "fp16"], None]
        assert case["hooked"] == ["the script has registered its own communication hook, which stays"] * 2
        assert (
            case["single"]
            == ["the program's DistributedDataParallel has one rank, so nothing is exchanged"] * 2
        )
        assert (
            case["frozen"]
            == [
                "the program's DistributedDataParallel uses parameters that were frozen later, which this lever does not support"
            ]
            * 2
        )


@pytest.mark.parametrize(
    ("way", "within", "first"), [("bf16", 2.0**-7, 3), ("fp16", 2.0**-10, 4), ("powersgd", 0.5, 4)]
)
def test_fewer_bytes_within_rounding_and_off_again_bit_for_bit(two, way, within, first):
    """float16 learns the scale of each bucket in an uncompressed pass; PowerSGD was told to leave one pass
    uncompressed.
    """
    for rank in two:
        case = rank["compression"][way]
        plain, *others = case["gradients"]
        assert case["buckets"] > 1
        assert [each == plain for each in others] == [not first <= step < 7 for step in range(1, 10)]
        assert all(apart(each, plain) < within for each in others)
        assert bool(case["reports"]) == (way == "powersgd")
    assert two[0]["compression"][way]["gradients"] == two[1]["compression"][way]["gradients"]


def test_a_sum_without_division_is_another_gradient(two):
    for rank in two:
        plain, *_, off = rank["compression"]["bad"]["gradients"]
        assert apart(rank["compression"]["bad"]["gradients"][4], plain) > 0.9
        assert off == plain


def test_levers_are_switched_on_together(two):
    """The last lever on is the first one off, as in a search.

    Then the script registers its own hook, which stays.
    """
    for rank in two:
        case, ours = rank["both"], "gradients sent by flatout"
        assert case["hooks"] == [""] * 7 + [ours] * 3 + [""] * 5 + [ours] * 3 + ["allreduce_hook"] * 6
        assert case["views"] == [False] * 6 + [True] * 7 + [False] * 11
        assert case["later"] == "the script has registered its own communication hook, which stays"
    assert two[0]["both"]["same weights"] == two[1]["both"]["same weights"]


def test_a_module_that_is_saved_is_that_of_the_script(two):
    for rank in two:
        case = rank["copies"]
        assert not case["ours"]
        assert case["loaded"] == case["copied"] == case["itself"]


def test_the_known_bad_lets_ranks_diverge(two):
    assert two[0]["bad"]["bad"]["digests"] != two[0]["bad"]["plain"]["digests"]
    assert two[0]["bad"]["plain"]["digests"][-1] == two[1]["bad"]["plain"]["digests"][-1]
    assert two[0]["bad"]["bad"]["digests"][-1] != two[1]["bad"]["bad"]["digests"][-1]


@pytest.mark.full
@pytest.mark.processes
def test_ranks_of_torchrun_switch_together(tmp_path):
    """After each step both ranks have the same weights, whatever was switched on before.

    Rank 0 is measured, so that two programs show the same batches.
    """
    words = [sys.executable, str(PROGRAM.with_name("ddp_switching.py")), str(tmp_path), "cpu"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=hang_s(150), check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["options"]["ddp_flags"]["effect"] == "exact"
    assert found["options"]["comm_compression"]["values"] == ["bf16", "fp16"]
    assert (found["status"], found["skipped"]) == ("finished", [])
    assert all(check["passed"] for check in found["replica"]["checks"]), found["replica"]
    assert found["first loss"] == found["first losses"][0] != found["first losses"][1]
    together = min(map(len, found["info"]))
    assert together > 36
    assert found["info"][0][:together] == found["info"][1][:together]


@pytest.mark.full
@pytest.mark.processes
def test_a_lever_left_out_later_is_reported_in_a_real_run(flatout):
    """The first passes are observed, and by then flatout has already reported the levers that it applies."""
    program = PROGRAM.with_name("ddp_training.py")
    under = flatout(
        "run", "--plan", "none", "--with", "ddp_flags", "python", *TORCHRUN, str(program), ".", "12", "keeps"
    )
    assert under.code == 0, under.err
    assert "applied ddp_flags(gradient_as_bucket_view=True, broadcast_buffers=False)" in under.err
    assert under.err.count(f"flatout: ddp_flags: gradient_as_bucket_view is not used: {KEEPS}") == 1
    info = [(flatout.folder / f"seen.{rank}").read_text().split() for rank in (0, 1)]
    assert len(info[0]) == 12
    assert info[0] == info[1]

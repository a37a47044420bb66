"""Ranks that keep a shard of each weight compared with one process: gradients, losses, weights, checkpoints,
and the bytes that each holds.
"""

import json
import random
from pathlib import Path

import pytest
from processes import run_python
from vectors import distance

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).with_name("shard_cases.py")
GRADIENT = {"float64": 1e-12, "float32": 1e-6}
LATER = {"float64": 1e-9, "float32": 2e-3}
PLAIN = {
    "seed": 3,
    "dtype": "float64",
    "length": 23,
    "batch": 8,
    "window": 1,
    "steps": 5,
    "optimizer": "adam",
    "foreach": None,
    "two": False,
    "clip": None,
    "loss": "mean",
    "tied": True,
    "frozen": False,
    "other": False,
    "pieces": False,
    "penalty": False,
    "averaged": False,
    "reload": False,
    "scaled": False,
    "resume": None,
    "procs": [1, 2],
    "division": {"batches": "index"},
}
WEIGH, WRONG, RESUMED = 0, 1, 3


def a_case(draw):
    return {
        "seed": draw.randrange(1000),
        "length": draw.randint(14, 26),
        "batch": draw.randint(4, 9),
        "window": draw.choice((1, 2)),
        "steps": 4,
        "two": draw.random() < 0.5,
        "optimizer": draw.choice(("sgd", "adam")),
        "clip": draw.choice(("norm", "value")),
        "tied": draw.random() < 0.5,
        "frozen": draw.random() < 0.5,
        "division": {"batches": draw.choice(("index", "cut"))},
    }


def the_cases(folder):
    draw = random.Random(8)
    return [
        PLAIN | case
        for case in (
            {"weigh": True},
            {"wrong": True, "steps": 1},
            {"steps": 30, "clip": "norm", "reload": True},
            {"steps": 3, "resume": str(folder / "2.1.0.pt")},  # from the checkpoint of one process
            {
                "dtype": "float32",
                "optimizer": "sgd",
                "two": True,
                "frozen": True,
                "other": True,
                "penalty": True,
                "scaled": True,
                "clip": "norm",
                "averaged": True,
                "length": 25,
            },  # the last batch has one sample, fewer than there are ranks
            {
                "pieces": True,
                "clip": "value",
                "window": 2,
                "foreach": True,
                "tied": False,
                "division": {"batches": "cut"},
            },
            {"loss": "sum", "steps": 2, "division": {"batches": "cut", "reduction": "sum"}},
            {
                "division": {"batches": "same"},
                "steps": 2,
            },  # every rank computes whole batches, as a sharded reference run does
            {"procs": [1, 4], "machine": 2, "clip": "norm", "steps": 2},
            a_case(draw),
        )
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    cases = the_cases(folder)
    (folder / "cases.json").write_text(json.dumps(cases))
    run_python(PROGRAM, folder / "cases.json", folder, limit_s=280)
    found = {
        (at, procs): [json.loads((folder / f"{at}.{procs}.{rank}.json").read_text()) for rank in range(procs)]
        for at, case in enumerate(cases)
        for procs in case["procs"]
    }
    return cases, found, json.loads((folder / "read_back.json").read_text())


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_sharded_weights_learn_what_whole_ones_learn(trained):
    """The cases cover mean and sum, uneven remainders, accumulation, clipping, two optimizers and a scaler.

    They cover tied, frozen and unused weights, scalars, other dtypes, a model called in pieces, a penalty, an
    average of weights, and several machines. Output and counts are those of one process.
    """
    cases, found, _ = trained
    for (at, procs), ranks in found.items():
        case, one = cases[at], found[at, 1][0]
        if procs == 1 or case.get("weigh"):
            continue
        if case.get("wrong"):
            assert distance(ranks[0]["gradients"], one["gradients"]) > 0.5
            continue
        for rank in ranks:
            assert (
                distance(rank["gradients"], one["gradients"])
                <= GRADIENT["float32" if case["other"] else case["dtype"]]
            ), case
            for name in ("losses", "norms", "evaluations"):
                assert (
                    distance([rank[name]], [one[name]])
                    <= LATER["float32" if name == "norms" else case["dtype"]]
                ), (name, case)
            for name in ("weights", "averaged"):
                assert distance(rank.get(name, []), one.get(name, [])) <= LATER[case["dtype"]], (name, case)
            assert rank["weights"] == ranks[0]["weights"]
            assert (rank["names"], rank["types"]) == (one["names"], one["types"])
            assert (
                rank["printed"][:3] == one["printed"][:3]
                if case["dtype"] == "float64"
                else rank["printed"][0] == one["printed"][0]
            )


@pytest.mark.timeout(300)
def test_checkpoints_keep_the_format_of_one_process(trained):
    """Names, whole tensors, groups, state and the model itself are unchanged.

    A checkpoint of one process is resumed as one process resumes it.
    """
    cases, found, read_back = trained
    assert len(read_back) == 7
    for at, seen in read_back.items():
        ranks = found[int(at), 2]
        assert seen["names"], cases[int(at)]
        assert all(seen["groups"]), cases[int(at)]
        assert set(seen["kinds"]) <= {"Tensor", "Parameter"}
        assert seen["kept"] == ranks[0]["weights"]
        half = len(seen["state"]) // 2
        for mine, one in zip(seen["state"][:half], seen["state"][half:], strict=True):
            assert distance(mine, one) <= LATER[cases[int(at)]["dtype"]], cases[int(at)]
        assert all(seen["modules"]), cases[int(at)]
    assert cases[RESUMED]["resume"]
    assert distance([found[RESUMED, 2][0]["losses"]], [found[RESUMED, 1][0]["losses"]]) <= 1e-12


@pytest.mark.timeout(300)
def test_a_rank_holds_only_its_shard(trained):
    """Weights, gradients and optimizer state of a model that divides evenly; the script still holds a list of
    its weights.
    """
    _, found, _ = trained
    one = found[WEIGH, 1][0]["bytes"]
    for rank in found[WEIGH, 2]:
        assert 0.5 * one <= rank["bytes"] <= 0.53 * one

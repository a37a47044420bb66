"""Two and four processes compared with one on the same global batches: gradients, trajectories, and the
samples of each rank.
"""

import json
import random
import sys
from pathlib import Path

import pytest
from processes import run_python
from vectors import distance

pytestmark = pytest.mark.processes

PROGRAM, LAUNCHER = (Path(__file__).with_name(name) for name in ("train_cases.py", "launcher.py"))
CASES = 12
GRADIENT = {"float64": 1e-12, "float32": 1e-6}
WEIGHTS = {"float64": 1e-9, "float32": 2e-3}  # after so many steps, relative to their length


def a_case(draw):
    window, loss = draw.choice((1, 1, 1, 2, 3)), draw.choice(("mean", "mean", "sum"))
    batch = draw.randint(4, 13)
    exact = draw.random() < 0.4  # batch statistics and random numbers as in one process
    division = {"reduction": loss, "loaders": "0"}
    division |= (
        {"batches": draw.choice(("cut", "whole")), "batchnorm": "all", "draws": "all"}
        if exact
        else {"batches": draw.choice(("index", "index", "cut", "whole"))}
    )
    return {
        "seed": draw.randrange(1000),
        "dtype": "float64" if exact else draw.choice(("float64", "float32")),
        "batchnorm": exact,
        "dropout": 0.3 if exact else 0.0,
        "length": draw.randint(batch, 45),
        "batch": batch,
        "shuffle": draw.random() < 0.7,
        "drop_last": draw.random() < 0.3 or exact,
        "workers": 0,
        "optimizer": draw.choice(("sgd", "adam")),
        "two": draw.random() < 0.4,
        "loss": loss,
        "window": window,
        "clip": draw.choice((None, 0.3)),
        "steps": 16,
        "division": division,
    }


def trained(cases, folder, procs):
    (folder / "cases.json").write_text(json.dumps(cases))
    launcher = [] if procs == 1 else [LAUNCHER, "--procs", procs, "--", sys.executable]
    run_python(*launcher, PROGRAM, folder / "cases.json", folder, limit_s=240)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    draw = random.Random(5)
    cases = [a_case(draw) for _ in range(CASES)]
    cases[0] |= {
        "clip": None,
        "loss": "mean",
        "division": {**cases[0]["division"], "reduction": "sum"},
        "wrong": True,
    }  # errors that must be detected
    cases[1]["workers"] = 1
    cases[2] |= {
        "batch": 5,
        "length": 11,
        "drop_last": False,
        "batchnorm": False,
        "dropout": 0.0,
    }  # the last batch has one sample, fewer than there are ranks
    cases[3] |= {
        "loss": "contrast",
        "window": 1,
        "division": {"batches": "whole", "batchnorm": "all", "draws": "all"},
        "drop_last": True,
    }
    folder = tmp_path_factory.mktemp("plain")
    trained(cases, folder, 1)
    return cases, [json.loads((folder / f"{at}.plain.json").read_text()) for at in range(CASES)]


@pytest.mark.sampled(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("procs", "some"), [(2, CASES), (4, 5)]
)  # four processes on two cores mostly wait for each other
def test_ranks_compute_what_one_process_computes(plain, tmp_path, procs, some):
    cases, expected = plain[0][:some], plain[1][:some]
    trained(cases, tmp_path, procs)
    for at, (case, one) in enumerate(zip(cases, expected, strict=True)):
        ranks = [json.loads((tmp_path / f"{at}.{rank}.json").read_text()) for rank in range(procs)]
        if case.get("wrong"):
            assert distance(ranks[0]["gradients"], one["gradients"]) > 0.5, case
            continue
        for rank in ranks:
            assert distance(rank["gradients"], one["gradients"]) <= GRADIENT[case["dtype"]], case
            assert distance([rank["losses"]], [one["losses"]]) <= WEIGHTS[case["dtype"]], case
            assert distance(rank["weights"], one["weights"]) <= WEIGHTS[case["dtype"]], case
            assert rank["weights"] == ranks[0]["weights"], case
        for epoch, whole in enumerate(one["epochs"]):
            for step, batch in enumerate(whole):
                shares = [rank["epochs"][epoch][step] for rank in ranks]
                if len(batch) < procs or case["division"]["batches"] == "whole":
                    assert all(share == batch for share in shares), case
                else:
                    assert [number for share in shares for number in share] == batch, case
                    assert max(map(len, shares)) - min(map(len, shares)) <= 1, case

"""What two ranks send, read from one program's results."""

import json
import sys
from pathlib import Path

import pytest
from processes import run_python
from vectors import distance

HERE = Path(__file__).parent
pytestmark = [pytest.mark.timeout(150), pytest.mark.processes]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exchange")
    run_python(HERE / "launcher.py", "--procs", 2, "--", sys.executable, HERE / "exchange_cases.py", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def largest_difference(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_buckets_of_any_size(ranks):
    """Each leaves during the backward pass, and the exchange is observed inside of it."""
    for rank in ranks:
        case = rank["sizes"]
        assert case["offered"] == [[1], "exact"]
        sent = 8 * (7 * 20000 + 3 * 20001)
        for size, buckets in (("25", 1), ("1", 2), ("0.1", 4), ("all", 1)):
            traffic = {"sent_bytes": sent, "buckets": buckets, "left_early": buckets}
            assert {name: case[size][name] for name in traffic} == traffic, size
            assert distance([case[size]["gradient"]], [case["25"]["gradient"]]) <= 1e-12
        assert case["events"] == [
            "backward begins",
            "exchange begins",
            ["exchange ends", sent],
            "backward ends",
        ]
        assert distance([case["bad"]], [case["25"]["gradient"]]) > 0.1


@pytest.mark.parametrize(
    ("kind", "rounding", "bytes_of", "course"),
    [("bf16", 2.0**-7, 0.5, 1e-2), ("fp16", 2.0**-10, 0.5, 1e-3), ("powersgd", 0.0, 0.65, 0.1)],
)
def test_fewer_bytes_within_rounding(ranks, kind, rounding, bytes_of, course):
    """PowerSGD was told to leave three passes uncompressed."""
    for rank in ranks:
        plain, small = rank["transports"]["None"], rank["transports"][kind]
        assert distance([small["first"]], [plain["first"]]) <= rounding
        assert (small["first"] == plain["first"]) is (kind == "powersgd")
        assert small["sent"] <= bytes_of * plain["sent"]
        assert distance([small["losses"]], [plain["losses"]]) < course
        assert small["weights"] == ranks[0]["transports"][kind]["weights"] != plain["weights"]
        assert small["offered"] == ["bf16"]
        assert ["changes the maths" in report for report in small["reports"]] == [True] * (kind == "powersgd")
        assert distance([rank["transports"]["bad"]["first"]], [plain["first"]]) > 0.9


def test_accumulated_gradients_stay(ranks):
    for rank in ranks:
        assert largest_difference(*rank["accumulates"]) <= 1e-12

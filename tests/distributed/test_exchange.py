"""What two ranks send, and where they end when they step by themselves; read from one program's results.

A mean after every step equals the exchange of gradients, for this reason. Rank r has w and the gradient f_r
g_r of its share, where the mean of all f_r g_r is the whole batch's gradient G. Plain SGD makes it w - a f_r
g_r, and the mean of these over the ranks is w - a G: the result of the synchronous run. It does not hold for an
optimizer that is not linear in the gradient.
"""

from pathlib import Path

import pytest

from flatout.levers.local_sgd import LEVER

pytestmark = [pytest.mark.timeout(150), pytest.mark.processes]


@pytest.fixture(scope="module")
def ranks(as_two_ranks):
    return as_two_ranks(Path(__file__).with_name("exchange_cases.py"))


def distance(a, b):
    """The length of the difference, relative to that of the second."""
    return (sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / sum(y * y for y in b)) ** 0.5


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
            assert distance(case[size]["gradient"], case["25"]["gradient"]) <= 1e-12
        assert case["events"] == [
            "backward begins",
            "exchange begins",
            ["exchange ends", sent],
            "backward ends",
        ]
        assert distance(case["bad"], case["25"]["gradient"]) > 0.1


@pytest.mark.parametrize(
    ("kind", "rounding", "bytes_of", "course"),
    [("bf16", 2.0**-7, 0.5, 1e-2), ("fp16", 2.0**-10, 0.5, 1e-3), ("powersgd", 0.0, 0.65, 0.1)],
)
def test_fewer_bytes_within_rounding(ranks, kind, rounding, bytes_of, course):
    """PowerSGD was told to leave three passes uncompressed."""
    for rank in ranks:
        plain, small = rank["transports"]["None"], rank["transports"][kind]
        assert distance(small["first"], plain["first"]) <= rounding
        assert (small["first"] == plain["first"]) is (kind == "powersgd")
        assert small["sent"] <= bytes_of * plain["sent"]
        assert distance(small["losses"], plain["losses"]) < course
        assert small["weights"] == ranks[0]["transports"][kind]["weights"] != plain["weights"]
        assert small["offered"] == ["bf16"]
        assert ["changes the maths" in report for report in small["reports"]] == [True] * (kind == "powersgd")
        assert distance(rank["transports"]["bad"]["first"], plain["first"]) > 0.9


def test_accumulated_gradients_stay(ranks):
    for rank in ranks:
        assert largest_difference(*rank["accumulates"]) <= 1e-12


@pytest.mark.parametrize("two", ["False", "True"])
def test_rounds_of_one_step_are_the_synchronous_run(ranks, two):
    """The last batch has one sample, fewer than there are ranks; two optimizers step together."""
    for rank in ranks:
        synchronous, local = rank["every_step"][two]
        assert len(local) == 16
        assert max(map(largest_difference, local, synchronous)) <= 1e-12
    assert ranks[0]["every_step"][two][1] == ranks[1]["every_step"][two][1]


@pytest.mark.parametrize("outer", ["average", "nesterov"])
def test_the_outer_step_is_that_of_torchs_sgd(ranks, outer):
    """Every weight of both ranks is compared after every step, inner momentum included."""
    for number, rank in enumerate(ranks):
        weights, met, by_hand = rank["outer_steps"][outer]
        assert max(map(largest_difference, weights, by_hand[number])) <= 1e-12
        assert largest_difference(met, by_hand[2]) <= 1e-12
    first, second = (rank["outer_steps"][outer][0] for rank in ranks)
    same = [a == b for a, b in zip(first, second, strict=True)]
    assert same == [True] * 2 + [False, False, True] * 4 + [False]


def test_ranks_agree_wherever_they_must(ranks):
    for rank in ranks:
        case = rank["rendezvous"]
        assert case["warm"] == [[False, True], [False, True], [True, True], [True, False]]
        for name in ("evaluation", "state_dict", "save", "load_state_dict"):
            assert case[name] == [True, True], name
        assert case["put back"]


def test_progress_is_sent_in_fewer_bytes(ranks):
    plain, small = (ranks[0]["compressed"][kind] for kind in ("plain", "bf16"))
    assert small[0] * 4 == plain[0] == 8 * len(plain[1])  # float64 here
    assert 0 < largest_difference(small[1], plain[1]) < 1e-2
    assert small[1] == ranks[1]["compressed"]["bf16"][1]


def test_programs_that_cannot_step_alone(ranks):
    for rank in ranks:
        case = rank["errors"]
        counts = "(rank 0 3, rank 1 6)"
        assert case["lost"].startswith(f"CannotExchange: the ranks did different numbers of steps {counts}")
        for batches, option in (("whole", 'batches = "whole"'), ("index", 'batchnorm = "all"')):
            reason, error = case[batches]
            assert reason == error
            assert option in reason


@pytest.mark.parametrize(
    "value", [False, {"every": 0}, {"every": 2.5}, {"outer": "adam"}, {"overlap": True}, {"warmup": -1}]
)
def test_invalid_values(value):
    with pytest.raises(TypeError, match=r"local_sgd|every|outer|overlap|warmup"):
        LEVER.check(value)

"""Ranks that step by themselves and synchronise. They are compared with the synchronous run and with both
ranks computed in one process, and must agree wherever the program reads shared state.

A mean after every step equals the exchange of gradients, for this reason. Rank r has w and the gradient f_r
g_r of its share, where the mean of all f_r g_r is the whole batch's gradient G. Plain SGD makes it w - a f_r
g_r, and the mean of these over the ranks is w - a G: the result of the synchronous run. That holds from step
to step because all ranks start each step with the same w. It does not hold for an optimizer that is not
linear in the gradient.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.levers.local_sgd import LEVER

PROGRAM = Path(__file__).with_name("local_cases.py")
pytestmark = [pytest.mark.timeout(150), pytest.mark.processes]


@pytest.fixture(scope="module")
def found(as_two_ranks):
    return as_two_ranks(PROGRAM)


def apart(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("two", ["False", "True"])
def test_rounds_of_one_step_are_the_synchronous_run(found, two):
    """Batches are uneven, and one has fewer samples than there are ranks; with one optimizer, and with two
    that step together.
    """
    for rank in found:
        synchronous, local = rank["every_step"][two]
        assert len(local) == 16
        assert max(apart(a, b) for a, b in zip(local, synchronous, strict=True)) <= 1e-12
    assert found[0]["every_step"][two][1] == found[1]["every_step"][two][1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("outer", ["average", "nesterov"])
def test_the_outer_step_matches_the_written_out_computation(found, outer, overlap):
    """Every weight of both ranks is compared after every step, inner momentum included.

    With overlap the result of a round arrives exactly one round later.
    """
    by_hand = found[0]["outer_steps"][f"{outer} {overlap}"]["by hand"]
    for number, rank in enumerate(found):
        weights, met = rank["outer_steps"][f"{outer} {overlap}"]["flatout"]
        assert max(apart(a, b) for a, b in zip(weights, by_hand[number], strict=True)) <= 1e-12
        assert apart(met, by_hand[2]) <= 1e-12
    first, second = (rank["outer_steps"][f"{outer} {overlap}"]["flatout"][0] for rank in found)
    same = [a == b for a, b in zip(first, second, strict=True)]
    assert same == ([True] * 2 + [False] * 13 if overlap else [True] * 2 + [False, False, True] * 4 + [False])


@pytest.mark.parametrize("overlap", ["False", "True"])
def test_ranks_agree_wherever_they_must(found, overlap):
    for rank in found:
        case = rank["meetings"][overlap]
        assert case["warm"] == [
            [False, True],
            [False, True],
            [True, True],
            [True, False],
        ]  # after the third step they diverge
        for name in ("evaluation", "state_dict", "save", "load_state_dict"):
            assert case[name] == [True, True], name
        assert case["put back"]


def test_progress_is_sent_in_half_the_bytes(found):
    plain, small = (found[0]["compressed"][way] for way in ("plain", "bf16"))
    assert small[0] * 4 == plain[0] == 8 * len(plain[1])  # float64 here
    assert 0 < apart(small[1], plain[1]) < 1e-2
    assert small[1] == found[1]["compressed"]["bf16"][1]


def test_ranks_out_of_step_are_reported(found):
    for rank in found:
        assert rank["lost"].startswith(
            "CannotExchange: the ranks did different numbers of steps (rank 0 3, rank 1 6)"
        )


def test_programs_that_communicate_in_every_forward_pass_are_rejected(found):
    said = found[0]["refused"]
    assert said[0] == said[1]
    assert said[2] == said[3]
    assert 'batches = "whole"' in said[0]
    assert 'batchnorm = "all"' in said[2]


@pytest.mark.parametrize(
    "value",
    [False, {"every": 0}, {"every": 2.5}, {"outer": "adam"}, {"overlap": 1}, {"warmup": -1}, {"each": 2}],
)
def test_invalid_values(value):
    with pytest.raises(TypeError, match=r"local_sgd|every|outer|overlap|warmup"):
        LEVER.check(value)

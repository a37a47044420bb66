"""The communication between ranks: its bytes, its timing, and the accuracy of the gradients.

These tests read the results of one program of two ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("wire_cases.py")
DIGITS = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # half a unit in the last place, of a number
SINKS = {
    "bf16": 0.0,
    "fp16": 2.0**-30,
}  # of the largest number in the bucket: below that float16 has no digits left
ROUNDINGS = 3  # of each rank's part, and of their sum
pytestmark = [pytest.mark.timeout(150), pytest.mark.processes]


@pytest.fixture(scope="module")
def found(as_two_ranks):
    return as_two_ranks(PROGRAM)


def apart(a, b):
    """The length of the difference, relative to that of the second."""
    return (sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / sum(y * y for y in b)) ** 0.5


def rounded(got, right, way, scale=1.0):
    """Whether each number is right up to the rounding of its two parts and their sum; a part may be larger
    than the sum.
    """
    largest = max(map(abs, right)) * scale
    return all(
        abs(x - scale * y)
        <= ROUNDINGS * DIGITS[way] * (abs(scale * y) + 0.25 * largest) + SINKS[way] * largest
        for x, y in zip(got, right, strict=True)
    )


@pytest.mark.processes
def test_half_the_bytes_and_the_gradient_but_for_rounding(found):
    for rank in found:
        ways = rank["ways"]
        plain = ways["plain"][0]
        assert [each["gradient"] for each in ways["plain"]] == [plain["gradient"]] * 3
        for way in DIGITS:
            assert [each["sent"] * 2 for each in ways[way][-2:]] == [plain["sent"]] * 2
            assert rounded(ways[way][-1]["gradient"], plain["gradient"], way)
            assert 0 < apart(ways[way][-1]["gradient"], plain["gradient"]) < 2 * DIGITS[way]
        assert ways["plain again"]["gradient"] == plain["gradient"]
        assert ways["plain again"]["sent"] == plain["sent"] == 4 * len(plain["gradient"])
        assert apart(ways["bad"], plain["gradient"]) > 0.9
    for way in DIGITS:
        assert found[0]["ways"][way] == found[1]["ways"][way]


def test_no_rank_sends_what_another_does_not_expect(found):
    """Rank 0 had switched to another encoding and rank 1 had not: that pass was plain on both."""
    for rank in found:
        assert [rank["ways"][f"{way} late"] for way in DIGITS] == [rank["ways"]["plain"][0]["sent"]] * 2
        assert rank["ways"]["wanted again"]
        assert rank["ways"]["offered"] == [
            ["bf16", "fp16"],
            "all bucket sizes that this lever tries give the same buckets",
        ]


def test_the_exchange_is_observed_inside_the_backward_pass(found):
    ways = found[0]["ways"]
    assert ways["events"] == [
        "backward begins",
        "exchange begins",
        ["exchange ends", ways["plain"][0]["sent"]],
        "backward ends",
    ]


def test_float16_neither_overflows_nor_underflows(found):
    """The first pass of a kind is uncompressed.

    Where the scale of the last pass no longer fits, the bucket is sent twice.
    """
    for rank in found:
        case, whole = rank["extremes"], rank["ways"]["plain"][0]["sent"]
        assert max(case["plain"]) * 1e7 > 65504
        assert [each["sent"] for each in case["large"]] == [
            whole,
            whole / 2,
            whole + whole / 2,
            whole / 2,
            whole / 2,
        ]
        assert [each["sent"] for each in case["small"]] == [whole + whole / 2, whole / 2, whole / 2]
        for each, scale in zip(
            (*case["large"], *case["small"]), (1e7, 1e7, 1e12, 1e12, 1e12, 1e-9, 1e-9, 1e-9), strict=True
        ):
            assert rounded(each["gradient"], case["plain"], "fp16", scale), scale


def test_accumulated_gradients_are_not_sent_again(found):
    """A gradient a thousand times as large was accumulated before.

    Rounding it again in each of four passes would cause a larger error than their gradients.
    """
    for rank in found:
        case = rank["accumulation"]
        brought = [(x - y) / 4 for x, y in zip(case["summed"], case["large"], strict=True)]
        assert apart(brought, case["small"]) < 2 * DIGITS["bf16"]
        assert case["same tensors"]


def test_buckets_of_any_size(found):
    for rank in found:
        case = rank["sizes"]
        assert case["offered"] == [[1], "exact"]
        assert [case[size]["buckets"] for size in ("25", "1", "0.001", "all")] == [1, 3, 6, 1]
        for size in ("25", "1", "0.001", "all"):
            assert apart(case[size]["gradient"], case["25"]["gradient"]) <= 1e-12
            assert case[size]["early"] == case[size]["buckets"]
            assert case[size]["collectives"] == case[size]["buckets"] + 1
            assert case[size]["sent"] == 8 * len(case[size]["gradient"])
        assert apart(case["bad"], case["25"]["gradient"]) > 0.1


def test_training_ends_where_it_would(found):
    plain = found[0]["courses"]["plain"]
    for way, within in (("bf16", 1e-3), ("fp16", 1e-4), ("powersgd", 0.1)):
        course = found[0]["courses"][way]
        assert apart(course["losses"], plain["losses"]) < within
        assert course["weights"] == found[1]["courses"][way]["weights"]
    assert found[0]["courses"]["powersgd"]["sent"] < 0.3 * plain["sent"]
    assert "changes the maths" in found[0]["courses"]["powersgd"]["reports"][0]


def test_powersgd(found):
    """With full rank it is the mean itself.

    With rank one each pass is far from it, but the sent part and the kept part add up to the whole.
    """
    for rank in found:
        case = rank["powersgd"]
        assert case["full rank"] < 1e-12
        assert case["rank one, sum"] < 1e-12
        assert case["rank one, each"][:2] == [0.0, 0.0]
        assert min(case["rank one, each"][2:]) > 0.1
        assert (case["rank one, numbers"], case["rank one, collectives"]) == ((7 + 6) + 4 + (5 + 6), 2)
        assert case["same"] == 0.0
        assert case["torch"] < 1e-12

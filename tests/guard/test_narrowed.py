"""Which levers are left out of a plan that fails the replica of a step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flatout.guard.blame import narrowed
from flatout.schema.plan import Choice

NAMES = ("a", "b", "c", "d")


def judge_of(alone, together):
    """A judge that rejects ``alone`` levers, and sets of levers that contain one of ``together``."""
    asked: list[tuple[str, ...]] = []

    def judge(choices):
        names = frozenset(choice.name for choice in choices)
        asked.append(tuple(choice.name for choice in choices))
        broken = sorted(names & alone) or ["+".join(sorted(pair)) for pair in together if pair <= names]
        return {"checks": [{"name": "gradient", "passed": not broken, "why": f"{broken} differ"}]}

    return judge, asked


def choices(*names):
    return [Choice(name, True) for name in names]


def test_a_plan_that_passes_is_judged_once():
    judge, asked = judge_of(frozenset(), [])
    found = narrowed(judge, choices("a", "b"))
    assert (found["wrong"], found["alone"], found["rest"]) == ({}, {}, None)
    assert asked == [("a", "b")]


def test_the_lever_that_fails_alone_is_left_out_and_the_rest_is_judged():
    judge, asked = judge_of(frozenset({"b"}), [])
    found = narrowed(judge, choices("a", "b", "c"))
    assert set(found["wrong"]) == set(found["alone"]) == {"b"}
    assert not found["checks"][0]["passed"]
    assert found["rest"]["checks"][0]["passed"]
    assert asked[-1] == ("a", "c")


def test_of_levers_that_fail_together_only_the_least_valuable_is_left_out():
    judge, _ = judge_of(frozenset(), [frozenset({"a", "c"})])
    found = narrowed(judge, choices("a", "b", "c"))
    assert found["alone"] == {}
    assert list(found["wrong"]) == ["c"]
    assert found["rest"]["checks"][0]["passed"]


def test_a_single_lever_that_fails_leaves_nothing():
    judge, asked = judge_of(frozenset({"a"}), [])
    found = narrowed(judge, choices("a"))
    assert list(found["wrong"]) == ["a"]
    assert found["rest"] is None
    assert asked == [("a",)]


@given(
    alone=st.frozensets(st.sampled_from(NAMES)),
    together=st.lists(st.frozensets(st.sampled_from(NAMES), min_size=2, max_size=3), max_size=3),
    order=st.permutations(NAMES),
)
def test_what_is_left_passes_and_nothing_is_judged_twice(alone, together, order):
    judge, asked = judge_of(alone, together)
    found = narrowed(judge, choices(*order))
    rest = [name for name in order if name not in found["wrong"]]
    assert not alone & set(rest)
    assert not any(pair <= set(rest) for pair in together)
    assert len(asked) == len(set(asked))
    if found["wrong"] and rest:
        assert found["rest"]["checks"][0]["passed"]
    for name in set(order) - set(rest) - alone:  # passes alone, and fails with more valuable ones
        better = {other for other in rest if order.index(other) < order.index(name)}
        assert any(pair <= better | {name} for pair in together)

"""Which levers are left out of a plan that fails the replica of a step."""

from hypothesis import example, given
from hypothesis import strategies as st

from flatout.guard.replica import blame_levers
from flatout.schema.plan import Choice

NAMES = ("a", "b", "c", "d")


def judge_of(alone, together):
    """A judge that rejects ``alone`` levers, and sets of levers that contain one of ``together``."""
    asked = []

    def judge(choices):
        names = frozenset(choice.name for choice in choices)
        asked.append(tuple(choice.name for choice in choices))
        broken = sorted(names & alone) or ["+".join(sorted(pair)) for pair in together if pair <= names]
        return {"checks": [{"name": "gradient", "passed": not broken, "why": f"{broken} differ"}]}

    return judge, asked


@given(
    alone=st.frozensets(st.sampled_from(NAMES)),
    together=st.lists(st.frozensets(st.sampled_from(NAMES), min_size=2, max_size=3), max_size=3),
    order=st.permutations(NAMES),
    count=st.integers(1, len(NAMES)),
)
@example(frozenset(), [], ("a", "b"), 2)
@example(frozenset("b"), [], ("a", "b", "c"), 3)
@example(frozenset(), [frozenset("ac")], ("a", "b", "c"), 3)
@example(frozenset("a"), [], ("a",), 1)
def test_what_is_left_passes_and_nothing_is_judged_twice(alone, together, order, count):
    order = order[:count]
    judge, asked = judge_of(alone, together)
    found = blame_levers(judge, [Choice(name, True) for name in order])
    fails = bool(alone & set(order)) or any(pair <= set(order) for pair in together)
    assert found["checks"][0]["passed"] is not fails
    assert asked[0] == tuple(order)
    assert bool(found["failing"]) is fails
    assert len(asked) == 1 or (fails and count > 1)
    assert set(found["failing_alone"]) == (alone & set(order) if count > 1 else set())
    rest = [name for name in order if name not in found["failing"]]
    assert not alone & set(rest)
    assert not any(pair <= set(rest) for pair in together)
    assert len(asked) == len(set(asked))
    if found["failing"] and rest:
        assert found["remaining"]["checks"][0]["passed"]
        assert tuple(rest) in asked
    else:
        assert found["remaining"] is None
    for name in set(order) - set(rest) - alone:  # passes alone, and fails with more valuable ones
        better = {other for other in rest if order.index(other) < order.index(name)}
        assert any(pair <= better | {name} for pair in together)

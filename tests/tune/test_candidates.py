"""Which levers are tried, and how each of them ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.levers import TABLE
from flatout.schema.enums import Effect, Status
from flatout.schema.records import Ratio
from flatout.tune.candidates import Candidate, drop_slow_fetches, make_candidates, plan_of, widest_effect

LEVER = {lever.name: lever for lever in TABLE}
EVERY = frozenset(Effect) - {Effect.CHANGES_MATH}
numbers = st.floats(0.2, 5.0)
ratios = st.tuples(numbers, numbers, numbers, st.integers(1, 20)).map(
    lambda t: Ratio(sorted(t[:3])[1], sorted(t[:3])[0], sorted(t[:3])[2], t[3])
)


def candidate(name="threads", values=(1, 2), effect=Effect.ROUNDING):
    return Candidate(LEVER[name], tuple(values), effect)


def options(**changed):
    answers = {lever.name: {"skip": "it does not apply here"} for lever in TABLE}
    answers.update({name: {"values": [True], "effect": None} for name in ("tf32", "gc_pause", "loader")})
    return {**answers, **changed}


@pytest.mark.parametrize(
    ("effects", "only"),
    [(EVERY, None), (EVERY, frozenset({"batch_size"})), (frozenset(Effect), frozenset({"batch_size"}))],
)
def test_levers_that_change_the_maths_are_never_tried(effects, only):
    """Asking for it by name does not help either: it belongs in a hand-written plan."""
    one = make_candidates(options(batch_size={"values": [{"size": 8}], "effect": None}), effects, only)[
        "batch_size"
    ]
    assert not one.selectable
    assert "changes the training result" in one.reason


def test_requested_levers_narrow_the_candidates():
    found = make_candidates(options(), EVERY, frozenset({"tf32"}))
    assert [name for name, one in found.items() if one.selectable] == ["tf32"]
    assert found["gc_pause"].reason == "not among the requested levers"
    assert found["threads"].reason == "it does not apply here"
    assert list(found) == [lever.name for lever in TABLE]


def test_effects_narrow_the_candidates_by_their_effect_here():
    """Workers over a data set without random numbers are exact, whatever the lever declares."""
    resampled = make_candidates(options(), frozenset({Effect.EXACT}), None)
    assert [name for name, one in resampled.items() if one.selectable] == ["gc_pause"]
    assert "its effect here is resampled" in resampled["loader"].reason
    exact = make_candidates(
        options(loader={"values": [{"workers": 2}], "effect": "exact"}), frozenset({Effect.EXACT}), None
    )
    assert [name for name, one in exact.items() if one.selectable] == ["gc_pause", "loader"]
    assert exact["loader"].effect is Effect.EXACT


@pytest.mark.parametrize(
    ("loader", "offered"),
    [
        ({"length": 1000, "batch_size": 10, "num_workers": 0}, True),  # 100 batches, 20 ms each
        ({"length": 10_000, "batch_size": 10, "num_workers": 0}, False),
        ({"length": 1000, "batch_size": 10, "num_workers": 2}, False),  # at most 100 ms each, of two workers
        ({"length": None, "batch_size": None, "num_workers": 0}, True),
    ],
)
def test_levers_that_load_the_whole_data_set_first_are_left_out_where_that_takes_long(loader, offered):
    held = {
        "cached_prefix": candidate("cached_prefix", ({"mib": 9, "ahead": True}, {"mib": 9})),
        "threads": candidate(),
    }
    drop_slow_fetches(held, [loader], {"tick_ms": 100.0, "data_ms": 20.0}, max_fetch_s=10.0)
    assert [value.get("ahead", False) for value in held["cached_prefix"].values] == (
        [True, False] if offered else [False]
    )
    assert held["threads"].values == (1, 2)


def test_a_plan_is_in_the_order_in_which_levers_act():
    chosen = [
        candidate("fused_optimizer", ("fused",)),
        candidate("malloc", ("glibc",), Effect.EXACT),
        candidate("channels_last", (True,)),
    ]
    with pytest.raises(ValueError, match="no value of fused_optimizer"):
        plan_of(chosen)
    for one in chosen:
        one.value = one.values[0]
    assert [choice.name for choice in plan_of(chosen)] == ["malloc", "channels_last", "fused_optimizer"]
    assert plan_of(reversed(chosen)).digest == plan_of(chosen).digest
    assert widest_effect(chosen) is Effect.ROUNDING
    assert widest_effect(chosen[1:2]) is Effect.EXACT


@given(ratios)
def test_every_candidate_has_a_record_with_a_reason(ratio):
    fresh = make_candidates(options(), EVERY, None)["tf32"]
    measured = candidate()
    measured.value, measured.ratio, measured.how = 1, ratio, "live"
    measured.reject("slower here")
    for one in (fresh, measured):
        record = one.record()
        assert record.reason
        assert record.status in ("rejected", "skipped")
    assert (measured.record().low, measured.record().ratio, measured.record().high) == (
        ratio.low,
        ratio.median,
        ratio.high,
    )


def test_a_lever_is_rejected_with_its_last_value():
    one = candidate(values=(1, 2))
    one.reject_value(1, "it crashed")
    assert one.selectable
    assert one.values == (2,)
    one.reject_value(2, "it crashed as well")
    assert (one.status, one.reason, one.selectable) == (Status.REJECTED, "it crashed as well", False)
    assert one.rejected == {"threads=1": "it crashed", "threads=2": "it crashed as well"}

"""Which levers are tried, what is made of their ratios, and what an interrupted session need not measure again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.levers import TABLE
from flatout.plan.plan import spell
from flatout.plan.records import Contest, Ratio
from flatout.plan.words import Effect, Status
from flatout.tune.candidates import Candidate, consider, plan_of, promising_first, recall, widest, without_long_starts

LEVER = {lever.name: lever for lever in TABLE}
EVERY = frozenset(Effect) - {Effect.CHANGES_MATH}
numbers = st.floats(0.2, 5.0)
ratios = st.tuples(numbers, numbers, numbers, st.integers(1, 20)).map(lambda t: Ratio(sorted(t[:3])[1], sorted(t[:3])[0], sorted(t[:3])[2], t[3]))


def candidate(name="threads", values=(1, 2), effect=Effect.ROUNDING):
    return Candidate(LEVER[name], tuple(values), effect)


def options(**changed):
    answers = {lever.name: {"skip": "it does not apply here"} for lever in TABLE}
    answers.update({name: {"values": [True], "effect": None} for name in ("tf32", "gc_pause", "loader")})
    return {**answers, **changed}


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3]), ratios), min_size=1, max_size=6))
def test_the_best_value_counts(measured):
    one = candidate(values=(1, 2, 3))
    for value, ratio in measured:
        one.measured(value, ratio, "live")
    best = max(ratio.median for _, ratio in measured)
    assert one.ratio.median == best
    assert one.choice.value in [value for value, ratio in measured if ratio.median == best]
    assert not one.open


@given(ratios)
def test_a_clear_loss_never_wins_and_a_clear_win_never_loses(ratio):
    one = candidate()
    one.measured(1, ratio, "live")
    if ratio.high < 1.0:
        assert not one.won
    if ratio.low > 1.02:
        assert one.won
    assert one.won == (one.status is Status.SKIPPED)
    assert one.reason


@pytest.mark.parametrize(("median", "low", "high", "n", "won"), [
    (1.046, 0.967, 1.119, 13, True),  # not certain, and far more likely a gain than not
    (1.02, 0.90, 1.15, 13, False),
    (1.30, 0.70, 2.0, 13, True),
    (1.008, 1.006, 1.01, 13, False),  # certain, and not worth a lever
    (1.05, 0.90, 1.20, 2, True),  # a step of seconds: there is only the median
    (1.015, 1.01, 1.02, 2, False),
])
def test_what_is_likely_faster_is_tried_with_the_others(median, low, high, n, won):
    one = candidate()
    one.measured(1, Ratio(median, low, high, n), "live")
    assert one.won == won


@pytest.mark.parametrize(("effects", "only"), [(EVERY, None), (EVERY, frozenset({"batch_size"})), (frozenset(Effect), frozenset({"batch_size"}))])
def test_what_changes_the_maths_is_never_tried(effects, only):
    """Neither when it is asked for by name: a plan by hand is the place for it."""
    one = consider(options(batch_size={"values": [{"size": 8}], "effect": None}), effects, only)["batch_size"]
    assert not one.open
    assert "it changes what is learned" in one.reason


@given(ratios)
def test_every_candidate_has_a_record_with_a_reason(ratio):
    fresh = consider(options(), EVERY, None)["tf32"]
    measured = candidate()
    measured.measured(1, ratio, "live")
    for one in (fresh, measured):
        record = one.record()
        assert record.reason
        assert record.status in ("rejected", "skipped")
    assert (measured.record().low, measured.record().ratio, measured.record().high) == (ratio.low, ratio.median, ratio.high)


@given(ratios, ratios)
def test_programs_side_by_side_have_the_last_word_where_a_live_contest_could_not_tell(live, side_by_side):
    one = candidate()
    one.measured(1, live, "live")
    unclear = one.undecided
    assert unclear == (live.n >= 3 and live.high > 1.25 * live.low)
    one.measured(1, side_by_side, "processes")
    assert one.ratio == (side_by_side if unclear or side_by_side.median > live.median else live)
    assert not (unclear and one.undecided)


def test_a_candidate_without_a_value_has_no_choice():
    with pytest.raises(ValueError, match="no value of threads"):
        assert candidate().choice


def test_what_was_asked_for_narrows_the_field():
    found = consider(options(), EVERY, frozenset({"tf32"}))
    assert [name for name, one in found.items() if one.open] == ["tf32"]
    assert found["gc_pause"].reason == "it was not among the levers asked for"
    assert found["threads"].reason == "it does not apply here"
    assert list(found) == [lever.name for lever in TABLE]


def test_effects_narrow_the_field_by_what_they_are_here():
    """Workers over data that draws nothing are exact, whatever the lever says of itself."""
    resampled = consider(options(), frozenset({Effect.EXACT}), None)
    assert [name for name, one in resampled.items() if one.open] == ["gc_pause"]
    assert "its effect here is resampled" in resampled["loader"].reason
    exact = consider(options(loader={"values": [{"workers": 2}], "effect": "exact"}), frozenset({Effect.EXACT}), None)
    assert [name for name, one in exact.items() if one.open] == ["gc_pause", "loader"]
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
def test_nothing_that_fetches_a_whole_data_set_first_where_that_takes_long(loader, offered):
    held = {"cached_prefix": candidate("cached_prefix", ({"mib": 9, "ahead": True}, {"mib": 9})), "threads": candidate()}
    without_long_starts(held, [loader], {"tick_ms": 100.0, "data_ms": 20.0}, most_s=10.0)
    assert [value.get("ahead", False) for value in held["cached_prefix"].values] == ([True, False] if offered else [False])
    assert held["threads"].values == (1, 2)


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.one_of(st.none(), ratios)), max_size=5, unique_by=lambda pair: pair[0]))
def test_what_is_recalled_is_not_measured_again(known):
    """Every value either has a contest or is still open; a contest without a ratio was a failure, and is not tried again."""
    contests = [Contest(spell("threads", value), "plain", "live", r.median, r.low, r.high, r.n) if r else
                Contest(spell("threads", value), "plain", "live", None, None, None, 0, "it failed") for value, r in known]
    one = candidate(values=(1, 2, 3, 4))
    left = recall([one], contests)
    measured = {value for value, _ in known}
    assert set(one.values) == {1, 2, 3, 4} - measured
    assert set(map(id, left)) <= {id(one)}
    if not known:
        assert left == [one]
    if known and all(r is not None for _, r in known):
        assert one.ratio.median == max(r.median for _, r in known)


def test_only_contests_of_that_lever_against_the_plain_program_are_recalled():
    one = candidate(values=(1,))
    contests = [Contest("threads=1, tf32", "plain", "live", 2.0, 1.9, 2.1, 6), Contest("threads=1", "another plan", "live", 2.0, 1.9, 2.1, 6),
                Contest("threads=1", "plain", "fresh pairs", 2.0, 1.9, 2.1, 6), Contest("threads", "plain", "live", 2.0, 1.9, 2.1, 6)]
    assert recall([one], contests) == [one]
    assert one.ratio is None


def test_a_plan_is_in_the_order_in_which_levers_act():
    chosen = [candidate("fused_optimizer", ("fused",)), candidate("malloc", ("glibc",), Effect.EXACT), candidate("channels_last", (True,))]
    for one in chosen:
        one.measured(one.values[0], Ratio(1.5, 1.4, 1.6, 6), "live")
    assert [choice.name for choice in plan_of(chosen)] == ["malloc", "channels_last", "fused_optimizer"]
    assert plan_of(reversed(chosen)).digest == plan_of(chosen).digest
    assert widest(chosen) is Effect.ROUNDING
    assert widest(chosen[1:2]) is Effect.EXACT


def test_what_a_profile_asked_for_comes_first_and_nothing_is_lost():
    found = consider(options(), EVERY, None)
    again = promising_first(found, ["loader", "a_lever_of_tomorrow", "gc_pause"])
    assert list(again)[:2] == ["loader", "gc_pause"]
    assert again == found

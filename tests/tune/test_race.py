"""Who meets whom in the process race, and what is made of two levers that only win together."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.launch.command import understand
from flatout.levers import TABLE
from flatout.plan.folder import JobFolder
from flatout.plan.records import Ratio, SessionRecord
from flatout.plan.words import Effect, Status
from flatout.probe.machine import look
from flatout.tune.candidates import Candidate, plan_of
from flatout.tune.race import Lineup, lineups
from flatout.tune.tuning import Goal, Tuning

LEVER = {lever.name: lever for lever in TABLE}


@pytest.fixture
def two():
    return Candidate(LEVER["threads"], (1,), Effect.ROUNDING), Candidate(LEVER["loader"], ({"workers": 1},), Effect.EXACT)


def ratio(median: float, spread: float = 0.03) -> Ratio:
    return Ratio(median, median * (1 - spread), median * (1 + spread), 6)


def test_names(two):
    threads, loader = two
    assert Lineup().name == "A/A"
    assert len(Lineup().plan) == 0
    assert Lineup(((threads, 1),)).name == "threads=1"
    assert Lineup(((threads, 1), (loader, {"workers": 1}))).name == "threads=1, loader(workers=1)"


def test_two_losers_that_win_together_are_both_applied(two):
    threads, loader = two
    threads.measured(1, ratio(0.9), "live")
    Lineup(((loader, {"workers": 1}),)).measured(ratio(0.87))
    assert not threads.won
    assert not loader.won
    Lineup(((threads, 1), (loader, {"workers": 1}))).measured(ratio(1.4))
    assert threads.won
    assert loader.won
    assert threads.how == loader.how == "processes, together"
    assert plan_of(two).describe() == "threads=1, loader(workers=1)"


@given(st.floats(0.3, 3.0), st.floats(0.3, 3.0), st.floats(0.3, 3.0))
def test_together_counts_only_where_it_beats_plain_and_both_alone(one, other, together):
    threads, loader = Candidate(LEVER["threads"], (1,), Effect.ROUNDING), Candidate(LEVER["loader"], ({"workers": 1},), Effect.EXACT)
    threads.measured(1, ratio(one), "live")
    loader.measured({"workers": 1}, ratio(other), "processes")
    Lineup(((threads, 1), (loader, {"workers": 1}))).measured(ratio(together))
    counts = ratio(together).low > 1.0 and together > max(one, other)
    assert (threads.how == loader.how == "processes, together") == counts
    if not counts:
        assert (threads.ratio, loader.ratio) == (ratio(one), ratio(other))


def test_a_pair_that_dies_rejects_neither(two):
    threads, loader = two
    Lineup(((threads, 1), (loader, {"workers": 1}))).failed("it crashed")
    assert {one.status for one in two} == {Status.SKIPPED}
    Lineup(((loader, {"workers": 1}),)).failed("it crashed")
    assert (loader.status, loader.reason) == (Status.REJECTED, "it crashed")


@pytest.fixture
def tuning(tmp_path):
    (tmp_path / "train.py").touch()
    command = understand((sys.executable, str(tmp_path / "train.py")))
    tuning = Tuning(command, JobFolder(tmp_path / "job").make(), look(), SessionRecord([], str(tmp_path), {}), Goal(60.0))
    for name, values, effect in (("malloc", ("tcmalloc", "jemalloc"), Effect.EXACT), ("fused_optimizer", ("fused", "foreach"), Effect.ROUNDING),
                                 ("gc_pause", (True,), Effect.EXACT), ("compile", ("default",), Effect.ROUNDING), ("debug_off", (True,), Effect.EXACT)):
        tuning.candidates[name] = Candidate(LEVER[name], values, effect)
    return tuning


def test_what_no_live_contest_could_decide_meets_the_plain_program_side_by_side(tuning):
    for name, value, median, spread in (("fused_optimizer", "foreach", 1.0, 0.5), ("gc_pause", True, 1.0, 0.02),
                                        ("compile", "default", 1.0, 0.5), ("debug_off", True, 1.1, 0.5)):
        tuning.candidates[name].measured(value, ratio(median, spread), "live")
    assert [lineup.name for lineup in lineups(tuning)] == ["malloc=tcmalloc", "malloc=jemalloc", "A/A", "debug_off", "fused_optimizer=foreach"]

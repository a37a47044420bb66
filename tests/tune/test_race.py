"""Who meets whom in the process race, and what is made of two levers that only win together."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.launch.command import understand
from flatout.levers import TABLE
from flatout.measure.clock import seconds
from flatout.plan.folder import JobFolder
from flatout.plan.plan import Plan
from flatout.plan.records import Ratio, SessionRecord
from flatout.plan.words import Effect, Status
from flatout.probe.machine import look
from flatout.tune.candidates import Candidate, plan_of
from flatout.tune.race import OLD_TICKS, Lineup, lineups, process_race
from flatout.tune.tuning import Goal, Tuning, Watcher

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
    tuning = Tuning(command, JobFolder(tmp_path / "job").make(), look(), SessionRecord([], str(tmp_path), {}), Goal(48.0))
    for name, values, effect in (("malloc", ("tcmalloc", "jemalloc"), Effect.EXACT), ("fused_optimizer", ("fused", "foreach"), Effect.ROUNDING),
                                 ("gc_pause", (True,), Effect.EXACT), ("compile", ("default",), Effect.ROUNDING), ("debug_off", (True,), Effect.EXACT)):
        tuning.candidates[name] = Candidate(LEVER[name], values, effect)
    return tuning


def test_what_no_live_contest_could_decide_meets_the_plain_program_side_by_side(tuning):
    for name, value, median, spread in (("fused_optimizer", "foreach", 1.0, 0.5), ("gc_pause", True, 1.0, 0.02),
                                        ("compile", "default", 1.0, 0.5), ("debug_off", True, 1.1, 0.5)):
        tuning.candidates[name].measured(value, ratio(median, spread), "live")
    assert [lineup.name for lineup in lineups(tuning)] == ["malloc=tcmalloc", "malloc=jemalloc", "A/A", "debug_off", "fused_optimizer=foreach"]


class OutOfTime(Watcher):
    """Takes the time for one more program away as soon as the racing ones have started."""

    tuning: Tuning

    def __init__(self) -> None:
        self.started = 0
        self.programs = 0

    def stage(self, name: str, detail: str = "") -> None:
        self.started += name == "starting"
        if self.started == 2:
            self.tuning.start_cost_s = 25.0

    def contest(self, plan: str, ratio: object, note: str = "") -> None:
        self.programs = max(self.programs, len(self.tuning.arena.running))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("late", [False, True])
def test_an_old_plain_program_is_not_raced_against_young_ones(tuning, by_hand, late):
    """A young plain program takes its place; where there is no time to start one, the second plain program of the race does."""
    pytest.importorskip("torch")
    (tuning.job.path.parent / "train.py").write_text(by_hand)
    tuning.candidates = {"malloc": Candidate(LEVER["malloc"], ("glibc",), Effect.EXACT)}
    watcher = OutOfTime() if late else Watcher()
    tuning.watcher = watcher
    if isinstance(watcher, OutOfTime):
        watcher.tuning = tuning
    try:
        tuning.observed = tuning.enter(Plan()).trial
        tuning.observed.go(2 * OLD_TICKS, seconds() + 60)
        old_ticks, tuning.arena.tick_ms, tuning.start_cost_s = tuning.observed.ticks_done, 1.0, 1.0
        process_race(tuning)
        assert tuning.observed.ticks_done == old_ticks
        assert tuning.candidates["malloc"].ratio is not None
        assert [contest.plan for contest in tuning.session.contests] == (["malloc=glibc"] if late else ["A/A", "malloc=glibc"])
        assert (tuning.session.noise_floor is None) == late
        assert tuning.arena.running == [tuning.observed]
        if isinstance(watcher, OutOfTime):
            assert watcher.programs == 3  # the observed one, A/A and malloc: no other was started
    finally:
        tuning.arena.close()

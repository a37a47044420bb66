"""The clock of a search: how its budget is shared out."""

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
from flatout.tune.candidates import LIVE, Candidate
from flatout.tune.confirm import replica
from flatout.tune.tuning import CONFIRM_SHARE, OVERRUN, PAIR_S, PAIRS, ROUNDS_OF_A_PAIR, Goal, Tuning

LEVER = {lever.name: lever for lever in TABLE}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "train.py").touch()
    command, job, facts = understand((sys.executable, str(folder / "train.py"))), JobFolder(folder / "job").make(), look()

    def one(budget_s: float, tick_ms: float = 10.0, start_cost_s: float = 5.0) -> Tuning:
        tuning = Tuning(command, job, facts, SessionRecord([], str(folder), {}), Goal(budget_s))
        tuning.arena.tick_ms, tuning.start_cost_s = tick_ms, start_cost_s
        return tuning

    return one


@given(budget_s=st.floats(30.0, 3600.0), tick_ms=st.floats(0.1, 20_000.0), start_cost_s=st.floats(1.0, 300.0))
def test_a_pair_measures_as_long_as_it_takes_to_start_but_not_beyond_its_share(make, budget_s, tick_ms, start_cost_s):
    tuning = make(budget_s, tick_ms, start_cost_s)
    assert 2 <= tuning.rounds <= ROUNDS_OF_A_PAIR
    if tuning.rounds == 2:
        return  # fewer say nothing, whatever they cost
    measured_s, starts_s = 2 * tuning.rounds * tuning.arena.block_s, 2 * start_cost_s
    assert measured_s <= max(2 * PAIR_S, starts_s) * 1.001
    if measured_s > 2 * PAIR_S * 1.001:
        assert PAIRS * (measured_s + starts_s) <= CONFIRM_SHARE * budget_s * 1.001


def test_a_slow_program_that_starts_slowly_is_measured_longer_where_the_budget_allows(make):
    assert make(600.0, tick_ms=4000.0, start_cost_s=5.0).rounds == 2
    assert make(600.0, tick_ms=4000.0, start_cost_s=30.0).rounds == 6
    assert make(600.0, tick_ms=4000.0, start_cost_s=45.0).rounds == 3
    assert make(200.0, tick_ms=4000.0, start_cost_s=30.0).rounds == 2


def test_where_there_is_no_time_to_check_rounding_what_is_exact_goes_on_alone(make):
    """The overrun leaves time for two pairs, and none for the steps of 6 s that the guard would do again."""
    tuning = make(300.0, tick_ms=6000.0, start_cost_s=1.0)
    tuning.start_s -= 300.0 + OVERRUN * 300.0 - 2 * tuning.pair_s - 10.0
    exact, rounding = Candidate(LEVER["malloc"], ("tcmalloc",), Effect.EXACT), Candidate(LEVER["channels_last"], (True,), Effect.ROUNDING)
    for one in (exact, rounding):
        one.measured(one.values[0], Ratio(1.2, 1.1, 1.3, 4), LIVE)
    assert replica(tuning, [exact, rounding]) is None
    assert exact.won
    assert not rounding.won
    assert rounding.status is Status.REJECTED
    assert rounding.reason == "there was no time left to check its numerics and confirm it; give --budget 7m"

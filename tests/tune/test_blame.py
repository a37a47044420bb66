"""Real programs that fail or end: the search finds the cause, and never blames a lever for the program's own
behaviour.
"""

import pytest

from flatout.levers import TABLE
from flatout.schema.enums import Effect, Status
from flatout.schema.errors import ProgramFailed
from flatout.schema.plan import Choice
from flatout.schema.records import TrialRecord
from flatout.tune.blame import blame, handle_end
from flatout.tune.candidates import Candidate
from flatout.tune.comparison import ProgramRequest, measure_together
from flatout.tune.effects import TimedBlock
from flatout.tune.factors import make_space
from flatout.tune.goal import Goal
from flatout.tune.search import search

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(180), pytest.mark.processes]

LEVER = {lever.name: lever for lever in TABLE}
LEVERS = {"malloc": ("glibc",), "gc_pause": (True,)}
# What a program may do at its 60th step, under one or two levers.
PRELUDE = "import gc, os, sys\nBAD = '%s'.split()\n"
CHECK = """    seen = {"malloc": "MALLOC_TOP_PAD_" in os.environ, "gc_pause": not gc.isenabled() or gc.get_threshold()[0] > 10_000, "always": True}
    if step == 60 and all(seen[name] for name in BAD):
        raise ValueError("it was too much")
    loss = """


@pytest.fixture
def make(new_tuning, monkeypatch, by_hand):
    monkeypatch.delenv("MALLOC_TOP_PAD_", raising=False)
    return lambda bad, goal=None: new_tuning(PRELUDE % bad + by_hand.replace("    loss = ", CHECK), goal)


def run_under(tuning, keys):
    """Run one program with these factors on, from its start to beyond the 60th step, and return how the
    search classifies its end.
    """
    for name, values in LEVERS.items():
        tuning.candidates[name] = Candidate(LEVER[name], values, Effect.EXACT)
    make_space(tuning)
    tuning.start_cost_s, tuning.interleaver.tick_ms, tuning.interleaver.longest_ticks = 2.0, 10.0, 35
    (seen,) = measure_together(
        tuning.interleaver, [ProgramRequest(tuning.plan_for(keys), (None,) * 4)], 1e9, 60.0
    )
    assert seen.end_record is not None
    assert seen.end_record.status == "failed"
    handle_end(tuning, keys, seen)


@pytest.mark.full
def test_the_lever_that_crashes_the_program_is_found_among_others(make):
    tuning = make("malloc")
    run_under(tuning, {"malloc=glibc", "gc_pause"})
    assert tuning.candidates["malloc"].status is Status.REJECTED
    assert tuning.candidates["malloc"].reason == "the program fails with it: ValueError: it was too much"
    assert tuning.candidates["gc_pause"].status is Status.SKIPPED
    assert set(tuning.choices) == {"gc_pause"}


@pytest.mark.full
def test_two_levers_that_fail_only_together_stay_apart(make):
    tuning = make("malloc gc_pause")
    run_under(tuning, {"malloc=glibc", "gc_pause"})
    assert {candidate.status for candidate in tuning.candidates.values()} == {Status.SKIPPED}
    assert set(tuning.choices) == {"malloc=glibc", "gc_pause"}
    assert not tuning.space.allowed(frozenset(tuning.choices))
    assert tuning.session.comparisons[-1].note == "they do not work together: ValueError: it was too much"


def test_without_time_only_levers_that_have_not_trained_are_blamed(make):
    tuning = make("", Goal(1e-6))
    values = {**LEVERS, "fused_optimizer": ("fused",)}
    for name in values:
        tuning.candidates[name] = Candidate(LEVER[name], values[name], Effect.EXACT)
    make_space(tuning)
    tuning.blocks.append(TimedBlock(1, frozenset({"malloc=glibc", "gc_pause"}), 0.0, 0, 10.0))
    choices = [Choice(name, value) for name, (value,) in values.items()]
    blame(tuning, choices, TrialRecord(status="failed", reason="ValueError: it was too much"), 60)
    assert {name for name, c in tuning.candidates.items() if c.status is Status.REJECTED} == {
        "fused_optimizer"
    }
    assert "no time to find the lever responsible" in tuning.candidates["fused_optimizer"].reason


def test_failures_of_the_plain_program_are_no_levers_fault(make):
    tuning = make("always")
    with pytest.raises(
        ProgramFailed, match=r"fails by itself after about .*(\n.*)*ValueError: it was too much"
    ):
        run_under(tuning, {"malloc=glibc", "gc_pause"})
    assert {candidate.status for candidate in tuning.candidates.values()} == {Status.SKIPPED}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_short_program_is_started_as_often_as_it_takes(make, monkeypatch):
    """With sixty steps each process gives a few blocks.

    No lever reports that the program is too short or that it fails.
    """
    monkeypatch.setenv("STEPS", "60")
    for budget_s in (40.0, 120.0, 300.0):  # a busy machine starts few programs in 40 s
        tuning = make("always", Goal(budget_s, only_levers=frozenset(LEVERS)))
        found = search(tuning)
        if len(tuning.process_numbers) >= 2:
            break
    assert len(tuning.process_numbers) >= 2
    levers = {lever.name: lever for lever in found.levers}
    for name in LEVERS:
        assert levers[name].ratio is not None or found.disturbance, levers[name].reason
        assert "fails with it" not in levers[name].reason
        assert "short" not in levers[name].reason
    assert found.baseline.step_ms
    assert tuning.interleaver.running == []

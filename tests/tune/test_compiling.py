"""Programs that compile while others are measured: each is interleaved within the available memory and
measured before the time is over.
"""

from dataclasses import replace

import pytest

from flatout.levers import TABLE
from flatout.probe.machine import look
from flatout.schema.enums import Effect
from flatout.tune.candidates import Candidate
from flatout.tune.explore import MIN_COPIES, MIN_COPIES_ALONE, BackgroundCompiler, explore
from flatout.tune.factors import make_space
from flatout.tune.goal import Goal, restricted
from flatout.tune.search import observe

pytestmark = pytest.mark.processes

LEVER = {lever.name: lever for lever in TABLE}


@pytest.fixture
def make(new_tuning):
    def one(text="", budget_s=300.0, copies=9, **levers):
        tuning = new_tuning(text, Goal(budget_s), replace(look(), cores=4))
        tuning.max_copies = copies
        for name, values in levers.items():
            tuning.candidates[name] = Candidate(LEVER[name], values, LEVER[name].effect)
        return tuning

    return one


def quick(tuning):
    return restricted(tuning.space, [factor.key for factor in tuning.space.factors if not factor.warms_up])


def under(compiling):
    return {choice.name for choice in compiling.trial.plan} if compiling.trial is not None else set()


def test_each_value_of_a_compiler_is_measured(make):
    """A value runs with the levers that the prior expects to be faster, and never with those that
    exclude it.
    """
    tuning = make(compile=("default", "max-autotune-no-cudagraphs"), inplace=(True,), gc_pause=(True,))
    make_space(tuning)
    compiling, seen = BackgroundCompiler(tuning), []
    for _ in range(3):
        compiling.begin(quick(tuning))
        if compiling.trial is not None:
            compiling.begin(quick(tuning))  # one at a time
            seen.append(compiling.trial.plan.get("compile").value)
            assert tuning.interleaver.background == tuning.interleaver.running == [compiling.trial]
            assert "inplace" not in under(compiling)
            compiling._end(compiling.trial)
    assert seen == ["default", "max-autotune-no-cudagraphs"]
    assert not tuning.interleaver.running


def test_a_compiler_that_does_not_fit_beside_others_works_after_them(make):
    tuning = make(copies=MIN_COPIES_ALONE, compile=("default",))
    make_space(tuning)
    compiling = BackgroundCompiler(tuning)
    compiling.begin(quick(tuning))
    assert compiling.trial is None
    assert compiling.reserved_s > 0
    compiling.begin(quick(tuning), exclusive=True)
    assert under(compiling) == {"compile"}


def test_no_time_is_reserved_where_memory_suffices(make):
    tuning = make(copies=MIN_COPIES, compile=("default",))
    make_space(tuning)
    assert BackgroundCompiler(tuning).reserved_s == 0.0


def test_a_compiler_without_enough_time_is_not_started(make):
    tuning = make(compile=("default",))
    make_space(tuning)
    tuning.start_s -= 300.0
    compiling = BackgroundCompiler(tuning)
    compiling.begin(quick(tuning), exclusive=True)
    assert compiling.trial is None


@pytest.mark.full
@pytest.mark.slow
def test_a_search_measures_compiled_programs(make, by_hand):
    tuning = make(by_hand, 600.0)  # it ends as soon as the compiled program is measured
    observe(tuning)
    tuning.max_copies, tuning.candidates = (
        MIN_COPIES_ALONE,
        {"compile": Candidate(LEVER["compile"], ("default",), Effect.ROUNDING)},
    )
    explore(tuning)
    assert {"compile=default" in block.active for block in tuning.blocks} == {True, False}
    assert tuning.candidates["compile"].ratio is not None

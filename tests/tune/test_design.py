"""What is measured next: rows keep the rules, balance the unknown effects, and leave settled ones alone."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.tune.design import live_factor_sets, next_processes, worth_more_time
from flatout.tune.effects import Factor, Space, TimedBlock, fit_effects

NONE = frozenset()


def mixed_space(live=5, process=5, **kwargs):
    """Live levers a, b, ... and process levers p, q, ..."""
    return Space(
        (
            *(Factor(key, key, True) for key in "abcdefghijkl"[:live]),
            *(Factor(key, key, False) for key in "pqrstuv"[:process]),
        ),
        **kwargs,
    )


@st.composite
def ruled_spaces(draw):
    live, process = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    names = ["abcdefg"[at] for at in range(live)] + ["pqrstuv"[at] for at in range(process)]
    pairs = list(itertools.combinations(names, 2))
    excludes = frozenset(map(frozenset, draw(st.lists(st.sampled_from(pairs), max_size=3))))
    needs = {
        a: (b,)
        for a, b in draw(st.lists(st.sampled_from(pairs), max_size=2))
        if frozenset((a, b)) not in excludes
    }
    factors = []
    for name in names:
        for value in range(draw(st.integers(1, 2))):
            factors.append(
                Factor(
                    f"{name}={value}",
                    name,
                    name < "p",
                    draw(st.sampled_from((0.0, -0.1, 0.1))),
                    warms_up=draw(st.booleans()),
                )
            )
    return Space(tuple(factors), excludes, needs)


def measured(space, rng, processes, rows=8, effects=None):
    """Blocks of designed processes of a program with these effects; 0 for all other effects."""
    blocks = []
    for process in range(processes):
        on = next_processes(space, fit_effects(space, blocks), blocks, 1, rng)[0]
        luck = 0.04 * rng.standard_normal()
        for at, live in enumerate(live_factor_sets(space, fit_effects(space, blocks), on, rows, rng)):
            log_ms = (
                4
                + luck
                + sum((effects or {}).get(key, 0.0) for key in on | live)
                + 0.03 * rng.standard_normal()
            )
            blocks.append(TimedBlock(process, on | live, 8.0 * process + 0.35 * at, at, math.exp(log_ms)))
    return blocks


@given(ruled_spaces(), st.integers(0, 2**32 - 1), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_every_row_is_allowed(space, seed, processes):
    """This holds for live levers that need a process lever and the reverse: the blocks of a process complete
    its levers.
    """
    rng = np.random.default_rng(seed)
    blocks = measured(space, rng, processes, 4)
    fitted = fit_effects(space, blocks) if blocks else None
    assert all(space.allowed(block.active) for block in blocks)
    for on in next_processes(space, fitted, blocks, 5, rng):
        assert not any(space.factors[space.index[key]].switchable for key in on)
        rows = live_factor_sets(space, fitted, on, 6, rng)
        assert len(rows) == 6
        for row in rows:
            assert space.allowed(on | row)
            assert all(space.factors[space.index[key]].switchable for key in row)


def test_the_first_processes_are_the_plain_program_and_the_likeliest_plan():
    space = Space(
        (
            Factor("a", "a", True, mean=-0.2),
            Factor("p", "p", False, mean=-0.1),
            Factor("q", "q", False, mean=0.1),
            Factor("r", "r", False),
            Factor("w", "w", True, mean=-0.2, warms_up=True),
        )
    )
    assert next_processes(space, None, (), 4, np.random.default_rng(0))[:2] == [
        NONE,
        {"p", "w"},
    ]


@pytest.mark.parametrize("seed", range(5))
def test_processes_are_balanced_at_first(seed):
    """Of twelve processes each lever is on in four to eight, and each pair of levers occurs in all four
    combinations.
    """
    rows = next_processes(mixed_space(), None, (), 12, np.random.default_rng(seed))
    for key in "pqrst":
        assert 4 <= sum(key in row for row in rows) <= 8
    for pair in itertools.combinations("pqrst", 2):
        assert len({tuple(key in row for key in pair) for row in rows}) == 4


def test_settled_levers_are_not_varied():
    """Clear winners stay on and clear losers stay off; unmeasured levers are varied."""
    rng, effects = (
        np.random.default_rng(0),
        {"a": -0.3, "b": 0.3, "c": -0.3, "d": 0.3, "e": 0.3, "f": 0.3, "p": -0.5, "q": 0.5, "r": 0.5},
    )
    blocks, space = measured(mixed_space(6, 3), rng, 24, 12, effects), mixed_space(12, 4)
    fitted = fit_effects(space, blocks)
    processes = next_processes(space, fitted, blocks, 8, rng)
    assert all("p" in on and not on & {"q", "r"} for on in processes)
    assert {"s" in on for on in processes} == {True, False}
    rows = live_factor_sets(space, fitted, frozenset({"p"}), 24, rng)
    assert all(row >= {"a", "c"} and not row & set("bdef") for row in rows)
    for key in "ghijkl":
        assert 4 <= sum(key in row for row in rows) <= 20


def test_rows_go_where_something_is_undecided():
    """After much data on one lever and none on another, the next processes measure mostly the other."""
    space, rng = mixed_space(0, 2), np.random.default_rng(0)
    blocks = [
        TimedBlock(
            process,
            frozenset({"p"} if process % 2 else ()),
            8.0 * process + at,
            at,
            math.exp(4 + 0.03 * rng.standard_normal()),
        )
        for process in range(12)
        for at in range(4)
    ]
    rows = next_processes(space, fit_effects(space, blocks), blocks, 4, rng)
    assert sum("q" in row for row in rows) >= 2


def test_a_designed_search_finds_the_best_plan():
    effects = {"a": -0.2, "b": 0.1, "p": -0.3, "q": 0.1, "r": -0.08}
    space, found = mixed_space(4, 4), []
    for seed in range(5):
        fitted = fit_effects(space, measured(space, np.random.default_rng(seed), 16, 8, effects))
        found.append(sum(effects.get(key, 0.0) for key in fitted.best()))
    assert np.mean(found) < -0.55


def test_more_time_is_worth_less_and_less():
    space = mixed_space(2, 2)
    blocks = measured(space, np.random.default_rng(0), 24, 10, {"a": -0.2, "b": 0.1, "p": -0.3, "q": 0.2})
    few, many = (fit_effects(space, [b for b in blocks if b.process < n]) for n in (1, 24))
    assert worth_more_time(few, few.best())
    assert not worth_more_time(many, many.best())
    assert worth_more_time(many, NONE)

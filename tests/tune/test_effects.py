"""The regression of the search.

Its answers are compared with independent computations, its intervals with simulated programs, and allowed
sets with their rules.
"""

import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import hang_s

from flatout.tune.effects import PLAN, Factor, PriorScales, Space, TimedBlock, fit_effects, plan_speed
from flatout.tune.mixed_model import Component, Group, solve

FIXED = 1e-6  # log sd of a known component


def space_of(levers, values=1, **kwargs):
    return Space(
        tuple(
            Factor(f"{name}={value}", name, name < "d")
            for name in "abcdefghijklmnopqrstuv"[:levers]
            for value in range(values)
        ),
        **kwargs,
    )


@st.composite
def spaces(draw):
    levers = draw(st.integers(1, 5))
    names = "abcde"[:levers]
    pairs = [frozenset(pair) for pair in itertools.combinations(names, 2)]
    needs = (
        {
            pair[0]: (pair[1],)
            for pair in draw(st.lists(st.sampled_from(list(itertools.combinations(names, 2))), max_size=2))
        }
        if levers > 1
        else {}
    )
    excludes = frozenset(draw(st.lists(st.sampled_from(pairs), max_size=3))) if pairs else frozenset()
    return space_of(levers, draw(st.integers(1, 2)), excludes=excludes, needs=needs)


def allowed_by_definition(space, on):
    levers = [factor.lever for factor in space.factors if factor.key in on]
    return (
        len(set(levers)) == len(levers)
        and not any(pair <= set(levers) for pair in space.excludes)
        and all(needed in levers for lever in levers for needed in space.needs.get(lever, ()))
    )


def simulated(space, rng, processes, rows, noise=0.04, luck=0.05):
    """Blocks of a program with known effects, and the effects."""
    effects = {factor.key: float(rng.normal(0, 0.12)) for factor in space.factors}
    blocks, every = [], [space.keys(row) for row in space.allowed_sets]
    for process in range(processes):
        mine = float(rng.normal(0, luck))
        fixed = every[rng.integers(len(every))]
        for at in range(rows):
            on = frozenset(
                key for key in fixed if not space.factors[space.index[key]].live or rng.random() < 0.5
            )
            if space.allowed(on):
                log_ms = (
                    4
                    + mine
                    + sum(effects[key] for key in on)
                    + noise * float(rng.standard_t(3)) / math.sqrt(3)
                )
                blocks.append(TimedBlock(process, on, 10.0 * process + 0.3 * at, at, math.exp(log_ms)))
    return blocks, effects


def blocks_of(rows, rng=None, noise=0.0):
    """Blocks from rows of (process, factors, seconds, window, log of the time over 100 ms)."""
    return [
        TimedBlock(
            process,
            frozenset(on),
            at_s,
            window,
            100 * math.exp(log + noise * rng.standard_normal() if noise else log),
        )
        for process, on, at_s, window, log in rows
    ]


def spread(**known):
    """Nothing but these variations, as (median, log sd)."""
    tiny = (1e-4, FIXED)
    return PriorScales(t_dof=1e9, noise_t_dof=1e9, work=tiny, drift=tiny, cold=tiny, **known)


# -- allowed sets


@given(spaces())
def test_allowed_sets(space):
    keys = [factor.key for factor in space.factors]
    every = [frozenset(some) for n in range(len(keys) + 1) for some in itertools.combinations(keys, n)]
    allowed = {on for on in every if allowed_by_definition(space, on)}
    assert {on for on in every if space.allowed(on)} == allowed
    assert {space.keys(row) for row in space.allowed_sets} == allowed


@given(spaces(), st.integers(0, 2**32 - 1))
def test_sampled_sets_are_allowed_and_differ(space, seed):
    rows = space.sample(np.random.default_rng(seed), 32)
    found = [space.keys(row) for row in rows]
    assert len(set(found)) == len(found)
    assert all(allowed_by_definition(space, on) for on in found)


def test_a_key_twice_or_unknown_is_rejected():
    with pytest.raises(ValueError, match="twice"):
        Space((Factor("a", "a", True), Factor("a", "b", True)))
    with pytest.raises(ValueError, match="'b' is not among"):
        space_of(1).allowed(frozenset({"b"}))


@given(spaces(), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_the_descent_finds_what_enumeration_finds(space, seed):
    """Sets that cannot be enumerated are searched.

    Single levers and linked pairs suffice for effects without large interactions.
    """
    effects = np.random.default_rng(seed).normal(0, 1, (4, len(space.factors) + len(space.pairs)))
    effects[:, len(space.factors) :] *= 0.05
    best = space.best_rows(effects, 0.01)
    times = [
        (space.features(rows) * effects).sum(axis=1) + 0.01 * rows.sum(axis=1)
        for rows in (best, _searched(space, effects))
    ]
    assert space.allowed_rows(_searched(space, effects)).all()
    chained = any(
        sum(lever in pair for pair in (*space.excludes, *({a, *b} for a, b in space.needs.items()))) > 1
        for lever in space.columns_of
    )
    assert (times[1] >= times[0] - 1e-9).all()
    assert chained or np.allclose(*times)


def _searched(space, effects):
    """The answer for a space with too many sets to enumerate."""
    large = Space(space.factors, space.excludes, space.needs)
    large.__dict__["every_row"] = None
    return large.best_rows(effects, 0.01)


def test_many_factors_are_searched_in_time_and_within_the_rules():
    space = space_of(20, excludes=frozenset({frozenset("ab"), frozenset("cd")}), needs={"e": ("f",)})
    assert space.allowed_sets is None
    keys = ("a=0", "e=0", "k=0", "t=0")
    fitted = fit_effects(
        space, blocks_of((at, {key}, float(at), 0, -0.02 * at) for at, key in enumerate(keys))
    )
    assert space.allowed(fitted.best())
    assert fitted.regret(fitted.best()) >= 0


# -- estimates


def test_as_generalised_least_squares():
    """With known variances and normal noise: the posterior of a small case, computed from the covariance of
    the measurements.
    """
    space = Space((Factor("a", "a", True, mean=-0.1, sd=0.2), Factor("b", "b", False, sd=0.3)))
    rows = [(0, ""), (0, "a"), (1, "b"), (1, "ab"), (2, ""), (2, "a"), (3, "b"), (3, "ab"), (3, "b")]
    rng = np.random.default_rng(1)
    ms = [
        100 * math.exp(-0.2 * ("a" in on) + 0.1 * ("b" in on) + 0.01 * rng.standard_normal())
        for _, on in rows
    ]
    blocks = [
        TimedBlock(process, frozenset(on), 0.0, at, t)
        for at, ((process, on), t) in enumerate(zip(rows, ms, strict=True))
    ]
    fitted = fit_effects(space, blocks, spread(process=(0.05, FIXED), noise=(0.2, FIXED)))

    x = np.array([["a" in on, "b" in on, on == "ab"] for _, on in rows], dtype=float)
    prior = np.array([-0.1, 0.0, 0.0])
    same = np.array([[a == b for b, _ in rows] for a, _ in rows], dtype=float)
    between = x @ np.diag([0.2**2, 0.3**2, 0.035**2])
    cov_y = between @ x.T + 9.0 + 0.05**2 * same + (0.2**2 + 1e-8) * np.eye(len(rows))
    y = np.log(ms)
    gain = between.T @ np.linalg.inv(cov_y)
    expected = prior + gain @ (y - np.median(y) - x @ prior)
    expected_cov = np.diag([0.2**2, 0.3**2, 0.035**2]) - gain @ between
    assert fitted.mean == pytest.approx(expected, abs=1e-4)
    assert fitted.cov == pytest.approx(expected_cov, rel=1e-3, abs=1e-6)
    assert fitted.gain(frozenset("a")).median == pytest.approx(math.exp(-expected[0]), rel=1e-4)


@pytest.mark.parametrize("ms", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_time_is_rejected(ms):
    with pytest.raises(ValueError, match="positive"):
        fit_effects(space_of(1), [TimedBlock(0, frozenset(), 0.0, 0, ms)])


def test_an_outlier_has_little_influence():
    rng = np.random.default_rng(2)
    rows = ((0, {"a=0"} if at % 2 else (), 0.4 * at, at, 0.0) for at in range(40))
    blocks = blocks_of(rows, rng, 0.02)
    spoilt = [*blocks[:39], TimedBlock(0, frozenset({"a=0"}), 15.6, 39, 1000.0)]
    assert fit_effects(space_of(1), spoilt).effect("a=0").median == pytest.approx(
        fit_effects(space_of(1), blocks).effect("a=0").median, abs=0.01
    )


def test_the_same_window_is_the_same_work():
    """Windows differ by half of the time, in the same order under both plans; without them the intervals
    would be far wider.
    """
    rng = np.random.default_rng(3)
    work = rng.normal(0, 0.5, 12)
    rows = (
        (
            process,
            {"d=0"} if process % 2 else (),
            0.4 * at + 0.1 * process,
            at,
            work[at] - 0.2 * (process % 2),
        )
        for process in range(4)
        for at in range(12)
    )
    blocks = blocks_of(rows, rng, 0.01)
    found = fit_effects(space_of(4), blocks)
    apart = fit_effects(
        space_of(4),
        [TimedBlock(b.process, b.active, b.at_s, 100 * b.process + b.window, b.ms) for b in blocks],
    )
    assert math.log(found.effect("d=0").high / found.effect("d=0").low) < 0.7 * math.log(
        apart.effect("d=0").high / apart.effect("d=0").low
    )


def test_blocks_whose_slices_alternated_share_the_disturbance():
    """A tenth of a second of another tenant slows both programs; with times of their own it would be noise."""
    rng = np.random.default_rng(5)
    slowed = rng.exponential(0.2, 10)
    rows = (
        (
            process,
            {"d=0"} if process % 2 else (),
            5.0 * (process // 2) + 0.7 * at,
            at,
            slowed[at] - 0.05 * (process % 2),
        )
        for process in range(4)
        for at in range(10)
    )
    blocks = blocks_of(rows, rng, 0.005)
    shared, own = (
        fit_effects(
            space_of(4),
            [
                TimedBlock(
                    b.process, b.active, b.at_s + apart_s * b.process, 100 * b.process + b.window, b.ms
                )
                for b in blocks
            ],
        ).gain(frozenset({"d=0"}))
        for apart_s in (0.0, 0.01)
    )
    assert shared.low < math.exp(0.05) < shared.high
    assert math.log(shared.high / shared.low) < 0.8 * math.log(own.high / own.low)


def test_intervals_cover_the_truth():
    """40 programs of six levers. Thousands show 93 to 97 %; 240 intervals differ from that by chance."""
    space, covered = space_of(6), []
    for seed in range(40):
        blocks, effects = simulated(space, np.random.default_rng(seed), 8, 8)
        fitted = fit_effects(space, blocks)
        for key, effect in effects.items():
            estimate = fitted.effect(key)
            covered.append(estimate.low <= math.exp(-effect) <= estimate.high)
    assert 0.91 <= np.mean(covered) <= 0.99


def test_samples_are_those_of_the_posterior():
    blocks, _ = simulated(space_of(3), np.random.default_rng(7), 4, 6)
    fitted = fit_effects(space_of(3, misfit=0.0), blocks)
    draws = fitted.draws(4000, seed=1)
    assert (draws == fitted.draws(4000, seed=1)).all()
    assert draws.mean(axis=0) == pytest.approx(fitted.mean, abs=0.01)
    assert np.cov(draws.T) == pytest.approx(fitted.cov, abs=0.003)
    on = frozenset({"a=0", "c=0"})
    gains, estimate = np.exp(-draws @ space_of(3).features(space_of(3).rows([on]))[0]), fitted.gain(on)
    assert (estimate.median, estimate.low, estimate.high) == pytest.approx(
        tuple(np.quantile(gains, (0.5, 0.025, 0.975))), rel=0.05
    )
    assert estimate.chance == pytest.approx((gains > 1).mean(), abs=0.03)


def test_a_gain_that_is_too_small_is_left_out():
    fitted = fit_effects(Space((Factor("a", "a", True, mean=-0.01), Factor("b", "b", True, mean=-0.05))), ())
    assert fitted.best() == {"a", "b"}
    assert fitted.best(min_gain_per_lever=0.02) == {"b"}


def test_a_t_prior_shrinks_large_effects_less():
    """One coefficient far outside its prior, measured precisely enough to show it."""
    x, y = np.array([[1.0, 0.0]] * 6), np.full(6, 1.0) + np.array([0.05, -0.05, 0.03, -0.03, 0.01, -0.01])
    noise = Component(0.2, FIXED)
    normal, tailed = (
        solve(x, y, [Group(1, np.array([0.1]), 0.0, t_dof), Group(1, noise)], noise, slice(0, 1), 1)
        .parts[0]
        .mean[0]
        for t_dof in (None, 4.0)
    )
    assert normal < 0.75
    assert tailed > 0.85


@pytest.mark.processes
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="threads are counted in /proc")
@pytest.mark.parametrize("limit", [None, "2"])
def test_numpy_has_one_thread_and_the_environment_is_restored(limit):
    """This runs in a process that imports the search first, with a product large enough for a thread pool."""
    code = (
        "import flatout.tune.search, os, numpy\n"
        "numpy.ones((600, 600)) @ numpy.ones((600, 600))\n"
        "print(os.environ.get('OMP_NUM_THREADS'), [line.split()[1] for line in open('/proc/self/status') if line.startswith('Threads')][0])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **({"OMP_NUM_THREADS": limit} if limit else {})},
        capture_output=True,
        text=True,
        timeout=hang_s(60),
    )
    assert done.stdout.split() == [str(limit), "1"], done.stderr


def test_a_machine_that_changes_its_speed_within_seconds():
    """Interleaved programs are slow and fast together: that is a phase of the machine, not noise of their
    blocks.
    """
    rows = (
        (
            process,
            {"p"} if process else (),
            0.7 * turn + 0.35 * process,
            2 * turn + process,
            slow - 0.1 * process,
        )
        for turn in range(48)
        for slow in [0.5 * (0.7 * turn % 8.0 < 4.0)]
        for process in range(2)
    )
    blocks = blocks_of(rows, np.random.default_rng(0), 0.02)
    fitted = fit_effects(Space((Factor("p", "p", False),)), blocks)
    assert fitted.noise_sd < 0.1
    gain = fitted.gain(frozenset({"p"}))
    assert gain.low < math.exp(0.1) < gain.high


def test_more_data_never_reduces_the_error_of_a_set_below_the_misfit():
    """The model has no interactions of three levers."""
    rows = ((at, {"a=0"} if at % 2 else (), 0.1 * at, at, 0.01 * (at % 4 // 2)) for at in range(400))
    blocks = blocks_of(rows)
    estimate = fit_effects(space_of(1, misfit=0.05), blocks).gain(frozenset({"a=0"}))
    assert math.log(estimate.high / estimate.low) == pytest.approx(2 * 1.96 * 0.05 * math.sqrt(2), rel=0.02)
    assert fit_effects(space_of(1), blocks).gain(frozenset({"a=0"}), frozenset({"a=0"})).low == pytest.approx(
        1.0
    )


def test_an_effect_relative_to_another_value_of_its_lever():
    times = [("", 0.0), ("a=0", -0.22), ("a=1", -0.1)] * 6
    rows = ((0, {key} if key else (), float(at), at, log) for at, (key, log) in enumerate(times))
    fitted = fit_effects(space_of(1, values=2), blocks_of(rows))
    for beside in ("a=0", "a=1"):
        assert fitted.effect("a=1", frozenset({beside})) == fitted.effect("a=1")
    assert fitted.best() == {"a=0"}


def fresh_pairs(rng, speed, pairs=3, luck=0.03, noise=0.04):
    """Interleaved blocks of fresh processes, after those of a search."""
    blocks = []
    for pair in range(pairs):
        for side, on in enumerate((frozenset(), frozenset({PLAN}))):
            mine = float(rng.normal(0, luck)) - (math.log(speed) if on else 0.0)
            for at in range(8):
                at_s, ms = 500 + 20.0 * pair + at, math.exp(4 + mine + noise * float(rng.standard_normal()))
                blocks.append(TimedBlock(900 + 2 * pair + side, on, at_s, 10**6 + 100 * pair + at, ms))
    return blocks


@pytest.mark.parametrize("supporters", [1, 2])
def test_a_factor_of_one_process_alone_cannot_be_far_outside_of_its_prior(supporters):
    """Its process is 2.9 times as fast, for this factor or for anything else that is true of it."""
    rows = (
        (process, {"d=0"} if process >= 5 - supporters else (), 4.0 * process + 0.4 * at, at, at_log)
        for process in range(5)
        for at in range(6)
        for at_log in [-math.log(2.9) if process >= 5 - supporters else 0.0]
    )
    estimate = fit_effects(space_of(4), blocks_of(rows, np.random.default_rng(0), 0.02)).effect("d=0")
    assert (estimate.low > 1.8) is (supporters > 1)


@pytest.mark.parametrize(("blocks", "cold"), [(2, 0), (3, 1)])
def test_cold_blocks_are_not_the_effect_of_a_lever(blocks, cold):
    """Levers do nothing. With one on, a block after the start or after a stop of 40 s takes 1.8 times as long."""
    rows = (
        (process, {"d=0"} if lever else (), 100.0 * process + at + 40 * (at >= cold), at, slow)
        for process in range(5)
        for lever in [process % 2]
        for at in range(blocks if lever else 6)
        for slow in [math.log(1.8) * (lever and at == cold)]
    )
    estimate = fit_effects(space_of(4), blocks_of(rows, np.random.default_rng(1), 0.02)).effect("d=0")
    assert 0.92 < estimate.low < 1 < estimate.high < 1.08


@pytest.mark.parametrize("speed", [1.0, 1.3])
def test_the_interval_of_a_plan_covers_the_truth(speed):
    covered = []
    for number in range(100):
        rng = np.random.default_rng(number)
        estimate = plan_speed(fresh_pairs(rng, speed))
        covered.append(estimate.low <= speed <= estimate.high)
    assert sum(covered) >= 90  # of 100 with intervals of 95 %; fewer happen once in 90 times

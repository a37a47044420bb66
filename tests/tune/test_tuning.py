"""The clock of a search: how its budget is shared."""

import math
import random
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.job.folder import JobFolder
from flatout.launch.command import parse_command
from flatout.levers import TABLE
from flatout.measure.load import MachineLoad
from flatout.probe.machine import look
from flatout.render.summary import effort
from flatout.schema.enums import Effect, Status
from flatout.schema.records import TrialRecord
from flatout.schema.session import GuardRecord, SessionRecord
from flatout.tune.blame import handle_end
from flatout.tune.candidates import Candidate
from flatout.tune.comparison import MeasuredBlock, ProgramResult, complete_rounds
from flatout.tune.conclude import best_measured, conclude
from flatout.tune.confirm import confirm_plan
from flatout.tune.effects import PLAN
from flatout.tune.factors import make_space, reuse_blocks
from flatout.tune.goal import Goal
from flatout.tune.limits import CONFIRM_SHARE, MAX_PAIR_ROUNDS, OVERRUN_SHARE, PAIR_SIDE_S, USUAL_PAIRS
from flatout.tune.narrow import check_step
from flatout.tune.pairs import keys_of
from flatout.tune.tuning import Tuning

LEVER = {lever.name: lever for lever in TABLE}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "train.py").touch()
    command, job, facts = (
        parse_command((sys.executable, str(folder / "train.py"))),
        JobFolder(folder / "job").make(),
        look(),
    )

    def one(budget_s, tick_ms=10.0, start_cost_s=5.0, **more):
        tuning = Tuning(
            command, job, facts, SessionRecord([], str(folder), {}), Goal(**{"budget_s": budget_s, **more})
        )
        tuning.interleaver.tick_ms, tuning.start_cost_s = tick_ms, start_cost_s
        return tuning

    return one


def test_a_session_that_takes_longer_than_its_budget_says_what_ran_then(make):
    tuning = make(10.0)
    tuning.stage("exploring", "")
    tuning.explain_overrun()
    assert tuning.session.overrun == ""
    tuning.start_s -= 9.0
    tuning.stage("guard", "")
    tuning.start_s -= 1.5
    tuning.stage("confirming", "")
    tuning.explain_overrun()
    assert tuning.session.overrun == ""  # within a tenth
    tuning.start_s -= 1.0
    tuning.session.spent_s, tuning.session.budget_s = tuning.spent_s, 10.0
    tuning.explain_overrun()
    assert (
        effort(tuning.session)
        == "0 comparisons in 12 s, of a budget of 10 s; not done by then: guard, confirming"
    )


@given(budget_s=st.floats(30.0, 3600.0), tick_ms=st.floats(0.1, 20_000.0), start_cost_s=st.floats(1.0, 300.0))
def test_a_pair_measures_as_long_as_it_takes_to_start_but_not_beyond_its_share(
    make, budget_s, tick_ms, start_cost_s
):
    tuning = make(budget_s, tick_ms, start_cost_s)
    assert 2 <= tuning.rounds <= MAX_PAIR_ROUNDS
    if tuning.rounds == 2:
        return  # fewer give no information, whatever they cost
    measured_s, starts_s = 2 * tuning.rounds * tuning.interleaver.block_s, tuning.joint_start_s(2)
    assert measured_s <= max(2 * PAIR_SIDE_S, starts_s) * 1.001
    if measured_s > 2 * PAIR_SIDE_S * 1.001:
        assert USUAL_PAIRS * (measured_s + starts_s) <= CONFIRM_SHARE * budget_s * 1.001


@given(
    tick_ms=st.floats(0.1, 20_000.0),
    start_cost_s=st.floats(1.0, 300.0),
    warm_ticks=st.integers(1, 30),
    programs=st.sampled_from([1, 2]),
)
def test_the_cost_of_a_start_is_estimated_from_several(make, tick_ms, start_cost_s, warm_ticks, programs):
    tuning = make(300.0, tick_ms, start_cost_s)
    tuning.warmup_ticks = warm_ticks
    assert start_cost_s <= tuning.joint_start_s(programs) <= 2 * start_cost_s * 1.001
    assert tuning.single_start_s(tuning.joint_start_s(programs), programs) == pytest.approx(start_cost_s)


def test_a_slow_program_that_starts_slowly_is_measured_longer_where_the_budget_allows(make):
    assert make(600.0, tick_ms=4000.0, start_cost_s=5.0).rounds == 2
    assert make(600.0, tick_ms=4000.0, start_cost_s=30.0).rounds == 5
    assert make(600.0, tick_ms=4000.0, start_cost_s=45.0).rounds == 6
    assert make(200.0, tick_ms=4000.0, start_cost_s=30.0).rounds == 2


def test_without_time_to_check_rounding_only_exact_levers_continue(make):
    """The overrun leaves time for two pairs, but not for the 6 s steps that the guard would repeat."""
    tuning = make(300.0, tick_ms=6000.0, start_cost_s=1.0)
    tuning.start_s -= 300.0 + OVERRUN_SHARE * 300.0 - 2 * tuning.pair_s - 10.0
    exact, rounding = (
        Candidate(LEVER["malloc"], ("tcmalloc",), Effect.EXACT),
        Candidate(LEVER["channels_last"], (True,), Effect.ROUNDING),
    )
    assert check_step(tuning, [exact, rounding]) == ([exact], None)
    assert exact.status is Status.SKIPPED
    assert rounding.status is Status.REJECTED
    assert (
        rounding.reason
        == "not kept, because its gradient could not be checked: the budget ran out; give --budget 8m"
    )


def seen(process, times, loads=None):
    """The result of a program: a block for each of the times, beside these loads."""
    return ProgramResult(
        blocks=[
            MeasuredBlock(at, 10.0 * process + at, at * 35, ms, load)
            for at, (ms, load) in enumerate(zip(times, loads or [0.0] * len(times), strict=True))
        ]
    )


def trying(tuning, **values):
    """The search with these levers in its space."""
    for name, value in values.items():
        tuning.candidates[name] = Candidate(LEVER[name], (value,), LEVER[name].effect)
    make_space(tuning)
    return tuning


@pytest.mark.parametrize(
    ("start_cost_s", "tick_ms", "more", "budget_s"),
    [
        (5.0, 50.0, {}, 90.0),
        (12.0, 50.0, {}, 300.0),
        (5.0, 150.0, {}, 300.0),
        (5.0, 50.0, {"memory_limit_bytes": 1}, 300.0),
    ],
)
def test_the_default_budget(make, start_cost_s, tick_ms, more, budget_s):
    tuning = make(None, tick_ms, start_cost_s, **more)
    tuning.choose_budget()
    assert tuning.budget_s == budget_s
    assert tuning.end_s == pytest.approx(tuning.start_s + budget_s)


@pytest.mark.parametrize(
    ("device", "horizon_s", "budget_s"),
    [
        ("cuda", 3600.0, 300.0),
        ("cuda", 60.0, 90.0),
        ("cpu", 600.0, 90.0),
        ("cpu", 3600.0, 180.0),
        ("cpu, data", 3600.0, 90.0),  # for which a step waits nine tenths of its time
        ("cpu", 36_000.0, 300.0),
    ],
)
def test_the_default_budget_has_time_for_a_compiler_where_that_pays_within_the_job(
    make, device, horizon_s, budget_s
):
    tuning = make(None, 5.0, 5.0, horizon_s=horizon_s)
    if device.endswith("data"):
        tuning.plain_trial = SimpleNamespace(ready={"data_ms": 4.5})
    device = device.partition(",")[0]
    tuning.session.context = {"device": device, "layers": ["Conv2d"], "loaders": []}
    tuning.candidates["compile"] = Candidate(LEVER["compile"], ("default",), Effect.ROUNDING)
    tuning.choose_budget()
    assert tuning.budget_s == budget_s


def test_the_gain_of_a_lever_is_estimated_from_all_blocks(make):
    """Six processes: malloc is 20 % faster in three of them, gc_pause does nothing, threads=1 is half as
    fast.
    """
    tuning = trying(make(90.0), malloc="glibc", gc_pause=True, threads=1)
    assert set(tuning.choices) == {"malloc=glibc", "gc_pause", "threads=1"}
    speed = {"malloc=glibc": 1 / 1.2, "gc_pause": 1.0, "threads=1": 2.0}
    noise = random.Random(0)
    for process in range(6):
        life = {"malloc=glibc"} if process % 2 else set()
        rows = [
            frozenset(life | set(live))
            for live in ((), ("gc_pause",), ("threads=1",), ("gc_pause", "threads=1"))
        ] * 2
        times = [10.0 * math.prod(map(speed.get, row)) * noise.lognormvariate(0, 0.01) for row in rows]
        tuning.add_blocks(process, rows, seen(process, times), 0)
    assert best_measured(tuning) == {"malloc=glibc"}
    (found,) = conclude(tuning)
    assert (found.lever.name, found.value) == ("malloc", "glibc")
    assert found.ratio.low < 1.2 < found.ratio.high
    assert (tuning.candidates["threads"].status, tuning.candidates["threads"].reason) == (
        Status.REJECTED,
        "slower here",
    )
    assert tuning.candidates["gc_pause"].reason == "no speed-up beyond the noise"
    assert tuning.candidates["gc_pause"].ratio is not None
    tuning.disturbance.samples[:] = [MachineLoad(1.0, ("python (pid 1)",))]
    conclude_again(tuning)
    assert tuning.candidates["gc_pause"].ratio is None  # the effect of other processes on it may be larger
    assert tuning.candidates["malloc"].ratio is not None
    assert tuning.session.blocks[0].keys() == {"process", "active", "at_s", "window", "ms", "host", "busy"}


@pytest.mark.parametrize(("busy_rows", "threads"), [(0, "2x"), (1, "2x"), (3, "none")])
def test_a_number_of_threads_is_chosen_from_blocks_beside_idle_processes_alone(make, busy_rows, threads):
    """Of four rows of each process, others take a core in some, and there one thread is 15 times as fast."""
    tuning = trying(make(90.0), threads=1)
    noise = random.Random(0)
    for process in range(4):
        rows = [frozenset(keys) for keys in ((), ("threads=1",))] * 4
        loads = [1.0 if at // 2 < busy_rows else 0.0 for at in range(8)]
        times = [
            (4.0 if row else 60.0 if load else 8.0) * noise.lognormvariate(0, 0.01)
            for row, load in zip(rows, loads, strict=True)
        ]
        tuning.add_blocks(process, rows, seen(process, times, loads), 0)
    selected, lever = conclude(tuning), tuning.candidates["threads"]
    if threads == "none":
        assert not selected
        assert (lever.status, lever.ratio) == (Status.REJECTED, None)
        assert lever.reason.startswith("no number of threads is chosen beside other programs")
        assert lever.reason.endswith("stop them and tune again")
        assert tuning.session.obstacle.startswith("other processes keep 1.0 of")
    else:
        assert selected == [lever]
        assert tuning.gain(frozenset({"threads=1"})).median == pytest.approx(2.0, rel=0.05)


@pytest.fixture
def confirms(monkeypatch):
    """``confirms(tuning, selected, times)``: pairs in which a plan, by its keys, has these milliseconds a step."""

    def confirm(tuning, selected, times):
        def one_pair(tuning, tuned, pairs):
            seed = len(pairs.tuned)
            record = TrialRecord("finished", "", seed=seed, phases={}, steps=16, warmup_ms=5.0)
            pairs.plain[seed] = pairs.tuned[seed] = record
            for keys, all_ms in ((frozenset(), pairs.plain_ms), (keys_of(tuned), pairs.tuned_ms)):
                process, ms = 100 + len(tuning.blocks), times[keys]
                all_ms.append(ms)
                blocks = tuning.add_blocks(process, [keys] * 4, seen(process, [ms] * 4), seed + 1)
                pairs.blocks += [replace(block, active=frozenset({PLAN} if keys else ())) for block in blocks]

        monkeypatch.setattr("flatout.tune.confirm.measure_pairs", one_pair)
        monkeypatch.setattr("flatout.tune.confirm.judge", lambda *_: GuardRecord("same", ""))
        monkeypatch.setattr(tuning.disturbance, "sample", lambda: None)
        confirm_plan(tuning, selected, None)

    return confirm


def test_a_plan_that_contradicts_its_expectation_makes_room_for_the_next_best(make, confirms):
    """The first three blocks of each process were cold, and gc_pause got the difference."""
    tuning = trying(make(300.0), malloc="glibc", gc_pause=True)
    malloc, pause = frozenset({"malloc=glibc"}), frozenset({"gc_pause"})
    plain = frozenset()
    for process, sets, times in (
        (0, [plain, plain, plain, pause, pause, pause, plain], [40.0, 42.0, 41.0, 12.0, 10.0, 10.0, 20.0]),
        (1, [plain, plain, plain, pause, pause, pause], [39.0, 40.0, 41.0, 12.0, 10.0, 10.0]),
        (2, [malloc] * 4, [31.0, 7.5, 7.6, 7.5]),
    ):
        tuning.add_blocks(process, sets, seen(process, times), 0)
    selected = conclude(tuning)
    assert pause <= keys_of(selected)
    assert tuning.gain(keys_of(selected)).median > 1.3
    confirms(tuning, selected, {plain: 10.0, pause: 13.0, malloc: 7.5, malloc | pause: 10.5})
    assert "malloc" in [choice["name"] for choice in tuning.session.best.plan["choices"]]
    assert tuning.session.speedup.median == pytest.approx(1.33, rel=0.05)
    assert len([row.plan for row in tuning.session.comparisons if row.how == "fresh pairs"]) == 2


@pytest.mark.parametrize(
    ("ms", "obstacle"),
    [(6.5, "malloc=glibc was expected at 2.0"), (5.1, ""), (2.5, "malloc=glibc was expected at 2.0")],
)
def test_a_session_says_that_a_plan_gives_less_or_more_than_expected(make, confirms, ms, obstacle):
    tuning, malloc = trying(make(90.0), malloc="glibc"), frozenset({"malloc=glibc"})
    for process in range(6):
        rows = [malloc if process % 2 else frozenset()] * 4
        tuning.add_blocks(process, rows, seen(process, [5.0 if process % 2 else 10.0] * 4), 0)
    confirms(tuning, conclude(tuning), {frozenset(): 10.0, malloc: ms})
    assert tuning.session.speedup.median == pytest.approx(10 / ms, rel=0.02)
    assert tuning.session.obstacle.startswith(obstacle)
    assert bool(tuning.session.obstacle) is bool(obstacle)
    assert ("gain more than later ones" in tuning.session.obstacle) is (ms < 3)


@pytest.mark.parametrize("load", [0.0, 1.0])
@pytest.mark.parametrize("name", ["malloc", "threads"])
def test_a_plan_kept_beside_other_programs_has_no_figure_anywhere(make, confirms, load, name):
    """The load begins after the exploration."""
    value = {"malloc": "glibc", "threads": 1}[name]
    tuning = trying(make(90.0), **{name: value})
    key = f"{name}={value}"
    for process in range(6):
        rows = [frozenset({key} if process % 2 else ())] * 4
        tuning.add_blocks(process, rows, seen(process, [5.0 if process % 2 else 10.0] * 4), 0)
    selected = conclude(tuning)
    tuning.disturbance.samples += [MachineLoad(load)] * 99

    confirms(tuning, selected, {frozenset(): 10.0, frozenset({key}): 5.0})
    tuning.session.disturbance = tuning.disturbance.sentence() if load else ""
    tuning.session.status = "done"
    tuning.save()
    if load and name == "threads":
        assert tuning.session.outcome == "undecided"
        return
    assert tuning.session.outcome == "faster"
    (lever,) = [lever for lever in tuning.session.levers if lever.status == "applied"]
    (choice,) = tuning.session.best.plan["choices"]
    if load:
        assert (tuning.session.speedup, lever.ratio) == (None, None)
        assert choice["evidence"].startswith(
            "the plan is faster beside other programs, cannot tell how much: other"
        )
    else:
        assert tuning.session.speedup.median == pytest.approx(2.0, rel=0.1)
        assert "the whole plan" in choice["evidence"]


def test_rounds_beside_other_programs_can_be_left_out():
    one, other = seen(0, [1.0, 2.0, 3.0], [0.0, 1.0, 0.0]), seen(1, [4.0, 5.0], [0.1, 1.0])
    assert complete_rounds([one, other]) == [(1.0, 4.0), (2.0, 5.0)]
    assert complete_rounds([one, other], 0.3) == [(1.0, 4.0)]


def measured(tuning, logs, processes=6):
    """Blocks of processes that each run these sets in turn; ``logs`` is the log time of each against the
    plain program's 10 ms.
    """
    noise = random.Random(0)
    life = [key for key in tuning.choices if not tuning.space.factors[tuning.space.index[key]].switchable]
    for process in range(processes):
        fixed = frozenset(key for at, key in enumerate(life) if process >> at & 1)
        rows = [row for row in logs if row & set(life) == fixed] * 3
        times = [10.0 * math.exp(logs[row] + noise.gauss(0, 0.01)) for row in rows]
        tuning.add_blocks(process, rows, seen(process, times), 0)


def test_of_two_winners_that_exclude_each_other_one_stays_and_so_does_the_rest_of_the_plan(make):
    speed = {"autocast": 2.6, "compile": 1.3, "inplace": 1.1, "fused_optimizer": 1.1}
    values = dict(zip(speed, ("bfloat16", "default", True, "fused"), strict=True))
    tuning = trying(make(300.0), **values)
    names = {key: choice.name for key, choice in tuning.choices.items()}
    sets = [frozenset(key for at, key in enumerate(names) if number >> at & 1) for number in range(16)]
    measured(
        tuning,
        {
            row: -sum(math.log(speed[names[key]]) for key in row)
            for row in sets
            if {"compile", "inplace"} - {names[key] for key in row}
        },
    )
    assert {candidate.lever.name for candidate in conclude(tuning)} == {
        "autocast",
        "compile",
        "fused_optimizer",
    }


def test_a_lever_that_is_slower_alone_is_found_with_its_partner(make):
    """Half precision in another memory layout, and a device that is twice as fast once the loader no longer
    limits it.
    """
    alone = {("autocast",): 0.1, ("channels_last",): 0.0, ("autocast", "channels_last"): -0.5}
    behind = {
        ("autocast",): math.log(21 / 24),
        ("loader",): math.log(6 / 24),
        ("autocast", "loader"): math.log(3 / 24),
    }
    for logs, partner in ((alone, {"channels_last": True}), (behind, {"loader": {"workers": 4}})):
        tuning = trying(make(300.0), autocast="bfloat16", **partner)
        keys = {choice.name: key for key, choice in tuning.choices.items()}
        measured(
            tuning,
            {frozenset(): 0.0} | {frozenset(keys[name] for name in row): log for row, log in logs.items()},
        )
        best = best_measured(tuning)
        assert best == frozenset(keys.values())
        assert tuning.gain(best).median == pytest.approx(math.exp(-min(logs.values())), rel=0.1)


def test_determinism_is_judged_before_the_levers_of_the_observed_program(make):
    tuning = make(90.0)
    digests = {"1": "a", "2": "b", "4": "c", "8": "under levers"}
    tuning.keep_first_plain(
        TrialRecord("finished", losses=["0x1p+0"] * 9, warmup_steps=5, weights_digests=digests)
    )
    assert len(tuning.first_record.losses) == 5
    assert tuning.first_record.weights_digests == {"1": "a", "2": "b", "4": "c"}


def conclude_again(tuning):
    for candidate in tuning.candidates.values():
        candidate.status, candidate.reason = Status.SKIPPED, ""
    conclude(tuning)


def test_an_interrupted_search_continues_with_its_blocks(make):
    tuning = trying(make(90.0), gc_pause=True)
    tuning.add_blocks(0, [frozenset(), frozenset({"gc_pause"})], seen(0, [10.0, 9.0]), 0)
    later = make(90.0)
    later.session = tuning.session
    trying(later, gc_pause=True)
    reuse_blocks(later)
    assert [(block.active, block.ms) for block in later.blocks] == [
        (frozenset(), 10.0),
        (frozenset({"gc_pause"}), 9.0),
    ]
    assert {block.host for block in later.blocks} != {block.host for block in tuning.blocks}
    later.drop_factor("gc_pause")
    assert [block.active for block in later.blocks] == [frozenset()]


def test_a_lever_that_leaves_the_search_takes_the_blocks_of_later_programs_along(make):
    tuning = trying(make(60.0), gc_pause=True, attention=True)
    both = frozenset({"gc_pause", "attention"})
    rows = [frozenset(), frozenset({"gc_pause"}), both]
    blocks = [MeasuredBlock(row, float(row), 10 * row, 5.0) for row in range(3)]
    for process in range(
        2
    ):  # two programs that ran at the same time; each says that attention changes nothing
        result = ProgramResult(list(blocks), failed_lever=("attention", "nothing to replace"))
        tuning.add_blocks(process, rows, result, 0)
        assert tuning.refit().best() <= tuning.space.index.keys()
        handle_end(tuning, both, result)
        assert tuning.gain(frozenset({"gc_pause"})).n == process + 1
    assert tuning.candidates["attention"].status is Status.REJECTED
    assert [block.active for block in tuning.blocks] == rows[:2] * 2

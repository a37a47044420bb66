"""Decides what a search on a GPU does next. Pure: a frozen state goes in, the next action comes out.

Several processes import side by side, and are held before they touch the device or make a loader. Then they get
a plan. So a plan costs a few seconds, not a start.

    guard      the plain program replays a step with the levers of the whole plan, and rejects the wrong ones
    pairs      two pairs of processes, plain and planned, take turns: they confirm what is left of the plan
    improve    levers off and on in the process of the plan; levers that start slowly, such as compilers, start in
               the background. A better plan is confirmed in the same way

The last confirmed plan stays valid at every moment. `flatout.tune.card` carries the actions out.
"""

from __future__ import annotations

import math
from collections import Counter
from statistics import NormalDist

from flatout.measure.statistics import Round, compare
from flatout.schema.records import QUANTILE, Ratio
from flatout.tune.card_state import (
    NEXT,
    PLAIN,
    RESERVE,
    Action,
    Confirm,
    End,
    Keys,
    Measure,
    Outcome,
    Program,
    Release,
    Replay,
    Stage,
    Start,
    State,
    Stop,
    Wait,
    block_s,
)
from flatout.tune.limits import MIN_PAIRS
from flatout.tune.space import Space

MAX_PAIRS = 4
SLOW_ROUNDS = 3  # of each set: with and without the slow lever, and without what it may replace
VARIANT_ROUNDS, MORE_ROUNDS = 2, 8  # of each variant of the plan; more if it may be better
MIN_GAIN = 1.02  # expected of a plan, before it replaces a confirmed one
MIN_CHANCE = 0.95  # of being faster than the base
CHANGE_SD = 0.06  # in log time: what one lever on or off may change
HELPS = 1.01  # the expected gain of a lever that is switched, with which it joins the others
FEW_CORES = 4  # up to here two processes import side by side; above, one for each CORES_PER_START
CORES_PER_START = 3


def starts_at_once(cores: int) -> int:
    """How many processes may import at the same time."""
    return 2 if cores <= FEW_CORES else max(2, cores // CORES_PER_START)


def first_starts(cores: int, process: Keys) -> tuple[Start, ...]:
    """The processes that start together with the plain program of seed 0."""
    starts = Start(0, process), Start(1, process), Start(1, PLAIN), Start(0, process)
    return starts[: starts_at_once(cores) - 1]


def next_action(state: State) -> Action:
    """The next action. It follows from the state alone."""
    if state.now_s > state.end_s + state.overrun_s:
        return Stop()
    plan = _plan_to_confirm(state)
    if plan is not None:
        return _towards(state, plan)
    return _improve(state) if state.fits(0.0) else Stop()


# -- which plan


def _plan_to_confirm(state: State) -> Keys | None:
    """The plan that should be confirmed next; None if exploring comes first, or nothing is worth it."""
    undecided = [
        plan
        for plan, outcome in state.outcomes.items()
        if outcome is Outcome.UNDECIDED and _pairs_done(state, plan) < MAX_PAIRS
    ]
    first = [] if state.kept or state.first in state.outcomes else [state.first]
    plans = [*first, *undecided[-1:], *_better_plans(state)]
    for plan in plans:
        begun = any(p.plan == plan for p in state.programs)
        if plan and state.fits(_confirm_s(state, plan), begun):
            return plan
    return None


def _better_plans(state: State) -> list[Keys]:
    """The measured plans that promise more than the base, the best first."""
    base, gains = state.base, dict[Keys, float]()
    for plan in {block.active for block in state.blocks} - state.outcomes.keys():
        ratio = gain(state, plan, base)
        if ratio is None or plan & state.wrong or state.sound(plan) != plan:
            continue
        expected, chance = _posterior(state, ratio, plan - base)
        if expected >= MIN_GAIN and chance >= MIN_CHANCE:
            gains[plan] = expected
    return sorted(gains, key=lambda plan: -gains[plan])


def _posterior(state: State, ratio: Ratio, added: Keys) -> tuple[float, float]:
    """The expected gain and its chance, from a measured ratio and the prior of what the plan adds."""
    factors = [factor for factor in state.space.factors if factor.key in added and factor.warms_up]
    mean, sd = (-factors[0].mean, factors[0].sd) if factors else (0.0, CHANGE_SD)
    error = (math.log(ratio.high) - math.log(ratio.low)) / (2 * QUANTILE)
    weight = sd**2 / (sd**2 + error**2)
    expected = weight * math.log(ratio.median) + (1 - weight) * mean
    return math.exp(expected), NormalDist().cdf(expected / (error * math.sqrt(weight)))


def gain(state: State, plan: Keys, base: Keys) -> Ratio | None:
    """How many times as fast ``plan`` is as ``base``, from neighbouring blocks of one process; None if unknown."""
    groups = []
    for process in {block.process for block in state.blocks}:
        ours = [b for b in state.blocks if b.process == process and b.active == plan]
        theirs = [b for b in state.blocks if b.process == process and b.active == base]
        if ours and theirs:
            groups.append([Round(min(theirs, key=lambda b: abs(b.at_s - a.at_s)).ms, a.ms) for a in ours])
    return compare(groups) if groups else None


def _confirm_s(state: State, plan: Keys) -> float:
    """Seconds until this plan is confirmed, from here."""
    costs, seconds = state.costs, 2 * state.costs.end_s
    spare = [p.seed for p in state.programs if p.stage in (Stage.IMPORTING, Stage.HELD)]
    for seed in range(_pairs(state, plan)):
        for side in (PLAIN, plan):
            program, step_s = state.at(seed, side), state.step_s(side)
            if program is None:
                seconds += costs.ready_s(step_s) / min(2, state.copies)
                if seed in spare:
                    spare.remove(seed)
                else:
                    seconds += costs.import_s / starts_at_once(state.cores)
            seconds += (state.rounds - _rounds(state, program)) * block_s(step_s)
    if state.unchecked(plan):
        seconds += costs.replica_s
    return seconds


def _rounds(state: State, program: Program | None) -> int:
    """The blocks of a pair that this process has."""
    return min(state.rounds, len(state.blocks_of(program))) if program is not None else 0


def _pairs(state: State, plan: Keys) -> int:
    """How many pairs decide on this plan: one more than it has, if they did not."""
    return _pairs_done(state, plan) + 1 if state.outcomes.get(plan) is Outcome.UNDECIDED else MIN_PAIRS


def _pairs_done(state: State, plan: Keys) -> int:
    return sum(_rounds(state, p) == state.rounds for p in state.programs if p.plan == plan)


# -- towards its confirmation


def _towards(state: State, plan: Keys) -> Action:
    """The guard first: meanwhile other processes import and warm up. Then the pairs, one after another."""
    seeds, unchecked = range(_pairs(state, plan)), state.unchecked(plan)
    needs = [(0, PLAIN)]
    for seed in seeds if state.copies > 1 else ():
        needs += [(seed, PLAIN), (seed, plan)]
    needs += [(seed, PLAIN) for seed in seeds] + [(seed, plan) for seed in seeds]
    needs += [*_slow_need(state, plan), *_spares(state)]
    waits_for_guard = unchecked and not state.outcomes  # a later plan differs in a lever that hardly fails
    action = _provide(state, list(dict.fromkeys(needs)), (plan, NEXT) if waits_for_guard else (NEXT,))
    if action is not None:
        return action
    home = _replay_home(state, unchecked)
    if unchecked and home is not None:
        return Replay(home.number, unchecked)
    pairs = [(state.at(seed, PLAIN), state.at(seed, plan)) for seed in seeds]
    for pair in pairs:
        sides = [
            p for p in pair if p is not None and p.stage is Stage.READY and _rounds(state, p) < state.rounds
        ]
        if not sides or (state.copies > 1 and any(p is None or p.stage is Stage.WARMING for p in pair)):
            continue
        sides = [p for p in pair if p is not None and p.stage is Stage.READY]
        count = state.rounds - min(_rounds(state, p) for p in sides)
        return Measure(tuple(p.number for p in sides), tuple((p.plan & state.live,) * count for p in sides))
    if all(_rounds(state, p) == state.rounds for pair in pairs for p in pair):
        return Confirm(plan, tuple((a.number, b.number) for a, b in pairs if a and b))
    return _wait_or_stop(state)


def _replay_home(state: State, unchecked: Keys) -> Program | None:
    """The process that replays: the one whose slow levers are warm, else the plain one, else any."""
    slow, ready = unchecked & set(state.slow), [p for p in state.programs if p.stage is Stage.READY]
    return min(ready, key=lambda p: (len(slow - p.plan), len(p.plan)), default=None)


def _spares(state: State) -> list[tuple[int, Keys]]:
    """Processes that import early, so that the next plan need not wait for them."""
    return [(seed, NEXT) for seed in range(MIN_PAIRS)] if state.cores > FEW_CORES else []


def _provide(
    state: State, needs: list[tuple[int, Keys]], waiting: tuple[Keys, ...] = (NEXT,)
) -> Action | None:
    """Start, release or end a process, so that each need has one; None if all have, or must wait.

    ``waiting``: plans that cannot be released yet.
    """
    spare = [p for p in state.programs if p.stage in (Stage.IMPORTING, Stage.HELD)]
    importing = sum(p.stage is Stage.IMPORTING for p in spare)
    on_device = [p for p in state.programs if p.uses_device]
    for seed, plan in needs:
        if state.at(seed, plan) is not None:
            continue
        before_start = (state.base if plan == NEXT else plan) & state.process
        program = next((p for p in spare if (p.seed, p.plan) == (seed, before_start)), None)
        if program is None:
            if state.room and importing < starts_at_once(state.cores) and state.fits(state.costs.import_s):
                return Start(seed, before_start)
            continue
        spare.remove(program)
        if program.stage is not Stage.HELD or plan in waiting:
            continue
        if len(on_device) < state.copies:
            return Release(program.number, plan)
        done = [p for p in on_device if p.stage is Stage.READY and _is_done(state, p, needs, waiting)]
        if done:
            return End(done[0].number)
    return None


def _is_done(
    state: State, program: Program, needs: list[tuple[int, Keys]], waiting: tuple[Keys, ...]
) -> bool:
    """Whether this process may leave the device to another one."""
    if (program.seed, program.plan) not in needs:
        return True
    partner = [
        state.at(program.seed, plan) for seed, plan in needs if seed == program.seed and plan != program.plan
    ]
    needed = state.copies > 1 and any(p is None or _rounds(state, p) < state.rounds for p in partner)
    replays = len(waiting) > 1 and sum(p.stage is Stage.READY for p in state.programs) == 1
    return _rounds(state, program) == state.rounds and not needed and not replays


def _slow_need(state: State, plan: Keys) -> list[tuple[int, Keys]]:
    """The process of the next slow lever, while cores are left for it."""
    key = next((key for key in state.slow if key not in state.tried_slow | state.wrong), None)
    if key is None:
        return []
    if state.outcomes or (state.cores > FEW_CORES and state.copies > 2 * MIN_PAIRS):
        return [(0, slow_plan(state.space, plan, key))]
    return []


def slow_plan(space: Space, plan: Keys, key: str) -> Keys:
    """The plan with a slow lever, without what it excludes."""
    lever_of = space.lever_of
    rest = {
        other
        for other in plan
        if lever_of[other] != lever_of[key]
        and frozenset((lever_of[other], lever_of[key])) not in space.excludes
    }
    return frozenset(rest | {key})


def _wait_or_stop(state: State) -> Action:
    waiting = any(p.stage in (Stage.IMPORTING, Stage.WARMING) for p in state.programs)
    return Wait() if waiting else Stop()


# -- after it


def _improve(state: State) -> Action:
    """Measure what could make the plan better, if there is time to confirm it."""
    base = state.base
    ready = [p for p in state.programs if p.stage is Stage.READY]
    slow = next((p for p in ready if p.plan & (set(state.slow) - state.tried_slow)), None)
    if slow is not None:
        return _measure_slow(state, slow)
    needs = _slow_need(state, base)
    if needs and state.fits(_confirm_s(state, needs[0][1]) + state.costs.slow_s):
        action = _provide(state, needs)
        if action is not None:
            return action
    if needs and (action := _provide(state, _spares(state))) is not None:
        return action
    home = next((p for p in ready if p.plan == base), None)
    rows = _variant_rows(state, base) if home is not None else ()
    confirm_s = _confirm_s(state, NEXT)
    seconds = state.end_s - state.now_s - RESERVE * confirm_s
    rows = rows[: max(0, int(seconds / block_s(state.step_s(base))))]
    if home is not None and len(rows) > 2:
        return Measure((home.number,), (rows,), alone=False)
    return _wait_or_stop(state) if needs and state.fits(confirm_s) else Stop()


def _measure_slow(state: State, program: Program) -> Action:
    """With and without the slow lever, each with and without the live levers that it may replace."""
    live, slow, home = program.plan & state.live, program.plan & set(state.slow), state.at(0, state.base)
    base = state.base & state.live
    sets = (
        [live, base, *(live - {key} for key in sorted(live & state.replaced_by_slow))]
        if slow & live
        else [live]
    )
    rows = tuple(sets) * SLOW_ROUNDS
    if home is None or slow & live:
        return Measure((program.number,), (rows,))
    return Measure((program.number, home.number), (rows * 3, (state.base & state.live,) * len(rows) * 3))


def _variant_rows(state: State, base: Keys) -> tuple[Keys, ...]:
    """Blocks with one live lever off, or one more on, between blocks of the base; last all changes that help."""
    lever_of = state.space.lever_of
    measured = Counter(block.active for block in state.blocks)
    variants, better = list[Keys](), base
    for key in sorted(state.live - set(state.slow) - state.wrong):
        same = {other for other in base if lever_of[other] == lever_of[key]}
        variant = base - {key} if key in base else (base - same) | {key}
        if not state.space.allowed(variant):
            continue
        ratio = gain(state, variant, base)
        expected, chance = _posterior(state, ratio, PLAIN) if ratio is not None else (1.0, 0.5)
        rounds = (
            MORE_ROUNDS if ratio is None or (ratio.median > HELPS and chance < MIN_CHANCE) else VARIANT_ROUNDS
        )
        if measured[variant] < rounds:
            variants.append(variant)
        if expected > HELPS:
            better = better ^ (variant ^ base)
    if not variants and better != base and measured[better] < MORE_ROUNDS and state.space.allowed(better):
        variants = [better] * MORE_ROUNDS
    return tuple(row & state.live for variant in variants for row in (base, variant))

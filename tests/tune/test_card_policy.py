"""The policy of a search on a GPU keeps its rules in simulated sessions (bench/simulated_card.py)."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from simulated_card import KINDS, Simulation, start_session

from flatout.tune.card_policy import next_action, starts_at_once
from flatout.tune.card_state import (
    PLAIN,
    Confirm,
    Outcome,
    Release,
    Replay,
    Stage,
    Start,
    Stop,
)

SHORT_S = {"gpt at batch 64": 180.0}


def sessions(kind, count=6, **options):
    """Simulated sessions after their end, each with its actions and the state before each."""
    for number in range(count):
        budget_s = SHORT_S.get(kind, 90.0)
        world = Simulation(KINDS[kind], budget_s, 16, np.random.default_rng(number), **options)
        start_session(world)
        steps = []
        while not steps or not isinstance(steps[-1][1], Stop):
            state = world.state()
            action = next_action(state)
            steps.append((state, action))
            assert len(steps) < 300
            if not isinstance(action, Stop):
                world.carry_out(action)
        yield world, steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copies", [1, 2, 9])
def test_a_wrong_lever_is_never_kept_and_no_rule_is_broken(kind, copies):
    for world, steps in sessions(kind, wrong_share=0.1, copies=copies):
        for state, action in steps:
            programs = {p.number: p for p in state.programs}
            assert sum(p.uses_device for p in state.programs) <= copies
            if isinstance(action, Start):
                importing = sum(p.stage is Stage.IMPORTING for p in state.programs)
                assert importing < starts_at_once(state.cores)
            elif isinstance(action, Release):
                program = programs[action.number]
                assert program.stage is Stage.HELD
                assert program.plan == action.plan & state.process
            elif isinstance(action, Replay):
                assert programs[action.number].stage is Stage.READY
                assert action.keys <= state.inexact
            elif isinstance(action, Confirm):
                assert not action.plan & state.wrong
                assert (action.plan & state.inexact) in state.checked | {PLAIN}
                assert len(action.pairs) >= 2
                for plain, planned in action.pairs:
                    assert programs[plain].plan == PLAIN
                    assert programs[planned].plan == action.plan
                    assert programs[plain].seed == programs[planned].seed
                    assert (
                        min(map(len, map(state.blocks_of, (programs[plain], programs[planned]))))
                        >= state.rounds
                    )
        assert not world.state().kept & world.wrong
        assert world.now_s <= 1.25 * world.budget_s


def test_a_plan_is_confirmed_early_and_stays_until_a_faster_one_is():
    for world, steps in sessions("gpt"):
        kept = list(dict.fromkeys(state.kept for state, _ in steps if state.kept))
        assert kept, "no plan was confirmed"
        assert min(world.confirmed_s.values()) < 60
        speeds = [world.step_ms(PLAIN) / world.step_ms(plan) for plan in kept]
        assert speeds[-1] >= 0.9 * max(speeds)
        assert all(world.outcomes[plan] is Outcome.KEPT for plan in kept)
        confirmed = [plan for plan, outcome in world.outcomes.items() if outcome is Outcome.KEPT]
        assert world.state().kept == confirmed[-1]


def test_a_refused_lever_leaves_before_any_process_trains_with_it():
    """The guard of the simulated GAN refuses autocast."""
    for world, steps in sessions("gan"):
        slow = set(world.kind.slow)  # starts early, beside the guard
        for _, action in steps:
            if isinstance(action, (Confirm, Release)) and not action.plan & slow:
                assert "autocast" not in action.plan


def test_a_plan_that_is_slower_ends_in_the_plain_program():
    for world, steps in sessions("gan", 3, slower=True):
        assert world.state().kept == PLAIN
        assert isinstance(steps[-1][1], Stop)

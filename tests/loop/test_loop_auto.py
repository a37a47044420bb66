"""plan="auto": the search with given times, a real loop that tunes itself, and a Loop in notebook cells."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from known_bad_levers import KNOWN_BAD  # noqa: E402
from torch import nn  # noqa: E402

from flatout import Loop, Plan  # noqa: E402
from flatout.loop import levers  # noqa: E402
from flatout.loop.autoplan import effects_of  # noqa: E402
from flatout.loop.tuning import TuningSample, bound, search  # noqa: E402
from flatout.probe.machine import look  # noqa: E402
from flatout.schema.enums import Effect  # noqa: E402
from flatout.schema.errors import LoopError  # noqa: E402
from flatout.schema.lever import Options  # noqa: E402
from flatout.schema.plan import Choice  # noqa: E402

FASTER = {"a": 0.5, "b": 1.0, "c": 2.0, "d": 0.8}


def played(steps, factors, check=lambda choices, effect: "", fails=lambda names: "", noise=lambda at: 1.0):
    """The outcome of each lever where a step takes 10 ms times the factors of the active levers, and the
    active levers in each step.
    """
    going = search([(Choice(name, True), Effect.ROUNDING) for name in factors], steps, check)
    wanted, used = None, []
    try:
        wanted = next(going)
        while True:
            names = [choice.name for choice in wanted]
            used.append(names)
            ms = 10.0 * noise(len(used))
            for name in names:
                ms *= factors[name]
            wanted = going.send(TuningSample(ms, fails(names)))
    except StopIteration as over:
        return {each.choice.name: each for each in over.value}, used


def test_winners_stay_and_losers_leave():
    found, used = played(3000, FASTER)
    assert {name for name, each in found.items() if each.kept} == {"a", "d"}
    assert found["a"].ratio.median == pytest.approx(2.0)
    assert found["d"].ratio.median == pytest.approx(1.25)  # on top of a
    assert "slower" in found["c"].reason
    assert "noise" in found["b"].reason
    assert used[-1][:1] == ["a"]
    assert sum("c" in names for names in used) < sum(
        "b" in names for names in used
    )  # a clear loser is dropped early


def test_no_step_runs_with_a_lever_that_the_guard_rejects():
    found, used = played(
        600, FASTER, check=lambda choices, effect: "it is wrong" if choices[-1].name == "a" else ""
    )
    assert not any("a" in names for names in used)
    assert (found["a"].kept, found["a"].reason) == (False, "it is wrong")


def test_a_lever_that_fails_or_needs_more_memory_leaves_at_once():
    found, used = played(600, FASTER, fails=lambda names: "memory" if "a" in names else "")
    assert (found["a"].kept, found["a"].reason) == (False, "memory")
    assert sum("a" in names for names in used) == 1


@given(
    st.integers(0, 700),
    st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.3, 3.0)),
    st.integers(0, 2**31),
)
@settings(max_examples=12)
def test_never_more_steps_than_allowed_whatever_the_times(steps, factors, seed):
    generator = torch.Generator().manual_seed(seed)
    shakes = (0.5 + torch.rand(800, generator=generator)).tolist()
    found, used = played(steps, factors, noise=lambda at: shakes[at])
    assert len(used) <= max(steps, 0)
    assert list(found) == list(factors)
    assert all(each.reason for each in found.values() if not each.kept)


def test_the_bound():
    assert (bound(None), bound(100), bound(10**6)) == (600, 20, 600)


def data(count=150):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(count)
    ]


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture
def trained():
    """``trained(...)`` returns the losses of a Loop with these options, and the Loop.

    The settings that it found faster (a garbage collector setting, say) do not affect later tests.
    """
    loops = []

    def train(**more):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
        loop = Loop(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn, data(), epochs=2, **more)
        loops.append(loop)
        return [step.loss.item() for step in loop], loop

    yield train
    for loop in reversed(loops):
        loop.close()


def test_a_loop_that_tunes_itself_with_exact_levers_gives_the_plain_losses(trained, caplog):
    caplog.set_level(logging.INFO, "flatout")
    plain, _ = trained()
    losses, loop = trained(plan="auto", effects="exact")
    assert losses == plain
    assert not loop.tuning
    assert 10 < loop.tuned.steps <= 60
    tried = {each.choice.name: each for each in loop.tuned.tried}
    assert tried["gc_pause"].ratio.n >= 3
    assert "which was not requested" in tried["fused_optimizer"].reason
    assert "costs time and saves memory" in tried["recompute"].reason
    assert "before the program starts" in tried["malloc"].reason or "no " in tried["malloc"].reason
    assert {outcome.choice.name for outcome in loop.outcomes if outcome.applied} == {
        choice.name for choice in loop.plan
    }
    assert "tuned in" in caplog.text
    assert not loop.model._forward_hooks
    assert not loop.model._forward_pre_hooks


def test_its_plan_changes_only_rounding_and_can_be_used_by_the_next_run(trained):
    plain, _ = trained()
    losses, loop = trained(plan="auto")
    assert losses == pytest.approx(plain, rel=1e-3)
    assert loop.optimizer.param_groups[0].get("fused") is (True if loop.plan.get("fused_optimizer") else None)
    again, other = trained(plan=Plan.from_toml(loop.plan.to_toml()))
    assert again == pytest.approx(plain, rel=1e-3)
    assert {outcome.choice.name for outcome in other.outcomes if outcome.applied} == {
        choice.name for choice in loop.plan
    }
    loop.close()
    assert not loop.optimizer.param_groups[0].get("fused")


def test_a_wrong_lever_never_affects_the_training(trained, monkeypatch):
    """The known-bad variant of a lever that applies here: it would double the learning rate."""
    from dataclasses import replace

    table = tuple(
        replace(lever, apply=KNOWN_BAD[lever.name], applies=lambda facts, context: Options((True,)))
        if lever.name == "fused_optimizer"
        else lever
        for lever in levers.TABLE
    )
    monkeypatch.setattr(levers, "TABLE", table)
    plain, _ = trained()
    losses, loop = trained(plan="auto")
    bad = next(each for each in loop.tuned.tried if each.choice.name == "fused_optimizer")
    assert not bad.kept
    assert "the guard rejected it" in bad.reason
    assert bad.ratio is None
    assert losses == plain


def test_half_precision_can_be_left_out(trained):
    _, loop = trained(plan="auto", effects="rounding")
    halves = [each for each in loop.tuned.tried if each.effect is Effect.PRECISION]
    assert {"autocast", "reduced_precision", "tf32"} <= {each.choice.name for each in halves}
    assert not any(each.kept or each.ratio for each in halves)
    if {"amx_bf16", "avx512_bf16"} & set(look().cpu_flags):
        assert "its effect here is precision, which was not requested" in [each.reason for each in halves]
    assert Effect.PRECISION in effects_of("precision")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"plan": "auto", "effects": "resampled"}, 'Use "exact"'),
        ({"effects": "exact"}, "applies only to plan"),
    ],
)
def test_invalid_options(trained, more, words):
    with pytest.raises(LoopError, match=words):
        trained(**more)


CELLS = [
    """
import torch
from torch import nn
import flatout
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loop = flatout.Loop(model, optimizer, loss_fn, batches, epochs=2)
""",
    """
for step in loop:
    if step.index == 5:
        raise KeyboardInterrupt  # the stop button
""",
    "shown = repr(loop)",
    """
for step in loop:
    pass
""",
    """
loop = flatout.Loop(model, optimizer, interrupted, batches, epochs=1)
for step in loop:
    pass
""",
    """
rest = [step.index for step in loop]
loop.close()
loop.close()
""",
]


def test_the_cells_of_a_notebook():
    """Interrupted between two steps and inside one, inspected, resumed, created again, closed twice."""
    once = iter([False] * 3 + [True])

    def interrupted(model, batch):
        if next(once, False):
            raise KeyboardInterrupt
        return loss_fn(model, batch)

    space = {"loss_fn": loss_fn, "interrupted": interrupted, "batches": data(10)}
    stopped = []
    for at, cell in enumerate(CELLS):
        try:
            exec(compile(cell, f"cell {at}", "exec"), space)
        except KeyboardInterrupt:
            stopped.append(at)
    assert stopped == [1, 4]
    assert space["shown"] == "Loop(Linear, SGD, 6 steps done, epoch 0, plain)"
    assert space["rest"] == list(range(3, 13))
    assert all(p.isfinite().all() for p in space["model"].parameters())

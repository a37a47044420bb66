"""torch.compile for real: names and draws stay, what cannot be compiled runs as it is."""

from __future__ import annotations

import copy
import shutil

import pytest

from flatout.capture.ledger import Ledger
from flatout.levers.autocast_policy import keep_float32
from flatout.levers.compile import LEVER
from flatout.plan.facts import Facts
from flatout.plan.lever import Options, Skip

torch = pytest.importorskip("torch")

needs_a_compiler = pytest.mark.skipif(not any(shutil.which(c) for c in ("c++", "g++", "clang++")), reason="not run: there is no C++ compiler here")


@pytest.fixture(autouse=True)
def forgotten():
    """Each test compiles anew."""
    yield
    torch._dynamo.reset()


@needs_a_compiler
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_it_trains_as_the_plain_model(program):
    """Dropout draws the same numbers, the keys stay, evaluation and copies work, and off again it is the plain model."""
    plain, live = program(), program()
    keys = list(live.model.state_dict())
    ledger = Ledger()
    undo = LEVER.apply(live.scene, "default", ledger)
    state, mine = torch.get_rng_state(), live.train(2)
    torch.set_rng_state(state)
    theirs = plain.train(2)
    assert mine == pytest.approx(theirs, rel=1e-3)
    assert live.scene.reports == []
    assert torch._dynamo.utils.counters["frames"]["ok"] >= 1
    assert list(live.model.state_dict()) == keys
    assert type(live.model) is torch.nn.Sequential
    live.model.eval()
    with torch.no_grad():
        assert torch.allclose(live.model(torch.ones(2, 3, 12, 12)), copy.deepcopy(live.model)(torch.ones(2, 3, 12, 12)), atol=1e-5)
    live.model.train()
    undo()
    before = torch._dynamo.utils.counters["frames"]["total"]
    live.train(1)
    assert torch._dynamo.utils.counters["frames"]["total"] == before


def test_a_compiler_that_fails_leaves_the_plain_model(program):
    """No compiler, a bug in it, an operation it does not know: the program goes on, and is told once."""
    from torch._inductor import config

    plain, live = program(), program()
    state = torch.get_rng_state()
    torch.set_rng_state(state)
    with config.patch({"cpp.cxx": ("/nonexistent/c++",), "force_disable_caches": True}):
        LEVER.apply(live.scene, "default", Ledger())
        mine = live.train()
    torch.set_rng_state(state)
    assert mine == plain.train()
    assert len(live.scene.reports) == 1
    assert live.scene.reports[0][0] == "compile"
    assert "the plain module is used" in live.scene.reports[0][1]


def test_an_error_of_the_model_is_its_own(program):
    live = program()
    LEVER.apply(live.scene, "default", Ledger())

    def angry(module, args):
        raise KeyError("mine")

    live.model.register_forward_pre_hook(angry)
    with pytest.raises(KeyError, match="mine"):
        live.model(torch.ones(2, 3, 12, 12))


def test_without_a_compiler_it_says_so(program, monkeypatch):
    live = program()
    monkeypatch.setenv("PATH", "/nonexistent")
    answer = LEVER.applies(Facts(), live.scene)
    assert isinstance(answer, Skip)
    assert "needs a C++ compiler" in answer.reason


@needs_a_compiler
def test_on_a_cpu_there_is_one_mode(program):
    answer = LEVER.applies(Facts(), program().scene)
    assert isinstance(answer, Options)
    assert answer.values == ("default",)


@pytest.mark.parametrize("value", ["default", "reduce-overhead"])
def test_the_inductor_draws_as_the_plain_program_while_it_is_on(program, value):
    from torch._inductor import config

    live = program()
    before = config.fallback_random
    undo = LEVER.apply(live.scene, value, Ledger())
    assert config.fallback_random is True
    undo()
    assert config.fallback_random is before


@needs_a_compiler
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_compiler_does_not_take_graphs_of_another_policy_from_its_cache():
    """AOTAutograd keeps graphs on the disk, by what they were before autocast."""
    def rows(x):
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x).softmax(-1)

    seen, ledger = [], Ledger()
    try:
        for _ in range(2):
            torch._dynamo.reset()
            with torch.no_grad():
                seen.append(torch.compile(rows)(torch.ones(8, 8)).dtype)
            keep_float32(torch, "cpu", ledger)
    finally:
        ledger.restore()
    assert seen == [torch.bfloat16, torch.float32]

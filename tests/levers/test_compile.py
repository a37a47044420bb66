"""Real torch.compile: names and random numbers stay, and unsupported code runs uncompiled."""

import copy
import shutil

import pytest

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.levers.autocast_policy import keep_float32
from flatout.levers.compile import LEVER
from flatout.schema.facts import Facts
from flatout.schema.lever import Options, Skip

torch = pytest.importorskip("torch")

needs_a_compiler = pytest.mark.skipif(
    not any(shutil.which(c) for c in ("c++", "g++", "clang++")),
    reason="not run: there is no C++ compiler here",
)


@pytest.fixture(autouse=True)
def forgotten():
    """Each test compiles from scratch."""
    yield
    torch._dynamo.reset()


@pytest.mark.processes
@needs_a_compiler
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_it_trains_as_the_plain_model(program):
    """Dropout uses the same random numbers, the keys stay, evaluation and copies work, and switched off it is
    the plain model again.
    """
    plain, live = program(), program()
    keys = list(live.model.state_dict())
    ledger = Ledger()
    undo = LEVER.apply(live.context, "default", ledger)
    state, mine = torch.get_rng_state(), live.train(2)
    torch.set_rng_state(state)
    theirs = plain.train(2)
    assert mine == pytest.approx(theirs, rel=1e-3)
    assert live.context.reports == []
    assert torch._dynamo.utils.counters["frames"]["ok"] >= 1
    assert list(live.model.state_dict()) == keys
    assert type(live.model) is torch.nn.Sequential
    live.model.eval()
    with torch.no_grad():
        assert torch.allclose(
            live.model(torch.ones(2, 3, 12, 12)),
            copy.deepcopy(live.model)(torch.ones(2, 3, 12, 12)),
            atol=1e-5,
        )
    live.model.train()
    undo()
    before = torch._dynamo.utils.counters["frames"]["total"]
    live.train(1)
    assert torch._dynamo.utils.counters["frames"]["total"] == before


@pytest.mark.processes
def test_a_compiler_that_fails_leaves_the_plain_model(program):
    """No compiler, a compiler bug or an unsupported operation: the program continues and gets one message."""
    from torch._inductor import config

    plain, live = program(), program()
    state = torch.get_rng_state()
    torch.set_rng_state(state)
    with config.patch({"cpp.cxx": ("/nonexistent/c++",), "force_disable_caches": True}):
        LEVER.apply(live.context, "default", Ledger())
        mine = live.train()
    torch.set_rng_state(state)
    assert mine == plain.train()
    assert len(live.context.reports) == 1
    assert live.context.reports[0][0] == "compile"
    assert "the plain module is used" in live.context.reports[0][1]


def test_an_error_of_the_model_is_its_own(program):
    live = program()
    LEVER.apply(live.context, "default", Ledger())

    def angry(module, args):
        raise KeyError("mine")

    live.model.register_forward_pre_hook(angry)
    with pytest.raises(KeyError, match="mine"):
        live.model(torch.ones(2, 3, 12, 12))


@pytest.mark.parametrize(
    ("present", "cc", "missing"),
    [
        ((), None, "gcc"),
        (("gcc",), None, None),
        (("clang",), None, None),
        (("gcc",), "icx", "icx"),
        (("icx",), "icx", None),
    ],
)
def test_on_a_gpu_triton_needs_a_host_compiler(program, monkeypatch, tmp_path, present, cc, missing):
    pytest.importorskip("triton")
    live = program()
    monkeypatch.setattr(type(live.context), "device_type", "cuda")
    for name in present:
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if cc:
        monkeypatch.setenv("CC", cc)
    answer = LEVER.applies(Facts(), live.context)
    if missing is None:
        assert isinstance(answer, Options)
    else:
        assert isinstance(answer, Skip)
        assert f"Triton needs a C compiler on the host, and {missing} was not found" in answer.reason


@needs_a_compiler
def test_on_a_cpu_there_is_one_mode(program):
    answer = LEVER.applies(Facts(), program().context)
    assert isinstance(answer, Options)
    assert answer.values == ("default",)


def test_the_inductor_uses_the_plain_random_numbers_while_it_is_on(program):
    from torch._inductor import config

    live = program()
    before = config.fallback_random
    undo = LEVER.apply(live.context, "default", Ledger())
    assert config.fallback_random is True
    undo()
    assert config.fallback_random is before


@pytest.mark.processes
@needs_a_compiler
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_the_cache_does_not_return_graphs_of_another_policy():
    """AOTAutograd keeps graphs on disk, keyed by their form before autocast."""

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


@pytest.mark.parametrize("nested", [False, True])
def test_a_shorter_last_batch_leaves_the_graph_of_whole_batches_alone(program, monkeypatch, nested):
    """A counting compiler shows which graph each call runs. A batch may be a tensor in a dictionary."""
    live, graphs, calls = program(), [], []
    if nested:
        plain = live.model.forward
        monkeypatch.setattr(live.model, "forward", lambda batch: plain(batch["images"][0]))
    really = torch.compile

    def counting(graph, example):
        graphs.append(graph)
        mine = len(graphs) - 1

        def run(*args):
            calls.append(mine)
            return graph(*args)

        return run

    monkeypatch.setattr(
        torch,
        "compile",
        lambda forward, mode=None, dynamic=None: really(forward, backend=counting, dynamic=dynamic),
    )
    undo = LEVER.apply(live.context, "default", Ledger())
    live.model.eval()
    for size in (8, 8, 5, 8, 3, 8):
        images = torch.ones(size, 3, 12, 12)
        live.model({"images": [images]} if nested else images)
    undo()
    whole = calls[0]
    assert [graph == whole for graph in calls] == [True, True, False, True, False, True]
    assert len(graphs) == 2


def test_a_program_that_starts_under_it_compiles_once(monkeypatch):
    """The lever acts after the first step, while root modules are still being detected."""
    graphs, really = [], torch.compile

    def counting(graph, example):
        graphs.append(graph)
        return graph

    class FromTheFirstStep(Listener):
        wants_phases = True

        def step_end(self):
            if context.steps == 1:
                LEVER.apply(context, "default", context.ledger)

    monkeypatch.setattr(
        torch,
        "compile",
        lambda forward, mode=None, dynamic=None: really(forward, backend=counting, dynamic=dynamic),
    )
    context = TrainingContext(torch, FromTheFirstStep(), Ledger())
    context.install()
    try:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = []
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).mean().backward()
            optimizer.step()
            compiled.append(len(graphs))
    finally:
        context.stop_observing()
        context.ledger.restore()
    assert compiled == [0, 0, 1, 1, 1]

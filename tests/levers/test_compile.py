"""Real torch.compile: names and random numbers stay, and unsupported code runs uncompiled."""

import copy
import json
import pickle
import shutil

import pytest

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.levers.autocast_policy import keep_float32
from flatout.levers.compile import LEVER, MANY_BLOCKS
from flatout.levers.graphs import LEVER as GRAPHS
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
@pytest.mark.parametrize(
    ("blocks", "device", "backwards", "values"),
    [
        (MANY_BLOCKS - 1, "cpu", 1, ("default",)),
        (MANY_BLOCKS, "cpu", 1, ("default", "blocks")),
        (MANY_BLOCKS, "cuda", 1, ("default", "blocks", "reduce-overhead", "max-autotune-no-cudagraphs")),
        (1, "cuda", 2, ("default", "max-autotune-no-cudagraphs")),
    ],
)
def test_modes_are_offered_where_they_apply(monkeypatch, blocks, device, backwards, values):
    monkeypatch.setattr("flatout.levers.compile.find_spec", lambda name: True)
    model = _stack([1] * blocks)
    context = _context(model)
    monkeypatch.setattr(type(context), "device_type", device)
    context.backwards_in_last_step = backwards
    answer = LEVER.applies(Facts(), context)
    assert isinstance(answer, Options)
    assert answer.values == values


class _Block(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.number = number

    def forward(self, x):
        return x + self.second(self.first(x).relu()) * self.number


def _stack(numbers):
    """Blocks between two layers that do not repeat."""
    return torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.Sequential(*map(_Block, numbers)), torch.nn.Linear(4, 5)
    )


def _context(model):
    context = TrainingContext(torch, Listener(), Ledger())
    context.register_objects([model], [torch.optim.SGD(model.parameters(), 0.1)], [])
    return context


@pytest.mark.parametrize(("numbers", "graphs"), [([1] * 12, 1), (range(12), 12)])
def test_one_graph_serves_all_blocks_of_a_kind(monkeypatch, numbers, graphs):
    """A number that each block has for itself needs a graph for each; torch would stop after eight."""
    made, really = [], torch.compile

    def counting(graph, example):
        made.append(graph)
        return graph

    monkeypatch.setattr(
        torch,
        "compile",
        lambda forward, mode=None, dynamic=None: really(forward, backend=counting, dynamic=dynamic),
    )
    model, batch = _stack(numbers), torch.ones(2, 4)
    context, expected = _context(model), model(batch)
    undo = LEVER.apply(context, "blocks", Ledger())
    for _ in range(2):
        assert torch.equal(model(batch), expected)
    undo()
    assert len(made) == graphs
    assert context.reports == []


def test_outputs_that_recorded_graphs_overwrite_are_copied(monkeypatch):
    """CUDA graphs write each output to the same memory; the lever `graphs` leaves such a module alone."""
    model, buffer = _stack([1]), torch.zeros(2, 5)
    context = _context(model)
    monkeypatch.setattr(
        torch, "compile", lambda forward, mode, dynamic: lambda *batch: (buffer.add_(1), {"loss": buffer})
    )
    ledger = Ledger()
    undo = LEVER.apply(context, "reduce-overhead", ledger)
    (first, named), _ = model(torch.ones(2, 4)), model(torch.ones(2, 4))
    assert first.eq(1).all()
    assert named["loss"].eq(1).all()
    with pytest.raises(LookupError, match=r"torch\.compile records Sequential as CUDA graphs itself"):
        GRAPHS.apply(context, True, ledger)
    undo()


ATTENTION = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x):
        return (self.q(x) @ self.k(x).mT * 0.25).softmax(-1) @ self.v(x)


model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(2, 8, 16)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.processes
def test_a_second_process_takes_the_compiled_code_from_the_cache(flatout, script, tmp_path):
    """Fused attention leaves no operation that needs a C++ compiler."""
    script(ATTENTION)
    env, seen = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}, []
    for _ in range(2):
        known = set(flatout.folder.glob(".flatout/*/runs/*/rank0.json"))
        done = flatout("run", "--with", "attention", "--with", "compile", "python", "train.py", env=env)
        assert done.code == 0, done.err
        assert "Failed to pickle" not in done.err
        (path,) = set(flatout.folder.glob(".flatout/*/runs/*/rank0.json")) - known
        seen.append(json.loads(path.read_text())["compiled"])
    assert [(each["cached"], each["uncached"]) for each in seen] == [(0, 2), (2, 0)]
    assert seen[1]["saved_ms"] > 0
    assert "| compiled code came from the cache: " in done.err


def test_graph_passes_are_part_of_a_key_that_other_processes_calculate():
    """torch 2.11 pickles them, torch 2.14 asks for their uuid."""
    from flatout.kernels.attention_graphs import rewrite
    from flatout.kernels.graph_passes import GraphPasses

    passes = GraphPasses([rewrite])
    loaded = pickle.loads(pickle.dumps(passes))
    assert (loaded.passes, loaded.uuid()) == ((rewrite,), passes.uuid())
    assert GraphPasses([]).uuid() != passes.uuid()


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

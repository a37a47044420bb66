"""The rules for every lever: its page, its reasons, its undo, its lines of code."""

import ast
import copy
import functools
import gc
import importlib
import inspect
import operator
import os
import random
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from known_bad_levers import KNOWN_BAD

import flatout
from flatout.agent.ledger import Ledger
from flatout.distributed.data_parallel import DataParallelScript
from flatout.distributed.division import SplitSettings
from flatout.job.rank_environment import this_rank
from flatout.levers import TABLE
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts, Gpu
from flatout.schema.lever import Lever, Options, Skip
from flatout.schema.plan import Choice, Plan

torch = pytest.importorskip("torch")

SECTIONS = [
    "What it does",
    "Why it is faster",
    "When it does not help",
    "What it can change",
    "Evidence",
    "Sources",
]
BF16 = Facts(
    cpu="x",
    cores=4,
    cpu_flags=("avx2", "avx512_bf16", "amx_bf16"),
    system="Linux",
    allocators={"tcmalloc": "/lib/libtcmalloc.so.4", "glibc": "libc"},
)
OLD = Facts(cpu="x", cores=1, cpu_flags=("avx2",), system="Darwin")
WITH_GPU = Facts(cores=8, system="Linux", gpus=(Gpu("H200", 2**37, (9, 0)),))
SET = Facts(
    system="Linux",
    environment={
        "OMP_NUM_THREADS": "2",
        "LD_PRELOAD": "/x/libjemalloc.so",
        "PYTORCH_ALLOC_CONF": "x",
        "MALLOC_ARENA_MAX": "1",
    },
)

# The values that a lever may get on a CPU or a GPU, for levers whose only value is not True.
VALUES = {
    "malloc": ["tcmalloc", "glibc"],
    "threads": [1],
    "loader": [
        {"workers": 1},
        {"workers": 0},
        {"workers": 2, "pin": True, "prefetch": 4},
        {"workers": 0, "pin": True},
    ],
    "autocast": ["bfloat16", "float16"],
    "compile": ["default", "blocks", "reduce-overhead", "max-autotune-no-cudagraphs"],
    "fused_optimizer": ["fused", "foreach"],
    "batched_transforms": ["all", "light"],
    "cached_prefix": [{"mib": 64}, {"mib": 64, "ahead": True}],
    "resident_data": [{"mib": 64}, {"mib": 64, "host": True}],
    "device_prefetch": [2, 0],
    "batch_size": [{"size": 4}, {"size": 16, "loader": 1}],
    "memory_budget": [0.5],
    "recompute": [{"blocks": 0.5}, {"blocks": 1.0}],
    "data_parallel": [{"reduction": "mean"}],
    "sharding": [{"over": "node"}, {"over": "all"}],
    "comm_compression": ["bf16", "fp16", "powersgd", {"kind": "powersgd", "rank": 1, "after": 2}],
    "gradient_buckets": [1, "all"],
    "ddp_flags": [{"gradient_as_bucket_view": True}, {"static_graph": True}],
}
UNAVAILABLE = {
    "graphs": "not all on one CUDA device",
    "resident_data": "no CUDA device",
}  # here; the message of their apply
ONE_PROCESS = "flatout started the program as one process"
AMONG_RANKS = {
    "comm_compression": ONE_PROCESS,
    "gradient_buckets": ONE_PROCESS,  # these act where ranks communicate (tests/distributed)
    "ddp_flags": "trains no torch.nn.parallel.DistributedDataParallel",
}
BY_NAME = {lever.name: lever for lever in TABLE}


def values_of(lever):
    return VALUES.get(lever.name, [True])


BY_NAME_ONLY = {"batch_size"}  # it changes the maths, so the tuner never uses it
IN_PROCESS = [lever for lever in TABLE if lever.moment is not Moment.PROCESS]
CASES = [
    pytest.param(lever, value, id=f"{lever.name}-{value}")
    for lever in IN_PROCESS
    if lever.name not in AMONG_RANKS
    for value in values_of(lever)
]

LIVE_HERE = [
    case
    for case in CASES
    if case.values[0].live
    and case.values[0].name != "compile"
    and (torch.cuda.is_available() or case.values[0].name not in UNAVAILABLE)
]


def as_a_rank(lever, monkeypatch, context):
    """Levers for several ranks need to know that they are on one; they contact the others in the first
    forward pass.
    """
    if lever.name in ("data_parallel", "sharding"):
        for name, value in (
            ("RANK", "0"),
            ("LOCAL_RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("RENDEZVOUS", "file:///nowhere"),
        ):
            monkeypatch.setenv(f"FLATOUT_{name}", value)
    if lever.name == "sharding":
        context.data_parallel = DataParallelScript(torch, context, this_rank(), SplitSettings(), Ledger())


def test_the_table_names_every_lever_once():
    files = {path.stem for path in (Path(flatout.__file__).parent / "levers").glob("*.py")} - {
        "__init__",
        "autocast_policy",
        "reasons",
        "recomputed_blocks",
    }
    assert {lever.name for lever in TABLE} == files
    assert set(VALUES) <= files
    assert len(BY_NAME) == len(TABLE)


@pytest.mark.parametrize("lever", TABLE, ids=lambda lever: lever.name)
def test_the_page(lever):
    """The docstring of the file is the page, with the fixed sections in their order, none of them empty."""
    module = importlib.import_module(f"flatout.levers.{lever.name}")
    assert module.LEVER is lever
    assert lever.page == module.__doc__
    first, *rest = lever.page.strip().splitlines()
    assert re.fullmatch(r"[A-Z].*\.", first)
    assert rest[0] == ""
    found = re.findall(r"^([A-Z][A-Za-z ]+): (.*)", "\n".join(rest), re.MULTILINE)
    assert [name for name, _ in found] == SECTIONS
    assert all(len(text) > 8 for _, text in found)


@pytest.mark.parametrize("lever", TABLE, ids=lambda lever: lever.name)
def test_the_value_is_whole(lever):
    assert isinstance(lever, Lever)
    assert lever.name.isidentifier()
    assert (lever.effect is Effect.CHANGES_MATH) == (lever.name in BY_NAME_ONLY)
    assert not (lever.effect is Effect.CHANGES_MATH and lever.live)
    assert all(
        bool(lever.reduced_part(value)) is (lever.effect is Effect.PRECISION) for value in values_of(lever)
    )
    assert set(lever.after) | set(lever.excludes) | set(lever.needs) <= set(BY_NAME)
    order = [each.name for each in TABLE]
    assert all(order.index(name) < order.index(lever.name) for name in (*lever.after, *lever.needs))
    if lever.moment is Moment.PROCESS:
        assert lever.apply is None
        assert not lever.live
    else:
        assert lever.apply is not None
        assert lever.name in KNOWN_BAD


@pytest.mark.parametrize("lever", TABLE, ids=lambda lever: lever.name)
def test_options_never_widen_the_declared_effect(lever):
    """Some options need ranks or a card, so the source is read."""
    source = inspect.getsource(inspect.getmodule(lever.applies))
    named = re.findall(r"Effect\.([A-Z_]+)", "".join(re.findall(r"\beffect=.*", source)))
    assert all(Effect[name].rank <= lever.effect.rank for name in named)


@pytest.mark.parametrize("lever", TABLE, ids=lambda lever: lever.name)
def test_the_lines_of_code(lever):
    """No lock-in: the lines are Python that parses, or a command line."""
    for value in values_of(lever):
        code = lever.code(value)
        assert isinstance(code, str)
        assert "flatout" not in code
        if lever.moment is Moment.PROCESS:
            assert "python train.py" in code
        else:
            assert ast.parse(code).body


# -- applies


def nothing(program):
    """Before anything has happened, as IMPORT and LOADER levers are asked."""
    return program(epochs=0)


def convolutions(program):
    return program()


def sgd_on_vectors(program):
    return program(optimizer="SGD", model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(432, 5)))


def in_float64(program):
    made = program(epochs=0, model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(432, 5)).double())
    made.model.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    made.train()
    return made


SCENES = [nothing, convolutions, sgd_on_vectors, in_float64]


@pytest.mark.parametrize("context", SCENES, ids=lambda context: context.__name__)
@pytest.mark.parametrize("facts", [BF16, OLD, WITH_GPU, SET], ids=["bf16", "old", "gpu", "set"])
def test_every_lever_answers_options_or_a_sentence(program, context, facts):
    live = context(program)
    for lever in TABLE:
        answer = lever.applies(facts, live.context)
        if isinstance(answer, Options):
            assert answer.values
            assert lever.name in VALUES or answer.values == (True,), (
                f"add the values of {lever.name} to VALUES"
            )
            assert len(set(map(repr, answer.values))) == len(answer.values)
            # Every offered value can be written into a plan and read again.
            plan = Plan(tuple(Choice(lever.name, value) for value in answer.values[:1]))
            assert Plan.from_toml(plan.to_toml()).choices[0].value == answer.values[0]
            assert lever.code(answer.values[0])
        else:
            assert isinstance(answer, Skip)
            assert len(answer.reason.split()) >= 4, answer
            assert not answer.reason.endswith(".")
            assert "\n" not in answer.reason


@pytest.mark.parametrize("lever", TABLE, ids=lambda lever: lever.name)
def test_asking_changes_nothing(program, lever):
    live = program()
    before = everything(live)
    lever.applies(BF16, live.context)
    assert everything(live) == before


def test_process_levers_name_their_variables():
    assert BY_NAME["allocator"].environment(WITH_GPU, True) == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True"
    }
    preload = BY_NAME["malloc"].environment(BF16, "tcmalloc")
    assert preload["LD_PRELOAD"] == "/lib/libtcmalloc.so.4"
    assert all(
        isinstance(v, str) for v in {**preload, **BY_NAME["malloc"].environment(BF16, "glibc")}.values()
    )
    both = BY_NAME["malloc"].environment(
        Facts(allocators=BF16.allocators, environment={"LD_PRELOAD": "/x/libother.so"}), "tcmalloc"
    )
    assert both["LD_PRELOAD"] == "/lib/libtcmalloc.so.4:/x/libother.so"
    with pytest.raises(LookupError, match="jemalloc is not installed here"):
        BY_NAME["malloc"].environment(BF16, "jemalloc")


# -- apply, undo


# Of torch, and of its C functions, each getter of a setting: a setter has the same name, or it ends in "enabled".
GETTER = re.compile(r"_?(?:get|is|are)_(\w+?)(?:_enabled)?")
NO_SETTING = re.compile(
    r"rng_state|autocast_(cpu|gpu|ipu|xla)|thread_name"
)  # compared below, deprecated, a name
CONFIGS = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")
PATCHED = (
    torch.Tensor,
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.utils.data.DataLoader,
    torch.autograd,
    torch.nn.functional,
    torch.nn.utils,
)


@functools.cache
def getters():
    """Name -> function that reads it, for every setting of torch that this test can find by its name or type."""
    found = {}
    for owner in (torch, torch._C):
        for name in dir(owner):
            match = GETTER.fullmatch(name)
            if (
                match
                and not NO_SETTING.search(name)
                and (
                    name.endswith("_enabled")
                    or hasattr(owner, f"set_{match[1]}")
                    or hasattr(owner, f"_set_{match[1]}")
                )
            ):
                found[f"{owner.__name__}.{name}"] = getattr(owner, name)
    for title, module in list(sys.modules.items()):
        for name, kind in vars(type(module)).items() if title.startswith("torch.backends") else ():
            if isinstance(kind, torch.backends.ContextProp):
                found[f"{title}.{name}"] = functools.partial(getattr, module, name)
    for title in ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"):
        owner = operator.attrgetter(title)(torch.backends)
        found[f"{title}.fp32_precision"] = functools.partial(getattr, owner, "fp32_precision")
    for title in CONFIGS:
        found[title] = importlib.import_module(title).get_config_copy
    return found


def read(getter):
    try:
        return getter()
    except (
        RuntimeError,
        TypeError,
    ) as error:  # a getter with an argument; precisions that contradict each other
        return str(error)


def are_collected(*objects):
    """Whether the collector examines each; it does not where it is frozen."""
    examined = set(map(id, gc.get_objects()))
    return [id(one) in examined for one in objects]


def everything(live):
    """What a lever could have changed: settings, hooks, forwards, layouts, groups, state, patches, generators.

    A lever that changes anything else must add it here: its undo is compared with nothing otherwise.
    """
    parameters = list(live.model.parameters())
    tensors = [
        *live.model.state_dict().values(),
        *(p.grad for p in parameters if p.grad is not None),
        *(
            v
            for p in parameters
            for v in live.optimizer.state.get(p, {}).values()
            if isinstance(v, torch.Tensor)
        ),
    ]
    return {
        **{name: read(getter) for name, getter in getters().items()},
        # torch has no getter for it, and it is a setting of this thread.
        "denormals": (torch.tensor(1e-39) * 1.0).item(),
        "validation": torch.distributions.Distribution._validate_args,
        "opt_einsum": [torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy],
        "printing": dict(vars(torch._tensor_str.PRINT_OPTS)),
        "environment": dict(os.environ),
        "interpreter": [sys.getswitchinterval(), sys.getrecursionlimit(), list(warnings.filters)],
        "gc": [gc.isenabled(), gc.get_threshold(), *are_collected(vars(torch), vars(live.model))],
        "patches": {
            (owner.__name__, name): id(value)
            for owner in PATCHED
            for name, value in vars(owner).items()
            if callable(value)
        },
        "random": [torch.get_rng_state().tolist(), random.getstate()],
        "autocast": [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")],
        "model": [
            type(live.model),
            sorted(vars(live.model)),
            list(live.model.state_dict()),
            [id(p) for p in parameters],
            live.model.training,
        ],
        "hooks": [
            [len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), m.forward.__qualname__]
            for m in live.model.modules()
        ],
        "parameter hooks": [len(p._backward_hooks or ()) for p in parameters],
        "layouts": [(t.dtype, tuple(t.shape), t.is_contiguous(), t.device) for t in tensors],
        "values": [t.tolist() for t in tensors],
        "groups": [
            {k: v for k, v in group.items() if k != "params"} for group in live.optimizer.param_groups
        ],
        "optimizer": [
            type(live.optimizer),
            sorted(vars(live.optimizer)),
            live.optimizer.step.__qualname__,
            [list(s) for s in live.optimizer.state.values()],
        ],
        "loader": [
            live.loader.num_workers,
            live.loader.pin_memory,
            len(live.context._loaders.rules),
            len(live.context._loaders.feed_rules),
            len(live.context._loaders._feeds),
        ],
    }


@pytest.mark.parametrize("name", sorted(AMONG_RANKS))
def test_levers_among_ranks_do_nothing_in_one_process(program, name):
    live, lever = program(), BY_NAME[name]
    assert lever.needs == (
        () if name in ("ddp_flags", "comm_compression") else ("data_parallel",)
    )  # those also act on a script's own ranks
    before = everything(live)
    for act in (lever.apply, KNOWN_BAD[name]):
        with pytest.raises(LookupError, match=AMONG_RANKS[name]):
            act(live.context, values_of(lever)[0], Ledger())
    with pytest.raises(TypeError):
        lever.check({"nothing": "like it"})
    assert everything(live) == before


def as_loaded(lever):
    """For the lever that freezes all objects and thaws them again: start with nothing frozen
    (tests/conftest.py freezes).
    """
    if lever.name == "gc_pause":
        gc.unfreeze()


@pytest.mark.parametrize(("lever", "value"), CASES)
def test_apply_then_undo_leaves_torch_as_found(program, lever, value, monkeypatch):
    live = program()
    as_a_rank(lever, monkeypatch, live.context)
    as_loaded(lever)
    gc.collect()
    before, ledger = everything(live), Ledger()
    if lever.name in UNAVAILABLE and not torch.cuda.is_available():
        with pytest.raises(LookupError, match=UNAVAILABLE[lever.name]):
            lever.apply(live.context, value, ledger)
        assert everything(live) == before
        return
    undo = lever.apply(live.context, value, ledger)
    if lever.name != "debug_off":  # only the argument checks were on for it to switch off
        assert ledger.entries() or lever.name == "cudnn_benchmark"
    undo()
    assert everything(live) == before
    assert ledger.entries() == []
    undo()  # a second undo changes nothing
    assert everything(live) == before


@pytest.mark.parametrize(("lever", "value"), LIVE_HERE)
def test_training_under_it_then_undo(program, lever, value):
    """The lever goes on and off between steps.

    The program trains before, under and after it, and every setting is restored.
    """
    live = program()
    as_loaded(lever)
    before = everything(live)
    undo = lever.apply(live.context, value, Ledger())
    under = live.train(2)
    undo()
    after = live.train(2)
    now = everything(live)
    assert all(torch.isfinite(torch.tensor([*under, *after])))
    for what in before.keys() - {"values", "random"}:
        assert now[what] == before[what], what


@pytest.mark.parametrize(("lever", "value"), LIVE_HERE)
def test_a_model_saved_under_it_is_the_plain_model(program, lever, value, tmp_path):
    """state_dict keys and values stay; a pickled or copied model and optimizer contain nothing of flatout."""
    live = program()
    keys = list(live.model.state_dict())
    undo = lever.apply(live.context, value, Ledger())
    live.train()
    assert list(live.model.state_dict()) == keys
    torch.save(live.model, tmp_path / "model.pt")
    torch.save(
        {"model": live.model.state_dict(), "optimizer": live.optimizer.state_dict()}, tmp_path / "states.pt"
    )
    loaded, copied = torch.load(tmp_path / "model.pt", weights_only=False), copy.deepcopy(live.model)
    states = torch.load(tmp_path / "states.pt", weights_only=True)
    undo()
    for path in tmp_path.iterdir():
        assert b"flatout" not in path.read_bytes()
    for other in (loaded, copied):
        assert "forward" not in vars(other)
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in other.modules())
        assert all(
            torch.equal(a, b)
            for a, b in zip(other.state_dict().values(), live.model.state_dict().values(), strict=True)
        )
    assert all(
        torch.equal(a, b)
        for a, b in zip(states["model"].values(), live.model.state_dict().values(), strict=True)
    )
    fresh = torch.optim.Adam(copied.parameters())
    fresh.load_state_dict(states["optimizer"])
    copied(torch.randn(2, 3, 12, 12)).sum().backward()
    fresh.step()


# -- exact means exact


@pytest.mark.parametrize("name", ["gc_pause", "debug_off"])
def test_exact_levers_give_bitwise_losses(program, name):
    plain = program(epochs=4)
    live = program(epochs=1)
    undo = BY_NAME[name].apply(live.context, True, Ledger())
    live.train(2)
    undo()
    live.train(1)
    assert live.losses == plain.losses
    assert all(
        torch.equal(a, b)
        for a, b in zip(live.model.state_dict().values(), plain.model.state_dict().values(), strict=True)
    )


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [1, 2])
def test_loader_workers_are_exact_over_data_without_random_numbers(program, workers):
    """Three epochs, shuffled by the global generator, with dropout using it in between."""
    plain, live = program(epochs=3), program(epochs=3, early=[(BY_NAME["loader"], {"workers": workers})])
    assert live.loader.num_workers == workers
    assert live.loader.persistent_workers
    assert live.context.data_is_random() is False
    assert live.losses == plain.losses


def test_compile_without_a_call_costs_nothing_and_leaves_nothing(program):
    """Applied and undone between two steps: no compilation, bitwise the same training."""
    plain, live = program(epochs=2), program(epochs=1)
    BY_NAME["compile"].apply(live.context, "default", Ledger())()
    live.train()
    assert live.losses == plain.losses


def test_a_lever_failing_to_apply_leaves_nothing(program):
    """The engine restores from the ledger, so everything that apply did before it failed must be in it."""
    live = program()
    for lever in IN_PROCESS:
        if lever.name in ("channels_last", "autocast", "compile"):
            before, ledger = everything(live), Ledger()
            broken = SimpleNamespace(
                **{n: getattr(live.context, n) for n in ("torch", "parameters", "optimizers", "device_type")},
                roots=[live.model, None],
            )
            broken.wrap_forward = live.context.wrap_forward
            with pytest.raises(AttributeError):
                lever.apply(broken, values_of(lever)[0], ledger)
            ledger.restore()
            assert everything(live) == before

"""Levers leave the script's own choices alone, and say so; test_reasons.py has whole programs that show each reason."""

from types import SimpleNamespace

import pytest

from flatout.agent.ledger import Ledger
from flatout.agent.program_view import ProgramView
from flatout.levers import TABLE
from flatout.schema.enums import Effect
from flatout.schema.facts import Facts, Gpu
from flatout.schema.lever import Options, Skip

torch = pytest.importorskip("torch")

LEVER = {lever.name: lever for lever in TABLE}
FACTS = Facts(cores=4, cpu_flags=("avx512_bf16",), system="Linux")


def asked(name, program, kind):
    """The answer of a lever for a program, or for the context of one."""
    answer = LEVER[name].applies(FACTS, getattr(program, "context", program))
    assert isinstance(answer, kind), answer
    return answer


def reason(name, program):
    return asked(name, program, Skip).reason


def values(name, program):
    return asked(name, program, Options).values


def load(live, data, **options):
    """The program's only loader, and what follows from a batch of it."""
    live.context.loaders.clear()
    live.context._loaders._dataset = None
    live.loader = torch.utils.data.DataLoader(data, **options)
    live.context.backwards += 1


@pytest.mark.parametrize(
    "own", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"fused": False}], ids=str
)
def test_own_form_of_the_optimizer(program, own):
    """This also holds where it was switched off: there is a reason for it."""
    live = program(epochs=0)
    live.optimizer = torch.optim.Adam(live.model.parameters(), **own)
    live.train()
    name, value = next(iter(own.items()))
    assert reason("fused_optimizer", live) == f"the program creates its Adam with {name}={value}"
    before = [dict(group) for group in live.optimizer.param_groups]
    with pytest.raises(LookupError):
        LEVER["fused_optimizer"].apply(live.context, "fused", Ledger())
    assert all(
        a[k] == b[k]
        for a, b in zip(before, live.optimizer.param_groups, strict=True)
        for k in a
        if k != "params"
    )


class Mine(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad


class Child(torch.optim.Adam):
    """Its step may be its own, so the class is not torch's."""


@pytest.mark.parametrize("kind", [Mine, Child])
def test_optimizers_without_such_a_form(program, kind):
    live = program(epochs=0)
    live.optimizer = kind(live.model.parameters())
    live.train()
    assert kind.__name__ in reason("fused_optimizer", live)


def test_one_of_two_optimizers_has_a_fused_form(program):
    live = program(epochs=0)
    other = Mine([torch.nn.Parameter(torch.zeros(2))])
    other.param_groups[0]["params"][0].grad = torch.ones(2)
    for x, y in live.loader:
        live.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(live.model(x), y).backward()
        other.step()
        live.optimizer.step()
    assert values("fused_optimizer", live) == ("fused",)
    undo = LEVER["fused_optimizer"].apply(live.context, "fused", Ledger())
    assert live.optimizer.param_groups[0]["fused"] is True
    assert "fused" not in other.param_groups[0]
    undo()
    assert live.optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("aid", ["anomaly", "distributions", "filled memory", "none"])
def test_debugging_aids(program, aid):
    live = program()
    checks = torch.distributions.Distribution._validate_args
    # The default, until the first torch.compile of a process.
    torch.distributions.Distribution.set_default_validate_args(True)
    if aid == "anomaly":
        torch.autograd.set_detect_anomaly(True, check_nan=False)
    elif aid == "distributions":
        torch.distributions.Normal(0.0, 1.0)
    elif aid == "filled memory":
        torch.use_deterministic_algorithms(True)
        assert torch.empty(1000).isnan().all()
    try:
        if aid == "none":
            assert reason("debug_off", live).endswith("torch.distributions is not used")
        else:
            assert values("debug_off", live) == (True,)
            undo = LEVER["debug_off"].apply(live.context, True, Ledger())
            assert not torch.is_anomaly_enabled()
            assert not torch.distributions.Distribution._validate_args
            assert not torch.utils.deterministic.fill_uninitialized_memory
            undo()
            assert torch.is_anomaly_enabled() == (aid == "anomaly")
            assert torch.is_anomaly_check_nan_enabled() == (aid != "anomaly")
            assert torch.distributions.Distribution._validate_args
            assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        torch.distributions.Distribution.set_default_validate_args(checks)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection_around_each_step_stays_off(program):
    """It is off between the steps, where levers are asked and applied."""
    live = program(epochs=0)

    def step():
        with torch.autograd.detect_anomaly():
            live.model(torch.randn(4, 3, 12, 12)).square().mean().backward()
            found = torch.is_anomaly_enabled()
        live.optimizer.step()
        return found

    assert step()
    assert values("debug_off", live) == (True,)
    undo = LEVER["debug_off"].apply(live.context, True, Ledger())
    assert not step()
    assert not torch.is_anomaly_enabled()
    undo()
    assert step()
    assert not torch.is_anomaly_enabled()


# -- precision flags, on a simulated GPU: the flags themselves are real


@pytest.fixture
def ampere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (8, 0))
    layer = torch.nn.Conv2d(1, 1, 1)
    kept = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield SimpleNamespace(
        torch=torch,
        device_type="cuda",
        roots=[layer],
        parameters=list(layer.parameters()),
        has_layer=lambda *names: True,
        kernel_flags=ProgramView(torch).kernel_flags,
    )
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = kept
    torch.set_float32_matmul_precision("highest")
    for owner in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        owner.fp32_precision = "none"


def older(precision):
    torch.set_float32_matmul_precision(precision)


def newer(precision):
    torch.backends.cuda.matmul.fp32_precision = precision


def oldest(allowed):
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.parametrize(
    ("sets", "value", "says"),
    [
        (older, "high", "is already set to tf32"),
        (older, "medium", "is already set to tf32"),
        (oldest, True, "is already set to tf32"),
        (newer, "tf32", "is already set to tf32"),
        (newer, "ieee", "is already set to ieee"),
        (older, "highest", "is already set to ieee"),
        (oldest, False, "is already set to ieee"),
    ],
)
def test_own_tf32_in_either_family_of_flags(ampere, sets, value, says):
    assert values("tf32", ampere)
    sets(value)
    assert says in reason("tf32", ampere)


@pytest.mark.parametrize("name", ["tf32", "reduced_precision"])
def test_both_families_of_flags_can_be_read_while_it_is_on(ampere, name):
    """torch raises an error where they disagree; so would the script, flex attention and max-autotune."""

    def read():
        return [
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.mkldnn.matmul.fp32_precision,
        ]

    before = read()
    undo = LEVER[name].apply(ampere, True, Ledger())
    on = read()
    assert on[0] == {"tf32": "high", "reduced_precision": "medium"}[name]
    assert on[4] == {"tf32": "tf32", "reduced_precision": "bf16"}[name]
    assert on[3] == "tf32"
    undo()
    assert read() == before


def test_a_precision_that_the_script_sets_later_holds(ampere):
    undo = LEVER["tf32"].apply(ampere, True, Ledger())
    torch.set_float32_matmul_precision("medium")
    assert torch.get_float32_matmul_precision() == "medium"
    undo()
    assert torch.get_float32_matmul_precision() == "highest"


def test_an_older_gpu_has_no_tf32(ampere, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (7, 5))
    assert "no TF32" in reason("tf32", ampere)


def test_own_determinism_is_kept(ampere):
    says = "deterministic algorithms are enabled"
    for name in ("tf32", "cudnn_benchmark"):
        assert values(name, ampere)
        torch.use_deterministic_algorithms(True)
        assert says in reason(name, ampere)
        torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = True
    assert says in reason("cudnn_benchmark", ampere)


def test_own_cudnn_benchmark(ampere):
    torch.backends.cudnn.benchmark = True
    assert reason("cudnn_benchmark", ampere) == "torch.backends.cudnn.benchmark is already True"


# -- loaders


class Stream(torch.utils.data.IterableDataset):
    """With a length, as many have: a second worker would repeat every sample."""

    def __len__(self):
        return 64

    def __iter__(self):
        return iter(torch.arange(64.0))


def test_an_iterable_data_set_is_left_alone(program):
    program(epochs=0, early=[(LEVER["loader"], {"workers": 2})])
    loader = torch.utils.data.DataLoader(Stream(), batch_size=4)
    assert loader.num_workers == 0
    assert torch.cat(list(loader)).tolist() == torch.arange(64.0).tolist()


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, at):
        return torch.rand(3, 12, 12), at % 5


@pytest.mark.parametrize(("random", "effect"), [(True, Effect.RESAMPLED), (False, Effect.EXACT)])
def test_random_data_is_resampled_not_exact(program, random, effect):
    live = program(epochs=not random)
    if random:
        load(live, Augmented(), batch_size=8)
        live.train()
    assert asked("loader", live, Options).effect is effect


@pytest.mark.parametrize(
    ("arguments", "workers"),
    [
        ({"batch_size": 8}, 1),
        ({"batch_size": 32}, 0),  # one batch: starting a worker would cost more
        ({"batch_size": 8, "num_workers": 2, "timeout": 5, "prefetch_factor": 3}, 1),
        ({"batch_sampler": [[0, 1], [2, 3], [4, 5], [6, 7]]}, 1),
        ({"batch_size": None}, 1),
        ({"batch_size": 8, "sampler": range(32)}, 1),
    ],
)
def test_changes_of_the_rule(program, arguments, workers):
    live = program(epochs=0, early=[(LEVER["loader"], {"workers": 1})])
    plain = {
        "batch_size": arguments.get("batch_size", 1),
        "drop_last": False,
        "timeout": arguments.get("timeout", 0),
    }
    loader = torch.utils.data.DataLoader(live.loader.dataset, **arguments)
    assert loader.num_workers == workers
    if "batch_sampler" not in arguments:
        assert {name: getattr(loader, name) for name in plain} == plain
    assert loader.prefetch_factor == (arguments.get("prefetch_factor") or (2 if workers else None))


class OwnOrder(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(32))


@pytest.mark.parametrize("value", [{"workers": 1}, {"workers": 2, "pin": True}], ids=str)
@pytest.mark.parametrize(
    "own",
    [
        lambda data: {"sampler": OwnOrder()},
        lambda data: {"batch_sampler": torch.utils.data.BatchSampler(OwnOrder(), 4, False)},
        lambda data: {
            "sampler": torch.utils.data.RandomSampler(data, replacement=True, generator=torch.Generator())
        },
    ],
    ids=["sampler", "batches", "drawn as it goes"],
)
def test_an_order_of_the_scripts_own_is_left_alone(program, own, value):
    """Workers ask ahead of time; its answers may depend on the training in between."""
    live = program(epochs=0, early=[(LEVER["loader"], value)])
    arguments = {"batch_size": 4, "num_workers": 3, **own(live.loader.dataset)}
    if "batch_sampler" in arguments:
        del arguments["batch_size"]
    load(live, live.loader.dataset, **arguments)
    assert live.loader.num_workers == 3
    assert "may depend on earlier steps, so batches cannot be loaded ahead" in reason("loader", live)


def test_workers_with_an_init_function_stay(program):
    """It may open the files of the samples; without a worker nothing would call it."""
    live = program(epochs=0, early=[(LEVER["loader"], {"workers": 0})])
    assert (
        torch.utils.data.DataLoader(
            live.loader.dataset, batch_size=4, num_workers=2, worker_init_fn=print
        ).num_workers
        == 2
    )


class OwnGenerator(torch.utils.data.Dataset):
    """Each worker would have a copy of it and get the same random numbers."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(1)

    def __len__(self):
        return 32

    def __getitem__(self, at):
        return torch.rand(3, 12, 12, generator=self.generator), at % 5


@pytest.mark.parametrize("make", [Augmented, OwnGenerator])
@pytest.mark.parametrize(
    ("workers", "values", "effect"),
    [
        (4, ({"workers": 2}, {"workers": 1}, {"workers": 0}), Effect.EXACT),
        (5, ({"workers": 1}, {"workers": 0}), Effect.EXACT),
        (1, None, Effect.RESAMPLED),
    ],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_fewer_workers_are_exact_where_they_can_replace_the_others(program, make, workers, values, effect):
    live = program(epochs=0)
    load(live, make(), batch_size=8, num_workers=workers)
    answer = asked("loader", live, Options)
    assert answer.effect is effect
    assert values is None or answer.values == values


def test_fewer_workers_than_asked(program):
    live = program(epochs=0, early=[(LEVER["loader"], {"workers": 0})])
    loader = torch.utils.data.DataLoader(
        live.loader.dataset,
        batch_size=8,
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=4,
        timeout=3,
        multiprocessing_context="spawn",
    )
    assert loader.num_workers == 0
    assert len(list(loader)) == 4


def test_on_cuda_batches_are_pinned_without_workers_too(program, monkeypatch):
    live = program()
    assert not any("pin" in value for value in values("loader", live))
    monkeypatch.setattr(type(live.context), "device_type", "cuda")
    offered = values("loader", live)
    assert {"workers": 0, "pin": True} in offered
    assert values("device_prefetch", live) == (0,)
    live.loader = torch.utils.data.DataLoader(live.loader.dataset, batch_size=4, num_workers=1)
    assert values("device_prefetch", live) == (1, 2, 0)


@pytest.mark.parametrize(
    ("on_the_gpu", "on_the_host", "offered"),
    [
        (2**30, 2**30, ({"mib": 1}, {"mib": 1, "host": True})),
        (2**30, 0, ({"mib": 1},)),
        (0, 2**30, ({"mib": 1, "host": True},)),
    ],
)
def test_data_that_does_not_fit_on_the_gpu_stays_on_the_host(
    program, monkeypatch, on_the_gpu, on_the_host, offered
):
    live = program()
    monkeypatch.setattr(type(live.context), "device_type", "cuda")
    facts = Facts(memory_bytes=on_the_host, gpus=(Gpu("H200", on_the_gpu, (9, 0)),))
    assert LEVER["resident_data"].applies(facts, live.context) == Options(offered)

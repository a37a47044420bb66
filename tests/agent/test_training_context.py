"""The training context on real loops of every kind finds the steps and the objects, and the program is
unaffected.
"""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

CYCLES = 5


def network(inplace=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(inplace=inplace), nn.Linear(12, 1))


def batches(count=CYCLES, size=16):
    source = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(size, 6, generator=source)
        yield x, x.sum(1, keepdim=True)


# Each program trains CYCLES steps and answers its modules, so that their weights can be compared. ------------------

PROGRAMS = []


def program(function):
    PROGRAMS.append(function)
    return function


def sgd(model, **more):
    return torch.optim.SGD(model.parameters(), lr=0.01, **more)


def mse(model, x, y):
    return functional.mse_loss(model(x), y)


def steps(out, model, optimizer, data=None, loss_of=mse, backward=torch.Tensor.backward, step=None):
    for x, y in batches() if data is None else data:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        backward(loss)
        (step or optimizer.step)()
        out.append(loss.item())
    return [model]


@program
def plain(out):
    model = network()
    return steps(out, model, torch.optim.Adam(model.parameters(), lr=0.01))


@program
def with_a_loader(out):
    model = network()
    data = [(x[0], y[0]) for x, y in batches(CYCLES * 4, 1)]
    order = torch.Generator().manual_seed(2)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=order)
    return steps(out, model, sgd(model), loader)


@program
def next_batch_between_forward_and_backward(out):
    model = network()
    optimizer = sgd(model)
    torch.manual_seed(3)
    x = torch.randn(8, 6)
    for _ in range(CYCLES):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        x = torch.randn(8, 6)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        out.append(loss.item())
    return [model]


class Duck:
    """Has the interface of an optimizer, without being one."""

    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters), "lr": 0.01}]

    def zero_grad(self):
        for p in self.param_groups[0]["params"]:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p -= self.param_groups[0]["lr"] * p.grad


@program
def duck_typed_optimizer(out):
    model = network()
    return steps(out, model, Duck(model.parameters()), batches(CYCLES + 1))


@program
def no_optimizer(out):
    model = network()

    @torch.no_grad()
    def update():
        for p in model.parameters():
            p -= 0.01 * p.grad

    return steps(out, model, model, batches(CYCLES + 1), step=update)


@program
def closure(out):
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    for x, y in batches():

        def again(x=x, y=y):
            optimizer.zero_grad()
            loss = mse(model, x, y)
            loss.backward()
            return loss

        out.append(float(optimizer.step(again)))
    return [model]


@program
def gan(out):
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 6), network()
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
    torch.manual_seed(4)
    for x, _ in batches():
        of_critic.zero_grad()
        real = functional.softplus(-critic(x)).mean()
        real.backward()
        fake = functional.softplus(critic(generator(torch.randn(16, 2)).detach())).mean()
        fake.backward()
        of_critic.step()
        of_generator.zero_grad()
        loss = functional.softplus(-critic(generator(torch.randn(16, 2)))).mean()
        loss.backward()
        of_generator.step()
        out.append(loss.item())
    return [generator, critic]


@program
def one_optimizer_a_parameter(out):
    """Stepped and zeroed inside the backward pass, to save the gradients' memory."""
    model = network()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for x, y in batches():
        loss = mse(model, x, y)
        loss.backward()
        out.append(loss.item())
    return [model]


@program
def accumulation(out):
    model = network()
    optimizer = sgd(model)
    for at, (x, y) in enumerate(batches(CYCLES * 3)):
        loss = mse(model, x, y) / 3
        loss.backward()
        if at % 3 == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        out.append(loss.item())
    return [model]


@program
def grad_scaler(out, enabled=True):
    """Enabled on the CPU, one loss is infinite, so the scaler skips one step."""
    model = network()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
    factors = iter([1.0, 1.0, float("inf") if enabled else 1.0, 1.0, 1.0])

    def step():
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    steps(
        out,
        model,
        optimizer,
        loss_of=lambda *given: mse(*given) * next(factors),
        backward=lambda loss: scaler.scale(loss).backward(),
        step=step,
    )
    assert scaler.get_scale() == (2.0**9 if enabled else 1.0)
    return [model]


@program
def double_backward(out):
    model = network(inplace=False)

    def with_slope(model, x, y):
        prediction = model(x.requires_grad_())
        (slope,) = torch.autograd.grad(prediction.sum(), x, create_graph=True)
        return functional.mse_loss(prediction, y) + slope.square().mean()

    return steps(out, model, sgd(model), loss_of=with_slope)


@program
def backward_with_create_graph(out):
    model = network(inplace=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def twice(loss):
        loss.backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        optimizer.zero_grad()
        (penalty * 0.1).backward()

    return steps(out, model, optimizer, backward=twice)


class WithItsLoss(nn.Module):
    """A batch is a dictionary, the loss a module attribute, and the output a dictionary that contains the
    loss.
    """

    def __init__(self):
        super().__init__()
        self.net = network()
        self.criterion = nn.MSELoss()

    def forward(self, *, batch):
        return {"loss": self.criterion(self.net(batch["x"]), batch["y"])}


def its_loss(model, x, y):
    return model(batch={"x": x, "y": y})["loss"]


@program
def loss_on_the_module(out):
    model = WithItsLoss()
    return steps(out, model, sgd(model), loss_of=its_loss)


@program
def evaluation_in_between(out):
    model = network()

    def evaluated():
        for x, y in batches():
            model.eval()
            with torch.no_grad():
                out.extend(mse(model, x, y).item() for _ in range(3))
            model.train()
            yield x, y

    return steps(out, model, sgd(model), evaluated())


class Lookahead(torch.optim.Optimizer):
    """A wrapper whose step calls the step of an inner optimizer."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step(closure)


@program
def wrapper_optimizer(out):
    model = network()
    return steps(out, model, Lookahead(sgd(model)))


@program
def autocast_of_its_own(out):
    model = network()

    def in_half(model, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return functional.mse_loss(model(x).float(), y)

    return steps(out, model, sgd(model), loss_of=in_half)


@program
def gradients_asked_for_by_hand(out):
    """autograd.grad: no backward pass is ever called."""
    model = network(inplace=False)
    parameters = list(model.parameters())

    def by_hand(loss):
        for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = grad

    return steps(out, model, sgd(model), backward=by_hand)


@program
def reentrant_checkpoint(out):
    """Calls backward inside the backward pass."""
    model = network()

    def again(model, x, y):
        return functional.mse_loss(checkpoint(model, x.requires_grad_(), use_reentrant=True), y)

    return steps(out, model, sgd(model), loss_of=again)


@program
def checkpointed_parts(out):
    """Parts of the model run again by themselves in the backward pass."""
    model = network()
    model.forward = lambda x: model[1:](checkpoint(model[0], x, use_reentrant=False))
    return steps(out, model, sgd(model))


@program
def scripted(out):
    """A ScriptModule has hooks, but no methods to set them."""
    model = torch.jit.script(network())
    return steps(out, model, sgd(model))


@program
def sharpness_aware(out):
    """An optimizer that never steps itself, on the parameter groups of one that does."""
    model = network()
    inner = sgd(model)

    class Sam(torch.optim.Optimizer):
        def __init__(self, groups):
            super().__init__(groups, {})

    sam = Sam(inner.param_groups)
    for batch in batches():
        steps([], model, sam, [batch], step=lambda: None)
        steps(out, model, sam, [batch], step=inner.step)
    return [model]


def trained(program):
    """Losses and weights, bit for bit."""
    out = []
    models = program(out)
    return [v.hex() for v in out], [p.detach().clone() for m in models for p in m.parameters()]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_the_steps_are_found_and_nothing_changes(program, enter):
    losses, weights = trained(program)
    context, probe = enter()
    observed_losses, observed_weights = trained(program)
    assert observed_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(weights, observed_weights, strict=True))
    assert context.steps == CYCLES
    assert probe.observed.count("step") == CYCLES
    # Every start has an end.
    for phase in ("forward", "backward", "optimizer"):
        assert probe.observed.count(phase) == probe.observed.count("/" + phase)
    assert len(probe.losses) == probe.observed.count("backward") == context.backwards


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (plain, {"roots": ["Sequential"], "boundaries": "optimizer", "backwards_per_step": 1}),
        (no_optimizer, {"roots": ["Sequential"], "optimizers": [], "boundaries": "backward"}),
        (duck_typed_optimizer, {"optimizers": [], "boundaries": "backward"}),
        (closure, {"closure_steps": True, "boundaries": "optimizer"}),
        (gan, {"backwards_per_step": 3, "boundaries": "optimizer"}),
        (accumulation, {"backwards_per_step": 3}),
        (reentrant_checkpoint, {"backwards_per_step": 1}),
        (checkpointed_parts, {"roots": ["Sequential"]}),
        (scripted, {"roots": ["RecursiveScriptModule"]}),
        (sharpness_aware, {"backwards_per_step": 2}),
        (loss_on_the_module, {"roots": ["WithItsLoss"]}),
        (with_a_loader, {"device": "cpu", "parameters": 97, "dtypes": ["torch.float32"]}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_objects_found(program, expected, enter):
    context, _ = enter()
    # They exist while they are described; the optimizers are gone, but the boundaries keep them.
    models = program([])
    gc.collect()
    described = context.describe()
    assert {k: described[k] for k in expected} == expected
    assert described["parameters"] >= sum(p.numel() for m in models for p in m.parameters()) / 2


def test_live_objects_are_described_while_they_live(enter):
    context, _ = enter()
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = Lookahead(inner)
    steps([], model, optimizer, batches(2))
    assert context.roots == [model]
    assert context.optimizers == [optimizer]
    assert context.parameters == list(model.parameters())
    assert context.has_layer("Linear")
    assert not context.has_layer("Conv")
    assert not context.model_is_split


def test_a_loss_without_parameters_is_not_a_root(enter):
    context, _ = enter()
    model, criterion = network(), nn.MSELoss()
    optimizer = sgd(model)
    for x, y in batches(2):
        criterion(model(x), y).backward()
        optimizer.step()
    assert context.roots == [model]
    assert context.loss_modules == [criterion]


@pytest.mark.parametrize(
    ("program", "flag"),
    [
        (autocast_of_its_own, "autocast_seen"),
        (backward_with_create_graph, "create_graph_seen"),
        (double_backward, "create_graph_seen"),
        (closure, "closure_steps"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_facts_for_levers(program, flag, enter):
    """Compiled functions cannot be differentiated twice, whether by backward or by autograd.grad; and similar
    facts.
    """
    context, _ = enter()
    plain([])
    assert not getattr(context, flag)
    context, _ = enter()
    program([])
    assert getattr(context, flag)


def test_scalers_that_are_switched_on(enter):
    context, _ = enter()
    scalers = [torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (True, False)]
    for scaler in scalers:
        scaler.scale(torch.ones(1, requires_grad=True).sum()).backward()
    assert context.scalers == scalers[:1]


def test_a_compiled_model_is_detected(enter):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        filters = len(warnings.filters)
        context, _ = enter()
        model = torch.compile(network(), backend="eager")
        optimizer = sgd(model)
        steps([], model, optimizer, batches(3))
        assert len(warnings.filters) == filters
    assert [str(w.message) for w in warned if "global hooks" in str(w.message)] == []
    assert context.compiled_by_script
    assert context.steps == 3


def test_the_unscaled_loss_is_observed(enter):
    _, probe = enter()
    out = []
    grad_scaler(out)
    assert [loss.item() for loss in probe.losses] == out


def test_the_loader_is_described_as_the_script_asked(enter):
    context, probe = enter()
    with_a_loader([])
    loader = context.loaders[0]
    asked = {
        "dataset": "list",
        "length": CYCLES * 4,
        "batch_size": 4,
        "num_workers": 0,
        "iterable": False,
    }
    assert {name: loader[name] for name in asked} == asked
    assert len(probe.batches) == CYCLES


def test_an_endless_sampler_is_never_counted(enter):
    class Endless(torch.utils.data.Dataset):
        def __len__(self):
            return 10**13

        def __getitem__(self, at):
            return torch.zeros(2)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield torch.zeros(2)

    context, probe = enter()
    first = torch.utils.data.DataLoader(Endless(), batch_size=2, sampler=iter(range(10**13)))
    second = torch.utils.data.DataLoader(Stream(), batch_size=2)
    next(iter(first)), next(iter(second))
    assert [(d["length"], d["iterable"]) for d in context.loaders] == [(None, False), (None, True)]
    assert len(probe.batches) == 2


def test_a_wrong_loader_gets_torchs_own_error(enter):
    enter()
    with pytest.raises(TypeError, match="unexpected keyword"):
        torch.utils.data.DataLoader([1], no_such_argument=1)
    with pytest.raises(ValueError, match="batch_size"):
        torch.utils.data.DataLoader([1], batch_size=-1)


def test_evaluation_is_not_taken_for_training(enter):
    _, probe = enter()
    evaluation_in_between([])
    assert probe.observed.count("forward") == CYCLES


def test_an_error_in_the_program_is_its_own(enter):
    """The forward raises once, the optimizer once; the script catches both and continues."""
    context, _ = enter()
    model = network()
    optimizer = sgd(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.zeros(2, 5))

    def closure():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        optimizer.step(closure)
    steps([], model, optimizer, batches(3))
    assert context.steps == 3
    assert context.roots == [model]


# -- checkpoints of the script contain nothing of flatout


class WithStateOfItsOwn(nn.Module):
    """Many libraries return their whole dictionary from __getstate__."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        return self.net(x)

    def __getstate__(self):
        return self.__dict__.copy()


def passed_on(forward):
    return lambda *args, **kwargs: forward(*args, **kwargs)


@pytest.mark.parametrize(
    "make",
    [network, WithItsLoss, WithStateOfItsOwn],
    ids=["Sequential", "with its loss", "with __getstate__"],
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["listened to", "under a lever"])
def test_saving_and_copying_a_model_in_training(enter, make, wrapped):
    context, _ = enter()
    model = make()
    optimizer = sgd(model)
    keys = list(model.state_dict())
    names = [name for name, _ in model.named_modules()]

    def step():
        steps([], model, optimizer, batches(2), its_loss if make is WithItsLoss else mse)

    step()
    if wrapped:
        context.wrap_forward(model, passed_on, context.ledger)
        step()
    whole = io.BytesIO()
    torch.save(model, whole)
    assert b"flatout" not in whole.getvalue()
    assert b"flatout" not in pickle.dumps(model)
    whole.seek(0)
    loaded = torch.load(whole, weights_only=False)
    copied = copy.deepcopy(model)
    for other in (loaded, copied):
        assert type(other) is type(model)
        assert not other._forward_hooks
        assert not other._forward_pre_hooks
        assert "forward" not in vars(other)
        assert list(other.state_dict()) == keys
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == names
    before, ended = [p.clone() for p in loaded.parameters()], context.steps
    step()  # the original is still observed, the copies are not touched
    assert context.steps == ended + 2
    assert all(torch.equal(a, b) for a, b in zip(before, loaded.parameters(), strict=True))


def test_hooks_of_the_script_are_saved_with_the_model(enter):
    enter()
    model = network()
    model.register_forward_hook(_noted)
    optimizer = sgd(model)
    steps([], model, optimizer, batches(2))
    other = pickle.loads(pickle.dumps(model))
    assert list(other._forward_hooks.values()) == [_noted]


def _noted(module, args, output):
    return None


# -- attaching keeps nothing alive and leaves nothing behind


def test_models_and_optimizers_are_not_kept_alive(enter):
    context, probe = enter()
    model = network()
    optimizer = sgd(model)
    steps([], model, optimizer, batches(3))
    held = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer
    probe.losses.clear()
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    assert context.roots == []
    assert context.optimizers == []


def test_leaving_restores_torch(enter):
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    def look():
        return [
            torch.autograd.backward,
            torch.optim.Optimizer.__init__,
            torch.utils.data.DataLoader.__init__,
            torch.amp.GradScaler.step,
            torch.amp.GradScaler.scale,
            torch.distributions.Distribution.__init__,
            vars(nn.Module).get("__reduce_ex__"),
            torch.autograd.grad,
            torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
            len(modules._global_forward_hooks),
            len(modules._global_forward_pre_hooks),
            len(optimizers._global_optimizer_pre_hooks),
            len(optimizers._global_optimizer_post_hooks),
        ]

    before = look()
    context, _ = enter()
    plain([])
    assert look() != before
    assert context.ledger.entries()
    context.ledger.restore()
    assert look() == before


def test_looking_for_roots_ends_after_two_steps(enter):
    """Global forward hooks cost a quarter of a forward pass of small layers."""
    from torch.nn.modules import module as modules

    before = len(modules._global_forward_hooks)
    enter()
    assert len(modules._global_forward_hooks) == before + 1
    plain([])
    assert len(modules._global_forward_hooks) == before


def test_at_rest_nothing_is_observed_and_training_continues(enter):
    context, probe = enter()
    model = network()
    optimizer = sgd(model)

    steps([], model, optimizer, batches(3))
    observed = len(probe.observed)
    context.stop_observing()
    steps([], model, optimizer, batches(3))
    assert len(probe.observed) == observed
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("item", "random"),
    [
        (lambda at: torch.tensor(at), False),
        (lambda at: torch.rand(1), True),
        (lambda at: __import__("random").random(), True),
        (lambda at: __import__("numpy").random.rand(), True),
        (lambda at: 1 / 0, True),
    ],
    ids=["no", "torch", "random", "numpy", "broken"],
)
def test_whether_a_data_set_draws_random_numbers(enter, item, random):
    import random as rng

    pytest.importorskip("numpy")

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, at):
            return item(at)

    context, _ = enter()
    data = Data()
    torch.utils.data.DataLoader(data)
    before = torch.get_rng_state(), rng.getstate()
    assert context.data_is_random() is random
    assert torch.equal(torch.get_rng_state(), before[0])
    assert rng.getstate() == before[1]

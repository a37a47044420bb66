"""The step replica inside a real training loop: sound levers pass, and broken ones fail in the comparison
meant for them.
"""

import itertools
import math
from contextlib import contextmanager

import known_bad_levers
import pytest
import torch
from known_bad_levers import KNOWN_BAD
from torch import nn

from flatout.agent.applier import Applier
from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.guard.replica import StepReplica
from flatout.levers import TABLE
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options
from flatout.schema.plan import Choice

NOTHING = lambda context, value, ledger: ledger.restore  # noqa: E731
SHELF = {lever.name: lever for lever in TABLE}
START = 3  # the step after which the replica begins to record
STEPS = 18


class ReplicaProbe(Listener):
    """Observes a loop, passes its events to a replica, and keeps the replica's result."""

    def __init__(self, *levers, start=START, step_ms=0.0):
        self.start, self.step_ms = start, step_ms
        self.context = TrainingContext(torch, self, Ledger())
        self.applier = Applier(levers, Facts(cores=2), self.context)
        self.choices = [Choice(lever.name, VALUES.get(lever.name, True)) for lever in levers]
        self.replica = self.verdict = None

    def forward_begin(self, *what):
        if self.replica is not None:
            self.replica.forward_begin(*what)

    def forward_end(self, *what):
        if self.replica is not None:
            self.replica.forward_end(*what)

    def optimizer_begin(self, *what):
        if self.replica is not None:
            self.replica.optimizer_begin(*what)

    def step_end(self):
        if self.context.steps == self.start:
            self.replica = StepReplica(self.context, self.applier, self.choices, self.step_ms)
        elif self.replica is not None and self.replica.captured:
            self.verdict, self.replica = self.replica.judge(), None


VALUES = {"threads": 1, "autocast": "bfloat16", "fused_optimizer": "fused"}


def lever(apply, name="one"):
    asked = Moment.STEP, Effect.ROUNDING, lambda facts, context: Options((True,)), lambda value: ""
    return Lever(name, *asked, apply=apply, live=True)


@contextmanager
def observed(*levers, **options):
    probe = ReplicaProbe(*levers, **options)
    probe.context.install()
    try:
        yield probe
    finally:
        probe.context.stop_observing()
        probe.context.ledger.restore()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8 * 16, 5)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        return self.head(self.drop(x.flatten(1)))


def descend(model, optimizer, batch, loss_of, steps=STEPS):
    """Returns the losses as hexadecimal floats."""
    losses = []
    for _ in range(steps):
        given = batch()
        optimizer.zero_grad()
        loss = loss_of(*given)
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def sgd(model, **more):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **more})


def classify(adamw=True):
    """A small network with every component that may go wrong."""
    torch.manual_seed(0)
    model, criterion = Net(), nn.CrossEntropyLoss()
    if adamw:
        descent = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    else:
        descent = sgd(model, lr=0.02, momentum=0.9, weight_decay=1e-3)
    return descend(
        model,
        descent,
        lambda: (torch.randn(32, 3, 8, 8), torch.randint(5, (32,))),
        lambda x, y: criterion(model(x + y[:, None, None, None] / 4), y),
    )


def learns_classes(model, batch):
    """Plain descent of a model with the cross entropy."""
    return descend(model, sgd(model), batch, lambda x, y: nn.functional.cross_entropy(model(x), y))


def judged(one, program=classify, **options):
    with observed(one, **options) as probe:
        program()
    assert probe.verdict is not None
    return probe.verdict


def acts(function):
    """``function(context, ledger)`` as what a lever applies."""
    return lambda context, value, ledger: (function(context, ledger), ledger.restore)[1]


def around(wrapper):
    """A wrapper of the forward pass of each root module."""
    return lambda context, value, ledger: known_bad_levers.around(context, wrapper, ledger)


def failed(verdict):
    return {check["name"] for check in verdict["checks"] if not check["passed"]}


# -- sound levers


@pytest.mark.parametrize("name", ["threads", "channels_last", "autocast", "fused_optimizer"])
def test_a_sound_lever_of_the_shelf_passes(name):
    verdict = judged(SHELF[name])
    assert not failed(verdict), verdict
    assert verdict["noise"] > 0


def test_levers_act_in_the_order_of_the_table_whatever_their_value():
    order = []

    def noting(name):
        return lever(acts(lambda *_: order.append(name)), name)

    with observed(noting("first"), noting("second")) as probe:
        probe.choices.reverse()  # the most valuable first
        classify()
    assert probe.verdict is not None
    assert order
    assert order == ["first", "second"] * (len(order) // 2)


def whole_data():
    """Each batch holds all samples and steps are small, so the gradients of two batches are almost equal."""
    torch.manual_seed(0)
    model, criterion = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5)), nn.CrossEntropyLoss()
    batch = torch.randn(16, 12), torch.randint(0, 5, (16,))
    descend(model, sgd(model, lr=1e-4), lambda: batch, lambda x, y: criterion(model(x), y))


def test_half_precision_passes_though_all_batches_are_equal():
    verdict = judged(SHELF["autocast"], whole_data)
    assert not failed(verdict), verdict


def scaled(factor):
    return around(lambda forward: lambda *args: factor * forward(*args))


@pytest.mark.parametrize("program", [classify, whole_data])
def test_outputs_that_are_one_per_cent_too_small_are_no_rounding(program):
    assert "outputs" in failed(judged(lever(scaled(0.99)), program))


class Noisy(nn.Module):
    """It adds noise to its input, as a diffusion model or a variational autoencoder does."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5))
        self.unused = nn.Linear(2, 2)  # no gradient ever

    def forward(self, x):
        return self.body(x + torch.randn_like(x))


def denoise():
    torch.manual_seed(0)
    learns_classes(Noisy(), lambda: (torch.randn(16, 12), torch.randint(0, 5, (16,))))


def test_a_model_that_draws_random_numbers_is_compared_with_float64():
    verdict = judged(SHELF["autocast"], denoise)
    assert not failed(verdict), verdict
    whys = {check["name"]: check["why"] for check in verdict["checks"]}
    assert "from float64, plain float32" in whys["outputs"]


class Attends(nn.Module):
    """Hand-written attention with a causal mask."""

    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(12, 36), nn.Linear(12, 5)
        self.register_buffer("mask", torch.ones(9, 9).tril())

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.transpose(-2, -1)).masked_fill(self.mask == 0, float("-inf")).softmax(-1)
        return self.head(weights @ v)


def attend():
    torch.manual_seed(0)
    model = Attends()
    descend(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        lambda: (torch.randn(16, 9, 12),),
        lambda x: nn.functional.cross_entropy(
            model(x).flatten(0, 1), x[..., :5].cumsum(1).argmax(-1).flatten()
        ),
    )


def test_fused_attention_passes_and_one_with_another_scale_does_not():
    verdict = judged(SHELF["attention"], attend)
    assert not failed(verdict), verdict
    assert verdict["smooth"]
    assert "outputs" in failed(judged(lever(KNOWN_BAD["attention"]), attend))


def test_no_lever_passes_where_the_programs_own_gradients_are_nan():
    with pytest.MonkeyPatch.context() as patch:
        plain = nn.CrossEntropyLoss.forward
        patch.setattr(nn.CrossEntropyLoss, "forward", lambda *a: plain(*a) * math.nan)
        verdict = judged(lever(NOTHING))
    (check,) = verdict["checks"]
    assert not check["passed"]
    assert check["why"] == "the program's own gradients are NaN or infinite, so rounding cannot be checked"


class Spotted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop = nn.Conv2d(3, 8, 3), nn.Dropout(0.4)
        self.second, self.top = nn.Conv2d(8, 8, 3), nn.Linear(8, 5)

    def forward(self, x):
        x = nn.functional.dropout(self.drop(self.first(x).relu()), 0.2, self.training)
        return self.top(self.second(x).relu().mean((2, 3)))


def test_dropout_of_images_has_the_same_mask_in_another_memory_format():
    def program():
        torch.manual_seed(0)
        learns_classes(Spotted(), lambda: (torch.randn(8, 3, 12, 12), torch.randint(5, (8,))))

    verdict = judged(SHELF["channels_last"], program)
    assert not failed(verdict), verdict


def with_lbfgs():
    torch.manual_seed(0)
    model, criterion = nn.Linear(8, 5), nn.CrossEntropyLoss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    for _ in range(STEPS):
        x, y = torch.randn(32, 8), torch.randint(5, (32,))

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def test_an_optimizer_that_needs_a_closure_is_judged_by_its_gradients():
    assert not failed(judged(lever(NOTHING), with_lbfgs))
    names = {check["name"] for check in judged(lever(NOTHING), with_lbfgs)["checks"]}
    assert "gradient" in names
    assert "update" not in names
    assert "outputs" in failed(judged(lever(scaled(0.99)), with_lbfgs))


def test_doing_nothing_passes_with_no_difference():
    verdict = judged(lever(NOTHING))
    assert not failed(verdict)
    of_halves = {"resolution", "flushed", "bits", "saturated"}
    assert {c["name"] for c in verdict["checks"]} == {
        "outputs",
        "gradient",
        "parameters",
        "clipping",
        "update",
        "bias",
        "buffers",
        "later gradient",
        *of_halves,
        *(f"later {name}" for name in of_halves),
    }


def gradients(change, at=slice(None)):
    @acts
    def apply(context, ledger):
        for p in context.parameters[at]:
            ledger.on_restore("hook", p.register_hook(change).remove)

    return apply


def test_noise_like_that_of_bfloat16_on_the_gradients_passes():
    draw = torch.Generator().manual_seed(5)
    noisy = gradients(lambda g: g * (1 + (torch.rand(g.shape, generator=draw) - 0.5) * 2.0**-8))
    assert not failed(judged(lever(noisy)))


# -- broken levers, each with the comparison that must detect it


def group(**settings):
    @acts
    def apply(context, ledger):
        for held in [held for optimizer in context.optimizers for held in optimizer.param_groups]:
            for key, setting in settings.items():
                ledger.set_item(held, key, setting)

    return apply


def module(name, **settings):
    @acts
    def apply(context, ledger):
        for root in context.roots:
            for key, setting in settings.items():
                ledger.set(getattr(root, name), key, setting)

    return apply


@acts
def running_statistics_in_bfloat16(context, ledger):
    def rounded(norm, args, output):
        for held in (norm.running_mean.data, norm.running_var.data):
            held.copy_(held.bfloat16())

    for root in context.roots:
        ledger.on_restore("forward hook", root.norm.register_forward_hook(rounded).remove)


def stepping(step):
    """``step(really, count)`` in place of each update, where ``count`` is its number."""

    @acts
    def apply(context, ledger):
        for optimizer in context.optimizers:
            count = itertools.count(1)
            ledger.set(
                optimizer,
                "step",
                lambda really=optimizer.step, count=count: step(really, next(count)),
                new=True,
            )

    return apply


def skip_every(every):
    return stepping(lambda really, count: really() if count % every else None)


def eight_bits(g):
    step = g.abs().max() / 127
    return (g / step).round() * step


@pytest.mark.parametrize(
    ("apply", "seen_by"),
    [
        (gradients(lambda g: 1.05 * g), "gradient"),
        (gradients(eight_bits), "gradient"),
        (gradients(lambda g: g * 0, slice(-1, None)), "parameters"),  # one bias
        (gradients(lambda g: g + 0.3 * g.flip(0), slice(0, 1)), "parameters"),  # one tensor
        (gradients(lambda g: g * float("nan"), slice(0, 1)), "gradient"),
        (gradients(lambda g: g * float("nan"), slice(0, 1)), "parameters"),  # and the later ones are right
        (group(lr=2e-3), "update"),
        (group(weight_decay=0.0), "update"),
        (group(betas=(0.9, 0.99)), "update"),
        (skip_every(4), "update"),
        (skip_every(10), "update"),
        (module("drop", p=0.0), "outputs"),
        (module("norm", momentum=0.0), "buffers"),
        (module("norm", momentum=0.2), "buffers"),
        (running_statistics_in_bfloat16, "buffers"),
        (module("norm", training=False), "outputs"),
    ],
)
def test_a_broken_lever_fails_where_it_is_broken(apply, seen_by):
    verdict = judged(lever(apply))
    assert seen_by in failed(verdict), verdict


def test_lost_clipping_fails():
    @acts
    def apply(context, ledger):
        ledger.set(torch.nn.utils, "clip_grad_norm_", lambda parameters, *args, **kwargs: torch.zeros(()))

    assert failed(judged(lever(apply))) == {"clipping"}


def test_a_nan_in_the_last_clipped_gradient_fails():
    clip = torch.nn.utils.clip_grad_norm_

    @acts
    def apply(context, ledger):
        def with_nan(parameters, *args, **kwargs):
            parameters = list(parameters)
            norm = clip(parameters, *args, **kwargs)
            parameters[-1].grad.fill_(float("nan"))
            return norm

        ledger.set(torch.nn.utils, "clip_grad_norm_", with_nan)

    assert failed(judged(lever(apply))) == {"clipping"}


def test_an_output_more_than_in_the_plain_step_fails():
    more = around_forward(lambda output: (output, output.detach().sum()))
    assert "outputs" in failed(judged(lever(more)))


# Exact levers are compared bit for bit, and levers that are not live get no replica.
NO_REPLICA_HERE = {
    **dict.fromkeys(("attention", "fused_ops"), "this network has no layer that they replace"),
    "gradient_buckets": "there is one rank",
    "memory_budget": "half of the bits of saved tensors is within the noise of these batches",
}


@pytest.mark.parametrize(
    "name",
    [
        one.name
        for one in TABLE
        if one.live and one.effect is not Effect.EXACT and one.name not in NO_REPLICA_HERE
    ],
)
def test_the_known_bad_of_a_lever_fails(name):
    """In a comparison: an error of the lever itself ("levers") would show nothing."""
    assert failed(judged(lever(KNOWN_BAD[name]))) - {"levers"}


def test_lost_momentum_fails():
    apply = acts(lambda context, ledger: [optimizer.state.clear() for optimizer in context.optimizers])
    assert "update" in failed(judged(lever(apply), lambda: classify(adamw=False)))


def test_a_lever_that_breaks_the_step_fails_with_its_error():
    verdict = judged(lever(around(lambda forward: lambda *args: 1 / 0)))
    assert failed(verdict) == {"levers"}
    assert "ZeroDivisionError" in verdict["checks"][0]["why"]


def test_a_lever_that_cannot_be_applied_fails_and_is_named():
    def apply(context, value, ledger):
        raise LookupError("nothing to hold on to")

    verdict = judged(lever(apply, "clumsy"))
    assert "clumsy: LookupError: nothing to hold on to" in verdict["checks"][0]["why"]


# -- half precision


class Task(nn.Module):
    """Computes its own loss from log_softmax and returns ``beside`` together with it."""

    def __init__(self, beside=False):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(12, 48), nn.LayerNorm(48), nn.Linear(48, 6)
        self.beside = beside

    def forward(self, x, y):
        logits = self.head(self.norm(self.inner(x).tanh()))
        loss = -nn.functional.log_softmax(logits, -1).gather(1, y[:, None]).mean()
        return (logits, loss) if self.beside else loss


def task(beside=False):
    """Trains a Task; returns the gradients of each step."""
    torch.manual_seed(0)
    model, seen = Task(beside), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(
        lambda *_: seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    )

    def batch():
        x = torch.randn(64, 12)
        return x, (x[:, :6] + 0.3 * torch.randn(64, 6)).argmax(1)

    descend(model, optimizer, batch, lambda x, y: model(x, y)[1] if beside else model(x, y))
    return seen


def around_forward(change):
    """Changes the output of the root module."""
    return around(lambda forward: lambda *args, **kwargs: change(forward(*args, **kwargs)))


def other_log_softmax(other):
    """Replaces log_softmax while a root module runs."""

    def wrapper(forward):
        def inside(*args, **kwargs):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(nn.functional, "log_softmax", lambda x, dim=-1, **_: other(x))
                return forward(*args, **kwargs)

        return inside

    return around(wrapper)


def unshifted(x, largest):
    x = x.clamp(max=largest)
    return x - x.exp().sum(-1, keepdim=True).log()


class ShortGradient(torch.autograd.Function):
    """A log_softmax whose gradient p - 1 is zero where p is nearly 1."""

    @staticmethod
    def forward(ctx, x):
        found = torch.log_softmax(x, -1)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx, grad):
        (found,) = ctx.saved_tensors
        total = grad.sum(-1, keepdim=True)
        share = found.exp()
        return grad - share.where(share < 0.98, 1.0) * total


def late_flush(context, value, ledger):
    """From the twelfth update on, small elements of the gradient are zero."""
    updates = [0]

    def counted(really, count):
        updates[0] = count
        really()

    def flush(g):
        return torch.where(g.abs() < 2.0**-6 * g.abs().max(), 0.0, g) if updates[0] >= 12 else g

    stepping(counted)(context, value, ledger)
    return gradients(flush)(context, value, ledger)


@pytest.mark.parametrize("name", ["autocast", "reduced_precision", "threads", "fused_optimizer"])
def test_sound_half_precision_passes_where_the_module_computes_its_loss(name):
    verdict = judged(SHELF[name], task)
    assert not failed(verdict), verdict
    assert "confident of these samples" in next(
        c["why"] for c in verdict["checks"] if c["name"] == "later gradient"
    )


@pytest.mark.parametrize(
    ("apply", "program", "seen_by"),
    [
        (around_forward(lambda loss: loss.bfloat16().float()), task, "resolution"),
        (around_forward(lambda loss: loss.half().float()), task, "resolution"),
        (gradients(lambda g: torch.where(g.abs() < 2.0**-6 * g.abs().max(), 0.0, g)), task, "flushed"),
        (gradients(lambda g: g.to(torch.float8_e4m3fn).float()), task, "bits"),
        (around_forward(lambda x: x.clamp(-0.2, 0.2)), classify, "saturated"),
        (gradients(lambda g: g.clamp(-1e-3, 1e-3)), task, "saturated"),
    ],
)
def test_broken_half_precision_fails_where_it_is_broken(apply, program, seen_by):
    verdict = judged(lever(apply), program)
    assert seen_by in failed(verdict), verdict


@pytest.mark.parametrize(
    "apply",
    [
        late_flush,
        other_log_softmax(lambda x: unshifted(x, 2.5)),
        other_log_softmax(ShortGradient.apply),
    ],
)
def test_a_late_failure_is_detected_by_the_later_step(apply):
    verdict = judged(lever(apply), task)
    assert failed(verdict), [(c["name"], c["value"], c["limit"]) for c in verdict["checks"]]
    assert all(name.startswith("later ") for name in failed(verdict)), verdict


class Scales(nn.Module):
    """A table of equal weights, most of them unused: weight decay rounds them all alike."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Parameter(torch.ones(1000, 10)), nn.Linear(10, 5)

    def forward(self, x):
        return self.head(x * self.table[0])


def test_a_program_whose_own_rounding_is_biased_blames_no_lever():
    def program():
        torch.manual_seed(0)
        model, criterion = Scales(), nn.CrossEntropyLoss()
        descend(
            model,
            sgd(model, momentum=0.9, weight_decay=5e-4),
            lambda: (torch.randn(16, 10), torch.randint(5, (16,))),
            lambda x, y: criterion(model(x), y),
        )

    assert not failed(judged(lever(NOTHING), program))


def eleven_weights():
    """Fewer elements than the chance limit's square: a bias must not count as their scatter."""
    torch.manual_seed(0)
    model = nn.Linear(10, 1)
    for p in model.parameters():
        nn.init.constant_(p, 0.7)  # every weight has the same unit in the last place
    descend(
        model,
        sgd(model, lr=0.02, momentum=0.9),
        lambda: (torch.randn(64, 10), torch.randn(64, 1)),
        lambda x, y: nn.functional.mse_loss(model(x), y),
    )


@pytest.mark.parametrize("program", [classify, eleven_weights])
def test_a_bias_of_one_unit_in_the_last_place_per_step_does_not_average_away(program):
    def apply(context, ledger):
        def upwards(optimizer, *_):
            with torch.no_grad():
                for p in (p for group in optimizer.param_groups for p in group["params"]):
                    p.copy_(torch.nextafter(p, torch.full_like(p, torch.inf)))

        for optimizer in context.optimizers:
            ledger.on_restore("hook", optimizer.register_step_post_hook(upwards).remove)

    assert failed(judged(lever(acts(apply)), program)) == {"bias"}


SLOW_MS = 9000.0  # a step of this length is replayed with 16 of 32 samples


@pytest.mark.parametrize("name", ["channels_last", "autocast", "fused_optimizer", "threads"])
def test_long_steps_judge_levers_on_part_of_the_batch(name, monkeypatch):
    sizes, really = [], Net.forward
    monkeypatch.setattr(Net, "forward", lambda self, x: (sizes.append(len(x)), really(self, x))[1])
    sound = judged(SHELF[name], step_ms=SLOW_MS)
    monkeypatch.undo()
    broken = judged(lever(KNOWN_BAD[name]), step_ms=SLOW_MS)
    assert not failed(sound), sound
    assert failed(broken), broken
    assert set(sizes) == {8, 16, 32}  # also half of the part
    assert sizes.count(32) == STEPS


@pytest.mark.parametrize("accepted", [{32}, {16, 32}])
def test_a_module_that_needs_its_whole_batch_is_replayed_with_all_of_it(accepted, monkeypatch):
    """Also one that accepts the part but not half of it, from which the error of the whole is estimated."""
    sizes, really = [], Net.forward

    def forward(self, x):
        assert len(x) in accepted
        sizes.append(len(x))
        return really(self, x)

    monkeypatch.setattr(Net, "forward", forward)
    assert not failed(judged(SHELF["channels_last"], step_ms=SLOW_MS))
    assert sizes.count(32) > STEPS
    assert failed(judged(lever(KNOWN_BAD["channels_last"]), step_ms=SLOW_MS))


def test_a_late_replica_detects_failures_that_the_early_one_cannot():
    def surer():
        """Its root module returns log-probabilities, and the program computes the loss."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 6), LogSoftmax())
        descend(
            model,
            torch.optim.Adam(model.parameters(), lr=0.03),
            lambda: (torch.randn(64, 12),),
            lambda x: nn.functional.nll_loss(model(x), x[:, :6].argmax(1)),
            steps=200,
        )

    saturating = lever(other_log_softmax(lambda x: unshifted(x, 5.0)))
    assert not failed(judged(saturating, surer))
    assert failed(judged(saturating, surer, start=180)) >= {"gradient"}
    assert not failed(judged(SHELF["autocast"], surer, start=180))


class LogSoftmax(nn.Module):
    def forward(self, x):
        return nn.functional.log_softmax(x, -1)


def test_a_loss_returned_with_the_logits_counts_once():
    taken = []
    with observed(lever(gradients(lambda g: taken.append(g.clone())))) as probe:
        seen = task(beside=True)
    assert probe.verdict is not None
    first = taken[: len(seen[0])]
    assert all(
        any(a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-8) for b in first)
        for a in seen[START]
    )


# -- the observed program


def test_recording_and_judging_change_nothing_in_the_program():
    alone = classify()
    with observed(SHELF["channels_last"]) as probe:
        together = classify()
    assert probe.verdict is not None
    assert together == alone


def test_a_program_without_an_optimizer_object_is_judged_by_its_gradients():
    def by_hand():
        torch.manual_seed(0)
        model = nn.LSTM(6, 12)
        state = None
        for _ in range(STEPS):
            x = torch.randn(5, 8, 6)
            model.zero_grad()
            output, state = model(x, state)
            state = tuple(part.detach() for part in state)
            (output[..., :6] - x).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)

    assert not failed(judged(SHELF["threads"], by_hand))
    verdict = judged(lever(gradients(lambda g: g * 0, slice(0, 1))), by_hand)
    assert failed(verdict) >= {"gradient", "parameters", "flushed"}


def test_a_program_in_float64_must_agree_far_beyond_single_precision():
    def double():
        torch.manual_seed(0)
        model = nn.Linear(6, 1).double()
        descend(
            model,
            sgd(model),
            lambda: (torch.randn(8, 6, dtype=torch.float64),),
            lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean(),
        )

    assert not failed(judged(SHELF["threads"], double))
    assert failed(judged(lever(gradients(lambda g: g * 1.02)), double)) == {"gradient", "parameters"}


def test_infinities_of_a_mask_in_the_outputs_are_no_error():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 4)

        def forward(self, x):
            return self.head(x).masked_fill(torch.tensor([False, False, False, True]), float("-inf"))

    def program():
        torch.manual_seed(0)
        learns_classes(Masked(), lambda: (torch.randn(8, 6), torch.randint(3, (8,))))

    assert not failed(judged(SHELF["threads"], program))


@pytest.mark.parametrize("where", ["forward", "optimizer"])
def test_running_out_of_memory_in_the_replica_blames_no_lever(where):
    def apply(context, value, ledger):
        def full(*_):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        handles = (
            [each.register_forward_pre_hook(full) for each in context.roots]
            if where == "forward"
            else [each.register_step_pre_hook(full) for each in context.optimizers]
        )
        return lambda: [handle.remove() for handle in handles]

    verdict = judged(lever(apply))
    assert "checks" not in verdict
    assert "too little memory" in verdict["failure"]


@pytest.mark.parametrize("right", [True, False])
def test_with_too_little_memory_part_of_the_batch_is_judged(right):
    def apply(context, value, ledger):
        def full(module, args):
            if len(args[0]) > 16:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        handles = [root.register_forward_pre_hook(full) for root in context.roots]
        if not right:
            handles += [p.register_hook(lambda grad: 1.05 * grad) for p in context.parameters]
        return lambda: [handle.remove() for handle in handles]

    def program():
        torch.manual_seed(0)
        learns_classes(nn.Linear(8, 5), lambda: (torch.randn(64, 8), torch.randint(5, (64,))))

    assert ("gradient" in failed(judged(lever(apply), program))) is not right


def test_too_little_memory_for_float64_does_not_leave_the_reference_out():
    class Net(nn.Linear):
        def forward(self, x):
            if x.dtype == torch.float64 and len(x) > 16:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().forward(x)

    def program():
        torch.manual_seed(0)
        learns_classes(Net(8, 5), lambda: (torch.randn(64, 8), torch.randint(5, (64,))))

    checks = judged(SHELF["fused_optimizer"], program)["checks"]
    assert "against float64" in next(check["why"] for check in checks if check["name"] == "gradient")


def test_a_module_that_keeps_its_last_loss_is_judged():
    """A tensor with a graph, which torch does not copy: as an attribute, and deep in an object of the module."""

    class Keeps(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            self.last = output.square().mean()
            self.kept = {"losses": [self.last * 2]}
            return output

    def program():
        torch.manual_seed(0)
        learns_classes(Keeps(8, 5), lambda: (torch.randn(32, 8), torch.randint(5, (32,))))

    assert not failed(judged(SHELF["fused_optimizer"], program))
    assert "update" in failed(judged(lever(group(lr=2e-3)), program))


def test_a_program_whose_module_is_never_called_gets_an_explanation():
    def bare():
        weights = torch.zeros(3, requires_grad=True)
        optimizer = torch.optim.SGD([weights], lr=0.1)
        for _ in range(STEPS + 12):
            optimizer.zero_grad()
            (weights - 1).square().sum().backward()
            optimizer.step()

    with observed(SHELF["threads"]) as probe:
        bare()
    assert probe.verdict is not None
    assert "no root module of this program" in probe.verdict["failure"]

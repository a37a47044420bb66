"""The step replica inside a real training loop: sound levers pass, and broken ones fail in the comparison
meant for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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

SHELF = {lever.name: lever for lever in TABLE}
START = 3  # the step after which the replica begins to record
STEPS = 18


class ReplicaProbe(Listener):
    """Observes a loop, passes its events to a replica, and keeps the replica's result."""

    def __init__(
        self, *levers: Lever, start: int = START, step_ms: float = 0.0, bitwise: bool = False
    ) -> None:
        self.start, self.step_ms, self.bitwise = start, step_ms, bitwise
        self.context = TrainingContext(torch, self, Ledger())
        self.applier = Applier(levers, Facts(cores=2), self.context)
        self.choices = [Choice(lever.name, VALUES.get(lever.name, True)) for lever in levers]
        self.replica: StepReplica | None = None
        self.verdict: dict[str, Any] | None = None

    def forward_begin(self, root: Any, args: tuple, kwargs: dict) -> None:
        if self.replica is not None:
            self.replica.forward_begin(root, args, kwargs)

    def forward_end(self, root: Any, output: Any) -> None:
        if self.replica is not None:
            self.replica.forward_end(root, output)

    def optimizer_begin(self, optimizer: Any) -> None:
        if self.replica is not None:
            self.replica.optimizer_begin(optimizer)

    def step_end(self) -> None:
        if self.context.steps == self.start:
            self.replica = StepReplica(self.context, self.applier, self.choices, self.step_ms)
        elif self.replica is not None and self.replica.captured:
            self.verdict, self.replica = self.replica.judge(bitwise=self.bitwise), None


VALUES: dict[str, Any] = {
    "threads": 1,
    "autocast": "bfloat16",
    "fused_optimizer": "fused",
    "reduced_precision": True,
}


def lever(apply: Callable[[Any, Any, Any], Any], name: str = "one") -> Lever:
    return Lever(
        name,
        Moment.STEP,
        Effect.ROUNDING,
        lambda facts, context: Options((True,)),
        lambda value: "",
        apply=apply,
        live=True,
    )


@contextmanager
def observed(
    *levers: Lever, start: int = START, step_ms: float = 0.0, bitwise: bool = False
) -> Iterator[ReplicaProbe]:
    probe = ReplicaProbe(*levers, start=start, step_ms=step_ms, bitwise=bitwise)
    probe.context.install()
    try:
        yield probe
    finally:
        probe.context.rest()
        probe.context.ledger.restore()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        return self.head(self.drop(x.flatten(1)))


def classify(optimizer: str = "adamw", steps: int = STEPS) -> list[str]:
    """A small network with every component that may go wrong; returns its losses as hexadecimal floats."""
    torch.manual_seed(0)
    model, criterion = Net(), nn.CrossEntropyLoss()
    if optimizer == "adamw":
        descent: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    else:
        descent = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(32, 3, 8, 8), torch.randint(5, (32,))
        descent.zero_grad()
        loss = criterion(model(x + y[:, None, None, None] / 4), y)
        loss.backward()
        descent.step()
        losses.append(loss.item().hex())
    return losses


def judged(
    one: Lever,
    program: Callable[[], Any] = classify,
    start: int = START,
    step_ms: float = 0.0,
    bitwise: bool = False,
) -> dict[str, Any]:
    with observed(one, start=start, step_ms=step_ms, bitwise=bitwise) as probe:
        program()
    assert probe.verdict is not None
    return probe.verdict


def failed(verdict: dict[str, Any]) -> set[str]:
    return {check["name"] for check in verdict["checks"] if not check["passed"]}


# -- sound levers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["threads", "channels_last", "autocast", "fused_optimizer"])
def test_a_sound_lever_of_the_shelf_passes(name: str) -> None:
    verdict = judged(SHELF[name])
    assert not failed(verdict), verdict
    assert verdict["noise"] > 0


def test_levers_act_in_the_order_of_the_table_whatever_their_value() -> None:
    order: list[str] = []

    def noting(name: str) -> Lever:
        return lever(lambda context, value, ledger: (order.append(name), ledger.restore)[1], name)

    with observed(noting("first"), noting("second")) as probe:
        probe.choices.reverse()  # the most valuable first
        classify()
    assert probe.verdict is not None
    assert order
    assert order == ["first", "second"] * (len(order) // 2)


class Noisy(nn.Module):
    """It adds noise to its input, as a diffusion model or a variational autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5))
        self.unused = nn.Linear(2, 2)  # no gradient ever

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x + torch.randn_like(x))


def denoise() -> None:
    torch.manual_seed(0)
    model = Noisy()
    descent = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x, y = torch.randn(16, 12), torch.randint(0, 5, (16,))
        loss = nn.functional.cross_entropy(model(x), y)
        descent.zero_grad()
        loss.backward()
        descent.step()


def test_a_model_that_draws_random_numbers_is_compared_with_float64() -> None:
    verdict = judged(SHELF["autocast"], denoise)
    assert not failed(verdict), verdict
    whys = {check["name"]: check["why"] for check in verdict["checks"]}
    assert "from float64, plain float32" in whys["outputs"]


class Attends(nn.Module):
    """Hand-written attention with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(12, 36), nn.Linear(12, 5)
        self.register_buffer("mask", torch.ones(9, 9).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.transpose(-2, -1)).masked_fill(self.mask == 0, float("-inf")).softmax(-1)
        return self.head(weights @ v)


def attend() -> None:
    torch.manual_seed(0)
    model = Attends()
    descent = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        x = torch.randn(16, 9, 12)
        descent.zero_grad()
        nn.functional.cross_entropy(
            model(x).flatten(0, 1), x[..., :5].cumsum(1).argmax(-1).flatten()
        ).backward()
        descent.step()


def test_fused_attention_passes_and_one_with_another_scale_does_not() -> None:
    verdict = judged(SHELF["attention"], attend)
    assert not failed(verdict), verdict
    assert verdict["smooth"]
    assert "outputs" in failed(judged(lever(KNOWN_BAD["attention"]), attend))


def test_no_lever_passes_where_the_programs_own_gradients_are_nan() -> None:
    with pytest.MonkeyPatch.context() as patch:
        plain = nn.CrossEntropyLoss.forward
        patch.setattr(nn.CrossEntropyLoss, "forward", lambda *a: plain(*a) * math.nan)
        verdict = judged(lever(lambda context, value, ledger: ledger.restore))
    (check,) = verdict["checks"]
    assert not check["passed"]
    assert check["why"] == "the program's own gradients are NaN or infinite, so rounding cannot be checked"


def test_doing_nothing_passes_with_no_difference() -> None:
    verdict = judged(lever(lambda context, value, ledger: ledger.restore))
    assert not failed(verdict)
    of_halves = {"resolution", "flushed", "bits", "saturated"}
    assert {c["name"] for c in verdict["checks"]} == {
        "outputs",
        "gradient",
        "parameters",
        "clipping",
        "update",
        "buffers",
        "later gradient",
        *of_halves,
        *(f"later {name}" for name in of_halves),
    }


def test_noise_like_that_of_bfloat16_on_the_gradients_passes() -> None:
    def apply(context: Any, value: Any, ledger: Any) -> Any:
        draw = torch.Generator().manual_seed(5)
        for p in context.parameters:
            ledger.call(
                "hook",
                p.register_hook(
                    lambda g: g * (1 + (torch.rand(g.shape, generator=draw) - 0.5) * 2.0**-8)
                ).remove,
            )
        return ledger.restore

    assert not failed(judged(lever(apply)))


# -- broken levers, each with the comparison that must detect it -------------------------------------------------------------


def gradients(
    change: Callable[[torch.Tensor], torch.Tensor], at: slice = slice(None)
) -> Callable[[Any, Any, Any], Any]:
    def apply(context: Any, value: Any, ledger: Any) -> Any:
        for p in context.parameters[at]:
            ledger.call("hook", p.register_hook(change).remove)
        return ledger.restore

    return apply


def group(**settings: Any) -> Callable[[Any, Any, Any], Any]:
    def apply(context: Any, value: Any, ledger: Any) -> Any:
        for optimizer in context.optimizers:
            for held in optimizer.param_groups:
                for key, setting in settings.items():
                    ledger.set_item(held, key, setting)
        return ledger.restore

    return apply


def module(name: str, **settings: Any) -> Callable[[Any, Any, Any], Any]:
    def apply(context: Any, value: Any, ledger: Any) -> Any:
        for root in context.roots:
            for key, setting in settings.items():
                ledger.set(getattr(root, name), key, setting)
        return ledger.restore

    return apply


def running_statistics_in_bfloat16(context: Any, value: Any, ledger: Any) -> Any:
    def rounded(norm: Any, args: Any, output: Any) -> None:
        for held in (norm.running_mean.data, norm.running_var.data):
            held.copy_(held.bfloat16())

    for root in context.roots:
        ledger.call("forward hook", root.norm.register_forward_hook(rounded).remove)
    return ledger.restore


def skip_every(count: int) -> Callable[[Any, Any, Any], Any]:
    def apply(context: Any, value: Any, ledger: Any) -> Any:
        for optimizer in context.optimizers:
            calls = [0]

            def sometimes(really: Any = optimizer.step, calls: Any = calls) -> None:
                calls[0] += 1
                if calls[0] % count:
                    really()

            ledger.set(optimizer, "step", sometimes, new=True)
        return ledger.restore

    return apply


def eight_bits(g: torch.Tensor) -> torch.Tensor:
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
def test_a_broken_lever_fails_where_it_is_broken(apply: Any, seen_by: str) -> None:
    verdict = judged(lever(apply))
    assert seen_by in failed(verdict), verdict


def test_lost_clipping_fails() -> None:
    def apply(context: Any, value: Any, ledger: Any) -> Any:
        ledger.set(torch.nn.utils, "clip_grad_norm_", lambda parameters, *args, **kwargs: torch.zeros(()))
        return ledger.restore

    assert failed(judged(lever(apply))) == {"clipping"}


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
def test_the_known_bad_of_a_lever_fails(name: str) -> None:
    """In a comparison: an error of the lever itself ("levers") would show nothing."""
    assert failed(judged(lever(KNOWN_BAD[name]))) - {"levers"}


def test_lost_momentum_fails() -> None:
    def apply(context: Any, value: Any, ledger: Any) -> Any:
        for optimizer in context.optimizers:
            optimizer.state.clear()
        return ledger.restore

    assert "update" in failed(judged(lever(apply), lambda: classify("sgd")))


def test_a_lever_that_breaks_the_step_fails_with_its_error() -> None:
    def apply(context: Any, value: Any, ledger: Any) -> Any:
        for root in context.roots:
            context.wrap_forward(root, lambda forward: lambda *args: 1 / 0, ledger)
        return ledger.restore

    verdict = judged(lever(apply))
    assert failed(verdict) == {"levers"}
    assert "ZeroDivisionError" in verdict["checks"][0]["why"]


def test_a_lever_that_cannot_be_applied_fails_and_is_named() -> None:
    def apply(context: Any, value: Any, ledger: Any) -> Any:
        raise LookupError("nothing to hold on to")

    verdict = judged(lever(apply, "clumsy"))
    assert "clumsy: LookupError: nothing to hold on to" in verdict["checks"][0]["why"]


# -- half precision -------------------------------------------------------------------------------------------------------


class Task(nn.Module):
    """Computes its own loss from log_softmax and returns ``beside`` together with it."""

    def __init__(self, beside: bool = False) -> None:
        super().__init__()
        self.inner, self.norm, self.head, self.beside = (
            nn.Linear(12, 48),
            nn.LayerNorm(48),
            nn.Linear(48, 6),
            beside,
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = self.head(self.norm(self.inner(x).tanh()))
        loss = -nn.functional.log_softmax(logits, -1).gather(1, y[:, None]).mean()
        return (logits, loss) if self.beside else loss


def task(beside: bool = False, steps: int = STEPS) -> list[list[torch.Tensor]]:
    """Trains a Task; returns the gradients of each step."""
    torch.manual_seed(0)
    model, seen = Task(beside), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        x = torch.randn(64, 12)
        y = (x[:, :6] + 0.3 * torch.randn(64, 6)).argmax(1)
        optimizer.zero_grad()
        output = model(x, y)
        (output[1] if beside else output).backward()
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return seen


def around_forward(change: Callable[[Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Changes the output of the root module."""

    def apply(context: Any, value: Any, ledger: Any) -> Any:
        for root in context.roots:
            context.wrap_forward(
                root, lambda forward: lambda *args, **kwargs: change(forward(*args, **kwargs)), ledger
            )
        return ledger.restore

    return apply


def other_log_softmax(other: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, Any, Any], Any]:
    """Replaces log_softmax while a root module runs."""

    def apply(context: Any, value: Any, ledger: Any) -> Any:
        def wrapper(forward: Any) -> Any:
            def inside(*args: Any, **kwargs: Any) -> Any:
                really = nn.functional.log_softmax
                nn.functional.log_softmax = lambda x, dim=-1, **_: other(x)  # type: ignore[assignment]
                try:
                    return forward(*args, **kwargs)
                finally:
                    nn.functional.log_softmax = really

            return inside

        for root in context.roots:
            context.wrap_forward(root, wrapper, ledger)
        return ledger.restore

    return apply


def unshifted(x: torch.Tensor, largest: float) -> torch.Tensor:
    x = x.clamp(max=largest)
    return x - x.exp().sum(-1, keepdim=True).log()


class ShortGradient(torch.autograd.Function):
    """A log_softmax whose gradient p - 1 is zero where p is nearly 1."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        found = torch.log_softmax(x, -1)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (found,) = ctx.saved_tensors
        total = grad.sum(-1, keepdim=True)
        share = found.exp()
        return grad - share.where(share < 0.98, 1.0) * total


def late_flush(context: Any, value: Any, ledger: Any) -> Any:
    """From the twelfth update on, small elements of the gradient are zero."""
    updates = [0]
    for optimizer in context.optimizers:

        def counted(really: Any = optimizer.step) -> None:
            updates[0] += 1
            really()

        ledger.set(optimizer, "step", counted, new=True)

    def flush(g: torch.Tensor) -> torch.Tensor:
        return torch.where(g.abs() < 2.0**-6 * g.abs().max(), 0.0, g) if updates[0] >= 12 else g

    return gradients(flush)(context, value, ledger)


@pytest.mark.parametrize("name", ["autocast", "reduced_precision", "threads", "fused_optimizer"])
def test_sound_half_precision_passes_where_the_module_computes_its_loss(name: str) -> None:
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
def test_broken_half_precision_fails_where_it_is_broken(apply: Any, program: Any, seen_by: str) -> None:
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
def test_a_late_failure_is_detected_by_the_later_step(apply: Any) -> None:
    verdict = judged(lever(apply), task)
    assert failed(verdict), [(c["name"], c["value"], c["limit"]) for c in verdict["checks"]]
    assert all(name.startswith("later ") for name in failed(verdict)), verdict


SLOW_MS = 9000.0  # a step of this length is replayed with 16 of 32 samples


@pytest.mark.parametrize("name", ["channels_last", "autocast", "fused_optimizer", "threads"])
def test_long_steps_judge_levers_on_part_of_the_batch(name: str) -> None:
    sizes: list[int] = []

    def program() -> None:
        really, Net.forward = Net.forward, lambda self, x: (sizes.append(len(x)), really(self, x))[1]  # type: ignore[method-assign]
        try:
            classify()
        finally:
            Net.forward = really  # type: ignore[method-assign]

    sound, broken = (
        judged(SHELF[name], program, step_ms=SLOW_MS),
        judged(lever(KNOWN_BAD[name]), step_ms=SLOW_MS),
    )
    assert not failed(sound), sound
    assert failed(broken), broken
    assert set(sizes) == {8, 16, 32}  # also half of the part
    assert sizes.count(32) == STEPS


def test_a_module_that_needs_its_whole_batch_is_replayed_with_all_of_it() -> None:
    def program() -> None:
        really, Net.forward = Net.forward, lambda self, x: really(self, x.reshape(32, 3, 8, 8))  # type: ignore[method-assign]
        try:
            classify()
        finally:
            Net.forward = really  # type: ignore[method-assign]

    assert not failed(judged(SHELF["channels_last"], program, step_ms=SLOW_MS))
    assert failed(judged(lever(KNOWN_BAD["channels_last"]), program, step_ms=SLOW_MS))


def test_a_late_replica_detects_failures_that_the_early_one_cannot() -> None:
    def surer() -> None:
        """Its root module returns log-probabilities, and the program computes the loss."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 6), LogSoftmax())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
        for _ in range(200):
            x = torch.randn(64, 12)
            optimizer.zero_grad()
            nn.functional.nll_loss(model(x), x[:, :6].argmax(1)).backward()
            optimizer.step()

    saturating = lever(other_log_softmax(lambda x: unshifted(x, 5.0)))
    assert not failed(judged(saturating, surer))
    assert failed(judged(saturating, surer, start=180)) >= {"gradient"}
    assert not failed(judged(SHELF["autocast"], surer, start=180))


class LogSoftmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.log_softmax(x, -1)


def test_a_loss_returned_with_the_logits_counts_once() -> None:
    taken: list[torch.Tensor] = []

    def note(context: Any, value: Any, ledger: Any) -> Any:
        for p in context.parameters:
            ledger.call("hook", p.register_hook(lambda g: taken.append(g.clone())).remove)
        return ledger.restore

    with observed(lever(note)) as probe:
        seen = task(beside=True)
    assert probe.verdict is not None
    first = taken[: len(seen[0])]
    assert all(
        any(a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-8) for b in first)
        for a in seen[START]
    )


# -- the observed program ----------------------------------------------------------------------------------------------------


def test_recording_and_judging_change_nothing_in_the_program() -> None:
    alone = classify()
    with observed(SHELF["channels_last"]) as probe:
        together = classify()
    assert probe.verdict is not None
    assert together == alone


def test_a_program_without_an_optimizer_object_is_judged_by_its_gradients() -> None:
    def by_hand() -> None:
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


def test_a_program_in_float64_must_agree_far_beyond_single_precision() -> None:
    def double() -> None:
        torch.manual_seed(0)
        model = nn.Linear(6, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            x = torch.randn(8, 6, dtype=torch.float64)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()

    assert not failed(judged(SHELF["threads"], double))
    assert failed(judged(lever(gradients(lambda g: g * 1.02)), double)) == {"gradient", "parameters"}


def test_infinities_of_a_mask_in_the_outputs_are_no_error() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x).masked_fill(torch.tensor([False, False, False, True]), float("-inf"))

    def program() -> None:
        torch.manual_seed(0)
        model = Masked()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            x, y = torch.randn(8, 6), torch.randint(3, (8,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    assert not failed(judged(SHELF["threads"], program))


class Unsteady(nn.Module):
    """Rounds differently in each call, as sums by atomic additions do."""

    def __init__(self, moves: float) -> None:
        super().__init__()
        self.head, self.moves = nn.Linear(8, 5), moves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS[0] += 1
        return self.head(x) * (1 + self.moves * (CALLS[0] % 3))


CALLS = [0]


@pytest.mark.parametrize(
    ("moves", "one", "fails"),
    [
        (0.0, "nothing", set()),
        (0.0, "a little", {"bitwise"}),
        (1e-6, "nothing", set()),
        (1e-6, "much", {"gradient", "parameters"}),
    ],
)
def test_bits_are_compared_where_the_plain_step_repeats_its_own(
    moves: float, one: str, fails: set[str]
) -> None:
    def apply(context: Any, value: Any, ledger: Ledger) -> Any:
        share = {"nothing": 0.0, "a little": 1e-6, "much": 0.5}[one]
        handles = [p.register_hook(lambda grad: grad * (1 + share)) for p in context.parameters]
        return lambda: [handle.remove() for handle in handles]

    def program() -> None:
        torch.manual_seed(0)
        model = Unsteady(moves)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            x, y = torch.randn(32, 8), torch.randint(5, (32,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    assert failed(judged(lever(apply), program, bitwise=True)) >= fails
    assert bool(fails) == bool(failed(judged(lever(apply), program, bitwise=True)))


@pytest.mark.parametrize("where", ["forward", "optimizer"])
def test_running_out_of_memory_in_the_replica_blames_no_lever(where: str) -> None:
    def apply(context: Any, value: Any, ledger: Ledger) -> Any:
        def full(*_: Any) -> None:
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


def test_a_program_whose_module_is_never_called_gets_an_explanation() -> None:
    def bare() -> None:
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

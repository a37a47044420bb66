"""The levers of the guard's test bed: sound ones (to be accepted) and broken ones (to be rejected).

The measured programs import this module (a trial's ``table`` is "guard_levers:TABLE"). Each entry is an
ordinary Lever: it states where it applies, what it claims to change (its Effect), and how to apply it. A
broken lever claims the same as a faulty optimisation of that kind. The guard sees only records and checks,
never a name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from guard_data import always_flipped, kept_too_late, no_augmentation, no_flip, other_constants, same_crop
from guard_half import HALF_BAD, in_autocast
from guard_hidden import HIDDEN_BAD
from guard_tools import (
    EXACT,
    PRECISION,
    RESAMPLED,
    ROUNDING,
    When,
    anywhere,
    around_step,
    both,
    hook_gradients,
    in_script,
    lever_of,
    modules,
    with_group,
    with_images,
    with_layer,
    with_optimizer,
    with_out_of_place,
    with_transform,
    with_weights,
    without_tokens,
)
from provenance import ROOT

sys.path.append(str(ROOT / "tests"))
from known_bad_levers import KNOWN_BAD  # type: ignore[import-not-found]  # of tests

from flatout.levers import TABLE as SHELF
from flatout.schema.enums import Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo

OF_SHELF = {lever.name: lever for lever in SHELF}


# -- good ----------------------------------------------------------------------------------------------------


def bf16_like_noise(context: Any, value: Any, ledger: Any) -> Undo:
    """Changes every gradient element by up to 2^-9 of itself, like bfloat16; uses its own generator."""
    draw = context.torch.Generator(device=context.device_type).manual_seed(1)
    torch = context.torch
    return hook_gradients(
        context,
        ledger,
        lambda g: g * (1 + (torch.rand(g.shape, generator=draw, device=g.device) * 2 - 1) * 2.0**-9),
    )


def ten_bit_products(context: Any, value: Any, ledger: Any) -> Undo:
    """Rounds the inputs of linear and convolution layers to ten bits of mantissa, like TF32."""
    torch = context.torch

    def rounded(module: Any, args: tuple) -> tuple:
        (x, *rest) = args
        mantissa, exponent = torch.frexp(x.detach())
        return (x + (torch.ldexp((mantissa * 2048).round() / 2048, exponent) - x.detach()), *rest)

    for module in modules(context, "Linear", "Conv2d"):
        ledger.on_restore("forward hook", module.register_forward_pre_hook(rounded).remove)
    return ledger.restore


def zero_grad_none(context: Any, value: Any, ledger: Any) -> Undo:
    for optimizer in context.optimizers:
        zero_grad = optimizer.zero_grad
        ledger.set(
            optimizer,
            "zero_grad",
            lambda *_, zero_grad=zero_grad, **__: zero_grad(set_to_none=True),
            new=True,
        )
    return ledger.restore


# -- bad: gradients and forward ------------------------------------------------------------------------------


def dropout_off(context: Any, value: Any, ledger: Any) -> Undo:
    for module in modules(context, "Dropout"):
        ledger.set(module, "p", 0.0)
    for module in modules(context, "LSTM"):
        ledger.set(module, "dropout", 0.0)
    return ledger.restore


def stale_batchnorm(context: Any, value: Any, ledger: Any) -> Undo:
    """Stops the update of running statistics; training itself does not use them."""
    for module in modules(context, "BatchNorm"):
        ledger.set(module, "momentum", 0.0)
    return ledger.restore


def stale_gradient(context: Any, value: Any, ledger: Any) -> Undo:
    """Uses the gradient of the previous step in each step, like a faulty overlap."""

    def make(optimizer: Any, step: Callable) -> Callable:
        held: dict[Any, Any] = {}

        def late(*args: Any, **kwargs: Any) -> Any:
            for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
                p.grad, held[p] = held.get(p, p.grad), p.grad.clone()
            return step(*args, **kwargs)

        return late

    return around_step(context, ledger, make)


# -- bad: loss and loop --------------------------------------------------------------------------------------


def label_smoothing(context: Any, value: Any, ledger: Any) -> Undo:
    functional = context.torch.nn.functional
    really = functional.cross_entropy
    ledger.set(
        functional,
        "cross_entropy",
        lambda *args, **kwargs: really(*args, **{**kwargs, "label_smoothing": 0.1}),
    )
    return ledger.restore


def off_by_one_mean(context: Any, value: Any, ledger: Any) -> Undo:
    """Divides the mean over n samples by n - 1."""
    functional = context.torch.nn.functional
    for name in ("cross_entropy", "mse_loss", "nll_loss", "binary_cross_entropy"):
        really = getattr(functional, name)

        def wrong(x: Any, target: Any, *args: Any, really: Any = really, **kwargs: Any) -> Any:
            return really(x, target, *args, **kwargs) * (len(target) / max(1, len(target) - 1))

        ledger.set(functional, name, wrong)
    return ledger.restore


def zero_grad_lost(context: Any, value: Any, ledger: Any) -> Undo:
    """Starts every other step from the gradients of the previous step."""
    for owner in [*context.optimizers, *context.roots]:
        calls = [0]

        def sometimes(*args: Any, really: Any = owner.zero_grad, calls: Any = calls, **kwargs: Any) -> None:
            calls[0] += 1
            if calls[0] % 2:
                really(*args, **kwargs)

        ledger.set(owner, "zero_grad", sometimes, new=True)
    return ledger.restore


def clip_lost(context: Any, value: Any, ledger: Any) -> Undo:
    ledger.set(
        context.torch.nn.utils, "clip_grad_norm_", lambda parameters, *args, **kwargs: context.torch.zeros(())
    )
    return ledger.restore


# -- bad: optimizer ------------------------------------------------------------------------------------------


def skipped_step(every: int) -> Callable[[Any, Any, Any], Undo]:
    def apply(context: Any, value: Any, ledger: Any) -> Undo:
        def make(optimizer: Any, step: Callable) -> Callable:
            calls = [0]

            def sometimes(*args: Any, **kwargs: Any) -> Any:
                calls[0] += 1
                if calls[0] % every:
                    return step(*args, **kwargs)
                group_lr = [group["lr"] for group in optimizer.param_groups]
                for group in optimizer.param_groups:
                    group["lr"] = 0.0
                result = step(*args, **kwargs)
                for group, lr in zip(optimizer.param_groups, group_lr, strict=True):
                    group["lr"] = lr
                return result

            return sometimes

        return around_step(context, ledger, make)

    return apply


def state_lost(context: Any, value: Any, ledger: Any) -> Undo:
    """Resets momentum and second moments every fifth step."""

    def make(optimizer: Any, step: Callable) -> Callable:
        calls = [0]

        def forgetful(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] % 5 == 0:
                optimizer.state.clear()
            return step(*args, **kwargs)

        return forgetful

    return around_step(context, ledger, make)


def weight_decay_lost(context: Any, value: Any, ledger: Any) -> Undo:
    for optimizer in context.optimizers:
        for group in optimizer.param_groups:
            ledger.set_item(group, "weight_decay", 0.0)
    return ledger.restore


def coarse_weights(coarse: Callable[[Any], Any]) -> Callable[[Any, Any, Any], Undo]:
    """Keeps the weights in few bits: small updates are lost."""

    def apply(context: Any, value: Any, ledger: Any) -> Undo:
        def make(optimizer: Any, step: Callable) -> Callable:
            def rounded(*args: Any, **kwargs: Any) -> Any:
                result = step(*args, **kwargs)
                with context.torch.no_grad():
                    for p in (p for group in optimizer.param_groups for p in group["params"]):
                        p.copy_(coarse(p))
                return result

            return rounded

        return around_step(context, ledger, make)

    return apply


def eight_bits(x: Any) -> Any:
    """Quantises a whole tensor to 127 levels and a sign."""
    step = x.abs().max().clamp_min(1e-30) / 127
    return (x / step).round() * step


# -- the table -----------------------------------------------------------------------------------------------


def _bad(of: str, when: When = anywhere) -> Lever:
    """Returns the broken version of a lever of the shelf, under that lever's claim."""
    lever = OF_SHELF[of]
    effect = RESAMPLED if of == "loader" else lever.effect
    moment = lever.moment if lever.moment is Moment.LOADER else Moment.STEP
    return replace(lever_of(f"{of}.known_bad", effect, KNOWN_BAD[of], when, moment), live=lever.live)


def _where(of: str, when: When, name: str = "") -> Lever:
    """Returns a lever of the shelf, where it applies by itself and ``unless`` gives no reason against it."""

    def applies(facts: Any, context: Any) -> Options | Skip:
        reason = when(context)
        return Skip(reason) if reason else OF_SHELF[of].applies(facts, context)

    return replace(OF_SHELF[of], name=name or of, applies=applies)


def _good(of: str, value: Any, when: When = anywhere, name: str = "") -> Lever:
    """Returns a lever of the shelf, applied although it gives no speed-up here."""

    def applies(facts: Any, context: Any) -> Options | Skip:
        reason = when(context)
        return Skip(reason) if reason else Options((value,))

    return replace(OF_SHELF[of], name=name or of, applies=applies)


def _runs_in_bf16(context: Any) -> str:
    return (
        "oneDNN has no bfloat16 LSTM on many CPUs"
        if context.has_layer("LSTM") and context.device_type == "cpu"
        else ""
    )


def classes(context: Any) -> str:
    return "" if not context.has_layer("Linear") or len(context.parameters) > 2 else "no classes"


def with_attention(context: Any) -> str:
    return getattr(OF_SHELF["attention"].applies(Facts(), context), "reason", "")


with_mean_loss = both(
    without_tokens,
    in_script("cross_entropy", "CrossEntropyLoss", "nll_loss", "mse_loss", "binary_cross_entropy", "BCELoss"),
)

GOOD: tuple[Lever, ...] = (
    OF_SHELF["malloc"],
    OF_SHELF["threads"],
    OF_SHELF["gc_pause"],
    _good("debug_off", True),
    OF_SHELF["loader"],
    OF_SHELF["cached_prefix"],
    OF_SHELF["batched_transforms"],
    OF_SHELF["channels_last"],
    _good("autocast", "bfloat16", _runs_in_bf16),
    _good("reduced_precision", True, _runs_in_bf16),
    OF_SHELF["compile"],
    OF_SHELF["attention"],
    OF_SHELF["fused_ops"],
    _good("recompute", {"blocks": 1.0}),
    _good("inplace", True, with_out_of_place),
    OF_SHELF["fused_optimizer"],
    _good("fused_optimizer", "foreach", with_optimizer, "foreach_optimizer"),
    lever_of("zero_grad_none", EXACT, zero_grad_none, with_optimizer),
    lever_of("bf16_like_noise", PRECISION, bf16_like_noise),
    lever_of("ten_bit_products", PRECISION, ten_bit_products),
    lever_of("one_ulp_as_rounding", ROUNDING, KNOWN_BAD["debug_off"]),
)

# The levers of the shelf that the test bed leaves out, and why. The known-bad of those in SHOWN_BY is judged.
NEEDS_A_GPU = "applies to CUDA devices only"
NEEDS_RANKS = "needs several ranks, and the programs of the test bed are one process"
LEFT_OUT = {
    **dict.fromkeys(("allocator", "tf32", "cudnn_benchmark", "early_values"), NEEDS_A_GPU),
    **dict.fromkeys(("resident_data", "device_prefetch", "graphs"), NEEDS_A_GPU),
    **dict.fromkeys(("data_parallel", "sharding", "ddp_flags"), NEEDS_RANKS),
    **dict.fromkeys(("comm_compression", "gradient_buckets"), NEEDS_RANKS),
    "batch_size": "changes the maths, so the guard does not judge it",
    "memory_budget": "compiles for minutes; its known-bad is that of recompute, under a weaker claim",
}

# Where the known-bad of a lever shows (default: anywhere), and what it does. A PROCESS lever has none: it
# changes no number, and nothing inside the program applies it.
SHOWN_BY: dict[str, When] = {
    "gc_pause": anywhere,  # consumes one random number
    "debug_off": anywhere,  # one unit in the last place
    "cudnn_benchmark": with_layer("Conv2d"),  # convolutions with two bits after the point
    "threads": anywhere,  # a data race on the first parameter
    "tf32": anywhere,  # weights of four bits and a sign
    # inputs of three bits
    "reduced_precision": lambda context: "the inputs are integers" if context.has_layer("Embedding") else "",
    "autocast": anywhere,  # gradients scaled, never unscaled
    "channels_last": with_images,  # height read as width
    "compile": with_layer("BatchNorm", "Dropout"),  # batch statistics frozen
    "attention": with_attention,  # the kernel's own scale on top of the script's
    "fused_ops": with_layer("Embedding"),  # no gradient from the last rows
    "recompute": anywhere,  # saved tensors keep half of their bits
    "inplace": with_out_of_place,  # the gradient passes where the activation is zero
    "fused_optimizer": with_optimizer,  # doubled learning rate
    "early_values": anywhere,  # reads the value of the previous step
    "loader": with_images,  # brighter images
    "cached_prefix": with_images,  # the adjacent samples
    "batched_transforms": with_images,  # brighter images
}

BAD: tuple[Lever, ...] = (
    *(_bad(name, when) for name, when in SHOWN_BY.items()),
    # For the ten gradients of the linear model, eight bits are as precise as bfloat16.
    lever_of(
        "eight_bit_gradients",
        ROUNDING,
        lambda context, value, ledger: hook_gradients(context, ledger, eight_bits),
        with_weights(100),
    ),
    lever_of(
        "gradients_twice",
        ROUNDING,
        lambda context, value, ledger: hook_gradients(context, ledger, lambda g: 2 * g),
    ),
    lever_of("dropout_off", ROUNDING, dropout_off, with_layer("Dropout")),
    lever_of("stale_batchnorm", ROUNDING, stale_batchnorm, with_layer("BatchNorm")),
    lever_of("stale_gradient", ROUNDING, stale_gradient, with_optimizer),
    lever_of(
        "label_smoothing",
        ROUNDING,
        label_smoothing,
        both(in_script("cross_entropy", "CrossEntropyLoss"), classes),
    ),
    lever_of("off_by_one_mean", ROUNDING, off_by_one_mean, with_mean_loss),
    lever_of("zero_grad_lost", ROUNDING, zero_grad_lost),
    lever_of("clip_lost", ROUNDING, clip_lost, in_script("clip_grad_norm_")),
    lever_of("step_4_skipped", ROUNDING, skipped_step(4), with_optimizer),
    lever_of("step_10_skipped", ROUNDING, skipped_step(10), with_optimizer),
    lever_of("state_lost", ROUNDING, state_lost, with_optimizer),
    lever_of("weight_decay_lost", ROUNDING, weight_decay_lost, with_group("weight_decay")),
    lever_of("bf16_weights", ROUNDING, coarse_weights(lambda p: p.bfloat16()), with_optimizer),
    lever_of("eight_bit_weights", ROUNDING, coarse_weights(eight_bits), with_optimizer),
    lever_of("other_constants", RESAMPLED, other_constants, with_transform("Normalize"), Moment.LOADER),
    lever_of("no_augmentation", RESAMPLED, no_augmentation, with_transform("Random"), Moment.LOADER),
    lever_of("no_flip", RESAMPLED, no_flip, with_transform("RandomHorizontalFlip"), Moment.LOADER),
    lever_of(
        "always_flipped", RESAMPLED, always_flipped, with_transform("RandomHorizontalFlip"), Moment.LOADER
    ),
    lever_of("same_crop", RESAMPLED, same_crop, with_transform("RandomCrop"), Moment.LOADER),
    *HALF_BAD,
    *HIDDEN_BAD,
    lever_of(
        "half_label_smoothing",
        PRECISION,
        in_autocast(label_smoothing),
        both(in_script("cross_entropy", "CrossEntropyLoss"), _runs_in_bf16, classes),
    ),
    lever_of(
        "half_off_by_one_mean", PRECISION, in_autocast(off_by_one_mean), both(with_mean_loss, _runs_in_bf16)
    ),
    lever_of("half_zero_grad_lost", PRECISION, in_autocast(zero_grad_lost), _runs_in_bf16),
    lever_of(
        "half_clip_lost", PRECISION, in_autocast(clip_lost), both(in_script("clip_grad_norm_"), _runs_in_bf16)
    ),
    lever_of(
        "half_dropout_off", PRECISION, in_autocast(dropout_off), both(with_layer("Dropout"), _runs_in_bf16)
    ),
    lever_of(
        "half_gradients_twice",
        PRECISION,
        in_autocast(lambda context, value, ledger: hook_gradients(context, ledger, lambda g: 2 * g)),
        _runs_in_bf16,
    ),
    lever_of("kept_too_late", RESAMPLED, kept_too_late, with_transform("Random"), Moment.LOADER),
)

# A new lever of the shelf needs no entry here: it is tried as sound, and its known-bad as broken.
GOOD += tuple(lever for lever in SHELF if lever.name not in {*LEFT_OUT, *(each.name for each in GOOD)})
BAD += tuple(
    _bad(lever.name)
    for lever in SHELF
    if lever.name in KNOWN_BAD and lever.name not in {*LEFT_OUT, *SHOWN_BY}
)
assert OF_SHELF.keys() >= {*LEFT_OUT, *SHOWN_BY}

TABLE: tuple[Lever, ...] = (*GOOD, *BAD)
assert len({lever.name for lever in TABLE}) == len(TABLE)  # a Plan names its levers

"""Broken half precision for the guard's test bed: too few bits for losses, sums, statistics or gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from guard_tools import (
    LOSSES,
    PRECISION,
    around_roots,
    around_step,
    both,
    hook_gradients,
    in_root,
    in_script,
    lever_of,
    modules,
    with_layer,
    with_optimizer,
    with_weights,
)
from provenance import SRC  # noqa: F401  puts src on the path

from flatout.levers import TABLE as SHELF
from flatout.schema.lever import Lever, Undo

AUTOCAST = next(lever for lever in SHELF if lever.name == "autocast")
SOFTMAX_RANGE = 11.0  # exp() of more is beyond float16
LATE_STEP = 12
SUM_PARTS = 256
EXPONENT_BITS = 2.0**-8  # relative to a tensor's largest value: eight bits under a common exponent


def half_loss(context: Any, value: Any, ledger: Any) -> Undo:
    """Computes the loss from bfloat16 and returns it in bfloat16."""
    functional = context.torch.nn.functional
    for name in LOSSES:
        really = getattr(functional, name)

        def short(x: Any, *args: Any, really: Any = really, **kwargs: Any) -> Any:
            return really(x.bfloat16().to(x.dtype), *args, **kwargs).bfloat16().to(x.dtype)

        ledger.set(functional, name, short)
    return ledger.restore


def raw_autocast(context: Any, value: Any, ledger: Any) -> Undo:
    """Uses torch.autocast on the CPU: log_softmax, sums and the module's own loss stay in bfloat16."""
    torch = context.torch

    def wrapper(forward: Any) -> Any:
        def in_half_precision(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = forward(*args, **kwargs)
            parts = tuple(part.float() for part in (output if isinstance(output, tuple) else (output,)))
            return parts if isinstance(output, tuple) else parts[0]

        return in_half_precision

    return around_roots(context, wrapper, ledger)


def inside_roots(context: Any, ledger: Any, replaced: dict[str, Callable[..., Any]]) -> Undo:
    """Replaces functions of torch.nn.functional while a root module's forward runs."""
    functional = context.torch.nn.functional

    def wrapper(forward: Any) -> Any:
        def changed(*args: Any, **kwargs: Any) -> Any:
            before = {name: getattr(functional, name) for name in replaced}
            try:
                for name, other in replaced.items():
                    setattr(functional, name, other)
                return forward(*args, **kwargs)
            finally:
                for name, other in before.items():
                    setattr(functional, name, other)

        return changed

    return around_roots(context, wrapper, ledger)


def half_softmax_gradient(context: Any, value: Any, ledger: Any) -> Undo:
    """Computes log_softmax in float32, but its gradient p - 1 in bfloat16: zero for a confident sample."""
    torch, functional = context.torch, context.torch.nn.functional

    class Short(torch.autograd.Function):  # type: ignore[name-defined,misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            found = torch.log_softmax(x, -1)
            ctx.save_for_backward(found)
            return found

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (found,) = ctx.saved_tensors
            total = grad.sum(-1, keepdim=True)
            share = (grad / total.where(total != 0, 1.0)).bfloat16()
            return ((share - found.exp().bfloat16()) * total).to(grad.dtype)

    really = functional.nll_loss
    return inside_roots(
        context,
        ledger,
        {
            "log_softmax": lambda x, dim=-1, **_: Short.apply(x),
            "cross_entropy": lambda x, target, **kwargs: really(Short.apply(x), target, **kwargs),
        },
    )


def saturating_softmax(context: Any, value: Any, ledger: Any) -> Undo:
    """Computes exp() without a shift by the largest logit, clamped to float16: large logits become equal."""
    torch, functional = context.torch, context.torch.nn.functional

    def log_softmax(x: Any, dim: int = -1, **_: Any) -> Any:
        x = x.clamp(max=SOFTMAX_RANGE)
        return x - x.exp().sum(dim, keepdim=True).log()

    really = functional.nll_loss
    return inside_roots(
        context,
        ledger,
        {
            "log_softmax": log_softmax,
            "softmax": lambda x, dim=-1, **_: torch.exp(log_softmax(x, dim)),
            "cross_entropy": lambda x, target, **kwargs: really(log_softmax(x), target, **kwargs),
        },
    )


def small_flushed(torch: Any, g: Any) -> Any:
    return torch.where(g.abs() < EXPONENT_BITS * g.abs().max(), 0.0, g)


def small_gradients_flushed(context: Any, value: Any, ledger: Any) -> Undo:
    """Keeps gradients under one exponent a tensor: elements 256 times below the largest become zero."""
    return hook_gradients(context, ledger, lambda g: small_flushed(context.torch, g))


def flushed_late(context: Any, value: Any, ledger: Any) -> Undo:
    """Does the same from the twelfth update on, like a scale that fits only the first gradients."""
    updates = [0]

    def make(optimizer: Any, step: Callable) -> Callable:
        def counted(*args: Any, **kwargs: Any) -> Any:
            updates[0] += 1
            return step(*args, **kwargs)

        return counted

    around_step(context, ledger, make)
    return hook_gradients(
        context, ledger, lambda g: small_flushed(context.torch, g) if updates[0] >= LATE_STEP else g
    )


def float16_unscaled(context: Any, value: Any, ledger: Any) -> Undo:
    """Keeps gradients in float16 without a loss scale: below 6e-5 they lose bits, below 6e-8 all of them."""
    return hook_gradients(context, ledger, lambda g: g.half().to(g.dtype))


def float8_gradients(context: Any, value: Any, ledger: Any) -> Undo:
    """Keeps gradients in 8-bit floats (E4M3), with a separate scale for each tensor."""

    def rounded(g: Any) -> Any:
        scale = g.abs().max().clamp_min(1e-30) / 448
        return (g / scale).to(context.torch.float8_e4m3fn).to(g.dtype) * scale

    return hook_gradients(context, ledger, rounded)


def half_running_statistics(context: Any, value: Any, ledger: Any) -> Undo:
    """Keeps BatchNorm's running statistics in bfloat16: small changes are lost."""

    def rounded(module: Any, args: tuple, output: Any) -> None:
        if module.training:
            for held in (
                module.running_mean.data,
                module.running_var.data,
            ):  # .data: the backward pass checks the version of the buffers
                held.copy_(held.bfloat16())

    for module in modules(context, "BatchNorm"):
        ledger.on_restore("forward hook", module.register_forward_hook(rounded).remove)
    return ledger.restore


def half_running_sums(context: Any, value: Any, ledger: Any) -> Undo:
    """Sums the gradient of a linear layer's weight over the batch in bfloat16, one part after another."""
    torch = context.torch

    class Summed(torch.autograd.Function):  # type: ignore[name-defined,misc]
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, Any]:
            x, weight = ctx.saved_tensors
            sum_ = torch.zeros_like(weight, dtype=torch.bfloat16)
            for g, part in zip(
                grad.flatten(0, -2).chunk(SUM_PARTS), x.flatten(0, -2).chunk(SUM_PARTS), strict=True
            ):
                sum_ += (g.t() @ part).bfloat16()
            return grad @ weight, sum_.to(weight.dtype)

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        found = Summed.apply(x, weight)
        return found if bias is None else found + bias

    return inside_roots(context, ledger, {"linear": linear})


def half_moments(context: Any, value: Any, ledger: Any) -> Undo:
    """Keeps the optimizer's averages in bfloat16: slow changes are lost."""

    def make(optimizer: Any, step: Callable) -> Callable:
        def rounded(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            for state in optimizer.state.values():
                for held in state.values():
                    if isinstance(held, context.torch.Tensor) and held.dim():
                        held.copy_(held.bfloat16())
            return result

        return rounded

    return around_step(context, ledger, make)


def in_autocast(other: Callable[[Any, Any, Any], Undo]) -> Callable[[Any, Any, Any], Undo]:
    """Combines sound half precision with a fault: its rounding does not excuse the fault."""

    def apply(context: Any, value: Any, ledger: Any) -> Undo:
        other(context, value, ledger)
        assert AUTOCAST.apply is not None
        return AUTOCAST.apply(context, "bfloat16", ledger)

    return apply


# Some of these are harmless in some programs: logits stay small with label smoothing, and sums of losses have
# large gradients.
HALF_BAD: tuple[Lever, ...] = (
    lever_of(
        "half_loss",
        PRECISION,
        half_loss,
        in_script(
            "cross_entropy", "CrossEntropyLoss", "nll_loss", "mse_loss", "binary_cross_entropy", "BCELoss"
        ),
    ),
    lever_of("raw_autocast", PRECISION, raw_autocast, in_root("log_share")),
    lever_of("half_softmax_gradient", PRECISION, half_softmax_gradient, in_root("log_share")),
    lever_of(
        "saturating_softmax",
        PRECISION,
        saturating_softmax,
        in_root("return F.log_softmax", "F.cross_entropy"),
    ),
    lever_of("small_gradients_flushed", PRECISION, small_gradients_flushed, with_weights(100)),
    lever_of("flushed_late", PRECISION, flushed_late, both(with_weights(100), with_optimizer)),
    lever_of(
        "float16_unscaled", PRECISION, float16_unscaled, in_root("log_share", "F.cross_entropy")
    ),  # in other programs gradients are large enough
    lever_of("float8_gradients", PRECISION, float8_gradients, with_weights(100)),
    lever_of("half_running_statistics", PRECISION, half_running_statistics, with_layer("BatchNorm2d")),
    lever_of(
        "half_running_sums", PRECISION, half_running_sums, both(with_layer("Linear"), with_weights(100))
    ),
    lever_of("half_moments", PRECISION, half_moments, with_optimizer),
)

"""Broken levers of the guard's test bed whose fault is small, late, or shows under some conditions only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from guard_tools import (
    LOSSES,
    ROUNDING,
    around_roots,
    around_step,
    in_script,
    lever_of,
    with_layer,
    with_optimizer,
)
from provenance import SRC  # noqa: F401  puts src on the path

from flatout.measure.nests import mapped
from flatout.schema.lever import Lever, Undo

SMALL_BATCH = 4  # samples
LATE_LOSS = 20  # the call of the loss function whose value becomes NaN


def bias_one_ulp(context: Any, value: Any, ledger: Any) -> Undo:
    """Moves every weight one unit in the last place upwards after each optimizer step."""
    torch = context.torch

    def make(optimizer: Any, step: Callable) -> Callable:
        def biased(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            with torch.no_grad():
                for p in (p for group in optimizer.param_groups for p in group["params"]):
                    p.copy_(torch.nextafter(p, torch.full_like(p, float("inf"))))
            return result

        return biased

    return around_step(context, ledger, make)


def with_nan(grad: Any) -> Any:
    """Returns a copy whose last element is NaN."""
    grad = grad.clone()
    grad.view(-1)[-1] = float("nan")
    return grad


def nan_after_first(context: Any, value: Any, ledger: Any) -> Undo:
    """Makes the last element of one gradient NaN: that of the second parameter of each root module."""
    for root in context.roots:
        for p in [p for p in root.parameters() if p.requires_grad][1:2]:
            ledger.on_restore("gradient hook", p.register_hook(with_nan).remove)
    return ledger.restore


def nan_after_clipping(context: Any, value: Any, ledger: Any) -> Undo:
    """Clips gradients, and makes the last element of the second one NaN."""
    utils = context.torch.nn.utils
    really = utils.clip_grad_norm_

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = list(parameters)
        total = really(parameters, *args, **kwargs)
        for p in [p for p in parameters if p.grad is not None][1:2]:
            p.grad = with_nan(p.grad)
        return total

    ledger.set(utils, "clip_grad_norm_", clip)
    return ledger.restore


def nan_in_a_late_loss(context: Any, value: Any, ledger: Any) -> Undo:
    """Makes the value of the twentieth loss NaN. Its gradient stays right."""
    functional, calls = context.torch.nn.functional, [0]
    for name in LOSSES:
        really = getattr(functional, name)

        def late(*args: Any, really: Any = really, **kwargs: Any) -> Any:
            loss = really(*args, **kwargs)
            calls[0] += 1
            if calls[0] == LATE_LOSS:
                loss.detach().fill_(float("nan"))
            return loss

        ledger.set(functional, name, late)
    return ledger.restore


def wrong_on_large_batches(context: Any, value: Any, ledger: Any) -> Undo:
    """Scales the outputs by 0.99 if the batch has more than four samples."""
    is_tensor = context.torch.is_tensor

    def wrapper(forward: Any) -> Any:
        def changed(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if all(not is_tensor(arg) or len(arg) <= SMALL_BATCH for arg in args):
                return output
            return mapped(output, lambda x: 0.99 * x if is_tensor(x) and x.is_floating_point() else x)

        return changed

    return around_roots(context, wrapper, ledger)


def output_more(context: Any, value: Any, ledger: Any) -> Undo:
    """Returns a third state of the LSTM, and drops it from the next input: the script passes it through."""

    def wrapper(forward: Any) -> Any:
        def more(tokens: Any, state: Any) -> Any:
            output, (hidden, cell) = forward(tokens, state and state[:2])
            return output, (hidden, cell, hidden + cell)

        return more

    return around_roots(context, wrapper, ledger)


def raises_in_replica(error_of: Callable[[Any], Exception]) -> Callable[[Any, Any, Any], Undo]:
    """Raises where the guard repeats a step, and does nothing in the program."""

    def apply(context: Any, value: Any, ledger: Any) -> Undo:
        def wrapper(forward: Any) -> Any:
            def changed(*args: Any, **kwargs: Any) -> Any:
                if context.paused:
                    raise error_of(context.torch)
                return forward(*args, **kwargs)

            return changed

        return around_roots(context, wrapper, ledger)

    return apply


HIDDEN_BAD: tuple[Lever, ...] = (
    lever_of("bias_one_ulp", ROUNDING, bias_one_ulp, with_optimizer),
    lever_of("nan_after_first", ROUNDING, nan_after_first),
    lever_of("nan_after_clipping", ROUNDING, nan_after_clipping, in_script("clip_grad_norm_")),
    lever_of(
        "nan_in_a_late_loss",
        ROUNDING,
        nan_in_a_late_loss,
        in_script(*LOSSES, "CrossEntropyLoss", "BCELoss", "BCEWithLogitsLoss"),
    ),
    lever_of("wrong_on_large_batches", ROUNDING, wrong_on_large_batches),
    lever_of("output_more", ROUNDING, output_more, with_layer("LSTM")),
    lever_of("replica_raises", ROUNDING, raises_in_replica(lambda torch: RuntimeError("in a copy"))),
    lever_of(
        "replica_out_of_memory",
        ROUNDING,
        raises_in_replica(lambda torch: torch.OutOfMemoryError("in a copy")),
    ),
)

"""Failures of the optimizer step: gradients that are not numbers, scalers, parameters."""

from __future__ import annotations

from flatout.diagnose.failures.autograd import forward_call, operation
from flatout.diagnose.kind import (
    RUNTIME,
    Diagnosis,
    kind,
    layer,
    match_message,
)
from flatout.schema.failure import FailureRecord


@kind("FE065", "first-nan")
def first_nan(failure: FailureRecord) -> Diagnosis | None:
    """Anomaly detection found the first NaN gradient.

    What:
        The gradient of the named operation is the first in the backward pass that is NaN.
    Why it happens:
        A square root or a norm at 0, a logarithm of 0, a division by 0, or an exponential that overflows.
        `torch.where` with a bad value in the branch that is not selected. In half precision it is often an
        overflow.
    How to fix it:
        Keep the argument away from the singularity: `torch.sqrt(x + eps)`, `log(x.clamp_min(eps))`. Use the
        stable forms (`log_softmax`, `binary_cross_entropy_with_logits`). Use a GradScaler for float16.
    Sources:
        https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection
    """
    found = match_message(
        failure,
        RUNTIME,
        r"Function '(?P<node>\w+)' returned nan values in its (?P<out>\d+)(?:st|nd|rd|th) output",
    )
    if found is None:
        return None
    name = operation(found["node"])
    place = forward_call(failure)
    fixes = {
        "Sqrt": "torch.sqrt(x + 1e-12)",
        "Log": "torch.log(x.clamp_min(1e-12))",
        "Div": "a / (b + 1e-12)",
        "Pow": "(x + 1e-12) ** p",
        "LinalgVectorNorm": "(x.square().sum(-1) + 1e-12).sqrt()",
        "Norm": "(x.square().sum(-1) + 1e-12).sqrt()",
        "Exp": "torch.exp(x.clamp_max(80))",
    }
    return Diagnosis(
        f"the gradient of `{name}` is the first that is NaN" + (f" ({place.sentence()})" if place else ""),
        f"{fixes.get(name, 'keep the argument of this operation away from points where its gradient is infinite')}   # at the singularity "
        f"the gradient is infinite, and 0 times infinity is NaN",
        place=place,
    )


@kind("FE068", "scaler-out-of-order")
def scaler_out_of_order(failure: FailureRecord) -> Diagnosis | None:
    """The gradient scaler was called out of order.

    What:
        A scaler needs these calls once per step, in this order: scale and backward, unscale_ (to clip
        gradients), step, update.
    Why it happens:
        `unscale_` runs in every accumulated batch, `update()` is missing, or `step` runs before there is a
        gradient.
    How to fix it:
        Call `unscale_`, clipping, `step` and `update` once, after the last backward pass of the accumulation.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping
    """
    found = match_message(
        failure,
        ("RuntimeError", "AssertionError", "ValueError"),
        r"(?P<twice>unscale_\(\) has already been called on this optimizer since the last update\(\))",
        r"(?P<after>unscale_\(\) is being called after step\(\))",
        r"(?P<step>step\(\) has already been called since the last update\(\))",
        r"(?P<none>No inf checks were recorded (?:for this optimizer|prior to update))",
        r"(?P<half>Attempting to unscale FP16 gradients)",
    )
    if found is None:
        return None
    why = {
        "twice": "`unscale_` was called twice before `update`",
        "after": "`unscale_` was called after `step`",
        "step": "`step` was called twice before `update`",
        "none": "`step` was called before any backward pass: no parameter of this optimizer has a gradient",
        "half": "the parameters themselves are float16; a scaler needs float32 parameters under autocast",
    }
    name = next(name for name in why if found[name])
    fix = (
        "model.float()   # weights in float32, float16 only inside torch.autocast"
        if name == "half"
        else (
            "scaler.scale(loss).backward()      # every batch\n# and once per step:\nscaler.unscale_(optimizer); "
            "clip_grad_norm_(model.parameters(), 1.0)\nscaler.step(optimizer); scaler.update()"
        )
    )
    return Diagnosis(f"the gradient scaler was called out of order: {why[name]}", fix)


@kind("FE069", "nothing-to-optimize")
def nothing_to_optimize(failure: FailureRecord) -> Diagnosis | None:
    """The optimizer got no parameters.

    What:
        The parameter list passed to the optimizer is empty.
    Why it happens:
        Layers are in a plain list or dictionary of the module. `model.parameters()`, a generator, was already
        consumed. Or a filter removed every parameter.
    How to fix it:
        Use `nn.ModuleList([...])` or `nn.ModuleDict` to register the layers, and `list(model.parameters())`
        for a list used twice.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.ModuleList.html
    """
    found = match_message(failure, ("ValueError",), r"optimizer got an empty parameter list")
    if found is None:
        return None
    return Diagnosis(
        "the optimizer got an empty parameter list",
        "self.layers = nn.ModuleList([...])   # a plain list does not register its layers\n"
        "parameters = list(model.parameters())   # a generator is empty the second time"
        + (f"\nthe module: {layer(failure)}" if layer(failure) else ""),
    )

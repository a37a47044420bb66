"""Failures of the backward pass and the optimizer step: missing, freed or modified graphs, NaN, scalers."""

import re

from flatout.diagnose.kind import Diagnosis, Form, kind, match_message, pattern_kind, search_log, tensor_name
from flatout.schema.failure import FailureRecord
from flatout.schema.findings import SourceLocation


def operation_name(node: str) -> str:
    """The operation behind an autograd node: ``ExpBackward0`` gives ``Exp``."""
    return re.sub(r"Backward\d*$", "", node)


def forward_call(failure: FailureRecord) -> SourceLocation | None:
    """The user's line in the "Traceback of forward call" that anomaly mode prints as a warning."""
    from flatout.diagnose.tracebacks import FRAME, is_user_file

    in_report, place, lines = False, None, failure.log_lines
    for number, line in enumerate(lines):
        in_report = in_report or "Traceback of forward call" in line or "Error detected in" in line
        frame = FRAME.match(line) if in_report else None
        if frame is not None and is_user_file(frame["file"]):
            text = lines[number + 1].strip() if number + 1 < len(lines) else ""
            place = SourceLocation(frame["file"], int(frame["line"]), 0, frame["function"] or "", text)
    return place


loss_without_grad = pattern_kind(
    "FE060",
    "loss-without-grad",
    """The loss has no autograd graph.
    The forward pass ran under `torch.no_grad()` or `inference_mode`. The loss went through `.item()`,
    `.detach()`, `.numpy()` or `torch.tensor(...)`. All parameters are frozen. Or an `argmax`, which has
    no gradient, lies between the output and the loss.
    https://docs.pytorch.org/docs/stable/notes/autograd.html""",
    Form(
        "`{tensor|the loss}` has no autograd graph: it depends on no parameter that requires a gradient",
        "print(loss.requires_grad, loss.grad_fn)   # after each step from the model's output to the loss, to see where the graph is lost\n"
        "look for torch.no_grad(), .detach(), .item(), torch.tensor(...) and argmax between model and loss, and for frozen parameters",
        r"element (?P<at>\d+) of tensors does not require grad and does not have a grad_fn",
    ),
    Form(
        "a tensor created under `torch.inference_mode()` is used where gradients are needed",
        "with torch.no_grad(): ...   # instead of inference_mode, if the result is used in training\n"
        "x = x.clone()               # outside inference_mode",
        r"Inference tensors cannot be saved for backward",
    ),
    show_tensors=True,
    values=lambda failure, _: tensor_name(failure, lambda tensor: not tensor.requires_grad),
)

backward_twice = pattern_kind(
    "FE061",
    "backward-twice",
    """The graph has already been freed.
    A hidden state (of an RNN or a memory) keeps its graph from step to step. Two losses share part of the
    forward pass and call `backward()` separately. Or `loss` is accumulated across steps with its graph.
    https://docs.pytorch.org/docs/stable/notes/autograd.html""",
    Form(
        "a backward pass went through a graph that an earlier backward pass had freed",
        "hidden = hidden.detach()              # for a state that is kept from step to step\n"
        "(loss_a + loss_b).backward()          # for two losses of one forward pass\n"
        "loss.backward(retain_graph=True)      # only if the same graph really needs two backward passes",
        r"Trying to backward through the graph a second time",
    ),
    show_tensors=True,
)


@kind("FE062", "changed-in-place")
def changed_in_place(failure: FailureRecord) -> Diagnosis | None:
    """A tensor needed by the backward pass was modified in place.

    Why it happens:
        An operation saved its input or output for the gradient, and `x += ...`, `x[...] = ...`, `relu_` or
        `inplace=True` overwrote it. Or `optimizer.step()` runs between a forward pass and its backward pass
        (GANs, several losses).
    How to fix it:
        Write out of place (`x = x + ...`), remove `inplace=True`, and step only after all backward passes of
        a forward pass. `torch.autograd.set_detect_anomaly(True)` names the line of the operation.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-correctness-checks"""
    match = match_message(
        failure,
        r"one of the variables needed for gradient computation has been modified by an inplace operation"
        r"(?:: \[(?P<type>[\w.]+) (?P<size>\[[\d, ]*\])\](?:, which is output (?P<out>\d+) of (?P<node>\w+))?,? is at version "
        r"(?P<now>\d+); expected version (?P<then>\d+))?",
        r"Output (?P<view>\d+) of (?P<node>\w+) is a view and(?: its base or another view of its base has been| is being) modified inplace",
    )
    if match is None:
        return None
    weight_node = r"(?:AsStrided|T)Backward0\b"
    size = f" ({match['size']})" if match["size"] else ""
    changed = f"the result of `{operation_name(match['node'])}`{size}" if match["node"] else f"a tensor{size}"
    if re.match(weight_node, match["node"]):
        changed = f"a weight{size}"
    times = match.number("now") - match.number("then")
    place = forward_call(failure)
    step = ""
    if re.match(weight_node, match["node"]) or search_log(failure, rf"\b{weight_node}"):
        step = "optimizer.step()            # only after all backward passes of this forward pass\n"
    return Diagnosis(
        f"{changed} was modified in place{f', {times} times' if times > 1 else ''} after the forward pass had saved it for the gradient",
        f"{step}x = x + y                   # instead of x += y and x[...] = y; nn.ReLU() instead of nn.ReLU(inplace=True)\n"
        "torch.autograd.set_detect_anomaly(True)   # for one run, to see the line of the operation",
        [f"the operation: {place.sentence()}: {place.text}"] if place else [],
    )


leaf_changed_in_place = pattern_kind(
    "FE063",
    "leaf-changed-in-place",
    """A parameter was modified in place while autograd was recording.
    A manual update or initialisation runs without `torch.no_grad()`. The functions of `torch.nn.init` have it.
    https://docs.pytorch.org/docs/stable/notes/autograd.html""",
    Form(
        "`{tensor|a parameter}` is a leaf tensor that requires a gradient, and it is modified in place while autograd is recording",
        "with torch.no_grad():\n    {line|weight -= lr * weight.grad}",
        r"a (?:view of a leaf|leaf) Variable that requires grad is being used in an in-place operation",
    ),
    show_tensors=True,
    values=lambda failure, _: tensor_name(failure, lambda tensor: tensor.requires_grad),
)

backward_of_many = pattern_kind(
    "FE064",
    "backward-of-many",
    """`backward()` was called on a tensor with several values.
    The loss has `reduction="none"`, DataParallel returns one loss for each GPU, or the mean is missing.
    https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html""",
    Form(
        "`{tensor|loss}`[[ ({shape})]] holds several values, and `backward()` needs a scalar",
        "{tensor|loss}.mean().backward()   # with weights: (weight * losses).sum().backward()",
        r"grad can be implicitly created only for scalar outputs",
    ),
    show_tensors=True,
)

NAN_FIXES = {
    "Sqrt": "torch.sqrt(x + 1e-12)",
    "Log": "torch.log(x.clamp_min(1e-12))",
    "Div": "a / (b + 1e-12)",
    "Pow": "(x + 1e-12) ** p",
    "LinalgVectorNorm": "(x.square().sum(-1) + 1e-12).sqrt()",
    "Norm": "(x.square().sum(-1) + 1e-12).sqrt()",
    "Exp": "torch.exp(x.clamp_max(80))",
}


@kind("FE065", "first-nan")
def first_nan(failure: FailureRecord) -> Diagnosis | None:
    """Anomaly detection found the first NaN gradient.

    Why it happens:
        A square root or a norm at 0, a logarithm of 0, a division by 0, or an exponential that overflows.
        `torch.where` with a bad value in the branch that is not selected. In half precision it is often an
        overflow.
    How to fix it:
        Keep the argument away from the singularity: `torch.sqrt(x + eps)`, `log(x.clamp_min(eps))`. Use the
        stable forms (`log_softmax`, `binary_cross_entropy_with_logits`). Use a GradScaler for float16.
    Sources:
        https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection"""
    match = match_message(
        failure, r"Function '(?P<node>\w+)' returned nan values in its (?P<out>\d+)(?:st|nd|rd|th) output"
    )
    if match is None:
        return None
    name, place = operation_name(match["node"]), forward_call(failure)
    default_fix = "keep the argument of this operation away from points where its gradient is infinite"
    return Diagnosis(
        f"the gradient of `{name}` is the first that is NaN" + (f" ({place.sentence()})" if place else ""),
        f"{NAN_FIXES.get(name, default_fix)}   # at the singularity the gradient is infinite, and 0 times infinity is NaN",
        place=place,
    )


SCALER_ORDER = (
    "scaler.scale(loss).backward()      # every batch\n# and once per step:\nscaler.unscale_(optimizer); "
    "clip_grad_norm_(model.parameters(), 1.0)\nscaler.step(optimizer); scaler.update()"
)
OUT_OF_ORDER = "the gradient scaler was called out of order: "
scaler_out_of_order = pattern_kind(
    "FE068",
    "scaler-out-of-order",
    """The gradient scaler was called out of order.
    `unscale_` runs in every accumulated batch, `update()` is missing, or `step` runs before there is a
    gradient. A scaler needs one call each per step, after the last backward pass of the accumulation.
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping""",
    Form(
        OUT_OF_ORDER + "`unscale_` was called twice before `update`",
        SCALER_ORDER,
        r"unscale_\(\) has already been called on this optimizer since the last update\(\)",
    ),
    Form(
        OUT_OF_ORDER + "`unscale_` was called after `step`",
        SCALER_ORDER,
        r"unscale_\(\) is being called after step\(\)",
    ),
    Form(
        OUT_OF_ORDER + "`step` was called twice before `update`",
        SCALER_ORDER,
        r"step\(\) has already been called since the last update\(\)",
    ),
    Form(
        OUT_OF_ORDER
        + "`step` was called before any backward pass: no parameter of this optimizer has a gradient",
        SCALER_ORDER,
        r"No inf checks were recorded (?:for this optimizer|prior to update)",
    ),
    Form(
        OUT_OF_ORDER
        + "the parameters themselves are float16; a scaler needs float32 parameters under autocast",
        "model.float()   # weights in float32, float16 only inside torch.autocast",
        r"Attempting to unscale FP16 gradients",
    ),
    types=("RuntimeError", "AssertionError", "ValueError"),
)

"""Failures of the backward pass and the optimizer step: missing, freed or modified graphs, and NaN."""

from __future__ import annotations

import re

from flatout.diagnose.kind import (
    RUNTIME,
    Diagnosis,
    describe_tensors,
    kind,
    layer,
    match_message,
    on_own_line,
    search_log,
)
from flatout.plan.failure import FailureRecord
from flatout.plan.findings import SourceLocation


def operation(node: str) -> str:
    """The operation behind an autograd node: ``ExpBackward0`` gives ``Exp``."""
    return re.sub(r"Backward\d*$", "", node)


def forward_call(failure: FailureRecord) -> SourceLocation | None:
    """The user's line in the "Traceback of forward call" that anomaly mode prints as a warning."""
    from flatout.diagnose.tracebacks import FRAME, is_mine

    info, place, lines = False, None, failure.around
    for at, line in enumerate(lines):
        info = (
            info or "Traceback of forward call that caused the error" in line or "Error detected in" in line
        )
        frame = FRAME.match(line) if info else None
        if frame is not None and is_mine(frame["file"]):
            place = SourceLocation(
                frame["file"],
                int(frame["line"]),
                0,
                frame["function"] or "",
                lines[at + 1].strip() if at + 1 < len(lines) else "",
            )
    return place


@kind("FE060", "loss-without-grad")
def loss_without_grad(failure: FailureRecord) -> Diagnosis | None:
    """The loss has no autograd graph.

    What:
        `backward()` was called on a tensor without a graph.
    Why it happens:
        The forward pass ran under `torch.no_grad()` or `inference_mode`. The loss went through `.item()`,
        `.detach()`, `.numpy()` or `torch.tensor(...)`. All parameters are frozen. Or an `argmax`, which has
        no gradient, lies between the output and the loss.
    How to fix it:
        Compute the loss from the model's output with torch operations only. Check that
        `any(p.requires_grad for p in model.parameters())` is true.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/autograd.html
    """
    found = match_message(
        failure,
        RUNTIME,
        r"element (?P<at>\d+) of tensors does not require grad and does not have a grad_fn",
        r"(?P<inference>Inference tensors cannot be saved for backward)",
        r"One of the differentiated Tensors does not require grad(?!)",
    )
    if found is None:
        return None
    if found["inference"]:
        return Diagnosis(
            "a tensor created under `torch.inference_mode()` is used where gradients are needed",
            "with torch.no_grad(): ...   # instead of inference_mode, if the result is used in training\nx = x.clone()               # outside inference_mode",
        )
    names = [tensor.name for tensor in on_own_line(failure) if not tensor.requires_grad]
    name = f"`{names[0]}`" if names else "the loss"
    return Diagnosis(
        f"{name} has no autograd graph: it depends on no parameter that requires a gradient",
        "print(loss.requires_grad, loss.grad_fn)   # after each step from the model's output to the loss, to see where the graph is lost\n"
        "look for torch.no_grad(), .detach(), .item(), torch.tensor(...) and argmax between model and loss, and for frozen parameters",
        describe_tensors(on_own_line(failure)),
    )


@kind("FE061", "backward-twice")
def backward_twice(failure: FailureRecord) -> Diagnosis | None:
    """The graph has already been freed.

    What:
        A backward pass went through a graph whose buffers an earlier backward pass had freed.
    Why it happens:
        A hidden state (of an RNN or a memory) keeps its graph from step to step. Two losses share part of the
        forward pass and call `backward()` separately. Or `loss` is accumulated across steps with its graph.
    How to fix it:
        Call `hidden = hidden.detach()` between steps, and `(loss_a + loss_b).backward()` for two losses. Use
        `retain_graph=True` only if the same graph really needs two backward passes: it keeps all of the
        graph's memory.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/autograd.html
    """
    found = match_message(
        failure,
        RUNTIME,
        r"Trying to backward through the graph a second time",
        r"Trying to backward through the graph second time",
    )
    if found is None:
        return None
    return Diagnosis(
        "a backward pass went through a graph that an earlier backward pass had freed",
        "hidden = hidden.detach()              # for a state that is kept from step to step\n"
        "(loss_a + loss_b).backward()          # for two losses of one forward pass\n"
        "loss.backward(retain_graph=True)      # only if the same graph really needs two backward passes",
        describe_tensors(on_own_line(failure)),
    )


@kind("FE062", "changed-in-place")
def changed_in_place(failure: FailureRecord) -> Diagnosis | None:
    """A tensor needed by the backward pass was modified in place.

    What:
        An operation saved its input or output for the gradient, and the tensor was overwritten before the
        backward pass.
    Why it happens:
        `x += ...`, `x[...] = ...`, `relu_` or `inplace=True` follows an operation that needs its output (exp,
        sigmoid, tanh, softmax). Or `optimizer.step()` runs between a forward pass and its backward pass
        (GANs, several losses).
    How to fix it:
        Write out of place (`x = x + ...`), remove `inplace=True`, and step only after all backward passes of
        a forward pass. `torch.autograd.set_detect_anomaly(True)` names the line of the operation.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-correctness-checks
    """
    found = match_message(
        failure,
        RUNTIME,
        r"one of the variables needed for gradient computation has been modified by an inplace operation"
        r"(?:: \[(?P<type>[\w.]+) (?P<size>\[[\d, ]*\])\](?:, which is output (?P<out>\d+) of (?P<node>\w+))?,? is at version "
        r"(?P<now>\d+); expected version (?P<then>\d+))?",
        r"Output (?P<view>\d+) of (?P<node>\w+) is a view and(?: its base or another view of its base has been| is being) modified inplace",
    )
    if found is None:
        return None
    size = f" ({found['size']})" if found["size"] else ""
    of = f"the result of `{operation(found['node'])}`{size}" if found["node"] else f"a tensor{size}"
    if found["node"].startswith(("AsStridedBackward", "TBackward")):
        of = f"a weight{size}"
    place = forward_call(failure)
    times = (
        f", {found.number('now') - found.number('then')} times"
        if found.number("now") - found.number("then") > 1
        else ""
    )
    step = (
        found["node"] in ("AsStridedBackward0", "TBackward0")
        or search_log(failure, r"\bAsStridedBackward0\b|\bTBackward0\b") is not None
    )
    fix = (
        "optimizer.step()            # only after all backward passes of this forward pass\n" if step else ""
    )
    return Diagnosis(
        f"{of} was modified in place{times} after the forward pass had saved it for the gradient",
        fix
        + "x = x + y                   # instead of x += y and x[...] = y; nn.ReLU() instead of nn.ReLU(inplace=True)\n"
        "torch.autograd.set_detect_anomaly(True)   # for one run, to see the line of the operation",
        [f"the operation: {place.sentence()}: {place.text}"] if place else [],
    )


@kind("FE063", "leaf-changed-in-place")
def leaf_changed_in_place(failure: FailureRecord) -> Diagnosis | None:
    """A parameter was modified in place while autograd was recording.

    What:
        A leaf tensor (a parameter) that requires a gradient was written to while autograd was recording.
    Why it happens:
        A manual update or initialisation runs without `torch.no_grad()`.
    How to fix it:
        Use `with torch.no_grad(): weight -= lr * weight.grad`, or the functions of `torch.nn.init`.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/autograd.html
    """
    found = match_message(
        failure,
        RUNTIME,
        r"a (?P<what>view of a leaf|leaf) Variable that requires grad is being used in an in-place operation",
        r"a leaf Variable that requires grad has been used in an in-place operation",
    )
    if found is None:
        return None
    names = [tensor.name for tensor in on_own_line(failure) if tensor.requires_grad]
    return Diagnosis(
        f"`{names[0] if names else 'a parameter'}` is a leaf tensor that requires a gradient, and it is modified in place while autograd is recording",
        f"with torch.no_grad():\n    {failure.own.text if failure.own and failure.own.text else 'weight -= lr * weight.grad'}",
        describe_tensors(on_own_line(failure)),
    )


@kind("FE064", "backward-of-many")
def backward_of_many(failure: FailureRecord) -> Diagnosis | None:
    """`backward()` was called on a tensor with several values.

    What:
        `backward()` without an argument needs a scalar.
    Why it happens:
        The loss has `reduction="none"`, DataParallel returns one loss for each GPU, or the mean is missing.
    How to fix it:
        `loss.mean().backward()`, or with weights `(weight * losses).sum().backward()`.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html
    """
    found = match_message(
        failure,
        RUNTIME,
        r"grad can be implicitly created only for scalar outputs",
        r"grad can be computed only for real scalar outputs(?!)",
    )
    if found is None:
        return None
    tensor = next((tensor for tensor in on_own_line(failure) if tensor.requires_grad), None)
    name = tensor.name if tensor else "loss"
    size = f" ({'x'.join(map(str, tensor.shape))})" if tensor else ""
    return Diagnosis(
        f"`{name}`{size} holds several values, and `backward()` needs a scalar",
        f"{name}.mean().backward()",
        describe_tensors(on_own_line(failure)),
    )


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


@kind("FE066", "numpy-of-grad")
def numpy_of_grad(failure: FailureRecord) -> Diagnosis | None:
    """A tensor with a graph, or on a GPU, was converted to NumPy.

    What:
        `.numpy()` works only on CPU tensors without a graph. This tensor has a graph or is on another device.
    Why it happens:
        An output or a loss is passed directly to a metric or a plot.
    How to fix it:
        `x.detach().cpu().numpy()`, or `x.item()` for one number.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.Tensor.numpy.html
    """
    found = match_message(
        failure,
        ("RuntimeError", "TypeError"),
        r"Can't call numpy\(\) on (?P<what>Tensor that requires grad|Variable that requires grad)",
        r"can't convert (?P<device>\w+(?::\d+)?) device type tensor to numpy",
    )
    if found is None:
        return None
    names = [tensor.name for tensor in on_own_line(failure)]
    name = names[0] if names else "x"
    why = f"is on {found['device']}" if found["device"] else "has a graph (it requires a gradient)"
    return Diagnosis(
        f"`{name}` {why} and cannot be converted to NumPy",
        f"{name}.detach().cpu().numpy()   # a number: {name}.item()",
        describe_tensors(on_own_line(failure)),
    )


@kind("FE067", "grad-of-integers")
def grad_of_integers(failure: FailureRecord) -> Diagnosis | None:
    """A gradient was requested for an integer tensor.

    What:
        Only floating point and complex tensors can have gradients.
    Why it happens:
        A parameter is created from integers (`torch.tensor([1, 2])` is int64), or the program trains
        quantised weights.
    How to fix it:
        Create it from floats: `torch.tensor([1., 2.])`. Keep quantised weights frozen and train an adapter.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/autograd.html
    """
    found = match_message(
        failure,
        RUNTIME,
        r"[Oo]nly Tensors of floating point(?: and complex)? (?:dtype )?can require gradients",
    )
    if found is None:
        return None
    return Diagnosis(
        "a gradient was requested for an integer tensor",
        "torch.tensor(values, dtype=torch.float32, requires_grad=True)",
        describe_tensors(on_own_line(failure)),
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

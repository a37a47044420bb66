"""Failures of the backward pass and the optimizer step: missing, freed or modified graphs, and NaN."""

from __future__ import annotations

import re

from flatout.diagnose.kind import (
    RUNTIME,
    Diagnosis,
    describe_tensors,
    kind,
    match_message,
    on_own_line,
    search_log,
)
from flatout.schema.failure import FailureRecord
from flatout.schema.findings import SourceLocation


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

"""Failures of the backward pass and of the step: no graph, a graph that is gone or was changed, values that are no numbers."""

from __future__ import annotations

import re

from flatout.diagnose.kind import RUNTIME, Answer, hit, kind, layer, near, on_own_line, seen
from flatout.plan.failure import FailureRecord
from flatout.plan.findings import Place


def operation(node: str) -> str:
    """``ExpBackward0`` as the operation that a person wrote: ``Exp``."""
    return re.sub(r"Backward\d*$", "", node)


def forward_call(failure: FailureRecord) -> Place | None:
    """The user's line in the "Traceback of forward call" that anomaly mode prints as a warning."""
    from flatout.diagnose.tracebacks import FRAME, is_mine

    told, place, lines = False, None, failure.around
    for at, line in enumerate(lines):
        told = told or "Traceback of forward call that caused the error" in line or "Error detected in" in line
        frame = FRAME.match(line) if told else None
        if frame is not None and is_mine(frame["file"]):
            place = Place(frame["file"], int(frame["line"]), 0, frame["function"] or "", lines[at + 1].strip() if at + 1 < len(lines) else "")
    return place


@kind("FE060", "loss-without-grad")
def loss_without_grad(failure: FailureRecord) -> Answer | None:
    """A loss that no parameter took part in.

    What:
        `backward()` was called on a tensor without a graph.
    Why it happens:
        The forward pass ran under `torch.no_grad()` or `inference_mode`, the loss went through `.item()`, `.detach()`, `.numpy()` or
        `torch.tensor(...)`, all parameters are frozen, or an `argmax` (which has no gradient) stands in between.
    How to mend it:
        Compute the loss from the model's output without leaving torch; check that `any(p.requires_grad for p in model.parameters())`.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/autograd.html
    """
    found = hit(
        failure,
        RUNTIME,
        r"element (?P<at>\d+) of tensors does not require grad and does not have a grad_fn",
        r"(?P<inference>Inference tensors cannot be saved for backward)",
        r"One of the differentiated Tensors does not require grad(?!)",
    )
    if found is None:
        return None
    if found["inference"]:
        return Answer(
            "a tensor that was made under `torch.inference_mode()` is used where gradients are wanted",
            "with torch.no_grad(): ...   # in place of inference_mode, where the result is used in training\nx = x.clone()               # outside of it",
        )
    names = [tensor.name for tensor in on_own_line(failure) if not tensor.requires_grad]
    name = f"`{names[0]}`" if names else "the loss"
    return Answer(
        f"{name} has no graph: no parameter that requires a gradient took part in it",
        "print(loss.requires_grad, loss.grad_fn)   # after each step from the model's output to the loss: where does it get lost?\n"
        "look for torch.no_grad(), .detach(), .item(), torch.tensor(...), argmax between model and loss, and for frozen parameters",
        seen(on_own_line(failure)),
    )


@kind("FE061", "backward-twice")
def backward_twice(failure: FailureRecord) -> Answer | None:
    """A graph that is gone.

    What:
        A backward pass went through a graph whose buffers an earlier one had freed.
    Why it happens:
        A hidden state (of an RNN, of a memory) is carried from step to step with its graph; two losses share a part of the forward pass and
        are walked one by one; or `loss` is kept and added to.
    How to mend it:
        `hidden = hidden.detach()` between steps; `(loss_a + loss_b).backward()` for two losses. `retain_graph=True` only where the same graph
        really is walked twice: it keeps all of its memory.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/autograd.html
    """
    found = hit(failure, RUNTIME, r"Trying to backward through the graph a second time", r"Trying to backward through the graph second time")
    if found is None:
        return None
    return Answer(
        "a backward pass went through a graph that an earlier one had freed",
        "hidden = hidden.detach()              # a state that is carried from step to step\n"
        "(loss_a + loss_b).backward()          # two losses of one forward pass: together\n"
        "loss.backward(retain_graph=True)      # only where the same graph really is walked twice",
        seen(on_own_line(failure)),
    )


@kind("FE062", "changed-in-place")
def changed_in_place(failure: FailureRecord) -> Answer | None:
    """A tensor that the backward pass needs was changed in place.

    What:
        An operation kept its input or output for the gradient, and it was written over before the backward pass came.
    Why it happens:
        `x += ...`, `x[...] = ...`, `relu_`, `inplace=True` after an operation that needs its output (exp, sigmoid, tanh, softmax); or
        `optimizer.step()` between a forward pass and its backward pass (GANs, several losses).
    How to mend it:
        Write out of place (`x = x + ...`), drop `inplace=True`, and step only after all backward passes of a forward pass.
        `torch.autograd.set_detect_anomaly(True)` names the line of the operation.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-correctness-checks
    """
    found = hit(
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
    times = f", {found.number('now') - found.number('then')} times" if found.number("now") - found.number("then") > 1 else ""
    step = found["node"] in ("AsStridedBackward0", "TBackward0") or near(failure, r"\bAsStridedBackward0\b|\bTBackward0\b") is not None
    mend = "optimizer.step()            # only after all backward passes of this forward pass\n" if step else ""
    return Answer(
        f"{of} was changed in place{times} after the forward pass had kept it for the gradient",
        mend + "x = x + y                   # in place of x += y and x[...] = y; nn.ReLU() in place of nn.ReLU(inplace=True)\n"
        "torch.autograd.set_detect_anomaly(True)   # once, to see the line of the operation",
        [f"the operation: {place.sentence()}: {place.text}"] if place else [],
    )


@kind("FE063", "leaf-changed-in-place")
def leaf_changed_in_place(failure: FailureRecord) -> Answer | None:
    """A parameter changed in place under autograd.

    What:
        A leaf (a parameter) that requires a gradient was written to while the graph was being built.
    Why it happens:
        An update or an initialisation by hand without `torch.no_grad()`.
    How to mend it:
        `with torch.no_grad(): weight -= lr * weight.grad`, or the functions of `torch.nn.init`.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/autograd.html
    """
    found = hit(
        failure,
        RUNTIME,
        r"a (?P<what>view of a leaf|leaf) Variable that requires grad is being used in an in-place operation",
        r"a leaf Variable that requires grad has been used in an in-place operation",
    )
    if found is None:
        return None
    names = [tensor.name for tensor in on_own_line(failure) if tensor.requires_grad]
    return Answer(
        f"`{names[0] if names else 'a parameter'}` is a leaf that requires a gradient, and it is written to while autograd listens",
        f"with torch.no_grad():\n    {failure.own.text if failure.own and failure.own.text else 'weight -= lr * weight.grad'}",
        seen(on_own_line(failure)),
    )


@kind("FE064", "backward-of-many")
def backward_of_many(failure: FailureRecord) -> Answer | None:
    """Backward from a tensor of many values.

    What:
        `backward()` without an argument starts from one number.
    Why it happens:
        A loss with `reduction="none"`, one loss for each GPU under DataParallel, or a forgotten mean.
    How to mend it:
        `loss.mean().backward()`; with weights `(weight * losses).sum().backward()`.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html
    """
    found = hit(failure, RUNTIME, r"grad can be implicitly created only for scalar outputs", r"grad can be computed only for real scalar outputs(?!)")
    if found is None:
        return None
    tensor = next((tensor for tensor in on_own_line(failure) if tensor.requires_grad), None)
    name = tensor.name if tensor else "loss"
    size = f" ({'x'.join(map(str, tensor.shape))})" if tensor else ""
    return Answer(f"`{name}`{size} holds several values, and a backward pass begins with one number", f"{name}.mean().backward()", seen(on_own_line(failure)))


@kind("FE065", "first-nan")
def first_nan(failure: FailureRecord) -> Answer | None:
    """Anomaly detection found the first NaN.

    What:
        The gradient of the operation that is named is the first in the backward pass that is no number.
    Why it happens:
        A square root or a norm at 0, a logarithm of 0, a division by 0, an exponential that overflows, `torch.where` with a bad value on the
        side that is not taken; in half precision often an overflow.
    How to mend it:
        Keep the argument away from the edge: `torch.sqrt(x + eps)`, `log(x.clamp_min(eps))`; use the stable forms (`log_softmax`,
        `binary_cross_entropy_with_logits`); a GradScaler for float16.
    Sources:
        https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection
    """
    found = hit(failure, RUNTIME, r"Function '(?P<node>\w+)' returned nan values in its (?P<out>\d+)(?:st|nd|rd|th) output")
    if found is None:
        return None
    name = operation(found["node"])
    place = forward_call(failure)
    mends = {
        "Sqrt": "torch.sqrt(x + 1e-12)",
        "Log": "torch.log(x.clamp_min(1e-12))",
        "Div": "a / (b + 1e-12)",
        "Pow": "(x + 1e-12) ** p",
        "LinalgVectorNorm": "(x.square().sum(-1) + 1e-12).sqrt()",
        "Norm": "(x.square().sum(-1) + 1e-12).sqrt()",
        "Exp": "torch.exp(x.clamp_max(80))",
    }
    return Answer(
        f"the gradient of `{name}` is the first that is no number" + (f" ({place.sentence()})" if place else ""),
        f"{mends.get(name, 'keep the argument of this operation away from where its gradient is infinite')}   # the gradient at the very "
        f"edge is infinite, and 0 times infinite is no number",
        place=place,
    )


@kind("FE066", "numpy-of-grad")
def numpy_of_grad(failure: FailureRecord) -> Answer | None:
    """An array wanted from a tensor with a graph, or on a GPU.

    What:
        NumPy shares memory with a tensor on the CPU without a graph; this one has a graph or lives on a device.
    Why it happens:
        An output or a loss goes to a metric or a picture as it is.
    How to mend it:
        `x.detach().cpu().numpy()`; one number: `x.item()`.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.Tensor.numpy.html
    """
    found = hit(
        failure,
        ("RuntimeError", "TypeError"),
        r"Can't call numpy\(\) on (?P<what>Tensor that requires grad|Variable that requires grad)",
        r"can't convert (?P<device>\w+(?::\d+)?) device type tensor to numpy",
    )
    if found is None:
        return None
    names = [tensor.name for tensor in on_own_line(failure)]
    name = names[0] if names else "x"
    why = f"lives on {found['device']}" if found["device"] else "has a graph (it requires a gradient)"
    return Answer(f"`{name}` {why}, and NumPy can hold neither", f"{name}.detach().cpu().numpy()   # one number: {name}.item()", seen(on_own_line(failure)))


@kind("FE067", "grad-of-integers")
def grad_of_integers(failure: FailureRecord) -> Answer | None:
    """A gradient asked for whole numbers.

    What:
        Only floating point and complex tensors have gradients.
    Why it happens:
        A parameter is made from whole numbers (`torch.tensor([1, 2])` is int64), or weights of a quantised model are to be trained.
    How to mend it:
        Make it of floats: `torch.tensor([1., 2.])`; quantised weights stay frozen and get an adapter.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/autograd.html
    """
    found = hit(failure, RUNTIME, r"[Oo]nly Tensors of floating point(?: and complex)? (?:dtype )?can require gradients")
    if found is None:
        return None
    return Answer(
        "a gradient was asked for a tensor of whole numbers", "torch.tensor(values, dtype=torch.float32, requires_grad=True)", seen(on_own_line(failure))
    )


@kind("FE068", "scaler-out-of-order")
def scaler_out_of_order(failure: FailureRecord) -> Answer | None:
    """A gradient scaler used out of order.

    What:
        A scaler wants, once in each step and in this order: scale and backward, unscale_ (where gradients are clipped), step, update.
    Why it happens:
        `unscale_` in every accumulated batch, `update()` forgotten, or `step` before there is a gradient.
    How to mend it:
        `unscale_`, clipping, `step` and `update` once, after the last backward pass of the accumulation.
    Sources:
        https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping
    """
    found = hit(
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
        "none": "`step` came before any gradient: no parameter of this optimizer has one",
        "half": "the parameters themselves are float16; a scaler wants float32 parameters under autocast",
    }
    name = next(name for name in why if found[name])
    mend = (
        "model.float()   # weights in float32, float16 only inside torch.autocast"
        if name == "half"
        else (
            "scaler.scale(loss).backward()      # every batch\n# and once a step:\nscaler.unscale_(optimizer); "
            "clip_grad_norm_(model.parameters(), 1.0)\nscaler.step(optimizer); scaler.update()"
        )
    )
    return Answer(f"the gradient scaler was used out of order: {why[name]}", mend)


@kind("FE069", "nothing-to-optimize")
def nothing_to_optimize(failure: FailureRecord) -> Answer | None:
    """An optimizer without parameters.

    What:
        The optimizer was given no parameter at all.
    Why it happens:
        Layers stand in a plain list or dictionary of the module, `model.parameters()` (which can be walked only once) was walked before, or
        a filter let nothing through.
    How to mend it:
        `nn.ModuleList([...])` or `nn.ModuleDict`, so that the module knows its layers; `list(model.parameters())` for what is used twice.
    Sources:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.ModuleList.html
    """
    found = hit(failure, ("ValueError",), r"optimizer got an empty parameter list")
    if found is None:
        return None
    return Answer(
        "the optimizer was given no parameter",
        "self.layers = nn.ModuleList([...])   # a plain list hides its layers from the module\n"
        "parameters = list(model.parameters())   # a generator is empty the second time" + (f"\nthe module: {layer(failure)}" if layer(failure) else ""),
    )

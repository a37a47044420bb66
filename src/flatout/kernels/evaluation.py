"""Evaluate a kernel's function on a case: outputs and gradients, compared with the reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flatout.kernels.kernel import Case, Function, Inputs, Kernel, tensors_of
from flatout.kernels.precision import distance


class Failed(Exception):
    """A check failed; the message says why."""


def compare(kernel: Kernel, case: Case, at: int, call: Function, exact: bool) -> float:
    """The largest error as a share of the allowed error. Raises Failed with the place if it exceeds 1."""
    inputs = inputs_of(case, at)
    expected = evaluate(kernel.reference, mapped(inputs, in_double), case, at)
    got = evaluate(call, on_device(cloned(inputs)), case, at)
    if len(got) != len(expected):
        raise Failed(f"{case.title}: {len(got)} results, but the reference has {len(expected)}")
    outputs, worst = len(got) - len(case.differentiate), 0.0
    same = (
        evaluate(kernel.reference, cloned(inputs), case, at) if exact and case.dtype is torch.float32 else ()
    )
    for which, (ours, right) in enumerate(zip(got, expected, strict=True)):
        title = f"output {which}" if which < outputs else f"gradient of {case.differentiate[which - outputs]}"
        if ours.shape != right.shape:
            raise Failed(f"{case.title}: {title} has shape {tuple(ours.shape)}, not {tuple(right.shape)}")
        found = distance(ours, right, case.terms, kernel.ulps, case.inside, case.dtype)
        if found.share > 1:
            raise Failed(
                f"{case.title}: {title} at {found.where} is {found.got:.9g}, not {found.expected:.9g} ({found.share:.3g} times the allowed error)"
            )
        if same and not torch.equal(bits(ours), bits(same[which])):
            raise Failed(f"{case.title}: {title} is close to the reference's, but must equal it bit for bit")
        worst = max(worst, found.share)
    return worst


def evaluate(call: Function, inputs: Inputs, case: Case, at: int) -> list[torch.Tensor]:
    """Outputs, then gradients of the differentiated inputs.

    Output gradients are drawn from the case's seed.
    """
    leaves = [inputs[name].requires_grad_() for name in case.differentiate]
    outputs = tensors_of(call(**inputs))
    found = [output.detach() for output in outputs]
    if leaves:
        draw = torch.Generator().manual_seed(1000 + at)
        through = [output for output in outputs if output.requires_grad]
        along = [
            torch.randn(output.shape, generator=draw).to(case.dtype).to(output.device, output.dtype)
            for output in through
        ]
        for leaf, gradient in zip(
            leaves, torch.autograd.grad(through, leaves, along, allow_unused=True), strict=True
        ):
            found.append(torch.zeros_like(leaf) if gradient is None else gradient)
    return found


def inputs_of(case: Case, at: int) -> Inputs:
    return case.make(torch.Generator().manual_seed(at))


def on_device(inputs: Inputs) -> Inputs:
    return mapped(inputs, lambda tensor: tensor.cuda()) if torch.cuda.is_available() else inputs


def cloned(inputs: Inputs) -> Inputs:
    return mapped(
        inputs, lambda tensor: tensor.detach().clone() if tensor.is_contiguous() else _same_layout(tensor)
    )


def _same_layout(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return tensor.detach().clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((extent,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float64) if tensor.is_floating_point() else tensor.clone()


def mapped(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    def of(value: object) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        return [of(each) for each in value] if isinstance(value, list) else value

    return {name: of(value) for name, value in inputs.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaNs compare by their bits as well."""
    return tensor.detach().cpu().contiguous().flatten().unsqueeze(-1).view(torch.uint8).flatten()

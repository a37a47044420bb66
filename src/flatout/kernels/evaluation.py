"""Evaluate a kernel's function on a case, and compare outputs and gradients with the reference in float64.

Two things round: the storage type, once or a few times per output (relative to that output), and the sums,
which are kept in float32 or better (relative to the largest output). n random roundings add up like sqrt(n):
Higham & Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019. So

    |got - float64|  <=  ULPS * u(dtype) * |float64|
                         +  (inside * u(dtype) + SLACK * u(sums) * (1 + sqrt(terms))) * max |float64|

``inside`` counts the values inside the formula that are rounded to the storage type before further use, and u
is the unit roundoff. No limit is tuned by hand for a kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_map_only

from flatout.kernels.kernel import Case, Function, Inputs, Kernel, tensors_of

ULPS = 4.0  # roundings in the storage type per output
SLACK = 8.0


class Failed(Exception):
    """A check failed; the message says why."""


@dataclass(frozen=True)
class Distance:
    """``share`` is the largest error as a share of the allowed error; at most 1 passes."""

    share: float
    where: tuple[int, ...] = ()
    got: float = 0.0
    expected: float = 0.0


def distance(
    got: torch.Tensor,
    expected: torch.Tensor,
    terms: int,
    inside: float = 0.0,
    stored: torch.dtype | None = None,
) -> Distance:
    """The distance of ``got`` from the float64 tensor ``expected`` of the same shape.

    NaN equals only NaN, and an infinity only itself. ``stored`` is the type of the inputs, if coarser than
    the result's.
    """
    if got.numel() == 0:
        return Distance(0.0)
    sums = torch.promote_types(got.dtype, torch.float32)
    ours = got.detach().to("cpu", torch.float64)
    expected = expected.detach().to("cpu", torch.float64)
    same = (ours == expected) | (ours.isnan() & expected.isnan())
    finite = expected.isfinite()
    scale = float(expected[finite].abs().max()) if bool(finite.any()) else 0.0
    u = max(torch.finfo(dtype).eps / 2 for dtype in (got.dtype, stored or got.dtype))
    of_sums = SLACK * torch.finfo(sums).eps / 2 * (1 + math.sqrt(terms))
    allowed = ULPS * u * expected.abs() + (inside * u + of_sums) * scale
    smallest = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
    share = torch.where(same, 0.0, (ours - expected).abs() / (allowed + smallest))
    share = torch.where(share.isnan(), math.inf, share)
    worst = share.argmax()
    place = torch.unravel_index(worst, share.shape) if share.dim() else ()
    share, ours, expected = (float(tensor.flatten()[worst]) for tensor in (share, ours, expected))
    return Distance(share, tuple(map(int, place)), ours, expected)


def compare(kernel: Kernel, case: Case, seed: int, call: Function) -> float:
    """The largest error as a share of the allowed error. Raises Failed with the place if it exceeds 1."""
    expected = evaluate(kernel.reference, in_double(inputs_of(case, seed)), case, seed)
    got = evaluate(call, on_device(inputs_of(case, seed)), case, seed)
    if len(got) != len(expected):
        raise Failed(f"{case.title}: {len(got)} results, but the reference has {len(expected)}")
    outputs, worst = len(got) - len(case.differentiate), 0.0
    for which, (ours, right) in enumerate(zip(got, expected, strict=True)):
        title = f"output {which}" if which < outputs else f"gradient of {case.differentiate[which - outputs]}"
        if ours.shape != right.shape:
            raise Failed(f"{case.title}: {title} has shape {tuple(ours.shape)}, not {tuple(right.shape)}")
        error = distance(ours, right, case.terms, case.inside, case.dtype)
        if error.share > 1:
            raise Failed(
                f"{case.title}: {title} at {error.where} is {error.got:.9g}, not {error.expected:.9g} ({error.share:.3g} times the allowed error)"
            )
        worst = max(worst, error.share)
    return worst


def evaluate(call: Function, inputs: Inputs, case: Case, seed: int) -> list[torch.Tensor]:
    """Outputs, then gradients of the differentiated inputs.

    Output gradients are drawn from the case's seed.
    """
    leaves = [inputs[name].requires_grad_() for name in case.differentiate]
    outputs = tensors_of(call(**inputs))
    results = [output.detach() for output in outputs]
    if leaves:
        draw = torch.Generator().manual_seed(1000 + seed)
        through = [output for output in outputs if output.requires_grad]
        along = [
            torch.randn(output.shape, generator=draw).to(case.dtype).to(output.device, output.dtype)
            for output in through
        ]
        gradients = torch.autograd.grad(through, leaves, along, allow_unused=True, materialize_grads=True)
        results += gradients
    return results


def inputs_of(case: Case, seed: int) -> Inputs:
    return case.make(torch.Generator().manual_seed(seed))


def on_device(inputs: Inputs) -> Inputs:
    return tree_map_only(torch.Tensor, torch.Tensor.cuda, inputs) if torch.cuda.is_available() else inputs


def in_double(inputs: Inputs) -> Inputs:
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, inputs
    )

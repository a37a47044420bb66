"""Evaluate a kernel's function on a case, and compare outputs and gradients with the reference in float64.

Two things round: the storage type, once or a few times per output (relative to that output), and the sums,
which are kept in float32 or better (relative to the largest output). n random roundings add up like sqrt(n):
Higham & Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019. So

    |result - float64|  <=  MAX_ULPS * u(dtype) * |float64|
        +  (inner_roundings * u(dtype) + SUM_SLACK * u(sums) * (1 + sqrt(terms))) * max |float64|

``inner_roundings`` counts the values inside the formula that are rounded to the storage type before further
use, and u is the unit roundoff. No limit is tuned by hand for a kernel.
"""

import math
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_map_only

from flatout.kernels.kernel import Case, Function, Inputs, Kernel, tensors_of

MAX_ULPS = 4.0  # roundings in the storage type per output
SUM_SLACK = 8.0


class CheckFailed(Exception):
    """A check failed; the message says why."""


@dataclass(frozen=True)
class Distance:
    """``error_ratio`` is the largest error as a share of the allowed error; at most 1 passes."""

    error_ratio: float
    position: tuple[int, ...] = ()
    got: float = 0.0
    expected: float = 0.0


def distance(
    result: torch.Tensor,
    expected: torch.Tensor,
    terms: int,
    inner_roundings: float = 0.0,
    input_dtype: torch.dtype | None = None,
) -> Distance:
    """The distance of ``result`` from the float64 tensor ``expected`` of the same shape.

    NaN equals only NaN, and an infinity only itself. ``input_dtype`` is the type of the inputs, if coarser than
    the result's.
    """
    if result.numel() == 0:
        return Distance(0.0)
    sum_dtype = torch.promote_types(result.dtype, torch.float32)
    actual = result.detach().to("cpu", torch.float64)
    expected = expected.detach().to("cpu", torch.float64)
    equal = (actual == expected) | (actual.isnan() & expected.isnan())
    finite = expected.isfinite()
    scale = float(expected[finite].abs().max()) if bool(finite.any()) else 0.0
    u = max(torch.finfo(dtype).eps / 2 for dtype in (result.dtype, input_dtype or result.dtype))
    sum_error = SUM_SLACK * torch.finfo(sum_dtype).eps / 2 * (1 + math.sqrt(terms))
    allowed = MAX_ULPS * u * expected.abs() + (inner_roundings * u + sum_error) * scale
    smallest_step = torch.finfo(result.dtype).smallest_normal * torch.finfo(result.dtype).eps
    ratio = torch.where(equal, 0.0, (actual - expected).abs() / (allowed + smallest_step))
    ratio = torch.where(ratio.isnan(), math.inf, ratio)
    worst = ratio.argmax()
    indices = torch.unravel_index(worst, ratio.shape) if ratio.dim() else ()
    ratio, actual, expected = (float(tensor.flatten()[worst]) for tensor in (ratio, actual, expected))
    return Distance(ratio, tuple(map(int, indices)), actual, expected)


def compare(kernel: Kernel, case: Case, seed: int, call: Function) -> float:
    """The largest error as a share of the allowed error. Raises CheckFailed with the position if it exceeds 1."""
    expected = evaluate(kernel.reference, in_double(inputs_of(case, seed)), case, seed)
    results = run_case(call, case, seed)
    if len(results) != len(expected):
        raise CheckFailed(f"{case.title}: {len(results)} results, but the reference has {len(expected)}")
    outputs, max_ratio = len(results) - len(case.differentiate), 0.0
    for index, (result, expected_result) in enumerate(zip(results, expected, strict=True)):
        title = f"output {index}" if index < outputs else f"gradient of {case.differentiate[index - outputs]}"
        if result.shape != expected_result.shape:
            raise CheckFailed(
                f"{case.title}: {title} has shape {tuple(result.shape)}, not {tuple(expected_result.shape)}"
            )
        error = distance(result, expected_result, case.terms, case.inner_roundings, case.dtype)
        if error.error_ratio > 1:
            raise CheckFailed(
                f"{case.title}: {title} at {error.position} is {error.got:.9g}, not {error.expected:.9g} ({error.error_ratio:.3g} times the allowed error)"
            )
        max_ratio = max(max_ratio, error.error_ratio)
    return max_ratio


def run_case(call: Function, case: Case, seed: int) -> list[torch.Tensor]:
    return evaluate(call, on_device(inputs_of(case, seed)), case, seed)


def evaluate(call: Function, inputs: Inputs, case: Case, seed: int) -> list[torch.Tensor]:
    """Outputs, then gradients of the differentiated inputs.

    Output gradients are drawn from the case's seed.
    """
    leaves = [inputs[name].requires_grad_() for name in case.differentiate]
    outputs = tensors_of(call(**inputs))
    results = [output.detach() for output in outputs]
    if leaves:
        generator = torch.Generator().manual_seed(1000 + seed)
        differentiable = [output for output in outputs if output.requires_grad]
        grad_outputs = [
            torch.randn(output.shape, generator=generator).to(case.dtype).to(output.device, output.dtype)
            for output in differentiable
        ]
        grads = torch.autograd.grad(
            differentiable, leaves, grad_outputs, allow_unused=True, materialize_grads=True
        )
        results += grads
    return results


def inputs_of(case: Case, seed: int) -> Inputs:
    return case.make(torch.Generator().manual_seed(seed))


def on_device(inputs: Inputs) -> Inputs:
    return tree_map_only(torch.Tensor, torch.Tensor.cuda, inputs) if torch.cuda.is_available() else inputs


def in_double(inputs: Inputs) -> Inputs:
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, inputs
    )

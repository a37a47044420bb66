"""Describe a kernel as a frozen value: its definition, its implementations, and the cases for its gate."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Inputs = dict[str, Any]  # by the argument's name: tensors, numbers, None
Function = Callable[..., Any]  # called with Inputs; returns a tensor or a tuple of tensors


@dataclass(frozen=True)
class Case:
    """One situation that a kernel must compute correctly.

    ``make(draw)`` returns the inputs on the CPU, drawn from the given generator, floating ones in ``dtype``.
    ``differentiate`` names the inputs whose gradients are compared. ``terms`` is the length of the longest
    sum in one output: the error bound grows with its square root. ``inner_roundings`` counts values inside the formula
    that are rounded to ``dtype`` (a residual's sum, half-precision logits): they weigh by the largest output,
    not by each. A case with ``bench`` is large and only timed: "gpu" on a GPU only, "any" on a CPU too.
    """

    title: str
    make: Callable[[torch.Generator], Inputs]
    dtype: torch.dtype = torch.float32
    differentiate: tuple[str, ...] = ()
    terms: int = 1
    inner_roundings: float = 0.0
    bench: str = ""


@dataclass(frozen=True)
class Implementation:
    """One way to compute a kernel.

    ``call`` takes the inputs of a case, and is differentiable if the kernel is. ``needs`` is the language: ""
    (plain torch, any device), "triton" or "cuda". ``dtypes`` are the supported types.
    """

    name: str
    call: Function
    needs: str = ""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Kernel:
    """A kernel with everything that its gate and its benchmark need.

    ``reference`` is plain torch, works in float64, and defines the kernel. ``operators`` maps the names of
    its torch.library operators ("flatout::layer_norm") to their Python functions: to observe allocations, the
    gate runs the function itself. ``wrong`` holds variants with typical mistakes of such a kernel: the gate
    must reject every one. ``sources`` are the files with CUDA C++. ``moved_bytes`` gives, for one case's
    inputs, the least traffic of a forward pass, which a benchmark compares with a copy.
    """

    name: str
    page: str
    reference: Function
    implementations: Sequence[Implementation]
    cases: Callable[[], Sequence[Case]]
    wrong: Mapping[str, Function] = field(default_factory=dict)
    operators: Mapping[str, Function] = field(default_factory=dict)
    sources: Sequence[Any] = ()
    moved_bytes: Callable[[Inputs], int] | None = None


def tensors_of(result: torch.Tensor | Iterable[Any]) -> tuple[torch.Tensor, ...]:
    """The tensors that a kernel's function returned, in order."""
    if isinstance(result, torch.Tensor):
        return (result,)
    return tuple(output for output in result if isinstance(output, torch.Tensor))


def has_triton() -> bool:
    """Whether Triton can be imported: CPU builds of torch come without it."""
    from importlib.util import find_spec

    return find_spec("triton") is not None

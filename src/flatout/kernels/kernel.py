"""What a kernel is: a frozen value that says what is computed, in which ways, and how the gate shall try it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Inputs = dict[str, Any]  # by the argument's name: tensors, numbers, None
Function = Callable[..., Any]  # called with Inputs; a tensor, or a tuple of tensors


@dataclass(frozen=True)
class Case:
    """One situation that a kernel must get right.

    ``make(draw)`` gives the inputs on the CPU, drawn from the generator it is handed, in ``dtype`` where they are
    floating. ``differentiate`` names the inputs whose gradients are compared. ``terms`` is the length of the longest sum
    behind one output: the bound of the error grows with its square root. ``inside`` counts the roundings to ``dtype`` of values inside
    the formula (a residual's sum, half-precision logits): they weigh by the largest output, not by each. A case with ``bench`` is large and only timed:
    "gpu" there alone, "any" on a CPU too.
    """

    title: str
    make: Callable[[torch.Generator], Inputs]
    dtype: torch.dtype = torch.float32
    differentiate: tuple[str, ...] = ()
    terms: int = 1
    inside: float = 0.0
    bench: str = ""


@dataclass(frozen=True)
class Implementation:
    """One way to compute it. ``call`` takes the inputs of a case and is differentiable where the kernel is.

    ``needs`` is what it is written in: "" (plain torch, any device), "triton" or "cuda". ``dtypes`` are those it takes.
    """

    name: str
    call: Function
    needs: str = ""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Kernel:
    """A kernel with everything that its gate and its bench need.

    ``reference`` is plain torch, works in float64, and is the meaning of the kernel. ``operators`` are the names of its
    torch.library operators ("flatout::layer_norm") with the Python function behind each: the gate runs the function itself
    where it has to see what is allocated. ``wrong`` are variants with the mistakes that such a kernel is prone to: the gate must
    reject every one of them. ``sources`` are the files with CUDA C++. ``moved_bytes`` and ``flops`` say, for one case's inputs, the
    least traffic and arithmetic of a forward pass: what the roofline of a device allows. ``exact`` holds the implementations
    to the reference's bits in float32.
    """

    name: str
    page: str
    reference: Function
    implementations: Sequence[Implementation]
    cases: Callable[[], Sequence[Case]]
    wrong: Mapping[str, Function]
    operators: Mapping[str, Function] = field(default_factory=dict)
    sources: Sequence[Any] = ()
    ulps: float = 4.0  # roundings in the storage type that one output may carry
    exact: bool = False
    moved_bytes: Callable[[Inputs], int] | None = None
    flops: Callable[[Inputs], int] | None = None


def tensors_of(result: Any) -> tuple[torch.Tensor, ...]:
    """The tensors that a function of a kernel gave, in their order."""
    if isinstance(result, torch.Tensor):
        return (result,)
    return tuple(each for each in result if isinstance(each, torch.Tensor))


def has_triton() -> bool:
    """Whether Triton can be imported: CPU builds of torch come without it."""
    from importlib.util import find_spec

    return find_spec("triton") is not None

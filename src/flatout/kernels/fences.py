"""Detect out-of-bounds access: each tensor ends (or begins) at a protected page.

A kernel that reads or writes one element too far ends the process with SIGSEGV at that instruction. Memory
that a kernel allocates is fenced as well and filled with NaN, which reveals elements that it never writes.
This works on a CPU only: Triton's interpreter, the CUDA emulator, and plain code. On a GPU, compute-sanitizer
does this.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PAGE = mmap.PAGESIZE
POISON_BYTE = 0x7F  # for types that are not floating: far from any sensible number
ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
FILLS = {"zeros", "zeros_like", "new_zeros", "full", "full_like", "new_full", "ones", "ones_like"}
_libc = ctypes.CDLL(None, use_errno=True)


def fenced(tensor: torch.Tensor, at_end: bool = True) -> torch.Tensor:
    """A copy with the same sizes and strides, with a protected page at its end or at its beginning."""
    if tensor.numel() == 0:
        return tensor.clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = extent * tensor.element_size()
    pages = -(-size // PAGE) * PAGE
    buffer = mmap.mmap(-1, pages + PAGE)
    forbidden = pages if at_end else 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    flat = torch.frombuffer(buffer, dtype=tensor.dtype, count=extent, offset=pages - size if at_end else PAGE)
    if _libc.mprotect(ctypes.c_void_p(address + forbidden), ctypes.c_size_t(PAGE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    flat.copy_(tensor.detach().as_strided((extent,), (1,)))  # including gaps between elements
    return flat.as_strided(tensor.shape, tensor.stride(), 0)


class Fenced(TorchDispatchMode):
    """While active, fences the allocations of the given operators' functions.

    ``functions``: by operator name.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], at_end: bool) -> None:
        super().__init__()
        self._functions, self._at_end = functions, at_end

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().rpartition(".")[0] if "." in function.name() else function.name()
        ours = self._functions.get(name)
        if ours is not None:  # call the function itself, to fence its allocations
            with self:
                return ours(*args, **(kwargs or {}))
        made = function(*args, **(kwargs or {}))
        plain = name.removeprefix("aten::")
        if plain not in ALLOCATES | FILLS or made.device.type != "cpu":
            return made
        if plain in ALLOCATES and made.numel():
            made.view(torch.uint8).fill_(
                POISON_BYTE
            ) if not made.is_floating_point() and made.dtype is not torch.bool else made.fill_(float("nan"))
        return fenced(made, self._at_end)

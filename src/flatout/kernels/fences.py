"""Detect out-of-bounds access: each tensor ends (or begins) at a protected page.

A kernel that reads or writes one element too far ends the process with SIGSEGV at that instruction. Memory
that a kernel allocates is fenced as well and filled with NaN, which reveals elements that it never writes.
This works on a CPU only: Triton's interpreter, the CUDA emulator, and plain code. On a GPU, compute-sanitizer
does this.
"""

import ctypes
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PAGE_BYTES = mmap.PAGESIZE
POISON_BYTE = 0x7F  # for types that are not floating: far from any sensible number
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
FILLED_ALLOCATIONS = {
    "zeros",
    "zeros_like",
    "new_zeros",
    "full",
    "full_like",
    "new_full",
    "ones",
    "ones_like",
}
_libc = ctypes.CDLL(None, use_errno=True)


def fenced(tensor: torch.Tensor, at_end: bool = True) -> torch.Tensor:
    """A copy with the same sizes and strides, with a protected page at its end or at its beginning."""
    if tensor.numel() == 0:
        return tensor.clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = extent * tensor.element_size()
    data_bytes = -(-size // PAGE_BYTES) * PAGE_BYTES
    buffer = mmap.mmap(-1, data_bytes + PAGE_BYTES)
    guard_offset = data_bytes if at_end else 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    flat = torch.frombuffer(
        buffer, dtype=tensor.dtype, count=extent, offset=data_bytes - size if at_end else PAGE_BYTES
    )
    if _libc.mprotect(ctypes.c_void_p(address + guard_offset), ctypes.c_size_t(PAGE_BYTES), 0):
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
        python_function = self._functions.get(name)
        if python_function is not None:  # call the function itself, to fence its allocations
            with self:
                return python_function(*args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        operator = name.removeprefix("aten::")
        if operator not in ALLOCATIONS | FILLED_ALLOCATIONS or result.device.type != "cpu":
            return result
        if operator in ALLOCATIONS and result.numel():
            result.view(torch.uint8).fill_(
                POISON_BYTE
            ) if not result.is_floating_point() and result.dtype is not torch.bool else result.fill_(
                float("nan")
            )
        return fenced(result, self._at_end)

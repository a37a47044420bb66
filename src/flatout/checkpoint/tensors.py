"""Write and read tensors in one safetensors file, each in one pass.

The safetensors library can read the file, but this module does not use it. When writing, the bytes go from
the tensors' memory to the disk and through the digest. This needs no second copy of the state, and the
training continues. When reading, each tensor gets its own memory. The library returns parts of a mapped file
instead. These change, or crash the process, when the file is overwritten or truncated, and the next
`torch.save` would write the whole file. Dtypes that the format does not have are stored as bytes; the caller
knows the original dtype.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.checkpoint.bounded import from_json
from flatout.checkpoint.disk import HashedFileReader, Stored, write_file
from flatout.schema.errors import SaveError

if TYPE_CHECKING:
    from torch import Tensor

SPELLED = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "complex64": "C64",
    "bool": "BOOL",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
NAMED = {spelled: name for name, spelled in SPELLED.items()}
MOST_HEAD_BYTES = 100_000_000  # the format's own limit
MOST_DIMENSIONS = 64


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> Stored:
    """Raises OSError. Tensors of other devices are copied to the host one by one."""
    ordered = dict(
        sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    )  # keeps each tensor aligned to its elements
    return write_file(path, _parts(ordered))


def _parts(tensors: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
    head: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        spelled = SPELLED.get(str(tensor.dtype).removeprefix("torch."))
        size = tensor.numel() * tensor.element_size()
        head[name] = {
            "dtype": spelled or "U8",
            "shape": list(tensor.shape) if spelled else [size],
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        here = tensor.detach().cpu().contiguous()
        yield memory_of(here)
        del here


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host, without NumPy. It does not keep the tensor alive."""
    size = tensor.numel() * tensor.element_size()
    return (
        memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
        if size
        else memoryview(b"")
    )


def read_tensors(torch: ModuleType, path: Path, stored: Stored) -> dict[str, Any]:
    """Tensors on the host, by name. Raises SaveError if the file is invalid or is not the ``stored`` one."""
    try:
        with HashedFileReader(path) as file:
            if file.length != stored.bytes:
                raise SaveError(f"{path.name} has {file.length:,} bytes instead of {stored.bytes:,}")
            found = _tensors_in(torch, file)
            if file.so_far != stored:
                raise SaveError(f"{path.name} is not what was written: its digest differs")
            return found
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RuntimeError,
        MemoryError,
        OverflowError,
    ) as error:
        raise SaveError(
            f"{path.name} is not a valid tensor file ({type(error).__name__}: {str(error)[:200]})"
        ) from None


def _tensors_in(torch: ModuleType, file: HashedFileReader) -> dict[str, Any]:
    length = bytearray(8)
    file.into(length)
    head_bytes = int.from_bytes(length, "little")
    if not 2 <= head_bytes <= min(MOST_HEAD_BYTES, file.length - 8):
        raise ValueError(f"its header has {head_bytes:,} bytes")
    head = bytearray(head_bytes)
    file.into(head)
    described = from_json(head)
    described.pop("__metadata__", None)
    found, at = {}, 0
    for name, metadata in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
        tensor = _empty(torch, metadata, at, file.length - 8 - head_bytes)
        file.into(memory_of(tensor))
        at += tensor.numel() * tensor.element_size()
        found[name] = tensor
    if 8 + head_bytes + at != file.length:
        raise ValueError("it contains bytes that belong to no tensor")
    return found


def _empty(torch: ModuleType, metadata: dict[str, Any], at: int, most_bytes: int) -> Any:
    """Allocate the tensor that begins ``at``. Rejects gaps, overlaps and sizes beyond the file."""
    dtype, shape, (start, end) = (
        getattr(torch, NAMED[metadata["dtype"]]),
        metadata["shape"],
        metadata["data_offsets"],
    )
    if len(shape) > MOST_DIMENSIONS or any(
        type(each) is not int or each < 0 for each in (*shape, start, end)
    ):
        raise ValueError("it has invalid sizes")
    if start != at or end > most_bytes or end - start != prod(shape) * dtype.itemsize:
        raise ValueError("its tensors are not contiguous")
    return torch.empty(shape, dtype=dtype, device="cpu")

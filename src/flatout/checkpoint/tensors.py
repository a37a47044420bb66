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

from flatout.checkpoint.disk import FileDigest, HashedFileReader, from_json, write_file
from flatout.schema.errors import MALFORMED, CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS_DTYPES = {
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
TORCH_DTYPES = {spelled: name for name, spelled in SAFETENSORS_DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 64


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> FileDigest:
    """Raises OSError. Tensors of other devices are copied to the host one by one."""
    # keeps each tensor aligned to its elements
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    return write_file(path, _parts(ordered))


def _parts(tensors: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        dtype = SAFETENSORS_DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": dtype or "U8",
            "shape": list(tensor.shape) if dtype else [size],
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        host = tensor.detach().cpu().contiguous()
        yield memory_of(host)
        del host


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host, without NumPy. It does not keep the tensor alive."""
    size = tensor.numel() * tensor.element_size()
    return (
        memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
        if size
        else memoryview(b"")
    )


def read_tensors(torch: ModuleType, path: Path, expected: FileDigest) -> dict[str, Any]:
    """Tensors on the host, by name. Raises CheckpointError if the file is invalid or is not the ``expected`` one."""
    try:
        with HashedFileReader(path) as file:
            if file.length != expected.bytes:
                raise CheckpointError(f"{path.name} has {file.length:,} bytes instead of {expected.bytes:,}")
            tensors = _tensors_in(torch, file)
            if file.digest != expected:
                raise CheckpointError(f"{path.name} is not what was written: its digest differs")
            return tensors
    except (*MALFORMED, OSError, RuntimeError, MemoryError) as error:
        raise CheckpointError(
            f"{path.name} is not a valid tensor file ({type(error).__name__}: {str(error)[:200]})"
        ) from None


def _tensors_in(torch: ModuleType, file: HashedFileReader) -> dict[str, Any]:
    length = bytearray(8)
    file.readinto(length)
    head_bytes = int.from_bytes(length, "little")
    if not 2 <= head_bytes <= min(MAX_HEADER_BYTES, file.length - 8):
        raise ValueError(f"its header has {head_bytes:,} bytes")
    text = bytearray(head_bytes)
    file.readinto(text)
    header = from_json(text)
    header.pop("__metadata__", None)
    tensors, offset = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        tensor = _empty(torch, entry, offset, file.length - 8 - head_bytes)
        file.readinto(memory_of(tensor))
        offset += tensor.numel() * tensor.element_size()
        tensors[name] = tensor
    if 8 + head_bytes + offset != file.length:
        raise ValueError("it contains bytes that belong to no tensor")
    return tensors


def _empty(torch: ModuleType, entry: dict[str, Any], offset: int, max_bytes: int) -> Any:
    dtype, shape, (start, end) = (
        getattr(torch, TORCH_DTYPES[entry["dtype"]]),
        entry["shape"],
        entry["data_offsets"],
    )
    if len(shape) > MAX_DIMENSIONS or any(
        type(number) is not int or number < 0 for number in (*shape, start, end)
    ):
        raise ValueError("it has invalid sizes")
    if start != offset or end > max_bytes or end - start != prod(shape) * dtype.itemsize:
        raise ValueError("its tensors are not contiguous")
    return torch.empty(shape, dtype=dtype, device="cpu")

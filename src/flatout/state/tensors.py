"""Tensors in one safetensors file: written in one pass by us, read by the safetensors library.

Written here and not there: the bytes go from the tensors' own memory to the disk and through the digest, without a second copy of the whole state, and the
training goes on meanwhile. Types of numbers that the format does not have are stored as bytes; whoever packed the state knows what they were.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flatout.plan.errors import SaveError
from flatout.state.disk import Stored, write_file

SPELLED = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64", "bool": "BOOL",
           "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
           "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"}


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> Stored:
    """Raises OSError. Tensors of other devices are brought to the host one by one."""
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))  # so that each one begins at a multiple of its elements
    return write_file(path, _parts(ordered))


def _parts(tensors: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
    head: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        spelled = SPELLED.get(str(tensor.dtype).removeprefix("torch."))
        size = tensor.numel() * tensor.element_size()
        head[name] = {"dtype": spelled or "U8", "shape": list(tensor.shape) if spelled else [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        here = tensor.detach().cpu().contiguous()
        yield _memory_of(here)
        del here


def _memory_of(tensor: Any) -> memoryview:
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())) if size else memoryview(b"")


def read_tensors(path: Path) -> dict[str, Any]:
    """On the host, by name. Raises SaveError for what is not such a file. Called for files whose digest was found right: the library maps them into memory."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, MemoryError) as error:
        raise SaveError(f"{path.name} is no file of tensors ({type(error).__name__}: {str(error)[:200]})") from None

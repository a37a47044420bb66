"""Rebuilds a state from its JSON and tensors."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from flatout.schema.errors import MALFORMED, CheckpointError

MAX_DEPTH = 64
FACTORIES: dict[str, Callable[[], Any]] = {
    "list": list,
    "dict": dict,
    "int": int,
    "float": float,
    "set": set,
    "str": str,
}
MAPPING_NAMES: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
SEQUENCE_NAMES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
TYPES_BY_NAME = {name: kind for kind, name in (MAPPING_NAMES | SEQUENCE_NAMES).items()}


def unpack(torch: ModuleType, tree: object, tensors: Mapping[str, Any]) -> Any:
    """Rebuild the state with new containers around ``tensors``.

    Raises CheckpointError for anything `pack` did not make.
    """
    try:
        return _value_of(torch, tree, tensors, 0)
    except (*MALFORMED, RuntimeError, MemoryError) as error:
        raise CheckpointError(
            f"a value in it cannot be read ({type(error).__name__}: {str(error)[:200]})"
        ) from None


def _value_of(torch: ModuleType, tree: Any, tensors: Mapping[str, Any], depth: int) -> Any:
    if depth > MAX_DEPTH + 1:
        raise ValueError("it is nested too deeply")
    if tree is None or type(tree) in (bool, int, float, str):
        return tree

    def unpacked(part: object) -> Any:
        return _value_of(torch, part, tensors, depth + 1)

    if type(tree) is list:
        return [unpacked(part) for part in tree]
    if "tensor" in tree:
        return _tensor_of(torch, tree, tensors)
    ((kind, metadata),) = tree.items()
    if kind in MAPPING_NAMES.values():
        container = TYPES_BY_NAME[kind]()
        for key, value in metadata:
            container[unpacked(key)] = unpacked(value)
        return container
    if kind == "default":
        return defaultdict(
            FACTORIES[metadata[0]], ((unpacked(key), unpacked(value)) for key, value in metadata[1])
        )
    if kind == "deque":
        return deque((unpacked(part) for part in metadata[0]), metadata[1])
    if kind in SEQUENCE_NAMES.values():
        return TYPES_BY_NAME[kind](
            unpacked(part)
            for part in metadata
            if kind == "tuple" or type(part) is not dict or "missing" not in part
        )
    return _leaf_of(torch, kind, metadata, unpacked)


def _leaf_of(torch: ModuleType, kind: str, metadata: Any, unpacked: Callable[[Any], Any]) -> Any:
    if kind == "float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[metadata]
    if kind == "int":
        return int(metadata, 16)
    if kind == "ints":
        words = array("q")
        words.frombytes(_bytes(metadata[1]))
        return {"list": list, "tuple": tuple}[metadata[0]](to_little_endian(words))
    if kind == "large":
        return unpacked(metadata).numpy()
    if kind == "complex":
        return complex(*(unpacked(part) for part in metadata))
    if kind == "bytes":
        return _bytes(metadata)
    if kind == "range":
        return range(*metadata)
    if kind == "size":
        return torch.Size(metadata)
    if kind == "dtype":
        return _dtype(torch, metadata)
    if kind == "device":
        return torch.device(metadata)
    if kind in ("array", "scalar"):
        import numpy

        dtype = numpy.dtype(str(metadata[0]))
        if dtype.hasobject or dtype.names is not None:
            raise ValueError("it is an array of objects")
        if kind == "scalar" and not dtype.itemsize:
            return dtype.type()  # an empty string
        values = numpy.frombuffer(_bytes(metadata[-1]), dtype).copy()
        return values.reshape(metadata[1]) if kind == "array" else values[0]
    if kind == "missing":
        return None
    raise ValueError(f"unknown kind of value {kind!r}")


def _tensor_of(torch: ModuleType, metadata: dict[str, Any], tensors: Mapping[str, Any]) -> Any:
    shape = metadata["shape"]
    order = metadata.get("order", list(range(len(shape))))
    if sorted(order) != list(range(len(shape))):
        raise ValueError("its dimensions have no valid order")
    flat = (
        tensors[metadata["tensor"]]
        .view(_dtype(torch, metadata["dtype"]))
        .reshape([shape[axis] for axis in order])
    )
    return flat.permute([order.index(axis) for axis in range(len(order))])


def _dtype(torch: ModuleType, name: str) -> Any:
    dtype = getattr(torch, name) if type(name) is str and name.isidentifier() else None
    if type(dtype) is not torch.dtype:
        raise ValueError(f"there is no dtype {name!r}")
    return dtype


def to_little_endian(words: array[int]) -> array[int]:
    if sys.byteorder == "big":
        words.byteswap()
    return words


def to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)

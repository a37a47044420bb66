"""A state as a closed set of JSON values and tensors.

Other values are named and left out; nothing is ever pickled.

``None``, ``bool``, ``int``, ``float``, ``str`` and ``list`` are themselves. Everything else is an object with
one key for its type:

    {"dict": [[key, value], ...]}        also "ordered", "counter"
    {"tuple": [...]}                     also "set", "frozenset", "size" (torch.Size)
    {"default": [factory, [[key, value], ...]]}
    {"deque": [[...], most]}
    {"float": "nan"}                     also "inf", "-inf"
    {"complex": [real, imaginary]}
    {"int": hexadecimal}                 of more than 64 bits
    {"ints": ["list" or "tuple", base64 of 64-bit words]}    for many integers
    {"bytes": base64}
    {"range": [start, stop, step]}
    {"dtype": "float32"}
    {"device": "cuda:0"}
    {"scalar": [numpy's dtype, base64]}
    {"array": [numpy's dtype, shape, base64]}
    {"large": tensor}                    a numpy array that is stored as a tensor
    {"tensor": name, "dtype": ..., "shape": [...], "order": [...]}
                                         its bytes are in the tensor file; ``order`` lists its dimensions from
                                         the widest stride to the narrowest, if they are not in that order
    {"missing": type}                    a list entry that was left out

Types are compared exactly: a subclass may carry unknown data.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.schema.errors import MALFORMED, CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


MAX_DEPTH = 64
FACTORIES: dict[str, Callable[[], Any]] = {kind.__name__: kind for kind in (list, dict, int, float, set, str)}
MAPPING_NAMES: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
SEQUENCE_NAMES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
TYPES_BY_NAME = {name: kind for kind, name in (MAPPING_NAMES | SEQUENCE_NAMES).items()}


def unpack(torch: ModuleType, tree: object, tensors: Mapping[str, Any]) -> Any:
    """Rebuild the state with new containers around ``tensors``.

    Raises CheckpointError for anything `pack` did not make."""
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


MIN_PACKED_INTS, LARGE_BYTES = 64, 4096
INT64_LIMIT = 1 << 63


@dataclass
class Packed:
    """``tree`` is JSON.

    ``tensors``: the program's own, by name, with dimensions in the order of their strides.

    ``left_out``: the places of values outside the set, with their types."""

    tree: Any
    tensors: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def pack(torch: ModuleType, state: object) -> Packed:
    return _Packer(torch, state).packed


class _Packer:
    def __init__(self, torch: ModuleType, state: object) -> None:
        self.torch = torch
        self.packed = Packed(None)
        self.names: dict[Any, str] = {}
        self.ancestors: set[int] = set()  # the containers of the present value
        self.packed.tree = self._pack(state, "", 0)

    def _pack(self, value: Any, where: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            # the only way for thousands of digits
            return value if -INT64_LIMIT <= value < INT64_LIMIT else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if depth > MAX_DEPTH or id(value) in self.ancestors:
            return self._missing(value, where)
        if (
            kind in (list, tuple)
            and len(value) >= MIN_PACKED_INTS
            and set(map(type, value)) == {int}
            and min(value) >= -INT64_LIMIT
            and max(value) < INT64_LIMIT
        ):
            return {"ints": [kind.__name__, to_base64(to_little_endian(array("q", value)).tobytes())]}
        self.ancestors.add(id(value))
        try:
            return self._pack_container(value, kind, where, depth)
        finally:
            self.ancestors.discard(id(value))

    def _pack_container(self, value: Any, kind: type, where: str, depth: int) -> Any:
        if kind is list:
            return self._pack_sequence(value, where, depth)
        if kind in MAPPING_NAMES:
            return {MAPPING_NAMES[kind]: self._pack_mapping(value, where, depth)}
        if kind in SEQUENCE_NAMES:
            return {SEQUENCE_NAMES[kind]: self._pack_sequence(value, where, depth)}
        if kind is defaultdict:
            name = next((name for name, kind in FACTORIES.items() if kind is value.default_factory), None)
            if name is None:
                return self._missing(value, where)
            return {"default": [name, self._pack_mapping(value, where, depth)]}
        if kind is deque:
            return {"deque": [self._pack_sequence(value, where, depth), value.maxlen]}
        if kind is complex:
            return {"complex": [self._pack(value.real, where, depth), self._pack(value.imag, where, depth)]}
        if kind is bytes:
            return {"bytes": to_base64(value)}
        if kind is range:
            return {"range": [value.start, value.stop, value.step]}
        return self._pack_library_value(value, where)

    def _pack_library_value(self, value: Any, where: str) -> Any:
        torch, kind = self.torch, type(value)
        if kind is torch.Size:
            return {"size": list(value)}
        if kind is torch.dtype:
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": str(value)}
        if kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return self._tensor(value, where)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            dtype = value.dtype
            if kind is numpy.ndarray and not dtype.hasobject and dtype.names is None:
                return self._array(value, where)
            if kind is dtype.type and not dtype.hasobject and dtype.names is None:
                return {"scalar": [dtype.str, to_base64(value.tobytes())]}
        return self._missing(value, where)

    def _array(self, value: Any, where: str) -> Any:
        if value.nbytes >= LARGE_BYTES and value.dtype.isnative:
            try:
                return {"large": self._tensor(self.torch.from_numpy(value.copy()), where)}
            except TypeError:
                pass  # torch does not have this dtype
        return {"array": [value.dtype.str, list(value.shape), to_base64(value.tobytes())]}

    def _tensor(self, tensor: Tensor, where: str) -> Any:
        tensor = tensor.detach()
        if (
            tensor.layout is not self.torch.strided
            or tensor.is_quantized
            or tensor.is_meta
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return self._missing(tensor, where)
        order = sorted(range(tensor.dim()), key=lambda axis: (-tensor.stride(axis), axis))
        if not tensor.permute(order).is_contiguous():  # a view or expanded: copy its bytes in order
            order = list(range(tensor.dim()))
        identity = (
            (tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.data_ptr())
            if tensor.numel()
            else id(tensor)
        )
        name = self.names.get(identity)
        if name is None:
            name = self.names[identity] = self._name(where)
            self.packed.tensors[name] = tensor.permute(order)
        metadata = {
            "tensor": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
        }
        return metadata if order == list(range(tensor.dim())) else {**metadata, "order": order}

    def _name(self, where: str) -> str:
        where = where.encode(errors="backslashreplace").decode()  # lone surrogates are not valid in the file
        name, number = where or "state", 1
        while name in self.packed.tensors or name == "__metadata__":
            name, number = f"{where}#{number}", number + 1
        return name

    def _pack_sequence(self, values: list[Any], where: str, depth: int) -> list[Any]:
        return [self._pack(value, f"{where}[{number}]", depth + 1) for number, value in enumerate(values)]

    def _pack_mapping(self, values: Mapping[Any, Any], where: str, depth: int) -> list[list[Any]]:
        pairs = []
        for key, value in values.items():
            is_text = type(key) is str
            place = f"{where}.{key}".removeprefix(".") if is_text else f"{where}[{repr(key)[:80]}]"
            packed_key, packed = self._pack(key, place, depth + 1), self._pack(value, place, depth + 1)
            if not any(type(part) is dict and "missing" in part for part in (packed_key, packed)):
                pairs.append([packed_key, packed])
        return pairs

    def _missing(self, value: object, where: str) -> dict[str, str]:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        self.packed.left_out[where] = kind
        return {"missing": kind}

"""Events of torch's profiler, as this package reads them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

DTYPE_BYTES = {
    "float": 4,
    "double": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "long int": 8,
    "long": 8,
    "int": 4,
    "short int": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
}
STACK_LINE = re.compile(r"^(.*)\((\d+)\): (.*)$")
Line = tuple[str, int, str]  # file, line, function


@dataclass
class OperatorEvent:
    name: str
    start: int
    end: int
    thread: int
    raw: Any
    children_ns: int = 0
    is_leaf: bool = True  # whether it does its work itself, without nested operators
    flops: float | None = None  # also None if a nested operator accounts for them
    device_ns: int = 0
    tensor_core_ns: int = 0
    line: Line | None = None


@dataclass
class OperatorTotals:
    calls: int = 0
    host_ns: int = 0
    device_ns: int = 0
    tensor_core_ns: int = 0
    flops: float = 0.0
    moved_bytes: float = 0.0
    shapes: Counter[str] = field(default_factory=Counter)
    lines: Counter[Line | None] = field(default_factory=Counter)


def kind_of(event: Any) -> str:
    """Return the activity under kineto's name. For an older torch it is derived from other properties."""
    on_device = not str(event.device_type()).endswith(".CPU")
    activity_type = getattr(event, "activity_type", None)
    if activity_type is not None:
        kind = str(activity_type())
        return (
            "kernel"
            if kind == "concurrent_kernel"
            else kind
            if on_device == kind.startswith(("kernel", "gpu_"))
            else ""
        )
    if event.is_user_annotation():
        return "user_annotation"
    if on_device:
        return "kernel"
    python = STACK_LINE.match(event.name()) or event.name().startswith(("nn.Module: ", "<built-in "))
    return "python_function" if python else "cpu_op"


def is_autograd_node(event: OperatorEvent) -> bool:
    """Return whether the event is a node of autograd's backward pass, which is no operator itself."""
    return event.name.startswith("autograd::engine") or (event.raw.scope() == 1 and "::" not in event.name)


def operand_bytes(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> float:
    """Return the bytes of all inputs, plus a result as large as the largest input.

    This is an estimate, exact for elementwise operators.
    """
    input_bytes = [
        prod(shape) * DTYPE_BYTES[dtype]
        for dtype, shape in zip(dtypes, shapes, strict=False)
        if dtype in DTYPE_BYTES and shape
    ]
    return float(sum(input_bytes) + max(input_bytes, default=0))


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    disjoint: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = disjoint[-1][0], max(end, disjoint[-1][1])
        else:
            disjoint.append((start, end))
    return disjoint


def union_ns(spans: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in merged(spans))

"""Events of torch's profiler, as this package reads them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

SIZES = {
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
class Event:
    name: str
    start: int
    end: int
    thread: int
    raw: Any
    children_ns: int = 0
    works: bool = True  # whether it does its work itself, without nested operators
    flops: float | None = None  # also None if a nested operator accounts for them
    device_ns: int = 0
    core_ns: int = 0
    line: Line | None = None


@dataclass
class Sum:
    calls: int = 0
    host_ns: int = 0
    device_ns: int = 0
    core_ns: int = 0
    flops: float = 0.0
    moved: float = 0.0
    shapes: Counter[str] = field(default_factory=Counter)
    lines: Counter[Line | None] = field(default_factory=Counter)


def kind_of(event: Any) -> str:
    """Return the activity under kineto's name. For an older torch it is derived from other properties."""
    on_device = not str(event.device_type()).endswith(".CPU")
    ask = getattr(event, "activity_type", None)
    if ask is not None:
        kind = str(ask())
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


def is_node(event: Event) -> bool:
    """Return whether the event is a node of autograd's backward pass, which is no operator itself."""
    return event.name.startswith("autograd::engine") or (event.raw.scope() == 1 and "::" not in event.name)


def moved_bytes(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> float:
    """Return the bytes of all inputs, plus a result as large as the largest input.

    This is an estimate, exact for elementwise operators.
    """
    read = [
        prod(shape) * SIZES[dtype]
        for dtype, shape in zip(dtypes, shapes, strict=False)
        if dtype in SIZES and shape
    ]
    return float(sum(read) + max(read, default=0))


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def union_ns(spans: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in merged(spans))

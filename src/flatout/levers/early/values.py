"""Values that a program reads from tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class ReadValue:
    """A value that the script reads."""

    reads: int = 0
    unread: int = 0  # copies since the last read


def is_blocking_cpu_copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``tensor.to`` only requests a blocking copy in host memory."""
    if kwargs.keys() - {"device", "non_blocking"} or kwargs.get("non_blocking") or len(args) > 1:
        return False
    return str(args[0] if args else kwargs.get("device")) == "cpu"


def tensors_in(nest: object) -> Iterator[Any]:
    if isinstance(nest, (list, tuple)):
        for item in nest:
            yield from tensors_in(item)
    elif hasattr(nest, "untyped_storage"):
        yield nest

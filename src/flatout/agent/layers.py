"""Counts the layers of a script's models by class name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

MOST_NAMES = 32


def layer_counts(roots: Iterable[Any]) -> dict[str, int]:
    """Return class name -> number of modules, the most frequent first, at most 32.

    A subclass of a layer of torch counts as that layer; containers are left out. A module that two roots
    share counts once.
    """
    modules = {id(module): module for root in roots for module in root.modules()}
    counts = Counter(_name(type(module)) for module in modules.values())
    return dict(
        sorted(((name, n) for name, n in counts.items() if name), key=lambda each: (-each[1], each[0]))[
            :MOST_NAMES
        ]
    )


def _name(kind: type) -> str:
    for base in kind.__mro__:
        if base.__module__ == "torch.nn.modules.module":
            break
        if base.__module__ == "torch.nn.modules.container":
            return ""
        if base.__module__.startswith("torch.nn.modules."):
            return base.__name__
    return kind.__name__

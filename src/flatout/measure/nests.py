"""Nests of containers that hold tensors (batches, arguments, outputs), walked by torch's pytree.

pytree takes dataclasses, other mappings and subclasses of lists and tuples for leaves. They are opened here.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def tensors_in(nest: object) -> Iterator[Any]:
    """Yield every tensor of a nest, in order."""
    from torch.utils._pytree import tree_iter

    try:
        for leaf in tree_iter(nest):
            if hasattr(leaf, "untyped_storage"):
                yield leaf
            elif isinstance(leaf, Mapping):
                yield from tensors_in(list(leaf.values()))
            elif isinstance(leaf, (list, tuple)):
                yield from tensors_in(list(leaf))
            elif _is_dataclass(leaf):
                yield from tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    except RecursionError:
        return  # a nest that holds itself has no end


def mapped(
    nest: object, transform: Callable[[Any], Any], is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """The same nest in new containers, with ``transform`` applied to each leaf.

    ``is_leaf``: which containers count as leaves.
    """
    from torch.utils._pytree import tree_map

    def map_leaf(leaf: Any) -> Any:
        if is_leaf is not None and is_leaf(leaf):
            return transform(leaf)
        if isinstance(leaf, Mapping):
            copied: Any = copy.copy(leaf)
            for key in leaf:
                copied[key] = mapped(leaf[key], transform, is_leaf)
            return copied
        if isinstance(leaf, (list, tuple)):
            return type(leaf)(mapped(part, transform, is_leaf) for part in leaf)
        if _is_dataclass(leaf):
            parts = {
                field.name: mapped(getattr(leaf, field.name), transform, is_leaf)
                for field in dataclasses.fields(leaf)
                if field.init
            }
            return dataclasses.replace(leaf, **parts)
        return transform(leaf)

    return tree_map(map_leaf, nest, is_leaf=is_leaf)


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)

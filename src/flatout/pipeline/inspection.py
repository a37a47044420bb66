"""A copy of a data set that may be looked at: nothing that its code does while it is looked at happens to the program's own."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from types import MemberDescriptorType
from typing import Any

from torch.utils.data import ConcatDataset, Dataset

from flatout.pipeline.changes import LIBRARIES

DEEPEST = 8


def aside(dataset: Any, depth: int = 0) -> Any:
    """A copy to look at: what its code does to its attributes, and puts into its lists and dictionaries, does not happen to the original.

    Data sets in it and callable objects of the program's own are copied as well. Data itself is shared. What cannot be copied so is answered as it is.
    """
    kind = type(dataset)
    if kind in (list, tuple) or depth > DEEPEST or not hasattr(dataset, "__dict__"):
        return dataset
    copy = object.__new__(kind)
    for name, value in vars(dataset).items():
        if isinstance(value, Dataset) or _is_own(value):
            value = aside(value, depth + 1)
        elif isinstance(dataset, ConcatDataset) and name == "datasets":
            value = [aside(inner, depth + 1) for inner in value]
        elif type(value) in (list, dict, set, OrderedDict):
            value = value.copy()
        elif type(value) is defaultdict:
            value = defaultdict(value.default_factory, value)
        vars(copy)[name] = value
    for base in kind.__mro__:
        for name, slot in list(vars(base).items()):
            if isinstance(slot, MemberDescriptorType) and hasattr(dataset, name):
                slot.__set__(copy, slot.__get__(dataset))
    return copy


def _is_own(value: Any) -> bool:
    """A callable object of a class that the program defines, such as one around its transforms."""
    kind = type(value)
    plain = kind.__reduce_ex__ is object.__reduce_ex__ and "__del__" not in dir(kind) and not any("__slots__" in vars(base) for base in kind.__mro__[:-1])
    module = kind.__module__.partition(".")[0]
    is_object = hasattr(value, "__dict__") and not isinstance(value, type) and module not in LIBRARIES
    return is_object and plain and any("__call__" in vars(base) for base in kind.__mro__)

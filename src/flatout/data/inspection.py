"""Copies a data set for inspection, so that running its code does not change the program's data set."""

from collections import OrderedDict, defaultdict
from types import MemberDescriptorType
from typing import Any

from torch.utils.data import ConcatDataset, Dataset

from flatout.data.changes import LIBRARIES

MAX_DEPTH = 8


def inspection_copy(dataset: Dataset, depth: int = 0) -> Any:
    """A copy for inspection. Changes to its attributes, lists and dictionaries spare the original.

    Nested data sets and the program's own callable objects are copied too. The data itself is shared. An
    object that cannot be copied this way is returned unchanged.
    """
    kind = type(dataset)
    if kind in (list, tuple) or depth > MAX_DEPTH or not hasattr(dataset, "__dict__"):
        return dataset
    copy = object.__new__(kind)
    for name, value in vars(dataset).items():
        if isinstance(value, Dataset) or _is_program_callable(value):
            value = inspection_copy(value, depth + 1)
        elif isinstance(dataset, ConcatDataset) and name == "datasets":
            value = [inspection_copy(inner, depth + 1) for inner in value]
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


def _is_program_callable(value: object) -> bool:
    kind = type(value)
    copyable = (
        kind.__reduce_ex__ is object.__reduce_ex__
        and "__del__" not in dir(kind)
        and not any("__slots__" in vars(base) for base in kind.__mro__[:-1])
    )
    module = kind.__module__.partition(".")[0]
    is_object = hasattr(value, "__dict__") and not isinstance(value, type) and module not in LIBRARIES
    return is_object and copyable and any("__call__" in vars(base) for base in kind.__mro__)

"""Which objects belong to the user's code, and their digests."""

import os
import random
import sys
import zlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from flatout.agent.frames import is_installed, is_torch, is_user_file

ADDRESSES = 1 << 44, 1 << 47
PLAIN_TYPES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    range,
    slice,
    torch.Size,
    torch.dtype,
    torch.device,
)
# Classes of libraries that hold state of the user's code; all others hold the library's own state.
WALKED_TORCH_MODULES = (
    "torch.optim",
    "torch.amp",
    "torch.cuda.amp",
    "torch.nn",
    "torch.utils.data",
    "torch.distributions",
    "torch.func",
)
CHECKPOINT_FILE = "/torch/utils/checkpoint.py"  # torch functions that keep state for later: random states


def is_torch_file(file: str) -> bool:
    return is_torch(file) and not file.endswith(CHECKPOINT_FILE)


def is_plain(value: object) -> bool:
    return type(value) in PLAIN_TYPES or (
        isinstance(value, (list, tuple))
        and len(value) <= 16
        and all(type(each) in PLAIN_TYPES for each in value)
    )


def digest_of(values: Iterable[Any]) -> str:
    """Return a digest of many plain values."""
    return f"{zlib.crc32(repr(list(values)).encode(errors='replace')):08x}"


def repr_of(value: object) -> str:
    """Spell a plain value; memory addresses differ in each process, so they are all spelled alike."""
    return "an address" if is_address(value) else repr(value)


def is_address(value: object) -> bool:
    """Whether a number looks like the result of ``id``, which differs in each process."""
    return type(value) is int and ADDRESSES[0] <= value < ADDRESSES[1] and not value % 16


def is_user_class(kind: object) -> bool:
    known = _USER_CLASSES.get(kind)
    if known is None:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        known = _USER_CLASSES[kind] = (
            isinstance(file, str) and os.path.isabs(file) and is_user_file(file)
        ) or kind.__module__ == "__main__"
    return known


_USER_CLASSES: dict[Any, bool] = {}


def is_walked(kind: type) -> bool:
    """Whether objects of a library's class are walked; not those of Python, torch's internals or flatout."""
    module = kind.__module__ or ""
    if module.partition(".")[0] in ("torch", "flatout"):
        return module.startswith(WALKED_TORCH_MODULES) and not kind.__name__.endswith("DataLoaderIter")
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "/site-packages/" in file or "/dist-packages/" in file or is_installed(file)


def is_random(thing: object, numpy: ModuleType | None) -> bool:
    if isinstance(thing, (torch.Generator, random.Random)):
        return True
    return numpy is not None and isinstance(thing, (numpy.random.Generator, numpy.random.RandomState))


def bytes_of(numpy: ModuleType, array: Any) -> Any:
    return numpy.ascontiguousarray(array).view(numpy.uint8).reshape(-1) if array.size else b""

"""Collects what a script can reach at one moment: tensors, optimizers, random generators and plain values.

The walk starts at running functions, the user's modules and the objects of a listener. Each object is
identified by the first path that leads to it. Two runs with the same control flow have the same paths. The
walk calls nothing of the script and reads no tensor values.
"""

from __future__ import annotations

import contextvars
import decimal
import fractions
import functools
import gc
import inspect
import io
import itertools
import os
import pathlib
import random
import sys
import types
import uuid
import weakref
import zlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from flatout.agent.frames import (
    FLATOUT_DIR,
    is_installed,
    is_torch,
    is_user_file,
    qualified_name,
    user_modules,
)
from flatout.agent.names import variables_of

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch.nn import Module
    from torch.optim import Optimizer


# Which objects belong to the user's code, and their digests.

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


MAX_OBJECTS = 200_000
MAX_DEPTH = 24
MAX_WALKED_ENTRIES = 4096  # entries; longer containers are not walked if their first entries are plain
MAX_VALUE_CHARS, MAX_MARKS = 60, 256
SEQUENCES = (list, tuple, deque)
MAPPINGS = (dict, OrderedDict, types.MappingProxyType)
SKIPPED_TYPES = (
    types.ModuleType,
    types.FrameType,
    types.CodeType,
    types.BuiltinFunctionType,
    types.TracebackType,
)
calendar = sys.modules["datetime"]  # already imported by torch
WALKED_MODULES = ("queue", "_queue", "weakref", "collections", "dataclasses", "enum")
# Types whose repr shows their content, and types that hold objects in C.
REPR_TYPES = (
    uuid.UUID,
    calendar.date,
    calendar.time,
    calendar.timedelta,
    decimal.Decimal,
    fractions.Fraction,
    pathlib.PurePath,
    itertools.count,
)
C_CONTAINERS: tuple[type, ...] = (
    type(functools.lru_cache(len)),
    zip,
    map,
    filter,
    enumerate,
    reversed,
    itertools.chain,
    itertools.cycle,
    itertools.islice,
    itertools.starmap,
    itertools.takewhile,
    itertools.dropwhile,
    itertools.zip_longest,
    type(iter([])),
    type(iter(())),
    type(iter({}.values())),
    type(iter({}.items())),
)
MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module())) - {"training"}
# prefixes of torch's own attributes
OPTIMIZER_ATTRIBUTES = (
    "defaults",
    "_zero_grad_profile_name",
    "_warned_capturable_if_run_uncaptured",
    "_optimizer_",
)
NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")


class ReachableState:
    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self.optimizers: dict[str, Any] = {}
        self.generators: dict[str, Any] = {}
        self.memory_files: dict[str, Any] = {}  # in-memory files
        # variable -> digest of its plain values, and short marks of the first ones
        self.python_values: dict[str, str] = {}
        self.value_sentences: dict[str, list[str]] = {}  # variable -> a sentence on each first value
        self.of_modules: set[str] = set()  # paths of tensors that belong to modules
        self.complete = True

    def collect(self, frame: FrameType | None, extra: Mapping[str, Any]) -> ReachableState:
        """Walk everything from a frame on.

        ``extra``: further objects by a name of their own; no variable may lead to them."""
        walk = _Walk(self)
        for module in user_modules():
            name = module.__name__
            for key, value in list(vars(module).items()):
                walk.variable(f"{name}.{key}" if name != "__main__" else key, key, value)
        for name, variables, is_users in _frames(frame):
            for key, value in variables.items():
                walk.variable(f"{name}: {key}", key, value, is_users)
        for i, (_, value) in enumerate(contextvars.copy_context().items()):
            walk.variable(f"<context {i}>", "context", value, is_user=False)
        for name, value in extra.items():
            walk.variable(f"<{name}>", name, value, is_user=False)
        self.complete = walk.budget > 0
        return self


def _frames(frame: FrameType | None) -> list[tuple[str, dict[str, Any], bool]]:
    functions = []
    while frame is not None:
        code = frame.f_code
        if (
            code.co_flags & inspect.CO_OPTIMIZED
            and not is_torch_file(code.co_filename)
            and not code.co_filename.startswith((FLATOUT_DIR, "<"))
        ):
            functions.append(
                (qualified_name(code), variables_of(frame, always=True), is_user_file(code.co_filename))
            )
        frame = frame.f_back
    counts: dict[str, int] = {}
    named = []
    for name, variables, is_user in reversed(functions):
        counts[name] = counts.get(name, 0) + 1
        named.append((f"{name}()" if counts[name] == 1 else f"{name}()#{counts[name]}", variables, is_user))
    return named


class _Walk:
    def __init__(self, result: ReachableState) -> None:
        self.result = result
        self.seen: dict[int, Any] = {}  # kept alive, so that no id is reused
        self.budget = MAX_OBJECTS
        self._digest, self._marks = 0, ""
        self._value_sentences: list[str] = []

    def variable(self, path: str, name: str, value: object, is_user: bool = True) -> None:
        if name.startswith("__") or isinstance(value, SKIPPED_TYPES):
            return
        self._digest, self._marks, self._value_sentences = 0, "", []
        self._visit(path, value, is_user, 0)
        if self._digest:
            self.result.python_values[path], self.result.value_sentences[path] = (
                f"{self._digest:08x} {self._marks}",
                self._value_sentences,
            )

    def _add_value(self, path: str, value: str, is_user: bool) -> None:
        if is_user:
            mark = zlib.crc32(f"{path}={value};".encode(errors="replace"))
            self._digest = zlib.crc32(mark.to_bytes(4, "little"), self._digest) or 1
            if len(self._value_sentences) < MAX_MARKS:
                self._marks += f"{mark & 0xFFFF:04x}"
                self._value_sentences.append(f"`{path}` is {value[:MAX_VALUE_CHARS]} now")

    def _visit(self, path: str, value: object, is_user: bool, depth: int) -> None:
        kind = type(value)
        if kind in PLAIN_TYPES:
            self._add_value(path, repr_of(value), is_user)
            return
        if (
            self.budget <= 0
            or depth > MAX_DEPTH
            or isinstance(value, SKIPPED_TYPES)
            or id(value) in self.seen
        ):
            return
        self.budget -= 1
        self.seen[id(value)] = value
        visit = self._visitor(value)
        if visit is not None:
            visit(path, value, is_user, depth + 1)

    def _visitor(self, value: object) -> Callable[[str, Any, bool, int], None] | None:
        if isinstance(value, torch.Tensor):
            return self._tensor
        if isinstance(value, torch.nn.Module):
            return self._module
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer
        if isinstance(value, SEQUENCES):
            return self._sequence
        if isinstance(value, MAPPINGS):
            return self._mapping
        if isinstance(value, (set, frozenset)):
            return self._set
        if isinstance(value, types.FunctionType):
            return self._function
        if isinstance(value, types.MethodType):
            return lambda path, method, is_user, depth: self._visit(
                f"{path}.__self__", method.__self__, is_user, depth
            )
        if isinstance(value, functools.partial):
            return lambda path, partial, is_user, depth: self._visit(
                path, [partial.func, partial.args, partial.keywords], is_user, depth
            )
        if isinstance(value, types.GeneratorType):
            return self._generator
        if isinstance(value, type):
            return self._class if is_user_class(value) else None
        return self._object

    def _tensor(self, path: str, tensor: Tensor, is_user: bool, depth: int) -> None:
        self.result.tensors[path] = tensor

    def _module(self, path: str, module: Module, is_user: bool, depth: int) -> None:
        own = is_user_class(type(module))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                self.result.of_modules.add(f"{path}.{name}")
                self._visit(f"{path}.{name}", tensor, is_user, depth)
        for name, child in module._modules.items():
            if child is not None:
                self._visit(f"{path}.{name}", child, is_user, depth)
        for name, value in list(vars(module).items()):
            if name not in MODULE_ATTRIBUTES:
                self._visit(f"{path}.{name}", value, is_user and (own or name == "training"), depth)

    def _optimizer(self, path: str, optimizer: Optimizer, is_user: bool, depth: int) -> None:
        self.result.optimizers[path] = optimizer
        for i, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name == "params":
                    self._sequence(f"{path}.params{i}", value, False, depth)
                else:
                    self._visit(f"{path}.param_groups[{i}].{name}", value, is_user, depth)
        own = is_user_class(type(optimizer))
        for name, value in list(vars(optimizer).items()):
            if name not in ("param_groups", "state") and (own or not name.startswith("_")):
                self._visit(
                    f"{path}.{name}",
                    value,
                    is_user and own and not name.startswith(OPTIMIZER_ATTRIBUTES),
                    depth,
                )

    def _sequence(self, path: str, values: list[Any], is_user: bool, depth: int) -> None:
        self._add_value(path, f"{type(values).__name__} of {len(values)}", is_user)
        if len(values) > MAX_WALKED_ENTRIES and all(map(is_plain, list(values)[:64])):
            self._add_value(path, digest_of(values), is_user)
            return
        for i, value in enumerate(list(values)):
            self._visit(f"{path}[{i}]", value, is_user, depth)

    def _mapping(self, path: str, values: Mapping[Any, Any], is_user: bool, depth: int) -> None:
        self._add_value(path, f"dict of {len(values)}", is_user)
        if len(values) > MAX_WALKED_ENTRIES and all(map(is_plain, list(values.values())[:64])):
            self._add_value(path, digest_of(values.items()), is_user)
            return
        for i, (key, value) in enumerate(list(values.items())):
            has_name = type(key) in (str, int, float, bool) and not is_address(key)
            self._visit(f"{path}[{key!r}]" if has_name else f"{path}[#{i}]", value, is_user, depth)

    def _set(self, path: str, values: list[Any], is_user: bool, depth: int) -> None:
        if len(values) <= MAX_WALKED_ENTRIES and all(map(is_plain, values)):
            self._add_value(path, repr(sorted(map(repr_of, values))), is_user)

    def _function(self, path: str, function: Callable[..., Any], is_user: bool, depth: int) -> None:
        if not is_user_file(function.__code__.co_filename):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                self._visit(f"{path}.{name}", cell.cell_contents, is_user, depth)
            except ValueError:
                pass  # an empty cell
        self._visit(f"{path}.defaults", function.__defaults__, is_user, depth)
        self._visit(f"{path}.__dict__", vars(function), is_user, depth)

    def _generator(self, path: str, generator: Generator, is_user: bool, depth: int) -> None:
        file = generator.gi_code.co_filename
        if generator.gi_frame is not None and (is_user_file(file) or file.endswith(CHECKPOINT_FILE)):
            for name, value in variables_of(generator.gi_frame, always=True).items():
                self._visit(f"{path}.{name}", value, is_user, depth)

    def _class(self, path: str, kind: object, is_user: bool, depth: int) -> None:
        for name, value in list(vars(kind).items()):
            if not name.startswith("__") and not isinstance(
                value, (types.FunctionType, property, classmethod, staticmethod, types.MemberDescriptorType)
            ):
                self._visit(f"{path}.{name}", value, is_user, depth)

    def _object(self, path: str, thing: object, is_user: bool, depth: int) -> None:
        kind = type(thing)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(thing, numpy.ndarray):
            if thing.dtype.hasobject:
                return self._sequence(path, thing.reshape(-1).tolist(), is_user, depth)
            return self._add_value(
                path, f"array {thing.dtype} {thing.shape} {zlib.crc32(bytes_of(numpy, thing)):08x}", is_user
            )
        if numpy is not None and isinstance(thing, numpy.generic):
            return self._add_value(path, repr(thing), is_user)
        if isinstance(thing, (io.BytesIO, io.StringIO)):
            self.result.memory_files[path] = thing
            return None
        if isinstance(thing, REPR_TYPES):
            return self._add_value(path, repr(thing), is_user)
        if isinstance(thing, (bytearray, array)):
            return self._add_value(path, f"{kind.__name__} {zlib.crc32(thing):08x}", is_user)
        if isinstance(thing, C_CONTAINERS):
            return self._sequence(
                path,
                [item for item in gc.get_referents(thing) if not isinstance(item, (type, *SKIPPED_TYPES))],
                is_user,
                depth,
            )
        if isinstance(thing, weakref.ref):
            return self._visit(f"{path}()", thing(), is_user, depth)
        if is_random(thing, numpy):
            self.result.generators[path] = thing
            return None
        name = f"{kind.__module__}.{kind.__qualname__}"
        own = (
            is_user_class(kind)
            or name in NAMESPACES
            or kind.__module__ in WALKED_MODULES
            or kind.__module__.startswith("torch.optim")
        )
        if not own and not is_walked(kind):
            return None
        # user classes count even inside a library's object
        is_user = is_user_class(kind) or (is_user and own)
        for key, value in list(getattr(thing, "__dict__", {}).items()):
            self._visit(f"{path}.{key}", value, is_user, depth)
        for base in kind.__mro__:
            slots = getattr(base, "__slots__", ())
            for slot in slots if type(slots) in (list, tuple) else ():
                if slot not in ("__dict__", "__weakref__") and hasattr(thing, slot):
                    self._visit(f"{path}.{slot}", getattr(thing, slot), is_user, depth)
        return None

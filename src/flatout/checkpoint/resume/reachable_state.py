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
import pathlib
import sys
import types
import uuid
import weakref
import zlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from flatout.agent.frames import FLATOUT_DIR, is_user_file, qualified_name
from flatout.agent.names import variables_of
from flatout.checkpoint.resume.users_objects import (
    CHECKPOINTS,
    PLAIN,
    bytes_of,
    digest_of,
    is_address,
    is_open,
    is_plain,
    is_random,
    is_torchs,
    is_users_class,
    spelled_name,
    users_modules,
)

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

MOST_THINGS = 200_000
DEEPEST = 24
LONG = 4096  # entries; longer containers are not walked if their first entries are plain
SHOWN, MARKED = 60, 256
ROWS = (list, tuple, deque)
PAIRS = (dict, OrderedDict, types.MappingProxyType)
CLOSED = (types.ModuleType, types.FrameType, types.CodeType, types.BuiltinFunctionType, types.TracebackType)
calendar = sys.modules["datetime"]  # already imported by torch
OPEN_OF_PYTHON = ("queue", "_queue", "weakref", "collections", "dataclasses", "enum")
# Types whose repr shows their content, and types that hold objects in C.
INFO = (
    uuid.UUID,
    calendar.date,
    calendar.time,
    calendar.timedelta,
    decimal.Decimal,
    fractions.Fraction,
    pathlib.PurePath,
    itertools.count,
)
HOLDING: tuple[type, ...] = (
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
OF_MODULES = frozenset(vars(torch.nn.Module())) - {"training"}
# prefixes of torch's own attributes
OF_OPTIMIZERS = ("defaults", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_optimizer_")
NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")


class ReachableState:
    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self.optimizers: dict[str, Any] = {}
        self.generators: dict[str, Any] = {}
        self.buffers: dict[str, Any] = {}  # in-memory files
        # variable -> digest of its plain values, and short marks of the first ones
        self.plain: dict[str, str] = {}
        self.leaves: dict[str, list[str]] = {}  # variable -> those first values, for messages
        self.kept: set[str] = set()  # paths of tensors that belong to modules
        self.complete = True

    def look(self, frame: FrameType | None, also: Mapping[str, Any]) -> ReachableState:
        """Walk everything from a frame on.

        ``also``: further objects by a name of their own; no variable may lead to them.
        """
        walk = _Walk(self)
        for module in users_modules():
            name = module.__name__
            for key, value in list(vars(module).items()):
                walk.variable(f"{name}.{key}" if name != "__main__" else key, key, value)
        for name, variables, users in _frames(frame):
            for key, value in variables.items():
                walk.variable(f"{name}: {key}", key, value, users)
        for at, (_, value) in enumerate(contextvars.copy_context().items()):
            walk.variable(f"<context {at}>", "context", value, users=False)
        for name, value in also.items():
            walk.variable(f"<{name}>", name, value, users=False)
        self.complete = walk.left > 0
        return self


def _frames(frame: FrameType | None) -> list[tuple[str, dict[str, Any], bool]]:
    """Return the running functions, outermost first: stable name, variables, whether the user wrote it."""
    found = []
    while frame is not None:
        code = frame.f_code
        if (
            code.co_flags & inspect.CO_OPTIMIZED
            and not is_torchs(code.co_filename)
            and not code.co_filename.startswith((FLATOUT_DIR, "<"))
        ):
            found.append(
                (qualified_name(code), variables_of(frame, always=True), is_user_file(code.co_filename))
            )
        frame = frame.f_back
    counted: dict[str, int] = {}
    named = []
    for name, variables, users in reversed(found):
        counted[name] = counted.get(name, 0) + 1
        named.append((f"{name}()" if counted[name] == 1 else f"{name}()#{counted[name]}", variables, users))
    return named


class _Walk:
    def __init__(self, world: ReachableState) -> None:
        self.world = world
        self.seen: dict[int, Any] = {}  # kept alive, so that no id is reused
        self.left = MOST_THINGS
        self._digest, self._marks = 0, ""
        self._leaves: list[str] = []

    def variable(self, path: str, name: str, value: object, users: bool = True) -> None:
        if name.startswith("__") or isinstance(value, CLOSED):
            return
        self._digest, self._marks, self._leaves = 0, "", []
        self._visit(path, value, users, 0)
        if self._digest:
            self.world.plain[path], self.world.leaves[path] = (
                f"{self._digest:08x} {self._marks}",
                self._leaves,
            )

    def _note(self, path: str, value: str, users: bool) -> None:
        if users:
            mark = zlib.crc32(f"{path}={value};".encode(errors="replace"))
            self._digest = zlib.crc32(mark.to_bytes(4, "little"), self._digest) or 1
            if len(self._leaves) < MARKED:
                self._marks += f"{mark & 0xFFFF:04x}"
                self._leaves.append(f"`{path}` is {value[:SHOWN]} now")

    def _visit(self, path: str, value: object, users: bool, depth: int) -> None:
        kind = type(value)
        if kind in PLAIN:
            self._note(path, spelled_name(value), users)
            return
        if self.left <= 0 or depth > DEEPEST or isinstance(value, CLOSED) or id(value) in self.seen:
            return
        self.left -= 1
        self.seen[id(value)] = value
        visit = self._way_of(value)
        if visit is not None:
            visit(path, value, users, depth + 1)

    def _way_of(self, value: object) -> Callable[[str, Any, bool, int], None] | None:
        if isinstance(value, torch.Tensor):
            return self._tensor
        if isinstance(value, torch.nn.Module):
            return self._module
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer
        if isinstance(value, ROWS):
            return self._rows
        if isinstance(value, PAIRS):
            return self._pairs
        if isinstance(value, (set, frozenset)):
            return self._set
        if isinstance(value, types.FunctionType):
            return self._function
        if isinstance(value, types.MethodType):
            return lambda path, method, users, depth: self._visit(
                f"{path}.__self__", method.__self__, users, depth
            )
        if isinstance(value, functools.partial):
            return lambda path, partial, users, depth: self._visit(
                path, [partial.func, partial.args, partial.keywords], users, depth
            )
        if isinstance(value, types.GeneratorType):
            return self._generator
        if isinstance(value, type):
            return self._class if is_users_class(value) else None
        return self._object

    def _tensor(self, path: str, tensor: Tensor, users: bool, depth: int) -> None:
        self.world.tensors[path] = tensor

    def _module(self, path: str, module: Module, users: bool, depth: int) -> None:
        own = is_users_class(type(module))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                self.world.kept.add(f"{path}.{name}")
                self._visit(f"{path}.{name}", tensor, users, depth)
        for name, child in module._modules.items():
            if child is not None:
                self._visit(f"{path}.{name}", child, users, depth)
        for name, value in list(vars(module).items()):
            if name not in OF_MODULES:
                self._visit(f"{path}.{name}", value, users and (own or name == "training"), depth)

    def _optimizer(self, path: str, optimizer: Optimizer, users: bool, depth: int) -> None:
        self.world.optimizers[path] = optimizer
        for at, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name == "params":
                    self._rows(f"{path}.params{at}", value, False, depth)
                else:
                    self._visit(f"{path}.param_groups[{at}].{name}", value, users, depth)
        own = is_users_class(type(optimizer))
        for name, value in list(vars(optimizer).items()):
            if name not in ("param_groups", "state") and (own or not name.startswith("_")):
                self._visit(
                    f"{path}.{name}", value, users and own and not name.startswith(OF_OPTIMIZERS), depth
                )

    def _rows(self, path: str, values: list[Any], users: bool, depth: int) -> None:
        self._note(path, f"{type(values).__name__} of {len(values)}", users)
        if len(values) > LONG and all(map(is_plain, list(values)[:64])):
            self._note(path, digest_of(values), users)
            return
        for at, value in enumerate(list(values)):
            self._visit(f"{path}[{at}]", value, users, depth)

    def _pairs(self, path: str, values: Mapping[Any, Any], users: bool, depth: int) -> None:
        self._note(path, f"dict of {len(values)}", users)
        if len(values) > LONG and all(map(is_plain, list(values.values())[:64])):
            self._note(path, digest_of(values.items()), users)
            return
        for at, (key, value) in enumerate(list(values.items())):
            named = type(key) in (str, int, float, bool) and not is_address(key)
            self._visit(f"{path}[{key!r}]" if named else f"{path}[#{at}]", value, users, depth)

    def _set(self, path: str, values: list[Any], users: bool, depth: int) -> None:
        if len(values) <= LONG and all(map(is_plain, values)):
            self._note(path, repr(sorted(map(spelled_name, values))), users)

    def _function(self, path: str, function: Callable[..., Any], users: bool, depth: int) -> None:
        if not is_user_file(function.__code__.co_filename):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                self._visit(f"{path}.{name}", cell.cell_contents, users, depth)
            except ValueError:
                pass  # an empty cell
        self._visit(f"{path}.defaults", function.__defaults__, users, depth)
        self._visit(f"{path}.__dict__", vars(function), users, depth)

    def _generator(self, path: str, generator: Generator, users: bool, depth: int) -> None:
        file = generator.gi_code.co_filename
        if generator.gi_frame is not None and (is_user_file(file) or file.endswith(CHECKPOINTS)):
            for name, value in variables_of(generator.gi_frame, always=True).items():
                self._visit(f"{path}.{name}", value, users, depth)

    def _class(self, path: str, kind: object, users: bool, depth: int) -> None:
        for name, value in list(vars(kind).items()):
            if not name.startswith("__") and not isinstance(
                value, (types.FunctionType, property, classmethod, staticmethod, types.MemberDescriptorType)
            ):
                self._visit(f"{path}.{name}", value, users, depth)

    def _object(self, path: str, thing: object, users: bool, depth: int) -> None:
        kind = type(thing)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(thing, numpy.ndarray):
            if thing.dtype.hasobject:
                return self._rows(path, thing.reshape(-1).tolist(), users, depth)
            return self._note(
                path, f"array {thing.dtype} {thing.shape} {zlib.crc32(bytes_of(numpy, thing)):08x}", users
            )
        if numpy is not None and isinstance(thing, numpy.generic):
            return self._note(path, repr(thing), users)
        if isinstance(thing, (io.BytesIO, io.StringIO)):
            self.world.buffers[path] = thing
            return None
        if isinstance(thing, INFO):
            return self._note(path, repr(thing), users)
        if isinstance(thing, (bytearray, array)):
            return self._note(path, f"{kind.__name__} {zlib.crc32(thing):08x}", users)
        if isinstance(thing, HOLDING):
            return self._rows(
                path,
                [each for each in gc.get_referents(thing) if not isinstance(each, (type, *CLOSED))],
                users,
                depth,
            )
        if isinstance(thing, weakref.ref):
            return self._visit(f"{path}()", thing(), users, depth)
        if is_random(thing, numpy):
            self.world.generators[path] = thing
            return None
        name = f"{kind.__module__}.{kind.__qualname__}"
        own = (
            is_users_class(kind)
            or name in NAMESPACES
            or kind.__module__ in OPEN_OF_PYTHON
            or kind.__module__.startswith("torch.optim")
        )
        if not own and not is_open(kind):
            return None
        users = is_users_class(kind) or (users and own)  # user classes count even inside a library's object
        for key, value in list(getattr(thing, "__dict__", {}).items()):
            self._visit(f"{path}.{key}", value, users, depth)
        for each in kind.__mro__:
            for slot in (
                getattr(each, "__slots__", ())
                if type(getattr(each, "__slots__", ())) in (list, tuple)
                else ()
            ):
                if slot not in ("__dict__", "__weakref__") and hasattr(thing, slot):
                    self._visit(f"{path}.{slot}", getattr(thing, slot), users, depth)
        return None

"""Leak finder: finds living tensors of earlier steps, their container and the line that fills it.

It inspects only between two steps. Tensors are known by weak references, so that inspecting keeps none of
them alive.
"""

from __future__ import annotations

import ast
import gc
import linecache
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.frames import is_user_file, place_at
from flatout.schema.findings import SourceLocation

if TYPE_CHECKING:
    from torch import Tensor


# Names the variable or attribute that holds a tensor, and the line that put it there.

MAX_DEPTH = 5  # limit of nested containers
CONTAINERS = (list, dict, set, tuple, deque, cycle)  # itertools.cycle keeps all items
INSERTING_METHODS = (
    "append",
    "extend",
    "add",
    "insert",
    "appendleft",
    "update",
    "setdefault",
    "put",
    "put_nowait",
)
NamedHolder = tuple[str, str, str, tuple[str, ...]]  # kind, name, owner, files that can contain the name


def most_common_holder(tensors: list[Any], own_ids: set[int]) -> tuple[str, SourceLocation | None]:
    named: Counter[NamedHolder] = Counter(
        holder for tensor in tensors if (holder := _holder(tensor, own_ids)) is not None
    )
    if not named:
        return "", None
    kind, name, owner, files = named.most_common(1)[0][0]
    return f"{kind} `{name}`" + (f" of {owner}" if owner else ""), filling_line(name, kind, files)


def _holder(tensor: Tensor, own_ids: set[int]) -> NamedHolder | None:
    things, seen = [tensor], {id(tensor), *own_ids}
    for depth in range(MAX_DEPTH):
        for thing in things:
            kind = type(thing).__name__ if depth else "variable"
            holder = _name_in_frames(thing, kind) or _name_in_namespaces(thing, kind)
            if holder is not None:
                return holder
        containers = [
            thing
            for thing in gc.get_referrers(*things)
            if id(thing) not in seen and isinstance(thing, CONTAINERS) and thing is not things
        ]
        containers = [thing for thing in containers if not _is_namespace(thing)]
        if not containers:
            return None
        seen.update(map(id, containers))
        things = containers[:8]
    return None


def user_frames() -> Iterator[types.FrameType]:
    for frame in sys._current_frames().values():
        caller: types.FrameType | None = frame
        while caller is not None:
            if is_user_file(caller.f_code.co_filename):
                yield caller
            caller = caller.f_back


def _name_in_frames(thing: object, kind: str) -> NamedHolder | None:
    for frame in user_frames():
        for name, value in frame.f_locals.items():
            if value is thing:
                function = "" if frame.f_code.co_name == "<module>" else f"{frame.f_code.co_name}()"
                return kind, name, function, (frame.f_code.co_filename,)
    return None


def _name_in_namespaces(thing: object, kind: str) -> NamedHolder | None:
    for referrer in gc.get_referrers(thing):
        if isinstance(referrer, dict):
            name = next(
                (key for key, value in referrer.items() if value is thing and isinstance(key, str)), None
            )
            if name is None:
                continue
            if "__name__" in referrer and "__builtins__" in referrer:
                if is_user_file(str(referrer.get("__file__", ""))):
                    return kind, name, "", (referrer["__file__"],)
                continue
            owner = next(
                (o for o in gc.get_referrers(referrer) if getattr(o, "__dict__", None) is referrer), None
            )
            if owner is not None:
                return attribute_of(owner, name, kind)
        elif isinstance(referrer, types.CellType):
            for function in gc.get_referrers(
                *[c for c in gc.get_referrers(referrer) if isinstance(c, tuple)] or [()]
            ):
                closure = function.__closure__ or () if isinstance(function, types.FunctionType) else ()
                if referrer in closure:
                    name = function.__code__.co_freevars[closure.index(referrer)]
                    return kind, name, f"{function.__name__}()", (function.__code__.co_filename,)
        elif not isinstance(referrer, (list, set, tuple, types.FrameType, weakref.ref)) and not type(
            referrer
        ).__module__.startswith("torch"):
            name = next(
                (key for key, value in getattr(referrer, "__dict__", {}).items() if value is thing), None
            )
            if name is not None:
                return attribute_of(referrer, name, kind)
    return None


def attribute_of(owner: object, name: str, kind: str) -> NamedHolder | None:
    if type(owner).__module__.partition(".")[0] == __name__.partition(".")[0]:
        return None  # flatout's own notes in a trial
    files = []
    for base in type(owner).__mro__:
        file = getattr(sys.modules.get(base.__module__), "__file__", None)
        if file and is_user_file(file):
            files.append(file)
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main and is_user_file(main) and main not in files:
        files.append(main)
    return kind, f"self.{name}", type(owner).__name__, tuple(files)


def _is_namespace(thing: object) -> bool:
    return isinstance(thing, dict) and "__builtins__" in thing


def filling_line(name: str, kind: str, files: Iterable[str]) -> SourceLocation | None:
    """Return the user's line that fills this name: ``append`` and the like, or an assignment."""
    last_name = name.removeprefix("self.")
    for file in files:
        candidates = sorted(
            (rank, -inside, line, function)
            for rank, inside, line, function in _filling_nodes(file, last_name, kind)
        )
        if candidates:
            _, _, line, function = candidates[0]
            return place_at(file, line, function)
    return None


def _filling_nodes(file: str, last_name: str, kind: str) -> Iterator[tuple[int, int, int, str]]:
    """Yield rank (0 is most likely), loop depth, line and function of each candidate."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return
    running = {frame.f_code.co_name for frame in user_frames()}

    def walk(node: ast.AST, loops: int, function: str) -> Iterator[tuple[int, int, int, str]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # functions on the stack between two steps contain the loop
            loops, function = int(node.name in running), node.name
        elif isinstance(node, (ast.For, ast.While, ast.AsyncFor)):
            loops += 1
        rank = _rank(node, last_name, kind)
        if rank is not None:
            yield rank, loops, node.lineno, function  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            yield from walk(child, loops, function)

    yield from walk(tree, 0, "")


def _rank(node: ast.AST, last_name: str, kind: str) -> int | None:
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in INSERTING_METHODS
        and _last_name(node.func.value) == last_name
    ):
        return 0
    if isinstance(node, ast.AugAssign) and _last_name(node.target) == last_name:
        return 0
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _last_name(target.value) == last_name:
                return 0
            if _last_name(target) == last_name:
                reads_itself = any(
                    _last_name(part) == last_name for part in ast.walk(node.value)
                )  # x = x + y
                return 0 if reads_itself else (1 if kind == "variable" else 2)
    return None


def _last_name(node: ast.AST) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


MAX_NODES = 5000  # limit of a walk over the autograd graph
MAX_SUSPECTS = 4  # tensors whose holders are searched; each costs a walk over all objects
GROWABLE = (list, dict, set, deque)


@dataclass
class Leak:
    """What holds tensors of earlier steps: its readable name, and the line that puts them there."""

    holder: str = ""
    place: SourceLocation | None = None
    graph: bool = False
    tensors_a_step: float = 0.0


class LeakFinder:
    """Finds growing containers.

    ``inspect`` is called a few times, some steps apart; ``leak`` reports what grew in between.
    """

    def __init__(self, torch: ModuleType, owners: Iterable[Any] = ()) -> None:
        """``owners``: user objects whose attributes may grow, such as data sets."""
        self.torch = torch
        self._owners = [weakref.ref(owner) for owner in owners]
        self._lengths: list[dict[NamedHolder, int]] = []  # of the named containers, at each look
        self._snapshots: list[tuple[int, dict[int, weakref.ref[Any]]]] = []
        self._graph_sizes: list[int] = []
        # bytes of tensors in the user's variables, at each look
        self._sizes: list[dict[tuple[str, str], int]] = []

    def inspect(self, step: int) -> None:
        alive = {id(tensor): weakref.ref(tensor) for tensor in self._living_tensors()}
        self._snapshots.append((step, alive))
        self._graph_sizes.append(
            max(
                (self._nodes(tensor) for tensor in self._living_tensors() if tensor.grad_fn is not None),
                default=0,
            )
        )
        self._lengths.append(dict(self._containers()))
        self._sizes.append(
            {
                (frame.f_code.co_filename, name): value.untyped_storage().nbytes()
                for frame in user_frames()
                for name, value in frame.f_locals.items()
                if isinstance(value, self.torch.Tensor) and value.layout == self.torch.strided
            }
        )

    def leak(self, expected: Iterable[Any]) -> Leak | None:
        """Return the leak, if any.

        ``expected``: tensors that must live: parameters, gradients, optimizer state, buffers.
        """
        if len(self._snapshots) < 4:
            return None
        gc.unfreeze()  # frozen objects, the program's or those of lever gc_pause, are in no list of referrers
        expected_ids = {id(tensor) for tensor in expected}
        created = self._created_between(expected_ids)
        counts = [len(tensors) for tensors in created]
        steps = self._snapshots[-2][0] - self._snapshots[0][0]
        growing = all(counts) and steps > 0
        chain = (
            self._longest_chain(expected_ids)
            if all(b > a for a, b in zip(self._graph_sizes, self._graph_sizes[1:], strict=False))
            else None
        )
        suspects = [tensor for tensors in created for tensor in tensors] if growing else []
        if not suspects and chain is None:
            return self._growing_tensor()
        leak = Leak(tensors_a_step=len(suspects) / steps if suspects else 0.0)
        leak.graph = chain is not None or any(t.grad_fn is not None for t in suspects)
        searched = suspects[:MAX_SUSPECTS] or [chain]
        own_ids = {id(own) for own in (suspects, searched, created, *created)}
        leak.holder, leak.place = most_common_holder(searched, own_ids)
        return leak

    def growing_container(self) -> Leak | None:
        """Return the named container that grew at each look; of several, the one with the largest growth."""
        if len(self._lengths) < 4:
            return None
        if not (growth := _growth(self._lengths)):
            return None
        kind, name, owner, files = max(growth)[1]
        return Leak(f"{kind} `{name}`" + (f" of {owner}" if owner else ""), filling_line(name, kind, files))

    def _containers(self) -> Iterator[tuple[NamedHolder, int]]:
        for frame in user_frames():
            for name, value in frame.f_locals.items():
                if isinstance(value, GROWABLE):
                    yield (type(value).__name__, name, "", (frame.f_code.co_filename,)), len(value)
        for owner in (owner for ref in self._owners if (owner := ref()) is not None):
            for name, value in getattr(owner, "__dict__", {}).items():
                named = (
                    attribute_of(owner, name, type(value).__name__) if isinstance(value, GROWABLE) else None
                )
                if named is not None:
                    yield named, len(value)

    def _growing_tensor(self) -> Leak | None:
        if not (growth := _growth(self._sizes)):
            return None
        _, (file, name) = max(growth)
        return Leak(f"tensor `{name}`", filling_line(name, "variable", [file]))

    # -- tensors

    def _living_tensors(self) -> Iterator[Any]:
        tensor_class = self.torch.Tensor
        return (thing for thing in gc.get_objects() if issubclass(type(thing), tensor_class))

    def _created_between(self, expected_ids: set[int]) -> list[list[Any]]:
        now = {id(tensor): tensor for tensor in self._living_tensors() if id(tensor) not in expected_ids}
        groups = []
        for (_, before), (_, after) in zip(self._snapshots[:-2], self._snapshots[1:-1], strict=True):
            candidates = [(ref(), before.get(key)) for key, ref in after.items() if key in now]
            # An address is reused once its tensor is gone.
            groups.append(
                [
                    tensor
                    for tensor, earlier in candidates
                    if tensor is not None and (earlier is None or earlier() is not tensor)
                ]
            )
        return groups

    def _longest_chain(self, expected_ids: set[int]) -> Any:
        chains = [
            (self._nodes(tensor), tensor)
            for tensor in self._living_tensors()
            if tensor.grad_fn is not None and id(tensor) not in expected_ids
        ]
        return max(chains, key=lambda pair: pair[0])[1] if chains else None

    def _nodes(self, tensor: Tensor) -> int:
        seen: set[Any] = set()
        todo = [tensor.grad_fn]
        while todo and len(seen) < MAX_NODES:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            todo.extend(next_node for next_node, _ in node.next_functions)
        return len(seen)


def _growth(sizes: list[dict[Any, int]]) -> list[tuple[int, Any]]:
    """Return the total growth of each key whose size grew from each inspection to the next."""
    first, *later = sizes
    return [
        (later[-1][key] - size, key)
        for key, size in first.items()
        if all(key in inspection for inspection in later)
        and all(b[key] > a[key] for a, b in zip(sizes, later, strict=False))
    ]

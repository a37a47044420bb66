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
from typing import Any

from flatout.capture.frames import is_users, place_at
from flatout.plan.findings import SourceLocation

MOST_NODES = 5000  # limit of a walk over the autograd graph
DEEPEST = 4  # limit of nested containers
SUSPECTS = 4  # tensors whose holders are searched; each costs a walk over all objects
CONTAINERS = (list, dict, set, tuple, deque)
GROWING = (list, dict, set, deque)
PUTTING = ("append", "extend", "add", "insert", "appendleft", "update", "setdefault", "put", "put_nowait")

Named = tuple[str, str, str, tuple[str, ...]]  # kind, name, owner, files that can contain the name


@dataclass
class Held:
    """What holds tensors of earlier steps: its readable name, and the line that puts them there."""

    holder: str = ""
    place: SourceLocation | None = None
    graph: bool = False
    tensors_a_step: float = 0.0
    held_bytes: int = 0


class LeakFinder:
    """Finds growing containers.

    ``look`` is called a few times, some steps apart; ``found`` reports what grew in between.
    """

    def __init__(self, torch: Any, owners: Iterable[Any] = ()) -> None:
        """``owners``: user objects whose attributes may grow, such as data sets."""
        self.torch = torch
        self._owners = [weakref.ref(owner) for owner in owners]
        self._lengths: list[dict[Named, int]] = []  # of the named containers, at each look
        self._looks: list[tuple[int, dict[int, weakref.ref]]] = []
        self._graphs: list[int] = []
        # bytes of tensors in the user's variables, at each look
        self._sizes: list[dict[tuple[str, str], int]] = []

    def look(self, step: int) -> None:
        alive = {id(tensor): weakref.ref(tensor) for tensor in self._alive()}
        self._looks.append((step, alive))
        self._graphs.append(
            max((self._nodes(tensor) for tensor in self._alive() if tensor.grad_fn is not None), default=0)
        )
        self._lengths.append(dict(self._containers()))
        self._sizes.append(
            {
                (frame.f_code.co_filename, name): value.untyped_storage().nbytes()
                for frame in _frames()
                for name, value in frame.f_locals.items()
                if isinstance(value, self.torch.Tensor) and value.layout == self.torch.strided
            }
        )

    def found(self, known: Iterable[Any]) -> Held | None:
        """Return the leak, if any.

        ``known``: tensors that must live: parameters, gradients, optimizer state, buffers.
        """
        if len(self._looks) < 4:
            return None
        fine = {id(tensor) for tensor in known}
        births = self._births(fine)
        between = [len(tensors) for tensors in births]
        steps = self._looks[-2][0] - self._looks[0][0]
        growing = all(between) and steps > 0
        chain = (
            self._longest_chain(fine)
            if all(b > a for a, b in zip(self._graphs, self._graphs[1:], strict=False))
            else None
        )
        suspects = [tensor for tensors in births for tensor in tensors] if growing else []
        if not suspects and chain is None:
            return self._swollen()
        held = Held(tensors_a_step=len(suspects) / steps if suspects else 0.0)
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in suspects
            if t.layout == self.torch.strided
        }
        held.held_bytes = sum(storages.values())
        held.graph = chain is not None or any(t.grad_fn is not None for t in suspects)
        looked_at = suspects[:SUSPECTS] or [chain]
        ours = {id(mine) for mine in (suspects, looked_at, births, *births)}
        held.holder, held.place = _most_common_holder(looked_at, ours)
        return held

    def fullest(self) -> Held | None:
        """Return the named container that grew at each look; of several, the one with the largest growth."""
        if len(self._lengths) < 4:
            return None
        first, *later = self._lengths
        grown = [
            (later[-1][named] - count, named)
            for named, count in first.items()
            if all(named in counts for counts in later)
            and all(b[named] > a[named] for a, b in zip(self._lengths, later, strict=False))
        ]
        if not grown:
            return None
        kind, name, owner, files = max(grown)[1]
        return Held(f"{kind} `{name}`" + (f" of {owner}" if owner else ""), _putting_line(name, kind, files))

    def _containers(self) -> Iterator[tuple[Named, int]]:
        for frame in _frames():
            for name, value in frame.f_locals.items():
                if isinstance(value, GROWING):
                    yield (type(value).__name__, name, "", (frame.f_code.co_filename,)), len(value)
        for owner in (owner for ref in self._owners if (owner := ref()) is not None):
            for name, value in getattr(owner, "__dict__", {}).items():
                named = _attribute(owner, name, type(value).__name__) if isinstance(value, GROWING) else None
                if named is not None:
                    yield named, len(value)

    def _swollen(self) -> Held | None:
        """Return a single tensor that grew at each look: concatenation without removal."""
        first, *later = self._sizes
        grown = [
            (later[-1][key] - size, key)
            for key, size in first.items()
            if all(key in sizes for sizes in later)
            and all(b[key] > a[key] for a, b in zip(self._sizes, later, strict=False))
        ]
        if not grown:
            return None
        more, (file, name) = max(grown)
        return Held(f"tensor `{name}`", _putting_line(name, "variable", [file]), held_bytes=more)

    # -- tensors --------------------------------------------------------------------------------------------

    def _alive(self) -> Iterator[Any]:
        tensor_class = self.torch.Tensor
        return (thing for thing in gc.get_objects() if issubclass(type(thing), tensor_class))

    def _births(self, fine: set[int]) -> list[list[Any]]:
        """Group the living tensors by the look after which they were created; the last look is left out."""
        now = {id(tensor): tensor for tensor in self._alive() if id(tensor) not in fine}
        found = []
        for (_, before), (_, after) in zip(self._looks[:-2], self._looks[1:-1], strict=True):
            born = [(ref(), before.get(key)) for key, ref in after.items() if key in now]
            # An address is reused once its tensor is gone.
            found.append(
                [
                    tensor
                    for tensor, earlier in born
                    if tensor is not None and (earlier is None or earlier() is not tensor)
                ]
            )
        return found

    def _longest_chain(self, fine: set[int]) -> Any:
        chains = [
            (self._nodes(tensor), tensor)
            for tensor in self._alive()
            if tensor.grad_fn is not None and id(tensor) not in fine
        ]
        return max(chains, key=lambda pair: pair[0])[1] if chains else None

    def _nodes(self, tensor: Any) -> int:
        """Count the nodes of the autograd graph below a tensor, up to a limit."""
        seen: set[Any] = set()
        todo = [tensor.grad_fn]
        while todo and len(seen) < MOST_NODES:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            todo.extend(following for following, _ in node.next_functions)
        return len(seen)


def _most_common_holder(tensors: list[Any], ours: set[int]) -> tuple[str, SourceLocation | None]:
    named: Counter[Named] = Counter(
        holder for tensor in tensors if (holder := _holder(tensor, ours)) is not None
    )
    if not named:
        return "", None
    kind, name, owner, files = named.most_common(1)[0][0]
    return f"{kind} `{name}`" + (f" of {owner}" if owner else ""), _putting_line(name, kind, files)


def _holder(tensor: Any, ours: set[int]) -> Named | None:
    """Return the named object that holds a tensor, through containers; ``ours``: flatout's containers."""
    things, kind, seen = [tensor], "variable", {id(tensor), *ours}
    for _ in range(DEEPEST):
        for thing in things:
            found = _name_in_frames(thing, kind) or _name_in_namespaces(thing, kind)
            if found is not None:
                return found
        above = [
            thing
            for thing in gc.get_referrers(*things)
            if id(thing) not in seen and isinstance(thing, CONTAINERS) and thing is not things
        ]
        above = [thing for thing in above if not _is_namespace(thing)]
        if not above:
            return None
        seen.update(map(id, above))
        things, kind = above[:8], type(above[0]).__name__
    return None


def _frames() -> Iterator[types.FrameType]:
    for frame in sys._current_frames().values():
        each: types.FrameType | None = frame
        while each is not None:
            if is_users(each.f_code.co_filename):
                yield each
            each = each.f_back


def _name_in_frames(thing: Any, kind: str) -> Named | None:
    for frame in _frames():
        for name, value in frame.f_locals.items():
            if value is thing:
                function = "" if frame.f_code.co_name == "<module>" else f"{frame.f_code.co_name}()"
                return kind, name, function, (frame.f_code.co_filename,)
    return None


def _name_in_namespaces(thing: Any, kind: str) -> Named | None:
    """Find a global of a module, an attribute of an object, or a closure variable."""
    for referrer in gc.get_referrers(thing):
        if isinstance(referrer, dict):
            name = next(
                (key for key, value in referrer.items() if value is thing and isinstance(key, str)), None
            )
            if name is None:
                continue
            if "__name__" in referrer and "__builtins__" in referrer:
                if is_users(str(referrer.get("__file__", ""))):
                    return kind, name, "", (referrer["__file__"],)
                continue
            owner = next(
                (o for o in gc.get_referrers(referrer) if getattr(o, "__dict__", None) is referrer), None
            )
            if owner is not None:
                return _attribute(owner, name, kind)
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
                return _attribute(referrer, name, kind)
    return None


def _attribute(owner: Any, name: str, kind: str) -> Named | None:
    if type(owner).__module__.partition(".")[0] == __name__.partition(".")[0]:
        return None  # flatout's own notes in a trial
    files = []
    for each in type(owner).__mro__:
        file = getattr(sys.modules.get(each.__module__), "__file__", None)
        if file and is_users(file):
            files.append(file)
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main and is_users(main) and main not in files:
        files.append(main)
    return kind, f"self.{name}", type(owner).__name__, tuple(files)


def _is_namespace(thing: Any) -> bool:
    return isinstance(thing, dict) and "__builtins__" in thing


# -- source lines ------------------------------------------------------------------------------------------


def _putting_line(name: str, kind: str, files: Iterable[str]) -> SourceLocation | None:
    """Return the user's line that fills this name: ``append`` and the like, or an assignment."""
    short = name.removeprefix("self.")
    for file in files:
        found = sorted(
            (rank, -inside, line, function) for rank, inside, line, function in _puts(file, short, kind)
        )
        if found:
            _, _, line, function = found[0]
            return place_at(file, line, function)
    return None


def _puts(file: str, short: str, kind: str) -> Iterator[tuple[int, int, int, str]]:
    """Yield rank (0 is most likely), loop depth, line and function of each candidate."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return
    running = {frame.f_code.co_name for frame in _frames()}

    def walk(node: ast.AST, loops: int, function: str) -> Iterator[tuple[int, int, int, str]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # functions on the stack between two steps contain the loop
            loops, function = int(node.name in running), node.name
        elif isinstance(node, (ast.For, ast.While, ast.AsyncFor)):
            loops += 1
        rank = _rank(node, short, kind)
        if rank is not None:
            yield rank, loops, node.lineno, function  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            yield from walk(child, loops, function)

    yield from walk(tree, 0, "")


def _rank(node: ast.AST, short: str, kind: str) -> int | None:
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in PUTTING
        and _ends(node.func.value) == short
    ):
        return 0
    if isinstance(node, ast.AugAssign) and _ends(node.target) == short:
        return 0
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _ends(target.value) == short:
                return 0
            if _ends(target) == short:
                again = any(_ends(each) == short for each in ast.walk(node.value))  # x = x + y
                return 0 if again else (1 if kind == "variable" else 2)
    return None


def _ends(node: ast.AST) -> str:
    """Return the last name of ``a``, ``self.a``, ``a[i]`` and ``a[i].b``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""

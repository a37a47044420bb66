"""Names the variable or attribute that holds a tensor, and the line that put it there."""

from __future__ import annotations

import ast
import gc
import linecache
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import TYPE_CHECKING, Any

from flatout.agent.frames import is_users, place_at
from flatout.schema.findings import SourceLocation

if TYPE_CHECKING:
    from torch import Tensor

DEEPEST = 5  # limit of nested containers
CONTAINERS = (list, dict, set, tuple, deque, cycle)  # itertools.cycle keeps all items
PUTTING = ("append", "extend", "add", "insert", "appendleft", "update", "setdefault", "put", "put_nowait")
Named = tuple[str, str, str, tuple[str, ...]]  # kind, name, owner, files that can contain the name


def most_common_holder(tensors: list[Any], ours: set[int]) -> tuple[str, SourceLocation | None]:
    named: Counter[Named] = Counter(
        holder for tensor in tensors if (holder := _holder(tensor, ours)) is not None
    )
    if not named:
        return "", None
    kind, name, owner, files = named.most_common(1)[0][0]
    return f"{kind} `{name}`" + (f" of {owner}" if owner else ""), putting_line(name, kind, files)


def _holder(tensor: Tensor, ours: set[int]) -> Named | None:
    """Return the named object that holds a tensor, through containers; ``ours``: flatout's containers."""
    things, seen = [tensor], {id(tensor), *ours}
    for depth in range(DEEPEST):
        for thing in things:
            kind = type(thing).__name__ if depth else "variable"
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
        things = above[:8]
    return None


def frames() -> Iterator[types.FrameType]:
    for frame in sys._current_frames().values():
        each: types.FrameType | None = frame
        while each is not None:
            if is_users(each.f_code.co_filename):
                yield each
            each = each.f_back


def _name_in_frames(thing: object, kind: str) -> Named | None:
    for frame in frames():
        for name, value in frame.f_locals.items():
            if value is thing:
                function = "" if frame.f_code.co_name == "<module>" else f"{frame.f_code.co_name}()"
                return kind, name, function, (frame.f_code.co_filename,)
    return None


def _name_in_namespaces(thing: object, kind: str) -> Named | None:
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


def attribute_of(owner: object, name: str, kind: str) -> Named | None:
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


def _is_namespace(thing: object) -> bool:
    return isinstance(thing, dict) and "__builtins__" in thing


def putting_line(name: str, kind: str, files: Iterable[str]) -> SourceLocation | None:
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
    running = {frame.f_code.co_name for frame in frames()}

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

"""Possible values of an expression, traced to the calls that created them.

Tracing follows names, attributes, parameters and functions of the program.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.probe.kinds import FLUENT, WRAPPERS, called_like, kinds_of_name
from flatout.probe.names import FUNCTIONS, Binding
from flatout.probe.script import SourceFile
from flatout.probe.value_paths import (
    annotated,
    argument,
    default_of,
    dotted_path,
    flat,
    iterated,
    of_one_class,
    returns,
)

if TYPE_CHECKING:
    from flatout.probe.program import ScriptProgram


# Modules whose creation the program does not show: its use of them tells.
#
# A trainer class gets its model from a registry or a config. ``self.model.eval()`` or ``model.parameters()`` in the
# same class or function says what it is.

USES = {"parameters", "named_parameters", "eval"}


class ModulesByUse:
    def __init__(self, values: Values) -> None:
        self.values = values
        self._used: dict[int, set[tuple[int, str]]] = {}

    def __contains__(self, pair: tuple[SourceFile, ast.AST]) -> bool:
        """Return whether a name or an attribute of ``self`` is used as a module where it stands."""
        source, node = pair
        if isinstance(node, ast.Name):
            bindings = source.names.lookup(node)
            return (
                bool(bindings)
                and all(each.how in ("parameter", "assign") for each in bindings)
                and any((id(scope), node.id) in self._of(source) for scope in _scopes(source, node))
            )
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            klass = source.klass(node)
            return klass is not None and any(
                (id(each), node.attr) in self._of(home)
                for home, each in self.values.gradient_sources(source, klass)
            )
        return False

    def _of(self, source: SourceFile) -> set[tuple[int, str]]:
        """Return the functions with the names, and the classes with the attributes, that are used so in a file."""
        if id(source) not in self._used:
            found = self._used[id(source)] = set()
            for call in source.calls:
                if not isinstance(call.func, ast.Attribute) or call.func.attr not in USES or call.args:
                    continue
                owner = call.func.value
                if isinstance(owner, ast.Name):
                    found.add((id(_scopes(source, call)[0]), owner.id))
                elif isinstance(owner, ast.Attribute) and getattr(owner.value, "id", "") == "self":
                    found.add((id(source.klass(call)), owner.attr))
        return self._used[id(source)]


def _scopes(source: SourceFile, node: ast.AST) -> list[ast.AST]:
    """Return the functions around a node, innermost first, and the file."""
    return [*(each for each in source.parents(node) if isinstance(each, FUNCTIONS)), source.tree]


DEEP = 12  # maximum depth of tracing
MANY = 40  # maximum number of origins of an expression

# Methods of a LightningModule that return one object or several of a kind.
OF_LIGHTNING = {"optimizers": "Optimizer", "lr_schedulers": "Scheduler"}


@dataclass(frozen=True)
class ValueOrigin:
    """A node that a value comes from.

    ``part`` marks a value inside it: an element of a loop, an entry of a tuple, at ``path`` if that is known.
    """

    source: SourceFile
    node: ast.AST
    part: bool = False
    path: tuple[int, ...] = ()

    @property
    def dotted(self) -> str:
        """Return the dotted name of the called function, if the origin is a call of an import."""
        return self.source.dotted(self.node.func) if isinstance(self.node, ast.Call) and not self.part else ""

    @property
    def key(self) -> tuple[int, bool, tuple[int, ...]]:
        return id(self.node), self.part, self.path


class Values:
    def __init__(self, program: ScriptProgram) -> None:
        self.program = program
        self._memo: dict[tuple[int, int], list[ValueOrigin]] = {}
        self._kinds: dict[int, frozenset[str]] = {}
        self.by_use = ModulesByUse(self)
        self._attributes: dict[int, dict[str, list[ast.Assign | ast.AnnAssign]]] = {}

    # -- origins

    def origins(self, source: SourceFile, node: ast.AST, depth: int = 0) -> list[ValueOrigin]:
        """Return the possible origins of an expression.

        An expression that cannot be traced is its own origin.
        """
        if depth > DEEP:
            return [ValueOrigin(source, node)]
        memo = self._memo.get((id(node), depth))
        if memo is None:
            self._memo[id(node), depth] = [
                ValueOrigin(source, node)
            ]  # stops a name that is derived from itself
            unique = {origin.key: origin for origin in self._follow(source, node, depth)}
            memo = self._memo[id(node), depth] = list(unique.values())[:MANY]
        return memo

    def _follow(self, source: SourceFile, node: ast.AST, depth: int) -> Iterator[ValueOrigin]:
        if isinstance(node, ast.Name):
            bindings = source.names.reaching(node)
            if bindings and all(b.how != "import" for b in bindings):
                for binding in bindings:
                    yield from self._bound(source, binding, depth)
                return
        elif isinstance(node, ast.IfExp):
            yield from self.origins(source, node.body, depth + 1)
            yield from self.origins(source, node.orelse, depth + 1)
            return
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                yield from self.origins(source, value, depth + 1)
            return
        elif isinstance(node, ast.NamedExpr):
            yield from self.origins(source, node.value, depth + 1)
            return
        elif isinstance(node, ast.Attribute):
            found = list(self._attribute(source, node, depth))
            if found:
                yield from found
                return
        elif isinstance(node, ast.Call):
            yield from self._call(source, node, depth)
            return
        yield ValueOrigin(source, node)

    def _bound(self, source: SourceFile, binding: Binding, depth: int) -> Iterator[ValueOrigin]:
        value = binding.value
        if binding.how == "parameter":
            yield from self._arguments(source, binding.node, depth)
        elif binding.how == "augment" or value is None:
            yield ValueOrigin(source, binding.node)
        elif binding.how == "for":
            yield ValueOrigin(source, binding.node, True, binding.path)
        else:
            yield from self._part(source, value, binding.path, depth)

    def _part(
        self, source: SourceFile, value: ast.expr, path: tuple[int, ...], depth: int
    ) -> Iterator[ValueOrigin]:
        """Yield the entry of a value at ``path``, if the value is a visible tuple."""
        if not path:
            yield from self.origins(source, value, depth + 1)
            return
        for origin in self.origins(source, value, depth + 1):
            node = origin.node
            if (
                isinstance(node, (ast.Tuple, ast.List))
                and path[0] < len(node.elts)
                and not any(isinstance(e, ast.Starred) for e in node.elts)
            ):
                yield from self._part(origin.source, node.elts[path[0]], path[1:], depth + 1)
            else:
                yield ValueOrigin(origin.source, node, True, path)

    def _arguments(self, source: SourceFile, parameter: ast.AST, depth: int) -> Iterator[ValueOrigin]:
        """Yield the arguments that callers in the program pass for a parameter, and its default if it is an object.

        Without known callers it is the parameter itself, too.
        """
        function = source.parent(source.parent(parameter) or source.tree)
        found = omitted = False
        if isinstance(parameter, ast.arg) and isinstance(function, FUNCTIONS):
            for caller, call in self.program.callers(function):
                if any(isinstance(a, ast.Starred) for a in call.args):
                    continue
                handed = argument(source, function, parameter, call)
                omitted = omitted or handed is None
                if handed is not None:
                    found = True
                    yield from self.origins(caller, handed, depth + 1)
        default = default_of(function, parameter) if omitted or not found else None
        if default is not None and not isinstance(default, ast.Constant):
            yield from self.origins(source, default, depth + 1)
        if not found:
            yield ValueOrigin(source, parameter)

    def _attribute(self, source: SourceFile, node: ast.Attribute, depth: int) -> Iterator[ValueOrigin]:
        if source.dotted(node):
            return
        if node.attr == "module":  # of a wrapper
            yield from self.origins(source, node.value, depth + 1)
            return
        for home, klass in self.classes_of(source, node.value, depth):
            for owner, where in self.gradient_sources(home, klass):
                assigned = self.attributes(owner, where).get(node.attr, [])
                for statement in assigned:
                    if statement.value is not None:
                        yield from self._part(
                            owner, statement.value, dotted_path(statement, node.attr), depth + 1
                        )
                if assigned:
                    break

    def _call(self, source: SourceFile, node: ast.Call, depth: int) -> Iterator[ValueOrigin]:
        dotted = source.dotted(node.func)
        if dotted in WRAPPERS and node.args and dotted == "torch.compile":
            yield from self.origins(source, node.args[0], depth + 1)
            return
        if isinstance(node.func, ast.Attribute) and not dotted and node.func.attr in FLUENT:
            yield from self.origins(source, node.func.value, depth + 1)
            return
        found = False
        for home, function in self.program.functions_called(source, node):
            for returned in returns(function):
                found = True
                yield from self.origins(home, returned, depth + 1)
        if not found:
            yield ValueOrigin(source, node)

    def same(self, source: SourceFile, one: ast.AST, other_source: SourceFile, other: ast.AST) -> bool | None:
        """Return whether two expressions are one object, or None if unknown."""
        first = {origin.key: origin for origin in self.origins(source, one)}
        second = {origin.key: origin for origin in self.origins(other_source, other)}
        if first.keys() & second.keys():
            return True
        if (
            source is other_source
            and ast.dump(one) == ast.dump(other)
            and (source.function(one) is source.function(other) or of_one_class(source, one, other))
        ):
            return True
        made = all(
            isinstance(origin.node, ast.Call) and not origin.part
            for origin in [*first.values(), *second.values()]
        )
        return False if made and first and second else None

    # -- classes

    def classes_of(
        self, source: SourceFile, node: ast.AST, depth: int = 0
    ) -> Iterator[tuple[SourceFile, ast.ClassDef]]:
        """Yield the program's own classes that a value may be an instance of."""
        if isinstance(node, ast.Name) and node.id in ("self", "cls"):
            klass = source.klass(node)
            if klass is not None:
                yield source, klass
            return
        for origin in self.origins(source, node, depth + 1):
            if isinstance(origin.node, ast.Call) and not origin.part:
                yield from self.program.class_named(origin.source, origin.node.func)
            elif isinstance(origin.node, ast.arg):
                for named in annotated(origin.node):
                    yield from self.program.class_named(origin.source, named)

    def gradient_sources(
        self, source: SourceFile, klass: ast.ClassDef
    ) -> list[tuple[SourceFile, ast.ClassDef]]:
        """Return a class of the program and those of its bases that are in the program, too."""
        found: list[tuple[SourceFile, ast.ClassDef]] = []
        waiting = [(source, klass)]
        while waiting and len(found) < 20:
            home, each = waiting.pop(0)
            if all(each is not seen for _, seen in found):
                found.append((home, each))
                waiting += [pair for base in each.bases for pair in self.program.class_named(home, base)]
        return found

    def bases(self, source: SourceFile, klass: ast.ClassDef) -> set[str]:
        """Return the dotted names of all bases of a class outside the program."""
        return {
            dotted
            for home, each in self.gradient_sources(source, klass)
            for base in each.bases
            if (dotted := home.dotted(base))
        }

    def attributes(
        self, source: SourceFile, klass: ast.ClassDef
    ) -> dict[str, list[ast.Assign | ast.AnnAssign]]:
        """Return the assignments of a class to ``self.name`` in methods, and to ``name`` in the class body."""
        if id(klass) not in self._attributes:
            found: dict[str, list[ast.Assign | ast.AnnAssign]] = {}
            for node in ast.walk(klass):
                if isinstance(node, (ast.Assign, ast.AnnAssign)):
                    for target in flat(node.targets if isinstance(node, ast.Assign) else [node.target]):
                        own = (
                            isinstance(target, ast.Attribute)
                            and isinstance(target.value, ast.Name)
                            and target.value.id == "self"
                        )
                        if own or (isinstance(target, ast.Name) and source.parent(node) is klass):
                            found.setdefault(
                                getattr(target, "attr", "") or getattr(target, "id", ""), []
                            ).append(node)
            self._attributes[id(klass)] = found
        return self._attributes[id(klass)]

    # -- kinds

    def kinds(self, source: SourceFile, node: ast.AST) -> frozenset[str]:
        """Return the known kinds of a value.

        Kinds are Module, Loss, Optimizer, Scheduler, GradScaler, DataLoader, Sampler, Dataset, Tensor, list,
        ...
        """
        if id(node) not in self._kinds:
            self._kinds[id(node)] = frozenset()
            found = {kind for origin in self.origins(source, node) for kind in self._kinds_of(origin)}
            if not found - {"NoneType"} and (source, node) in self.by_use:
                found = {"Module"}
            self._kinds[id(node)] = frozenset(found)
        return self._kinds[id(node)]

    def is_a(self, source: SourceFile, node: ast.AST, kind: str) -> bool:
        return kind in self.kinds(source, node)

    def seems(self, source: SourceFile, node: ast.AST, kind: str) -> bool:
        """Return ``is_a``, or whether the name is typical of the kind if nothing is known.

        For example, ``optimizer`` from an unknown caller seems to be an optimizer. None is a placeholder.
        """
        known = self.kinds(source, node) - {"NoneType"}
        if known:
            return kind in known
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        return called_like(name, kind)

    def _kinds_of(self, origin: ValueOrigin) -> set[str]:
        node = origin.node
        if isinstance(node, (ast.List, ast.ListComp)):
            return {"list"} if not origin.part else set()
        if isinstance(node, (ast.Dict, ast.DictComp)):
            return {"dict"} if not origin.part else set()
        if isinstance(node, ast.Constant):
            return {type(node.value).__name__}
        if isinstance(node, (ast.For, ast.AsyncFor)) and origin.part:
            return {"Tensor"} if self.is_a(origin.source, iterated(node.iter), "DataLoader") else set()
        if isinstance(node, ast.BinOp):
            both = self.kinds(origin.source, node.left) | self.kinds(origin.source, node.right)
            return {"Tensor"} if "Tensor" in both else set()
        if isinstance(node, ast.arg) and not origin.part:
            return {
                kind for named in annotated(node) for kind in kinds_of_name(origin.source.dotted(named))
            } - {"Tensor"}
        if not isinstance(node, ast.Call):
            return set()
        if isinstance(node.func, ast.Attribute) and node.func.attr in OF_LIGHTNING and not node.args:
            return {OF_LIGHTNING[node.func.attr]}
        found: set[str] = set()
        for home, klass in self.program.class_named(origin.source, node.func):
            for base in self.bases(home, klass):
                found |= kinds_of_name(base)
            return found | {f"class {klass.name}"}
        if origin.dotted:
            return kinds_of_name(origin.dotted)
        if {"Module", "function"} & self.kinds(origin.source, node.func):
            return {"Tensor"}
        if isinstance(node.func, ast.Attribute) and "Tensor" in self.kinds(origin.source, node.func.value):
            return (
                {"float"}
                if node.func.attr in ("item", "size", "dim", "numel")
                else {"list"}
                if node.func.attr == "tolist"
                else {"Tensor"}
            )
        return found

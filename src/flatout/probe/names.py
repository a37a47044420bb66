"""Name resolution: the scopes of one file, the bindings in them, and which bindings may reach a use."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(eq=False)
class Binding:
    """One binding of a name. ``path`` is the position within ``value`` if the target is a tuple.

    ``how`` is one of: import, assign, augment, for, with, parameter, def, class, other.
    """

    how: str
    node: ast.AST
    value: ast.expr | None = None
    path: tuple[int, ...] = ()
    dotted: str = ""  # for an import: the imported name


@dataclass(eq=False)
class Scope:
    node: ast.AST
    parent: Scope | None
    names: dict[str, list[Binding]] = field(default_factory=dict)
    elsewhere: dict[str, Scope] = field(default_factory=dict)  # declared global or nonlocal

    def bind(self, name: str, binding: Binding) -> None:
        self.elsewhere.get(name, self).names.setdefault(name, []).append(binding)


class Names(ast.NodeVisitor):
    """The scopes of a tree. ``package`` is the dotted package of the file, for relative imports."""

    def __init__(self, tree: ast.Module, package: str = "") -> None:
        self.package = package
        self.module = Scope(tree, None)
        self.here = self.module
        self.at: dict[int, Scope] = {}
        self.parents: dict[int, ast.AST] = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.parents[id(child)] = node
        for statement in tree.body:
            self.visit(statement)

    def lookup(self, node: ast.Name) -> list[Binding]:
        """Return every binding of the name at this use. Class scopes are not visible inside methods."""
        scope = start = self.at.get(id(node), self.module)
        while True:
            if node.id in scope.elsewhere:
                return scope.elsewhere[node.id].names.get(node.id, [])
            if node.id in scope.names and (scope is start or not isinstance(scope.node, ast.ClassDef)):
                return scope.names[node.id]
            if scope.parent is None:
                return []
            scope = scope.parent

    def reaching(self, node: ast.Name) -> list[Binding]:
        """Return the bindings that may reach the use.

        The search runs backwards, up to the first binding that every path to the use passes.
        """
        found = self.lookup(node)
        scope = self.at.get(id(node), self.module)
        if len(found) < 2 or scope.names.get(node.id) is not found:
            return found
        above = {id(ancestor) for ancestor in self.ancestors(node)}
        reached = []
        for binding in sorted(found, key=lambda b: position(b.node), reverse=True):
            if position(binding.node) >= position(node) or (
                id(binding.node) in above and binding.how in ("assign", "augment")
            ):
                continue
            if not self._same_arm(binding.node, node) and not self._in_a_loop(node):
                continue  # the other arm of an if
            reached.append(binding)
            if (
                binding.how != "augment"
                and id(self._block(binding)) in above | {id(scope.node)}
                and self._same_arm(binding.node, node)
            ):
                break
        return reached or found

    def ancestors(self, node: ast.AST) -> list[ast.AST]:
        """Return the ancestors from the parent up to the module."""
        found = []
        while id(node) in self.parents:
            node = self.parents[id(node)]
            found.append(node)
        return found

    def _block(self, binding: Binding) -> ast.AST:
        """Return the statement in whose body a binding acts. A loop variable acts in its loop."""
        if binding.how in ("for", "with") and isinstance(
            binding.node, (ast.For, ast.AsyncFor, ast.With, ast.AsyncWith)
        ):
            return binding.node
        return self.parents.get(id(binding.node), self.module.node)

    def _same_arm(self, one: ast.AST, other: ast.AST) -> bool:
        arms = {id(node): arm for node, arm in self.arms(one)}
        return all(arms.get(id(node), arm) == arm for node, arm in self.arms(other))

    def _in_a_loop(self, node: ast.AST) -> bool:
        return any(
            isinstance(ancestor, (ast.For, ast.AsyncFor, ast.While)) for ancestor in self.ancestors(node)
        )

    def arms(self, node: ast.AST) -> list[tuple[ast.If, str]]:
        """Return the ifs around a node, innermost first, with the field that contains it."""
        found, child = [], node
        for ancestor in self.ancestors(node):
            if isinstance(ancestor, ast.If) and not is_main_guard(ancestor):
                arm = next(
                    (
                        name
                        for name in ("body", "orelse")
                        if any(child is each for each in getattr(ancestor, name))
                    ),
                    "test",
                )
                found.append((ancestor, arm))
            child = ancestor
        return found

    # -- building

    def visit_Name(self, node: ast.Name) -> None:
        self.at[id(node)] = self.here

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            self.here.bind(name, Binding("import", node, dotted=alias.name if alias.asname else name))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            package = self.package.split(".") if self.package else []
            module = ".".join([*package[: len(package) - node.level + 1], *filter(None, [module])])
        for alias in node.names:
            self.here.bind(
                alias.asname or alias.name,
                Binding("import", node, dotted=f"{module}.{alias.name}" if module else alias.name),
            )

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        arguments = node.args
        outside: list[ast.AST | None] = [*arguments.defaults, *arguments.kw_defaults]
        if not isinstance(node, ast.Lambda):
            self.here.bind(node.name, Binding("def", node))
            outside += [*node.decorator_list, node.returns]
        for each in outside:
            if each is not None:
                self.visit(each)
        self.here = Scope(node, self.here)
        for argument in [
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            *filter(None, [arguments.vararg, arguments.kwarg]),
        ]:
            self.here.bind(argument.arg, Binding("parameter", argument))
        for statement in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(statement)
        self.here = self.here.parent or self.module

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.here.bind(node.name, Binding("class", node))
        for outside in [*node.bases, *node.keywords, *node.decorator_list]:
            self.visit(outside)
        self.here = Scope(node, self.here)
        for statement in node.body:
            self.visit(statement)
        self.here = self.here.parent or self.module

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        self.here = Scope(node, self.here)
        for generator in node.generators:
            self._bind(generator.target, Binding("for", generator.target, generator.iter))
        self.generic_visit(node)
        self.here = self.here.parent or self.module

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def _bind(self, target: ast.AST, binding: Binding) -> None:
        if isinstance(target, ast.Name):
            self.here.bind(target.id, binding)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for index, element in enumerate(target.elts):
                self._bind(element, Binding(binding.how, binding.node, binding.value, (*binding.path, index)))
        elif isinstance(target, ast.Starred):
            self._bind(target.value, Binding("other", binding.node))

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._bind(target, Binding("assign", node, node.value))
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind(node.target, Binding("assign", node, node.value))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._bind(node.target, Binding("augment", node, node.value))
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._bind(node.target, Binding("assign", node, node.value))
        self.generic_visit(node)

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        self._bind(node.target, Binding("for", node, node.iter))
        self.generic_visit(node)

    visit_For = visit_AsyncFor = _for

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            if item.optional_vars is not None:
                self._bind(item.optional_vars, Binding("with", node, item.context_expr))
        self.generic_visit(node)

    visit_With = visit_AsyncWith = _with

    def _capture(self, node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar) -> None:
        if node.name:
            self.here.bind(node.name, Binding("other", node))
        self.generic_visit(node)

    visit_ExceptHandler = visit_MatchAs = visit_MatchStar = _capture

    def visit_Global(self, node: ast.Global) -> None:
        self.here.elsewhere.update(dict.fromkeys(node.names, self.module))

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        for name in node.names:
            scope = self.here.parent
            while scope is not None and name not in scope.names:
                scope = scope.parent
            if scope is not None:
                self.here.elsewhere[name] = scope


def position(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def is_main_guard(node: ast.If) -> bool:
    """Return whether this is ``if __name__ == "__main__":``, which is always true for a script."""
    test = node.test
    return isinstance(test, ast.Compare) and any(
        isinstance(each, ast.Name) and each.id == "__name__" for each in (test.left, *test.comparators)
    )

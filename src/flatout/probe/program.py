"""The whole program: a script and the modules that it imports from its own folder, not from packages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from flatout.probe.callers import Callers, is_abstract
from flatout.probe.each_step import functions_of_each_step
from flatout.probe.evaluation_loops import evaluation_loops
from flatout.probe.names import FUNCTIONS
from flatout.probe.script import SourceFile, Unreadable
from flatout.probe.step_loops import LoopVisit, ProgramEvent, StepLoop, step_loops
from flatout.probe.stores import Stores
from flatout.probe.values import ValueOrigin, Values
from flatout.probe.walk import Walk

# Steps whose loop the program does not show: a framework or another file calls a function for each batch.
#
# ``train_step(self, batch)`` of a unit class, or a function that is given to an engine. It runs the backward pass and
# the optimizer's step itself, outside any loop. It is a StepLoop whose loop is the function.


def step_functions(program: ScriptProgram) -> Iterator[StepLoop]:
    """Yield the functions without visible callers that are one training step, as loops."""
    roots: dict[int, list[ProgramEvent]] = {}
    for event in program.events:
        if isinstance(event.root, FUNCTIONS):
            roots.setdefault(id(event.root), []).append(event)
    for events in roots.values():
        root = events[0].root
        source = next((e.source for e in events if e.frames == (root,)), None)
        steps = [e for e in events if e.kind in ("step", "scaler_step") and not e.loops]
        if (
            source is None
            or not steps
            or not any(e.kind == "backward" for e in events)
            or any(loop.events[0].root is root for loop in program.step_loops)
            or any(_made_here(program, step, events) for step in steps)
        ):
            continue
        visit = LoopVisit(source, root, 0, 1)
        found = StepLoop(visit, ())
        found.events = [replace(e, loops=(visit, *e.loops)) for e in events]
        yield found


def _made_here(program: ScriptProgram, step: ProgramEvent, events: list[ProgramEvent]) -> bool:
    """Return whether the same run of the function makes the optimizer: then it runs once, and is no step of many."""
    made = {id(event.node) for event in events}
    return step.subject is None or any(
        id(origin.node) in made for origin in program.origins(step.source, step.subject)
    )


MAX_FILES = 200
INSTALLED = {"site-packages", "dist-packages"}


CallIndex = dict[str, list[tuple[int, SourceFile, ast.Call]]]


class ScriptProgram:
    """``main`` is the script, ``sources`` are all files, the script first.

    ``unread`` lists unreadable modules with reasons.
    """

    def __init__(
        self, main: SourceFile, others: list[SourceFile] | None = None, unread: list[str] | None = None
    ) -> None:
        self.main = main
        self.sources = [main, *(others or [])]
        self.unread = unread or []
        self.modules = {source.module: source for source in self.sources if source.module}
        self.values = Values(self)
        self.stores = Stores(self)

    @classmethod
    def of_text(cls, text: str, path: str = "train.py") -> ScriptProgram:
        """Create a program from text. Raises Unreadable."""
        return cls(SourceFile(path, text))

    @classmethod
    def read(cls, script: Path, root: Path | None = None) -> ScriptProgram:
        """Read a script and its modules. Raises OSError or Unreadable.

        ``root`` is the folder that imports start from: the script's own, or the current one for ``-m``.
        """
        if script.is_dir():
            script = script / "__main__.py"
        root = root or script.parent
        package = _package(script, root)
        main = SourceFile.read(script, package=package)
        found: dict[str, SourceFile] = {}
        unread: list[str] = []
        waiting = [main]
        while waiting and len(found) < MAX_FILES:
            source = waiting.pop(0)
            for name in imports(source):
                file = module_file(name, root)
                if file is None or name in found or file.resolve() == script.resolve():
                    continue
                try:
                    found[name] = SourceFile.read(
                        file, name, name if file.name == "__init__.py" else name.rpartition(".")[0]
                    )
                except (OSError, Unreadable) as error:
                    unread.append(str(error))
                else:
                    waiting.append(found[name])
        return cls(main, list(found.values()), unread)

    # -- call graph

    def definitions(self, source: SourceFile, node: ast.AST) -> Iterator[tuple[SourceFile, ast.AST]]:
        """Yield the functions, lambdas and classes of the program that an expression names."""
        dotted = source.dotted(node)
        if dotted:
            module, _, name = dotted.rpartition(".")
            home = self.modules.get(module)
            if home is not None:
                for binding in home.names.module.names.get(name, []):
                    if binding.how in ("def", "class"):
                        yield home, binding.node
            return
        if isinstance(node, ast.Name):
            for binding in source.names.lookup(node):
                if binding.how in ("def", "class"):
                    yield source, binding.node
                elif binding.how == "assign" and isinstance(binding.value, ast.Lambda):
                    yield source, binding.value

    def class_named(self, source: SourceFile, node: ast.AST) -> Iterator[tuple[SourceFile, ast.ClassDef]]:
        for home, found in self.definitions(source, node):
            if isinstance(found, ast.ClassDef):
                yield home, found

    def functions_called(self, source: SourceFile, call: ast.Call) -> list[tuple[SourceFile, ast.AST]]:
        """Return the functions of the program that a call may run, except constructors."""
        if id(call) not in self._called:
            self._called[id(call)] = []
            self._called[id(call)] = list(self._functions_called(source, call))
        return self._called[id(call)]

    @cached_property
    def _called(self) -> dict[int, list[tuple[SourceFile, ast.AST]]]:
        return {}

    def _functions_called(self, source: SourceFile, call: ast.Call) -> Iterator[tuple[SourceFile, ast.AST]]:
        direct = [
            pair for pair in self.definitions(source, call.func) if not isinstance(pair[1], ast.ClassDef)
        ]
        if direct or source.dotted(call.func):
            yield from direct
            return
        if isinstance(call.func, ast.Attribute):
            for home, klass in self.values.classes_of(source, call.func.value):
                found = list(self.methods(home, klass, call.func.attr))
                if all(is_abstract(method) for _, method in found):
                    overrides = self.calls_of.overrides(klass, call.func.attr)
                    found = overrides if len(overrides) == 1 else found
                yield from found
        for home, klass in self.values.classes_of(source, call.func):
            yield from self.methods(home, klass, "__call__")
        yield from self._passed(source, call.func)

    def _passed(self, source: SourceFile, node: ast.AST) -> Iterator[tuple[SourceFile, ast.AST]]:
        """Yield the functions and methods that are passed or assigned under this name: ``backward_with(loss)``
        where a caller passes ``self._scaled_backward``."""
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return
        for origin in self.values.origins(source, node):
            if origin.part or origin.node is node:
                continue
            if isinstance(origin.node, (*FUNCTIONS, ast.Lambda)):
                yield origin.source, origin.node
            elif isinstance(origin.node, ast.Attribute):
                for home, klass in self.values.classes_of(origin.source, origin.node.value):
                    yield from self.methods(home, klass, origin.node.attr)
            elif isinstance(origin.node, ast.Name):
                for home, definition in self.definitions(origin.source, origin.node):
                    if not isinstance(definition, ast.ClassDef):
                        yield home, definition

    def makers(self, source: SourceFile, call: ast.Call) -> Iterator[tuple[SourceFile, ast.AST]]:
        """Yield the ``__init__`` that a call runs, if it creates an instance of a class of the program.

        The ``__init__`` of a module is left out, because it only creates layers.
        """
        for home, klass in self.class_named(source, call.func):
            if id(klass) not in self._networks:
                yield from self.methods(home, klass, "__init__")

    def methods(
        self, source: SourceFile, klass: ast.ClassDef, name: str
    ) -> Iterator[tuple[SourceFile, ast.AST]]:
        """Yield the method that an instance of a class has under a name.

        It is its own, or the nearest inherited one.
        """
        for owner, each in self.values.gradient_sources(source, klass):
            method = next((m for m in each.body if isinstance(m, FUNCTIONS) and m.name == name), None)
            if method is not None:
                yield owner, method
                return

    @cached_property
    def _networks(self) -> set[int]:
        return {id(klass) for _, klass in self.modules_defined()}

    @cached_property
    def calls_of(self) -> Callers:
        return Callers(self)

    def callers(self, function: ast.AST) -> list[tuple[SourceFile, ast.Call]]:
        return self.calls_of.of(function)

    # -- queries of rules

    def calls(self, *dotted: str) -> Iterator[tuple[SourceFile, ast.Call]]:
        """Yield every call of one of these names, in the order of files and lines."""
        yield from _of_names(self._calls_by_name[0], dotted)

    def method_calls(self, *names: str) -> Iterator[tuple[SourceFile, ast.Call]]:
        """Yield every call ``x.name(...)`` of one of these names, for any x."""
        yield from _of_names(self._calls_by_name[1], names)

    @cached_property
    def _calls_by_name(self) -> tuple[CallIndex, CallIndex]:
        """All calls by dotted name, and those of methods by the name of the method, each with its place in the order."""
        dotted: CallIndex = {}
        methods: CallIndex = {}
        every = ((source, call) for source in self.sources for call in source.calls)
        for at, (source, call) in enumerate(every):
            dotted.setdefault(source.dotted(call.func), []).append((at, source, call))
            if isinstance(call.func, ast.Attribute):
                methods.setdefault(call.func.attr, []).append((at, source, call))
        return dotted, methods

    def nodes(self, *kinds: type) -> Iterator[tuple[SourceFile, ast.AST]]:
        for source in self.sources:
            for node in source.nodes:
                if isinstance(node, kinds):
                    yield source, node

    def modules_defined(self) -> Iterator[tuple[SourceFile, ast.ClassDef]]:
        """Yield the program's own subclasses of torch.nn.Module."""
        for source in self.sources:
            for klass in source.classes:
                bases = self.values.bases(source, klass)
                if any(
                    base in ("torch.nn.Module", "torch.nn.modules.Module", "torch.nn.Sequential")
                    or base.endswith("LightningModule")
                    for base in bases
                ):
                    yield source, klass

    def datasets_defined(self) -> Iterator[tuple[SourceFile, ast.ClassDef]]:
        for source in self.sources:
            for klass in source.classes:
                if any(
                    base.startswith(("torch.", "torchvision.datasets"))
                    and base.rpartition(".")[2].endswith(("Dataset", "Folder"))
                    for base in self.values.bases(source, klass)
                ):
                    yield source, klass

    def mentions(self, *words: str) -> bool:
        """Return whether a name, an attribute or an import of the program has one of these names.

        Such a doubt silences a rule.
        """
        wanted = set(words)
        for _, node in self.nodes(ast.Name, ast.Attribute, ast.alias, ast.keyword):
            spelled = (
                node.id
                if isinstance(node, ast.Name)
                else node.attr
                if isinstance(node, ast.Attribute)
                else node.name.rpartition(".")[2]
                if isinstance(node, ast.alias)
                else getattr(node, "arg", None)
            )
            if spelled in wanted:
                return True
        return False

    @cached_property
    def uses_device(self) -> bool:
        """Return whether anything is ever put on a device other than the CPU."""
        for _, call in self.method_calls("to", "cuda"):
            if call.func.attr == "cuda" or any(  # type: ignore[attr-defined]
                not isinstance(a, ast.Constant) or a.value != "cpu" for a in call.args
            ):
                return True
        return any(
            isinstance(node, ast.keyword) and node.arg == "device" for _, node in self.nodes(ast.keyword)
        )

    @cached_property
    def events(self) -> list[ProgramEvent]:
        """Return all events in order, from each possible entry point of the program."""
        return Walk(self).everything()

    @cached_property
    def step_loops(self) -> list[StepLoop]:
        return step_loops(self.events)

    @cached_property
    def steps(self) -> list[StepLoop]:
        """Return the loops that train, and the functions that are one step of a loop that is not visible."""
        return [*self.step_loops, *step_functions(self)]

    @cached_property
    def evaluation_loops(self) -> list[StepLoop]:
        """Return the loops that run a model for each batch and never train it."""
        return evaluation_loops(self)

    @cached_property
    def of_each_step(self) -> dict[int, tuple[SourceFile, ast.AST]]:
        """Return the functions that run in each training step, by the id of their node."""
        return functions_of_each_step(self)

    def origins(self, source: SourceFile, node: ast.AST) -> list[ValueOrigin]:
        return self.values.origins(source, node)


def imports(source: SourceFile) -> list[str]:
    """Return the dotted names of all imports of a file, packages before their contents."""
    found: dict[str, None] = {}
    for node in source.nodes:
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = source.names.package.split(".") if source.names.package else []
            base = ".".join(
                [
                    *(package[: len(package) - node.level + 1] if node.level else []),
                    *filter(None, [node.module]),
                ]
            )
            dotted = [base, *(f"{base}.{alias.name}" if base else alias.name for alias in node.names)]
        else:
            continue
        for name in filter(None, dotted):
            parts = name.split(".")
            found.update(dict.fromkeys(".".join(parts[: n + 1]) for n in range(len(parts))))
    return list(found)


def module_file(name: str, root: Path) -> Path | None:
    """Return the file of a module below ``root``, if it is the user's own."""
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    path = root.joinpath(*name.split("."))
    if INSTALLED & set(path.parts):
        return None
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _package(script: Path, root: Path) -> str:
    try:
        return ".".join(script.parent.resolve().relative_to(root.resolve()).parts)
    except ValueError:
        return ""


def _of_names(index: CallIndex, names: tuple[str, ...]) -> Iterator[tuple[SourceFile, ast.Call]]:
    found = [each for name in dict.fromkeys(names) for each in index.get(name, ())]
    for _, source, call in sorted(found, key=lambda each: each[0]) if len(names) > 1 else found:
        yield source, call

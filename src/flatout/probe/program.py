"""The whole program: a script and the modules that it imports from its own folder, not from packages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from flatout.probe.script import SourceFile, Unreadable

MAX_FILES = 200
INSTALLED = {"site-packages", "dist-packages"}


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
                    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
                    found[name] = SourceFile.read(file, package)
                except (OSError, Unreadable) as error:
                    unread.append(str(error))
                else:
                    waiting.append(found[name])
        return cls(main, list(found.values()), unread)

    def calls(self, dotted: str) -> Iterator[tuple[SourceFile, ast.Call]]:
        """Yield the calls of an imported function, such as ``torch.load``, under any name."""
        for source in self.sources:
            for call in source.calls:
                if source.dotted(call.func) == dotted:
                    yield source, call

    def nodes(self, kind: type) -> Iterator[tuple[SourceFile, ast.AST]]:
        return ((source, node) for source in self.sources for node in source.nodes if isinstance(node, kind))

    def mentions(self, *words: str) -> bool:
        """Whether a name, an attribute or a text of the program is one of these words."""
        return any(
            getattr(node, "id", None) in words
            or getattr(node, "attr", None) in words
            or (isinstance(node, ast.Constant) and node.value in words)
            for source in self.sources
            for node in source.nodes
        )


def imports(source: SourceFile) -> list[str]:
    """Return the dotted names of all imports of a file, packages before their contents."""
    found: dict[str, None] = {}
    for node in source.nodes:
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = source.imported_from(node)
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

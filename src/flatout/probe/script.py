"""A training script as text: its syntax tree, its names, and where a thing stands. Nothing is imported or run.

Beside it: names.py (scopes), values.py and kinds.py (what an expression may be), walk.py and flow.py (what happens in which order in which
loop) and program.py (the script with the modules that it imports from its own folder).
"""

from __future__ import annotations

import ast
import json
import stat
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from flatout.plan.findings import Place
from flatout.probe.names import FUNCTIONS, Binding, Names

MAX_BYTES = 4_000_000  # a script that a person wrote is never that large
MAX_NODES = 150_000  # some 15,000 lines; each rule walks them all
MAX_DEPTH = 200  # of nested nodes; every walk here calls itself, and Python lets it do so about a thousand times


class Unreadable(Exception):
    """A file that is no Python source. The message says why; ``line`` where that is known."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


class Source:
    """One file of the user's. ``tree`` is what ``ast`` makes of ``text``; ``module`` is the name under which others import it."""

    def __init__(self, path: str, text: str, module: str = "", package: str = "", cells: list[tuple[int, int]] | None = None) -> None:
        """Raises Unreadable."""
        self.path, self.text, self.module = path, text, module
        self.cells = cells or []
        try:
            self.tree = ast.parse(text, filename=path)
        except SyntaxError as error:
            line = error.lineno or 0
            raise Unreadable(f"{self.where(line)}: {error.msg}", line) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise Unreadable(f"{path}: Python cannot read it ({error})") from None
        if depth_of(self.tree) > MAX_DEPTH:
            raise Unreadable(f"{path}: its expressions are nested more than {MAX_DEPTH} deep")
        if sum(1 for _ in ast.walk(self.tree)) > MAX_NODES:
            raise Unreadable(f"{path}: it has more than {MAX_NODES:,} expressions; a script that a person wrote never has that many")
        self.names = Names(self.tree, package)
        self._dotted: dict[int, str] = {}

    @classmethod
    def read(cls, path: Path, module: str = "", package: str = "", shown: str = "") -> Source:
        """A .py file or a notebook. Raises OSError, or Unreadable in clear words."""
        shown = shown or str(path)
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):  # a device may have no end, and a pipe nobody who writes
            raise Unreadable(f"{shown} is not an ordinary file")
        if about.st_size > MAX_BYTES:
            raise Unreadable(f"{shown} has {about.st_size:,} bytes; a script that a person wrote is never that large")
        raw = path.read_bytes()
        if b"\0" in raw:
            raise Unreadable(f"{shown} is a binary file, no Python source")
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise Unreadable(f"{shown} is not UTF-8 text (byte {error.start:,})") from None
        if path.suffix == ".ipynb":
            text, cells = notebook(text, shown)
            return cls(shown, text, module, package, cells)
        return cls(shown, text, module, package)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def calls(self) -> list[ast.Call]:
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [node for node in self.nodes if isinstance(node, FUNCTIONS)]

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self.names.parents.get(id(node))

    def parents(self, node: ast.AST) -> Iterator[ast.AST]:
        return iter(self.names.ancestors(node))

    def statement(self, node: ast.AST) -> ast.stmt | None:
        return next((each for each in [node, *self.parents(node)] if isinstance(each, ast.stmt)), None)

    def function(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The function whose body a node stands in."""
        return next((each for each in self.parents(node) if isinstance(each, FUNCTIONS)), None)

    def klass(self, node: ast.AST) -> ast.ClassDef | None:
        return next((each for each in self.parents(node) if isinstance(each, ast.ClassDef)), None)

    def bindings(self, node: ast.AST) -> list[Binding]:
        return self.names.lookup(node) if isinstance(node, ast.Name) else []

    def dotted(self, node: ast.AST) -> str:
        """``torch.nn.functional.mse_loss`` for ``F.mse_loss``: a chain of names that begins with an import; else nothing."""
        if isinstance(node, ast.Attribute):
            before = self.dotted(node.value)
            return f"{before}.{node.attr}" if before else ""
        if not isinstance(node, ast.Name):
            return ""
        if id(node) not in self._dotted:
            self._dotted[id(node)] = ""  # a name that stands for itself ends here
            self._dotted[id(node)] = self._named(node)
        return self._dotted[id(node)]

    def _named(self, node: ast.Name) -> str:
        found = self.names.reaching(node)
        if found and all(b.how == "import" for b in found):
            return found[-1].dotted
        if len(found) == 1 and found[0].how == "assign" and not found[0].path and isinstance(found[0].value, (ast.Attribute, ast.Name)):
            return self.dotted(found[0].value)
        return ""

    def place(self, node: ast.AST, column: bool = True) -> Place:
        line = getattr(node, "lineno", 1)
        text = self.lines[line - 1] if 0 < line <= len(self.lines) else ""
        offset = getattr(node, "col_offset", 0)
        before = text.encode()[:offset].decode(errors="replace")  # ast counts bytes
        function = self.function(node)
        owner = self.klass(function) if function is not None else None
        name = "" if function is None else f"{owner.name}.{function.name}" if owner is not None else function.name
        file, shown = self.cell(line)
        return Place(file, shown, len(before) + 1 if column else 0, name, text.strip(), len(text) - len(text.lstrip()))

    def cell(self, line: int) -> tuple[str, int]:
        """The file's name and the line in it; of a notebook, the cell's number stands in the name and lines count from the cell's first."""
        for first, number in reversed(self.cells):
            if line >= first:
                return f"{self.path}[{number}]", line - first + 1
        return self.path, line

    def where(self, line: int) -> str:
        file, shown = self.cell(line)
        return f"{file}:{shown}"

    def code(self, node: ast.AST) -> str:
        """A node as one short line of code."""
        return " ".join(ast.unparse(node).split())


def notebook(text: str, shown: str) -> tuple[str, list[tuple[int, int]]]:
    """The code of a notebook as one text, and the line at which each code cell begins with the cell's number. Magic lines become comments."""
    try:
        cells = json.loads(text)["cells"]
        code = [(number, "".join(cell["source"])) for number, cell in enumerate(cells, 1) if cell.get("cell_type") == "code"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Unreadable(f"{shown} is no notebook that could be read: its JSON has no cells with a source") from None
    lines: list[str] = []
    starts = []
    for number, source in code:
        starts.append((len(lines) + 1, number))
        whole = source.lstrip().startswith("%%")
        for line in source.splitlines():
            word = line.lstrip()
            blank = len(line) - len(word)
            lines.append(" " * blank + "pass  # " + word if whole or word.startswith(("%", "!", "?")) or word.endswith("?") else line)
    return "\n".join(lines) + "\n", starts


def depth_of(tree: ast.AST) -> int:
    """How deep nodes are nested, counted without calling itself. A chain of ``elif`` or of operators counts, too."""
    deepest, level = 0, [tree]
    while level:
        deepest += 1
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return deepest

"""A training script as text: its syntax tree, its names, and places in it. Nothing is imported or run.

Related modules:

* names.py: scopes
* values.py and kinds.py: possible values of an expression
* walk.py and step_loops.py: order of events in loops
* program.py: the script with the modules that it imports from its own folder
"""

from __future__ import annotations

import ast
import json
import stat
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from flatout.probe.names import FUNCTIONS, Binding, Names
from flatout.schema.errors import MALFORMED
from flatout.schema.findings import SourceLocation

MAX_BYTES = 4_000_000  # larger than any handwritten script
MAX_NODES = 150_000  # some 15,000 lines; each rule walks them all
# Cell magics of a notebook whose body is Python. The body of others, such as %%bash, is not.
RUNS_PYTHON = ("%%time", "%%timeit", "%%capture", "%%prun", "%%flatout")
MAX_DEPTH = 200  # of nested nodes; walks are recursive, and Python allows about a thousand levels


class Unreadable(Exception):
    """A file that is not Python source. The message gives the reason, ``line`` its line if known."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


class SourceFile:
    """One file of the user.

    ``tree`` is the AST of ``text``. ``module`` is the name under which others import it. ``notebook`` is the
    JSON text of a notebook, ``cells`` are the first lines in ``text`` and the numbers of its code cells.
    """

    def __init__(
        self,
        path: str,
        text: str,
        module: str = "",
        package: str = "",
        cells: list[tuple[int, int]] | None = None,
        notebook: str = "",
    ) -> None:
        """Parse the text. Raises Unreadable."""
        self.path, self.text, self.module = path, text, module
        self.cells, self.notebook = cells or [], notebook
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
            raise Unreadable(
                f"{path}: it has more than {MAX_NODES:,} expressions, too many for a handwritten script"
            )
        self.names = Names(self.tree, package)
        self._dotted: dict[int, str] = {}

    @classmethod
    def read(cls, path: Path, module: str = "", package: str = "", shown: str = "") -> SourceFile:
        """Read a .py file or a notebook. Raises OSError or Unreadable."""
        shown = shown or str(path)
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(
            about.st_mode
        ):  # a device may have no end, and a pipe no writer
            raise Unreadable(f"{shown} is not a regular file")
        if about.st_size > MAX_BYTES:
            raise Unreadable(f"{shown} has {about.st_size:,} bytes, too many for a handwritten script")
        raw = path.read_bytes()
        if b"\0" in raw:
            raise Unreadable(f"{shown} is a binary file, not Python source")
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise Unreadable(f"{shown} is not UTF-8 text (byte {error.start:,})") from None
        if path.suffix == ".ipynb":
            code, cells = notebook(text, shown)
            return cls(shown, code, module, package, cells, text)
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
        """Return the function whose body contains a node."""
        return next((each for each in self.parents(node) if isinstance(each, FUNCTIONS)), None)

    def klass(self, node: ast.AST) -> ast.ClassDef | None:
        return next((each for each in self.parents(node) if isinstance(each, ast.ClassDef)), None)

    def bindings(self, node: ast.AST) -> list[Binding]:
        return self.names.lookup(node) if isinstance(node, ast.Name) else []

    def dotted(self, node: ast.AST) -> str:
        """Return the full name of an import, such as ``torch.nn.functional.mse_loss`` for ``F.mse_loss``, or
        "".

        The full name is a chain of names that starts with an import.
        """
        if isinstance(node, ast.Attribute):
            before = self.dotted(node.value)
            return f"{before}.{node.attr}" if before else ""
        if not isinstance(node, ast.Name):
            return ""
        if id(node) not in self._dotted:
            self._dotted[id(node)] = ""  # stops a name that refers to itself
            self._dotted[id(node)] = self._named(node)
        return self._dotted[id(node)]

    def _named(self, node: ast.Name) -> str:
        found = self.names.reaching(node)
        if found and all(b.how == "import" for b in found):
            return found[-1].dotted
        if (
            len(found) == 1
            and found[0].how == "assign"
            and not found[0].path
            and isinstance(found[0].value, (ast.Attribute, ast.Name))
        ):
            return self.dotted(found[0].value)
        return ""

    def place(self, node: ast.AST, column: bool = True) -> SourceLocation:
        line = getattr(node, "lineno", 1)
        text = self.lines[line - 1] if 0 < line <= len(self.lines) else ""
        offset = getattr(node, "col_offset", 0)
        before = text.encode()[:offset].decode(errors="replace")  # ast counts bytes
        function = self.function(node)
        owner = self.klass(function) if function is not None else None
        name = (
            ""
            if function is None
            else f"{owner.name}.{function.name}"
            if owner is not None
            else function.name
        )
        file, shown = self.cell(line)
        return SourceLocation(
            file, shown, len(before) + 1 if column else 0, name, text.strip(), len(text) - len(text.lstrip())
        )

    def cell(self, line: int) -> tuple[str, int]:
        """Return the file name and the line in it.

        In a notebook the name includes the number of the cell, and lines count from its start.
        """
        for first, number in reversed(self.cells):
            if line >= first:
                return f"{self.path}[{number}]", line - first + 1
        return self.path, line

    def line_of(self, file: str, line: int) -> int | None:
        """Return the line in ``text`` of a line in this file or in a cell of it; None if it is in neither."""
        if file == self.path:
            return line
        starts = (first for first, number in self.cells if file == f"{self.path}[{number}]")
        return next((first + line - 1 for first in starts), None)

    def where(self, line: int) -> str:
        file, shown = self.cell(line)
        return f"{file}:{shown}"

    def code(self, node: ast.AST) -> str:
        """Return a node as one short line of code."""
        return " ".join(ast.unparse(node).split())


def notebook(text: str, shown: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the code of a notebook as one text, and the first line and number of each code cell.

    Magic lines become comments, and so do whole cells in another language.
    """
    try:
        cells = json.loads(text)["cells"]
        code = [
            (number, "".join(cell["source"]))
            for number, cell in enumerate(cells, 1)
            if cell.get("cell_type") == "code"
        ]
    except MALFORMED:
        raise Unreadable(f"{shown} is not a readable notebook: its JSON has no cells with a source") from None
    lines: list[str] = []
    starts = []
    for number, source in code:
        starts.append((len(lines) + 1, number))
        first = source.split(maxsplit=1)[:1]
        whole = source.lstrip().startswith("%%") and first[0] not in RUNS_PYTHON
        for line in source.splitlines():
            word = line.lstrip()
            blank = len(line) - len(word)
            lines.append(
                " " * blank + "pass  # " + word
                if whole or word.startswith(("%", "!", "?")) or word.endswith("?")
                else line
            )
    return "\n".join(lines) + "\n", starts


def depth_of(tree: ast.AST) -> int:
    """Return the nesting depth of a tree, without recursion.

    A chain of ``elif`` or of operators counts, too.
    """
    deepest, level = 0, [tree]
    while level:
        deepest += 1
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return deepest

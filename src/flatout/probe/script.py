"""A training script as text: its syntax tree, its imports, and places in it. Nothing is imported or run."""

from __future__ import annotations

import ast
import json
import stat
from functools import cached_property
from pathlib import Path

from flatout.schema.errors import MALFORMED
from flatout.schema.findings import SourceLocation

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
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

    ``tree`` is the AST of ``text``. ``package`` is that of relative imports. ``cells`` of a notebook are the first
    lines in ``text`` and the numbers of its code cells."""

    def __init__(
        self, path: str, text: str, package: str = "", cells: list[tuple[int, int]] | None = None
    ) -> None:
        """Parse the text. Raises Unreadable."""
        self.path, self.text, self.package, self.cells = path, text, package, cells or []
        try:
            self.tree = ast.parse(text, filename=path)
        except SyntaxError as error:
            line = error.lineno or 0
            raise Unreadable(f"{self.where(line)}: {error.msg}", line) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise Unreadable(f"{path}: Python cannot read it ({error})") from None
        if depth_of(self.tree) > MAX_DEPTH:
            raise Unreadable(f"{path}: its expressions are nested more than {MAX_DEPTH} deep")
        self.nodes = list(ast.walk(self.tree))
        if len(self.nodes) > MAX_NODES:
            raise Unreadable(
                f"{path}: it has more than {MAX_NODES:,} expressions, too many for a handwritten script"
            )

    @classmethod
    def read(cls, path: Path, package: str = "") -> SourceFile:
        """Read a .py file or a notebook. Raises OSError or Unreadable."""
        shown, about = str(path), path.stat()
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
            return cls(shown, code, package, cells)
        return cls(shown, text, package)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def calls(self) -> list[ast.Call]:
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(node)

    def imported_from(self, node: ast.ImportFrom) -> str:
        """The dotted name of the module that an import names, relative ones from the file's package."""
        package = self.package.split(".") if self.package else []
        above = package[: len(package) - node.level + 1] if node.level else []
        return ".".join([*above, *filter(None, [node.module])])

    @cached_property
    def _imports(self) -> dict[str, str]:
        """The dotted names of what the file imports, without names that it gives to something else, too."""
        imports: dict[str, set[str]] = {}
        for node in self.nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                base = f"{self.imported_from(node)}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    whole = alias.name if alias.asname or base else alias.name.split(".")[0]
                    imports.setdefault(alias.asname or whole, set()).add((base + whole).lstrip("."))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                imports.setdefault(node.id, set()).add("")
            elif isinstance(node, ast.arg):
                imports.setdefault(node.arg, set()).add("")
            elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                imports.setdefault(node.name, set()).add("")
        return {name: min(dotted) for name, dotted in imports.items() if len(dotted) == 1}

    def dotted(self, node: ast.AST) -> str:
        """The full name of an import, such as ``torch.nn.functional.mse_loss`` for ``F.mse_loss``; "" for others."""
        if isinstance(node, ast.Attribute):
            before = self.dotted(node.value)
            return f"{before}.{node.attr}" if before else ""
        return self._imports.get(node.id, "") if isinstance(node, ast.Name) else ""

    def place(self, node: ast.AST) -> SourceLocation:
        line = getattr(node, "lineno", 1)
        text = self.lines[line - 1] if 0 < line <= len(self.lines) else ""
        offset = getattr(node, "col_offset", 0)
        before = text.encode()[:offset].decode(errors="replace")  # ast counts bytes
        names, above = list[str](), self.parent(node)
        while above is not None:
            if isinstance(above, (*FUNCTIONS, ast.ClassDef)):
                names.insert(0, above.name)
            above = self.parent(above)
        file, shown = self.cell(line)
        return SourceLocation(
            file, shown, len(before) + 1, ".".join(names), text.strip(), len(text) - len(text.lstrip())
        )

    def cell(self, line: int) -> tuple[str, int]:
        """Return the file name and the line in it.

        In a notebook the name includes the number of the cell, and lines count from its start.
        """
        for first, number in reversed(self.cells):
            if line >= first:
                return f"{self.path}[{number}]", line - first + 1
        return self.path, line

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

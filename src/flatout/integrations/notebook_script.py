"""Makes one script from the cells of a notebook session. IPython has already translated magics to calls.

The script holds all earlier cells that succeeded, then the cell that is measured. Magics and shell commands
are left out: a statement that calls ``get_ipython()`` becomes ``pass``.
"""

import ast
from collections.abc import Callable, Iterable, Sequence

RUNS_ITS_BODY = ("%%time", "%%capture")  # cell magics whose body defines names of the notebook
HEAD = "import os, sys\nsys.path[0] = os.getcwd()  # modules beside the notebook can be imported\n"
DEFINED_BY_IPYTHON = {
    "get_ipython": "from IPython import get_ipython",
    "display": "from IPython.display import display",
}


def script_of(
    earlier: Iterable[tuple[int, str]], cell: str, cell_count: int, translate: Callable[[str], str]
) -> str:
    """The script of a cell. ``earlier`` are (number, source) of cells; ``translate`` is IPython's.

    Raises SyntaxError if ``cell`` is not Python."""
    parts, future = [], list[str]()
    for count, source in [*earlier, (cell_count, cell)]:
        text = _without_cell_magic(source)
        if count != cell_count and (not text.strip() or text.strip() == cell.strip()):
            continue
        try:
            code, features = _strip_ipython(translate(text))
        except SyntaxError:
            if count == cell_count:
                raise
            continue  # it failed in the notebook, too
        future += features
        parts.append(f"# {f'In [{count}]' if count != cell_count else 'this cell'}\n{code.rstrip()}\n")
    body = "\n".join(parts)
    imports = [line for name, line in DEFINED_BY_IPYTHON.items() if name in body]
    head = [f"from __future__ import {name}" for name in dict.fromkeys(future)]
    return "\n".join(["# Made by %%flatout from the cells of a notebook.", *head, HEAD, *imports, body])


def _without_cell_magic(source: str) -> str:
    first, _, rest = source.lstrip().partition("\n")
    if not first.startswith("%%"):
        return source
    return rest if first.split()[0] in RUNS_ITS_BODY else ""


def _strip_ipython(source: str) -> tuple[str, Sequence[str]]:
    lines, future = source.splitlines(), list[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            future += [alias.name for alias in node.names]
        elif not isinstance(node, ast.Expr | ast.Assign) or not _calls_ipython(node):
            continue
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        lines[first] = " " * node.col_offset + "pass"
        lines[first + 1 : last] = [""] * (last - first - 1)
    return "\n".join(lines), future


def _calls_ipython(node: ast.AST) -> bool:
    return any(
        isinstance(child, ast.Call)
        and isinstance(child.func, ast.Attribute)
        and isinstance(child.func.value, ast.Call)
        and isinstance(child.func.value.func, ast.Name)
        and child.func.value.func.id == "get_ipython"
        for child in ast.walk(node)
    )

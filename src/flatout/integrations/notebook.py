"""`%load_ext flatout`, then `%%flatout profile` (or `tune`, `memory`) as the first line of a cell that trains.

The cell does not run in the notebook. The `flatout` command runs it in processes of its own, after the earlier
cells. Its text appears as it is written, then its page.
"""

import ast
import hashlib
import html
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from flatout.integrations.flatout_command import stream_flatout

PAGES = {"profile": "profile.html", "tune": "report.html", "memory": "memory.html"}
FOLDER = Path(".flatout") / "notebook"
HEIGHT = 640
USAGE = f"write `%%flatout {'|'.join(PAGES)} [options]` above the code of a training loop"


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext flatout`."""
    magic = FlatoutMagic(shell)
    shell.events.register("post_run_cell", magic.record_failure)
    shell.register_magic_function(magic.run, "cell", "flatout")


class Page:
    """A page of flatout: shown in a notebook, named in a terminal."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"page: {self.path}"

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"), quote=True)
        # The page has no script. The frame keeps its style apart from the notebook's.
        return f'<iframe sandbox srcdoc="{page}" style="width:100%;height:{HEIGHT}px;border:0"></iframe>'


class FlatoutMagic:
    """`%%flatout` of one session of IPython."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.failed: set[int] = set()

    def record_failure(self, result: Any) -> None:
        """Remember cells that failed: the script leaves them out."""
        if not result.success and result.execution_count is not None:
            self.failed.add(result.execution_count)

    def run(self, line: str, cell: str) -> Page:
        """Run `flatout LINE` on this cell. Raises UsageError of IPython, which is shown as one line."""
        words = self._words(line)
        path = self._script(cell)
        folder = path.with_suffix("")
        options = ["--job", str(folder), *(["--no-write"] if words[0] == "tune" else []), *words[1:]]
        result = stream_flatout([words[0], *options, sys.executable, str(path)], Path.cwd(), _show)
        if result.code:
            raise _usage(
                f"`flatout {words[0]}` ended with exit code {result.code}; its message is above. The script is {path}."
            )
        return Page(folder / PAGES[words[0]])

    def _words(self, line: str) -> Sequence[str]:
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise _usage(f"the options cannot be split into words ({error}); {USAGE}.") from None
        if not words:
            raise _usage(f"no command was given; {USAGE}.")
        if words[0] not in PAGES:
            raise _usage(f"`flatout {words[0]}` cannot run on a cell; {USAGE}.")
        return words

    def _script(self, cell: str) -> Path:
        """Write the script of a cell. Its name depends on its content, so a later cell does not change it."""
        count = self.shell.execution_count
        history = list(enumerate(self.shell.history_manager.input_hist_raw))[1:count]
        earlier = [(number, source) for number, source in history if number not in self.failed]
        try:
            text = script_of(earlier, cell, count, self.shell.input_transformer_manager.transform_cell)
        except SyntaxError as error:
            raise _usage(f"the cell is not Python: {error}.") from None
        path = FOLDER / f"cell-{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent.parent / ".gitignore").write_text("*\n", encoding="utf-8")
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise _usage(
                f"{path} cannot be written: {error.strerror}. Change to a folder of yours with %cd."
            ) from None
        return path


def _show(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


def _usage(message: str) -> Exception:
    from IPython.core.error import UsageError

    error: Exception = UsageError(f"flatout: {message}")
    return error


# Makes one script from the cells of a notebook session. IPython has already translated magics to calls.
#
# The script holds all earlier cells that succeeded, then the cell that is measured. Magics and shell commands
# are left out: a statement that calls ``get_ipython()`` becomes ``pass``.

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

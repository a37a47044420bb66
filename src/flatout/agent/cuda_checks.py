"""Finds, by reading source code, where a script would end if it were told that there is no CUDA device."""

from __future__ import annotations

import ast
import linecache
import operator
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

ACCELERATORS = ("cuda", "xpu", "mps")
ASKS = ("is_available", "device_count")
COMPARISONS: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.eq,
    ast.IsNot: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
LEAVING = ("exit", "quit", "sys.exit", "os._exit", "os.abort", "parser.error")


class CudaChecks:
    """The CUDA checks of each file; a file is read when it first asks."""

    def __init__(self) -> None:
        self._files: dict[str, Source] = {}

    def at(self, frame: FrameType) -> bool:
        """Whether the script would end because of the answer to the check at this frame."""
        demanded = self._of(frame.f_code.co_filename).demanded
        positions = getattr(frame.f_code, "co_positions", None)
        if positions is None:  # Python 3.10 knows only the line
            return frame.f_lineno in {line for line, _ in demanded}
        _, line, _, column = list(positions())[frame.f_lasti // 2]
        return (line, column) in demanded

    def has_another_way(self, filename: str) -> bool:
        """Whether a file checks for CUDA and continues without it."""
        return self._of(filename).has_another_way

    def _of(self, filename: str) -> Source:
        if filename not in self._files:
            self._files[filename] = Source("".join(linecache.getlines(filename)))
        return self._files[filename]


class Source:
    """CUDA checks of one file.

    ``demanded``: the end positions (line, column) of checks that must be answered with yes. A file that
    cannot be read has none.
    """

    def __init__(self, text: str) -> None:
        try:
            tree: ast.AST = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            tree = ast.Module([], [])
        self._nodes: list[Any] = list(ast.walk(tree))
        self._above = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        questions = [(node, asked) for node in self._nodes if (asked := _question(node))]
        demanded = [node for node, _ in questions if self._is_demanded(node, no_means=False)]
        self.demanded = {(node.end_lineno, node.end_col_offset) for node in demanded}
        self.has_another_way = any(
            asked == "is_available" and node not in demanded for node, asked in questions
        )

    def _is_demanded(self, node: object, no_means: bool, followed: tuple[str, ...] = ()) -> bool:
        """Whether the script ends if ``node`` is false (``no_means``: if it is true)."""
        for below, above in self._upwards(node):
            if isinstance(above, ast.UnaryOp) and isinstance(above.op, ast.Not):
                no_means = not no_means
            elif (
                isinstance(above, ast.Compare)
                and len(above.ops) == 1
                and isinstance(other := above.comparators[0], ast.Constant)
            ):
                compare = COMPARISONS.get(type(above.ops[0]))
                if compare is None or not isinstance(other.value, (bool, int)):
                    return False
                no_means = compare(no_means, other.value)
            elif isinstance(above, ast.Assert):
                return below is above.test and not no_means
            elif isinstance(above, ast.If):
                return below is above.test and _ends(above.body if no_means else above.orelse)
            elif isinstance(above, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
                names = [
                    ast.unparse(target)
                    for target in (above.targets if isinstance(above, ast.Assign) else [above.target])
                ]
                uses = [
                    use
                    for use in self._nodes
                    if isinstance(use, (ast.Name, ast.Attribute))
                    and isinstance(use.ctx, ast.Load)
                    and (name := ast.unparse(use)) in names
                    and name not in followed
                ]
                if any(self._is_demanded(use, no_means, (*followed, *names)) for use in uses):
                    return True
                if not isinstance(above, ast.NamedExpr):
                    return False
            elif not isinstance(above, ast.BoolOp):
                return False
        return False

    def _upwards(self, node: object) -> Iterator[tuple[Any, Any]]:
        while node in self._above:
            yield node, self._above[node]
            node = self._above[node]


def _question(node: object) -> str:
    """Return `torch.cuda.is_available()`, `torch.cuda.device_count()` or `x.is_cuda`; else an empty text."""
    if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
        owner, _, name = ast.unparse(node.func).rpartition(".")
        return name if name in ASKS and owner.rpartition(".")[2] in ("", *ACCELERATORS, "accelerator") else ""
    return "is_cuda" if isinstance(node, ast.Attribute) and node.attr == "is_cuda" else ""


def _ends(body: list[ast.stmt]) -> bool:
    """Whether a branch ends the script: it raises, exits, or prints and returns nothing."""
    if not body:
        return False
    last = body[-1]
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return ast.unparse(last.value.func).endswith(LEAVING)
    return isinstance(last, ast.Raise) or (
        isinstance(last, ast.Return) and last.value is None and len(body) > 1
    )

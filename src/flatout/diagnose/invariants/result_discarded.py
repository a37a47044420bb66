"""The result of a tensor method is discarded.

What:
    A line calls a method that returns a new tensor (`x.to(device)`, `x.detach()`, `x.clamp(0, 1)`) and does
    not use the result.
Why it matters:
    Only modules move in place. The tensor does not change: it stays on the wrong device, attached to its
    graph, or unclamped.
How to fix it:
    Write `x = x.to(device)`, or use the in-place method with an underscore: `x.clamp_(0, 1)`.
Example:
    import torch

    x = torch.randn(8, 4)
  - x.clamp(0, 1)  # <-
  + x = x.clamp(0, 1)
    print(x)
"""

import ast
import linecache
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from flatout.agent.frames import Line, is_user_file
from flatout.diagnose.invariant import Findings, Invariant, rule

PURE = frozenset(
    [
        "to",
        "cuda",
        "cpu",
        "detach",
        "clamp",
        "clip",
        "float",
        "half",
        "double",
        "long",
        "int",
        "bool",
        "view",
        "reshape",
        "permute",
        "transpose",
        "squeeze",
        "unsqueeze",
        "contiguous",
        "div",
        "mul",
        "add",
        "sub",
        "neg",
        "abs",
        "sqrt",
        "exp",
        "log",
        "pow",
        "flatten",
        "expand",
        "type",
        "clone",
        "round",
        "masked_fill",
        "index_fill",
        "scatter",
    ]
)


class ResultDiscarded(Invariant):
    calls = PURE

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: dict[Line, str] = {}

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_name != "__torch_function__":
            frame = frame.f_back
        caller = frame.f_back  # a module's own `to` calls that of its tensors
        if caller is None or not is_user_file(caller.f_code.co_filename) or "out" in kwargs:
            return
        if name in discarded(caller.f_code.co_filename).get(caller.f_lineno, ()):
            self.lines[caller.f_code, caller.f_lineno] = name

    def findings(self) -> Findings:
        for line, name in self.lines.items():
            yield RULE.finding(
                f"`{name}` returns a new tensor, and this line discards it: the tensor itself does not change",
                line,
                f"x = x.{name}(...)",
            )


@lru_cache(maxsize=256)
def discarded(file: str) -> Mapping[int, set[str]]:
    """The methods whose results a line of a file does not use."""
    found = defaultdict[int, set[str]](set)
    text = "".join(linecache.getlines(file))
    if file.endswith(".py"):
        for node in ast.walk(ast.parse(text)):
            call = node.value if isinstance(node, ast.Expr) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                found[call.lineno].add(call.func.attr)
    return found


RULE = rule(ResultDiscarded, "FL030", __doc__)

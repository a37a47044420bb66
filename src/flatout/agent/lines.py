"""Finds the user's line of each operator, through torch's dispatcher, for a step or two.

An operator of a backward pass belongs to the line whose gradient it computes. A profiler's own stacks name
only functions, not lines; they also cost a hundred times as much.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import Any

from flatout.agent.frames import Line, user_line
from flatout.agent.ledger import Ledger

Key = tuple[str, tuple[tuple[int, ...], ...]]  # an operator's name and the shapes of its tensors


class OperatorLines:
    """Maps operators to lines.

    ``by_operator``: the lines of each kind of call, in call order. ``times``: the time of each call, from
    ``now_ns``.
    """

    def __init__(self, torch: ModuleType, ledger: Ledger, now_ns: Callable[[], int]) -> None:
        self.torch, self.ledger, self.now_ns = torch, ledger, now_ns
        self.by_operator: dict[Key, list[Line | None]] = defaultdict(list)
        self.times: list[tuple[int, Line | None]] = []
        self._forward_lines: dict[
            int, Line | None
        ] = {}  # number of an autograd node -> the line that created it

    def install(self) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        lines = self

        class LineObserver(TorchDispatchMode):
            def __torch_dispatch__(
                self, function: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
            ) -> Any:
                lines._observed(function, args)
                return function(*args, **(kwargs or {}))

        mode = LineObserver()
        mode.__enter__()
        self.ledger.on_restore("dispatch mode", lambda: mode.__exit__(None, None, None))

    def _observed(self, function: Any, args: Any) -> None:
        node = self.torch._C._current_autograd_node()
        if node is None:
            line = user_line(sys._getframe(2))
            # its node was created just before
            self._forward_lines[self.torch._C._autograd._get_sequence_nr() - 1] = line
        else:
            number = node._sequence_nr()
            line = (
                self._forward_lines[number] if number in self._forward_lines else user_line(sys._getframe(2))
            )
        shapes = tuple(tuple(arg.shape) for arg in args if isinstance(arg, self.torch.Tensor) and arg.dim())
        self.by_operator[function._schema.name, shapes].append(line)
        self.times.append((self.now_ns(), line))

"""forward is called directly.

What:
    The program calls `model.forward(x)` instead of `model(x)`.
Why it matters:
    Hooks do not run, and everything built on hooks is silently skipped. DistributedDataParallel does not
    average gradients, `torch.compile` of a module does not compile, and FSDP does not gather its weights.
    Profilers and flatout see no forward pass.
How to fix it:
    Call the module: `model(x)`.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(3, 8, 4):
        optimizer.zero_grad()
  -     model.forward(x).square().mean().backward()  # <-
  +     model(x).square().mean().backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.forward
"""

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from flatout.agent.frames import Line, is_user_file
from flatout.diagnose.invariant import Findings, rule
from flatout.diagnose.running_modules import RunningModules
from flatout.schema.findings import Severity

MAX_LOOKS = 5000


class ForwardCalled(RunningModules):
    calls = frozenset(
        {"batch_norm", "conv1d", "conv2d", "embedding", "gru", "linear", "lstm", "matmul", "relu", "tanh"}
    )

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.looks = 0
        self.lines: dict[Line, list[Any]] = {}  # -> class of the module and calls

    def forward_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        self.look(sys._getframe(1), own_call=True)
        super().forward_begins(module, inputs)

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        self.look(sys._getframe(1), own_call=False)

    def look(self, frame: FrameType | None, own_call: bool) -> None:
        """Look for a ``forward`` of a module that does not run, up to the call of the innermost one that does."""
        self.looks += 1
        while frame is not None and self.looks < MAX_LOOKS:
            code = frame.f_code
            if code.co_name == "_call_impl":
                if not own_call:
                    return
                own_call = False  # of the module that begins
            caller = frame.f_back
            if code.co_name == "forward" and caller is not None and is_user_file(caller.f_code.co_filename):
                module = first_argument(frame)
                runs = any(each is module for each in (*self.running, first_argument(caller)))
                if isinstance(module, self.program.torch.nn.Module) and not runs:
                    line = caller.f_code, caller.f_lineno
                    self.lines.setdefault(line, [type(module).__name__, 0])[1] += 1
            frame = caller

    def findings(self) -> Findings:
        for line, (kind, calls) in self.lines.items():
            if calls > 1:
                yield RULE.finding(
                    f"`forward` of {kind} was called directly: every hook of the module was skipped",
                    line,
                    "call the module itself: model(x)",
                )


def first_argument(frame: FrameType) -> Any:
    names = frame.f_code.co_varnames[:1]
    return frame.f_locals.get(names[0]) if names and frame.f_code.co_argcount else None


RULE = rule(ForwardCalled, "FL306", __doc__, Severity.FRAGILE)

"""eval() does not disable this dropout.

What:
    `forward` calls `F.dropout(x, p)` without `training=self.training`, or calls a `torch.nn.Dropout(p)` that is no
    submodule of the model, such as one that it creates there.
Why it matters:
    The function defaults to `training=True`, and a new module is always in training mode. `model.eval()`
    changes neither. Test results are too poor and differ from call to call.
How to fix it:
    Use `F.dropout(x, p, training=self.training)`, or a `torch.nn.Dropout` created in `__init__`.
Example:
    import torch
    import torch.nn.functional as F

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 1)

        def forward(self, x):
  -         return self.fc(F.dropout(x, 0.5))  # <-
  +         return self.fc(F.dropout(x, 0.5, training=self.training))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(3, 8, 4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for x in torch.randn(3, 8, 4):
            model(x)
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.dropout.html
"""

import dis
import sys
from collections.abc import Mapping
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any
from weakref import WeakSet, ref

from flatout.agent.frames import is_user_file
from flatout.diagnose.invariant import Findings, line_here, rule
from flatout.diagnose.running_modules import DROPOUTS, RunningModules, acts_as_in_training, fingerprint

MIN_PASSES = 2
PASSED_ON = (
    "torch/overrides.py",
    "torch/nn/functional.py",
    "diagnose/observer.py",
    "invariants/dropout_always_on.py",
)
CALLS = frozenset({"CALL", "CALL_KW", "CALL_METHOD", "CALL_FUNCTION", "CALL_FUNCTION_KW"})


class DropoutAlwaysOn(RunningModules):
    calls = DROPOUTS

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: dict[Any, tuple[Any, set[Any]]] = {}  # line -> root module and its evaluation passes
        self.previous: Any = None  # root module and data
        self.sampled: WeakSet[Any] = WeakSet()  # they got the same data in a row: Monte Carlo dropout

    def root_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        new = None if self.program.torch.is_grad_enabled() else (ref(module), fingerprint(inputs))
        if new is not None and new == self.previous:
            self.sampled.add(module)
        self.previous = new

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if not self.running or self.previous is None or not acts_as_in_training(name, args, kwargs):
            return
        root, *_, module = self.running[0], *self.running
        if isinstance(module, self.program.torch.nn.modules.dropout._DropoutNd):
            on = not self.running[-2:][0].training and all(m is not module for m in root.modules())
        else:
            on = not module.training and mode_left_out(sys._getframe(1))
        if on:
            _, passes = self.lines.setdefault(line_here(), (ref(root), set()))
            passes.add((self.program.backwards, self.previous[1]))

    def findings(self) -> Findings:
        for line, (root, passes) in self.lines.items():
            if len(passes) >= MIN_PASSES and root() not in self.sampled:
                yield RULE.finding(
                    f"this dropout was active in {len(passes)} passes without gradients, although its module was in evaluation mode",
                    line,
                    "training=self.training, or a torch.nn.Dropout created in __init__",
                )


def mode_left_out(frame: FrameType | None) -> bool:
    """Whether the user's call of a functional dropout leaves out ``training``."""
    while frame is not None and frame.f_code.co_filename.endswith(PASSED_ON):
        frame = frame.f_back
    return (
        frame is not None
        and is_user_file(frame.f_code.co_filename)
        and leaves_out(frame.f_code, frame.f_lasti)
    )


@lru_cache(maxsize=256)
def leaves_out(code: CodeType, at: int) -> bool:
    before = [i for i in dis.get_instructions(code) if i.offset <= at][-4:]
    names = next((i.argval for i in reversed(before) if isinstance(i.argval, tuple)), ())
    positional = (before[-1].arg or 0) - len(names)
    return before[-1].opname in CALLS and positional < 3 and not {"training", "train"} & set(names)


RULE = rule(DropoutAlwaysOn, "FL023", __doc__)

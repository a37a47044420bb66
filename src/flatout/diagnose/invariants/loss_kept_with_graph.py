"""A running total keeps the graph of every step.

What:
    The training loop has `total += loss` or `losses.append(loss)`, directly or in a method of a metric object.
    `total` and `losses` outlive the step, and `loss` is a tensor with its graph.
Why it matters:
    A total of tensors is part of a graph that references the graphs of all previous steps. Memory grows with
    every step, often so slowly that it runs out only after hours.
How to fix it:
    Use `total += loss.detach()`, which stays on the device and does not wait, or `loss.item()`.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = 0.0
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
  -     total += loss  # <-
  +     total += loss.detach()
    print(total / 100)
Sources:
    https://docs.pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory
"""

import gc
import linecache
import re
import sys
from collections import deque
from collections.abc import Mapping
from types import FrameType, ModuleType
from typing import Any

from flatout.agent.frames import Line, is_user_file, place_at, place_of
from flatout.diagnose.invariant import Findings, line_here, rule
from flatout.diagnose.memory_growth import growth_finding
from flatout.diagnose.running_modules import LOSSES, RunningModules, graph_numbers, leaves_of
from flatout.schema.findings import Severity, SourceLocation
from flatout.schema.profile import ProfileRecord

SUMS = frozenset(
    {"__rdiv__", "__rsub__", "add", "add_", "div", "lerp", "mean", "mul", "mul_", "stack", "sub", "sum"}
)
MIN_STEPS = 5  # that a sum spans
MIN_KEPT = 10  # steps of which tensors are alive
MAX_SUMS = 1000


class LossKeptWithGraph(RunningModules):
    calls = SUMS | LOSSES

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.chains = program.tensor_map()  # numbers with a graph -> step of the oldest part, own step, line
        self.sums: dict[int, Line | None] = {}  # numbers of nodes that span steps -> line
        self.lines: dict[Line | None, int] = {}  # of sums that enter later sums -> steps that they span
        self.learned: set[Line | None] = set()  # their sums enter a backward pass
        self.made = program.tensor_map()  # outputs and losses with a graph -> step
        self.kept, self.search_at = 0, MIN_KEPT
        self.holder: Any = None  # name and place

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        tensor, step = self.program.torch.Tensor, self.program.steps
        if not isinstance(result, tensor) or result.numel() != 1 or result.grad_fn is None:
            return
        parts = [self.chains.get(value) for value in leaves_of(args) if isinstance(value, tensor)]
        oldest, line = step, line_here()
        for since, then, part_line in filter(None, parts):
            oldest = min(oldest, since)
            if then < step and then - since >= MIN_STEPS:
                self.lines[part_line] = max(step - since, self.lines.get(part_line, 0))
        self.chains[result] = oldest, step, line
        if name in LOSSES:
            self.made[result] = step
        elif step - oldest >= MIN_STEPS and len(self.sums) < MAX_SUMS:
            self.sums[result.grad_fn._sequence_nr()] = line

    def root_ends(self, module: Any, output: Any) -> None:
        for value in leaves_of(output)[:1]:
            if isinstance(value, self.program.torch.Tensor) and value.grad_fn is not None:
                self.made[value] = self.program.steps

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        for loss in losses:
            self.made[loss] = self.program.steps
        if self.sums:
            self.learned |= {self.sums[number] for number in graph_numbers(losses) & self.sums.keys()}

    def step_ends(self, optimizer: Any) -> None:
        if self.holder is None and len(self.made) >= self.search_at:
            alive = {step: value for value, step in self.made.items() if value.grad_fn is not None}
            if len(alive) >= self.search_at:
                self.search_at, oldest = 2 * len(alive), alive[min(alive)]
                self.kept, alive = len(alive), {}
                self.holder = holder_of(oldest, user_frames(sys._getframe(1)))

    def findings(self) -> Findings:
        for line, steps in self.lines.items():
            if line not in self.learned:
                yield RULE.finding(
                    f"this sum keeps the graphs of {steps} steps", place_of(line), "add loss.detach()"
                )
        if self.holder is not None:
            name, place = self.holder
            yield RULE.finding(
                f"`{name}` keeps tensors of {self.kept} steps with their graphs", place, "keep loss.detach()"
            )


def user_frames(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames += [frame] if is_user_file(frame.f_code.co_filename) else []
        frame = frame.f_back
    return frames


def holder_of(value: Any, frames: list[FrameType], levels: int = 3) -> Any:
    """The name of the user's container that keeps a value, and the place that fills it. None if it has no name."""
    spaces: list[Any] = [space for frame in frames for space in (frame.f_locals, frame.f_globals)]
    objects = [
        each for space in spaces for each in space.values() if not isinstance(each, (type, ModuleType))
    ]
    spaces += [vars(each) for each in objects if hasattr(each, "__dict__")]
    hidden = {id(space) for space in spaces}
    for _ in range(levels):
        holders = [
            r for r in gc.get_referrers(value) if type(r) in (list, deque, dict) and id(r) not in hidden
        ]
        for name, each in (pair for space in spaces for pair in space.items()):
            if any(each is holder for holder in holders):
                return name, place_that_fills(name, frames)
        if not holders:
            return None
        value = holders[0]
    return None


def place_that_fills(name: str, frames: list[FrameType]) -> SourceLocation | None:
    fills = re.compile(rf"\b{re.escape(name)}\b(.*\.(append|appendleft|extend)\(|\[.*\] *=|.*\+=)")
    for file in {frame.f_code.co_filename: None for frame in frames}:
        for number, text in enumerate(linecache.getlines(file), 1):
            if fills.search(text):
                return place_at(file, number)
    return None


def check_profile(profile: ProfileRecord) -> Findings:
    if profile.tensor_growth is not None and profile.tensor_growth.leaking and profile.tensor_growth.graph:
        yield growth_finding(RULE, profile, profile.tensor_growth, "with its graph")


RULE = rule(
    LossKeptWithGraph,
    "FL202",
    __doc__,
    Severity.MEMORY,
    check_profile=check_profile,
    sort_before=Severity.TIME,
)

"""The backward passes between two steps of an optimizer, as invariants of training loops ask about them.

A few elements of gradients and weights are compared between events. The invariants of a program share their
samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Invariant, line_here
from flatout.diagnose.observed_program import parameters_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

MAX_ROWS, ELEMENTS = 32, 16
MAX_OPTIMIZERS = 8  # the latest ones
MAX_PASSES = 256
MAX_NODES = 64  # of the graph, from the loss


@dataclass
class Pass:
    """A backward pass that gave gradients to the parameters of an optimizer."""

    line: Line | None
    scale: float  # by a scaler; 1 without one
    before: Any  # samples of the gradients
    after: Any
    weights: Any
    alone: bool  # it reached no other optimizer
    input_learns: bool  # a module got an input that requires a gradient


@dataclass
class Window:
    """What happened from one step of an optimizer to the end of the next one."""

    line: Line | None  # of the step
    passes: list[Pass]
    gradients: Any  # samples at the step
    weights: Any
    piled: list[Tensor]  # parameters whose gradients were in the previous step, and were only added to
    emptied: bool  # passes gave gradients, and the step found none
    cleared: Line | None  # the latest zero_grad
    ran: bool  # a module ran since then

    @property
    def unchanged(self) -> bool:
        """Whether the step used exactly what the last pass left."""
        return bool(self.passes) and bool((self.gradients == self.passes[-1].after).all())

    @property
    def scaled_copy(self) -> bool:
        """Whether the step used what the last pass left, perhaps times a factor, as clipping does."""
        one, other = self.gradients.flatten(), self.passes[-1].after.flatten()
        product = float(one @ other)
        return product > 0 and product >= 0.9999 * float(one.norm() * other.norm())


@dataclass
class State:
    parameters: list[Tensor]
    count: int
    passes: list[Pass] = field(default_factory=list)
    before: Any = None  # samples when the present pass began
    used: Any = None  # samples of what the latest step used, and what was added to it
    continued: Any = None  # rows that were not cleared since the latest step
    added: Any = None  # rows that a pass has added to since then
    cleared: Line | None = None
    ran: bool = False
    stepping: bool = False
    inside: bool = False  # a backward pass ran inside the step
    window: Window | None = None  # of the present step, or the latest


class GradientWindows:
    def __init__(self, program: Any) -> None:
        self.program = program
        self.states: WeakKeyDictionary[Optimizer, State] = WeakKeyDictionary()
        self.scales: dict[Any, float] = {}  # graph node of a scaled loss -> factor, until the next step
        self.losses: tuple[Tensor, ...] | None = None  # of the present backward pass
        self.line: Line | None = None  # of the present backward pass
        self.input_learns: bool | None = None  # of the first module since the latest pass

    def samples(self, tensors: Sequence[Tensor | None]) -> Any:
        """A row for each tensor, with a few of its elements; zeros for None."""
        torch = self.program.torch
        rows = torch.zeros(len(tensors), ELEMENTS, device="cpu")
        by_device: dict[Any, dict[int, Any]] = {}
        for i, tensor in enumerate(tensors):
            if tensor is not None and tensor.layout is torch.strided and tensor.is_floating_point():
                flat = tensor.detach().reshape(-1)
                by_device.setdefault(tensor.device, {})[i] = flat[:: max(1, -(-flat.numel() // ELEMENTS))]
        for taken in by_device.values():
            values = torch.cat([part.float() for part in taken.values()]).cpu()  # one copy, and one wait
            for i, part in zip(taken, values.split([len(part) for part in taken.values()]), strict=True):
                rows[i, : len(part)] = part
        return rows

    def state(self, optimizer: Optimizer) -> State:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        state = self.states.get(optimizer)
        if state is None or state.count != count:
            parameters = list(parameters_of(optimizer))
            state = self.states[optimizer] = State(parameters[:: -(-count // MAX_ROWS)], count)
            if len(self.states) > MAX_OPTIMIZERS:
                del self.states[next(iter(self.states))]
        return state

    def backward_begins(self, losses: tuple[Tensor, ...]) -> None:
        if losses is self.losses:
            return
        self.losses, self.line = losses, line_here()
        for optimizer in list(self.states):
            state = self.state(optimizer)
            state.before = self.samples([p.grad for p in state.parameters])
            state.inside = state.inside or state.stepping
            if state.used is not None:
                state.continued &= (state.before == state.used).all(1)

    def backward_ends(self) -> None:
        if self.losses is None:
            return
        scale, self.losses, reached = self.scale_of(self.losses), None, list[State]()
        for state in self.states.values():
            if state.before is None:
                continue
            after = self.samples([p.grad for p in state.parameters])
            rows = (after != state.before).any(1)
            if state.used is not None:
                state.added |= rows
                state.used = after
            if bool(rows.any()):
                reached.append(state)
                weights = self.samples(state.parameters)
                learns = bool(self.input_learns)
                state.passes.append(Pass(self.line, scale, state.before, after, weights, True, learns))
                del state.passes[:-MAX_PASSES]
        for state in reached if len(reached) > 1 else ():
            state.passes[-1].alone = False
        self.input_learns = None

    def scale_of(self, losses: Sequence[Tensor]) -> float:
        """The factor by which a scaler has multiplied these losses."""
        nodes, seen = [loss.grad_fn for loss in losses], 0
        while self.scales and nodes and seen < MAX_NODES:
            node, seen = nodes.pop(0), seen + 1
            if node in self.scales:
                return self.scales[node]
            nodes += [following for following, _ in node.next_functions] if node is not None else []
        return 1.0

    def graph_of(self, loss: Tensor) -> Any:
        """The last operation of a loss, before a scaler."""
        node = loss.grad_fn
        return node.next_functions[0][0] if node is not None and node in self.scales else node

    def gradients_cleared(self, parameters: Sequence[Tensor]) -> None:
        ids = {id(p) for p in parameters}
        for state in self.states.values():
            if any(id(p) in ids for p in state.parameters):
                state.cleared, state.ran = line_here(), False

    def forward_begins(self, inputs: Sequence[Any]) -> None:
        if self.input_learns is None and self.program.torch.is_grad_enabled():
            tensor = self.program.torch.Tensor
            self.input_learns = any(isinstance(given, tensor) and given.requires_grad for given in inputs)
        for state in self.states.values():
            state.ran = True

    def step_begins(self, optimizer: Optimizer) -> None:
        state = self.state(optimizer)
        if state.stepping:
            return
        state.stepping, state.inside = True, False
        gradients = self.samples([p.grad for p in state.parameters])
        emptied = bool(state.passes) and not any(
            p.grad is not None and bool(p.grad.any()) for p in parameters_of(optimizer)
        )
        weights = self.samples(state.parameters)
        state.window = Window(
            line_here(), state.passes, gradients, weights, [], emptied, state.cleared, state.ran
        )

    def step_ends(self, optimizer: Optimizer) -> Window | None:
        state = self.state(optimizer)
        window = state.window
        if not state.stepping or window is None:
            return window
        used = self.samples([p.grad for p in state.parameters])
        if state.used is not None:
            rows = (state.continued & state.added & used.any(1)).tolist()
            window.piled = [p for p, piled in zip(state.parameters, rows, strict=True) if piled]
        if state.inside:
            window.emptied, window.passes = False, []
        state.used, state.continued = used, used.any(1)
        state.added = self.program.torch.zeros_like(state.continued)
        state.stepping, state.passes, state.cleared = False, [], None
        self.scales.clear()
        return window


class WindowInvariant(Invariant):
    """An invariant that judges each step of an optimizer by its window."""

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.windows: GradientWindows = vars(program).setdefault("gradient_windows", GradientWindows(program))

    def stepped(self, optimizer: Optimizer, window: Window) -> None:
        """An optimizer has stepped."""

    def optimizer_made(self, optimizer: Optimizer) -> None:
        self.windows.state(optimizer)

    def forward_begins(self, module: Module, inputs: tuple[Any, ...]) -> None:
        if self.program.forward_depth == 1:
            self.windows.forward_begins(inputs)

    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:
        if isinstance(scaled, self.program.torch.Tensor) and scaled is not loss:
            self.windows.scales[scaled.grad_fn] = scaler.get_scale()

    def backward_begins(self, losses: tuple[Tensor, ...]) -> None:
        self.windows.backward_begins(losses)

    def backward_ends(self) -> None:
        self.windows.backward_ends()

    def gradients_cleared(self, parameters: Sequence[Tensor]) -> None:
        self.windows.gradients_cleared(parameters)

    def step_begins(self, optimizer: Optimizer) -> None:
        self.windows.step_begins(optimizer)

    def step_ends(self, optimizer: Optimizer) -> None:
        window = self.windows.step_ends(optimizer)
        if window is not None:
            self.stepped(optimizer, window)

    def scaler_stepped(self, scaler: Any, optimizer: Optimizer) -> None:
        self.windows.state(optimizer).passes = []  # it may have skipped the step

"""A copy of the model is the model itself.

What:
    Weights are copied or averaged into themselves: source and target share their memory. The target, teacher or best
    model is the same object, or a `state_dict()` that was not copied.
Why it matters:
    The target moves with every step of the model, so it holds nothing back and nothing still.
How to fix it:
    Make the copy with `copy.deepcopy(model)`; keep weights with `copy.deepcopy(model.state_dict())`.
Example:
    import copy
    import torch

    model = torch.nn.Linear(4, 1)
  - target = model
  + target = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(3, 8, 4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
  - target.load_state_dict(model.state_dict())  # <-
  + target.load_state_dict(model.state_dict())
"""

from collections.abc import Mapping
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, argument, line_here, rule
from flatout.diagnose.invariants.best_weights_not_copied import LiveStates


class CopyIsTheModel(LiveStates):
    in_run = True
    calls = LiveStates.calls | {"copy_", "lerp_"}

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: dict[Line | None, int] = {}  # of loads
        self.copies: dict[Line | None, int] = {}

    def state_loaded(self, module: Any, state: Mapping[str, Any], strict: bool, result: Any) -> None:
        tensors = [
            (own, state[name])
            for name, own in (*module.named_parameters(), *module.named_buffers())
            if isinstance(state.get(name), self.program.torch.Tensor) and own.numel()
        ]
        self.copies.pop(line_here(), None)  # of this load
        into_itself = tensors and all(same_memory(*pair) for pair in tensors)
        if self.program.steps and into_itself and not self.changed(state, {id(own) for own, _ in tensors}):
            self.lines[line_here()] = len(tensors)

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if name == "detach":
            super().called(name, args, kwargs, result)
            return
        source = argument(args, kwargs, 1, "src" if name == "copy_" else "end")
        if isinstance(source, self.program.torch.Tensor) and source.numel() and same_memory(args[0], source):
            own = args[0]._is_view() or isinstance(args[0], self.program.torch.nn.Parameter)
            if own and not self.changed(source, {id(args[0])}):
                self.copies[line_here()] = self.copies.get(line_here(), 0) + 1

    def findings(self) -> Findings:
        for line, tensors in (self.copies | self.lines).items():
            yield RULE.finding(
                f"{tensors} tensors were copied into themselves: source and target share their memory",
                line,
                "make the target with copy.deepcopy(model)",
            )


def same_memory(one: Any, other: Any) -> bool:
    return bool(
        one.device == other.device and one.data_ptr() == other.data_ptr() and one.shape == other.shape
    )


RULE = rule(CopyIsTheModel, "FL072", __doc__)

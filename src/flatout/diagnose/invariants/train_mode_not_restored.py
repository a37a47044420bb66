"""After the first evaluation, the model stays in evaluation mode.

What:
    Layers with dropout or batch normalisation act as in training, are set to evaluation mode for an evaluation, and
    stay in it while the optimizer goes on to train their weights or those beside them.
Why it matters:
    After the first evaluation, dropout drops nothing and batch normalisation uses frozen statistics, while the
    weights keep changing. The model overfits or diverges, without an error.
How to fix it:
    Call `model.train()` at the start of every epoch, or directly after the evaluation.
Example:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - model.train()
    for epoch in range(3):
  +     model.train()
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
  -     model.eval()  # <-
  +     model.eval()
        with torch.no_grad():
            print(model(torch.randn(8, 4)).square().mean())
"""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from flatout.agent.frames import Line
from flatout.diagnose.gains import event_of
from flatout.diagnose.invariant import Findings, counted, line_here, rule
from flatout.diagnose.running_modules import WITH_MODES, RunningModules, acts_as_in_training, kind_of
from flatout.schema.profile import ProfileRecord

MIN_STEPS = 3
DIFFERENT = ("Dropout", "BatchNorm", "AlphaDropout", "SyncBatchNorm", "RReLU", "InstanceNorm")


class Layer:
    """A module that calls dropout or batch normalisation, and the steps that trained it or the layers beside it."""

    trained = asleep = 0  # steps in training mode, and in evaluation mode
    after_evaluation = 0  # of the latter
    passes = 0  # with gradients, since the last step
    first = later = steps = (
        0  # most passes of a step after the latest `eval()`: of the first, of others; their number
    )
    evaluated = root_trains = False
    line: Line | None = None  # of the latest `eval()`
    call: Line | None = None  # of the latest pass with gradients

    def __init__(self, kind: str, running: list[Any]) -> None:
        owner = next((m for m in reversed(running) if any(True for _ in m.parameters())), running[0])
        self.kind, self.owner = kind, ref(owner)
        self.modes: set[bool] = set()  # of these passes


class TrainModeNotRestored(RunningModules):
    calls = WITH_MODES

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.layers: WeakKeyDictionary[Any, Layer] = WeakKeyDictionary()
        self.lines: WeakKeyDictionary[Any, Line | None] = WeakKeyDictionary()  # of the latest `eval()`
        self.switched_on: WeakSet[Any] = WeakSet()  # by `train()`
        self.call: Line | None = None  # of the running root module

    def root_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        self.call = line_here()

    def mode_set(self, module: Any, training: bool) -> None:
        self.lines[module] = None if training else line_here()
        if training:
            self.switched_on.add(module)
        if (layer := self.layers.get(module)) is not None:
            layer.evaluated, layer.first, layer.later, layer.steps = False, 0, 0, 0

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        training = acts_as_in_training(name, args, kwargs)
        if training is None or not self.running:
            return
        module = self.running[-1]
        layer = self.layers.get(module) or self.layers.setdefault(module, Layer(kind_of(name), self.running))
        if self.program.torch.is_grad_enabled():
            layer.modes.add(training)
            layer.passes += 1
            layer.root_trains, layer.call = self.running[0].training, self.call
        elif not training:
            layer.evaluated = True

    def step_begins(self, optimizer: Any) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        for module, layer in self.layers.items():
            owner = layer.owner() if layer.modes else None
            if owner is None or not any(id(p) in held and p.requires_grad for p in owner.parameters()):
                layer.passes = 0
                continue
            if layer.modes == {True}:
                layer.trained += 1
            elif layer.modes == {False}:
                if layer.first:
                    layer.later, layer.steps = max(layer.later, layer.passes), layer.steps + 1
                else:
                    layer.first = layer.passes
                # an evaluation with gradients came before the first step
                layer.evaluated = layer.evaluated or (layer.steps > 1 and layer.first > layer.later > 0)
                layer.asleep += 1
                was_on = layer.trained > 0 or module in self.switched_on
                layer.after_evaluation += layer.evaluated and was_on and not layer.root_trains
                layer.line = self.lines.get(module) or layer.line
            layer.modes, layer.passes = set(), 0

    def findings(self) -> Findings:
        found = [layer for layer in self.layers.values() if layer.after_evaluation >= MIN_STEPS]
        for line in {layer.line: None for layer in found}:
            of_line = [layer for layer in found if layer.line == line]
            others = f", and in training mode in {of_line[0].trained} others" if of_line[0].trained else ""
            yield RULE.finding(
                f"{said(of_line)} in evaluation mode in {max(layer.after_evaluation for layer in of_line)} training "
                f"steps after an evaluation{others}",
                line or of_line[0].call,
                "model.train()  # after the evaluation",
            )


def said(layers: list[Layer]) -> str:
    kinds = " and ".join(sorted({layer.kind for layer in layers}))
    return f"{counted(len(layers), 'layer')} with {kinds} {'was' if len(layers) == 1 else 'were'}"


def check_profile(profile: ProfileRecord) -> Findings:
    modes, modules = profile.settings.get("training") or {}, profile.settings.get("modules") or {}
    asleep = int(modes.get("eval") or modes.get("False") or 0)
    awake = int(modes.get("train") or modes.get("True") or 0)
    concerned = [name for name in modules if name.startswith(DIFFERENT)]
    if asleep and not awake and concerned:  # with parts frozen on purpose, others are not frozen
        yield RULE.profile_finding(
            f"all {asleep} modules are in evaluation mode during training, including {', '.join(concerned)}",
            event_of(profile, "forward")[2][:1],
        )


RULE = rule(TrainModeNotRestored, "FL016", __doc__, check_profile=check_profile)

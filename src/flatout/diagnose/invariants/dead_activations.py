"""A ReLU returns nothing but zeros.

What:
    In 30 training steps or more, every element that a ReLU returned was 0, for every sample. Its inputs were not 0. A
    layer with weights, or the end of the model, gets these zeros.
Why it matters:
    A ReLU passes no gradient where it returns 0. The layers before it get none through it, so they cannot leave this
    state, and the layers after it do not see the data.
How to fix it:
    Lower the learning rate: a large step often moves all biases below 0. Scale the inputs, initialise the bias with 0
    or more, or use a `LeakyReLU` or `GELU`. Use no ReLU at the end of a regression.
Example:
    import torch

    hidden, output = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
  - torch.nn.init.constant_(hidden.bias, -20.0)
  + torch.nn.init.constant_(hidden.bias, 0.0)
    model = torch.nn.Sequential(hidden, torch.nn.ReLU(), output)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in torch.randn(60, 8, 4):
        optimizer.zero_grad()
  -     loss = (model(x) - x[:, :1]).square().mean()  # <-
  +     loss = (model(x) - x[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
Sources:
    https://arxiv.org/abs/1903.06733
"""

from collections.abc import Mapping
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, argument, counted, line_here, rule
from flatout.diagnose.running_modules import RunningModules, has_values, leaves_of
from flatout.diagnose.value_sources import SHAPES

RELUS = frozenset({"relu", "relu6", "relu_"})
WITH_WEIGHTS = frozenset({"conv1d", "conv2d", "conv3d", "linear"})
ZEROS_STAY = SHAPES | {"adaptive_avg_pool2d", "dropout", "max_pool2d"}
FROM_WEIGHTS = ("Addmm", "Convolution", "CudnnBatchNorm", "NativeBatchNorm")  # nodes
MIN_STEPS, MIN_ELEMENTS = 30, 64
LOOK_EVERY = 5  # steps, while all activations live
Key = tuple[Line | None, int]  # of an activation: the line, and how many came before it in the pass


class DeadActivations(RunningModules):
    calls = RELUS | WITH_WEIGHTS | ZEROS_STAY

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.count = 0  # of activations in the present pass of the root module
        self.begun: Any = None  # the input of the innermost module, and whether it had negative elements
        self.zeros = program.tensor_map()  # tensor -> the activation that returned it, `follows_weights`
        self.alive, self.dead = set[Key](), set[Key]()  # since the latest backward pass
        self.steps: dict[Key, int] = {}  # in which nothing but zeros came, without a break

    @property
    def looks(self) -> bool:
        return bool(self.steps) or self.program.backwards % LOOK_EVERY == 0

    def root_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        self.count = 0

    def forward_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        super().forward_begins(module, inputs)
        if getattr(module, "inplace", False) and self.looks and len(inputs) == 1 and has_values(inputs[0]):
            self.begun = inputs[0], bool((inputs[0] < 0).any())

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if not self.running or not self.looks or not getattr(result, "requires_grad", False):
            return
        given = argument(args, kwargs, 0, "input")
        if name in WITH_WEIGHTS and given in self.zeros:
            self.dead.add(self.zeros[given][0])
        elif name in ZEROS_STAY and given in self.zeros:
            self.zeros[result] = self.zeros[given]
        elif name in RELUS:
            self.count += 1
            key = line_here(), self.count
            if result.any():
                self.alive.add(key)
            elif result.numel() >= MIN_ELEMENTS and self.had_negatives(given, result):
                self.zeros[result] = key, follows_weights(result)

    def had_negatives(self, given: Any, result: Any) -> bool:
        if given is not result:
            return bool((given < 0).any())
        return self.begun is not None and self.begun[0] is given and self.begun[1]

    def root_ends(self, module: Any, output: Any) -> None:
        for leaf in leaves_of(output):
            if isinstance(leaf, self.program.torch.Tensor) and leaf in self.zeros:
                key, follows = self.zeros[leaf]
                self.dead |= {key} if follows else set()

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        for key in self.alive:
            self.steps.pop(key, None)
        if self.dead and any(bool(loss.detach().any()) for loss in losses):  # else there is nothing to learn
            self.steps.update({key: self.steps.get(key, 0) + 1 for key in self.dead - self.alive})
        self.alive, self.dead, self.begun = set(), set(), None

    def findings(self) -> Findings:
        lines: dict[Line | None, list[int]] = {}
        for (line, _), steps in self.steps.items():
            if steps >= MIN_STEPS:
                lines.setdefault(line, []).append(steps)
        for line, each in lines.items():
            yield RULE.finding(
                f"{counted(len(each), 'ReLU')} of this call returned only zeros in the last {min(each)} steps: "
                "no gradient passes through",
                line,
                "lower the learning rate, or use a LeakyReLU",
            )


def follows_weights(activation: Any) -> bool:
    """Whether its input is the output of a layer: else it may be a margin, which is 0 for a good reason."""
    node = activation.grad_fn.next_functions[0][0]
    while node is not None and node.name().startswith("View"):
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith(FROM_WEIGHTS)


RULE = rule(DeadActivations, "FL082", __doc__)

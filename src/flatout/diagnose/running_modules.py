"""What several invariants ask about running modules, their modes and their graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from flatout.agent.frames import Line, is_torch, is_user_file
from flatout.diagnose.invariant import Invariant, argument

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from flatout.diagnose.observed_program import ObservedProgram

DROPOUTS = frozenset(
    {"alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"}
)
WITH_MODES = DROPOUTS | {"batch_norm"}
OF_CLASSES = frozenset(
    {"binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "nll_loss"}
)
LOSSES = OF_CLASSES | {"huber_loss", "kl_div", "l1_loss", "mse_loss", "smooth_l1_loss"}
MAX_NODES = 20_000
LEAF = 1 << 63  # the numbers of nodes that accumulate gradients lie above it
FINGERPRINT = 16  # elements


class RunningModules(Invariant):
    """Knows the modules that run, the innermost last."""

    def __init__(self, program: ObservedProgram) -> None:
        super().__init__(program)
        self.running: list[Module] = []

    def root_begins(self, module: Module, inputs: tuple[Any, ...]) -> None:
        """A root module runs."""

    def root_ends(self, module: Module, output: Any) -> None: ...

    def forward_begins(self, module: Module, inputs: tuple[Any, ...]) -> None:
        if self.program.torch._C._current_graph_task_id() == -1:  # else a checkpoint computes again
            self.running.append(module)
            if len(self.running) == 1:
                self.root_begins(module, inputs)

    def forward_ends(self, module: Module, output: Any) -> None:
        if any(each is module for each in self.running):
            while self.running.pop() is not module:
                pass
            if not self.running:
                self.root_ends(module, output)


def acts_as_in_training(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool | None:
    """Whether a call of ``WITH_MODES`` acts as in training. None if it acts alike in both modes."""
    if name == "batch_norm":
        return bool(kwargs.get("training")) if len(args) == 3 and args[1] is not None else None
    training = argument(args, kwargs, 2, "training", kwargs.get("train", True))
    return bool(training) if argument(args, kwargs, 1, "p", 0.5) else None


def kind_of(name: str) -> str:
    return "dropout" if name in DROPOUTS else "batch normalisation"


def direct_line() -> Line | None:
    """The line that made the call, if it is the user's own and not that of a library below it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_torch(frame.f_code.co_filename):
        frame = frame.f_back
    return (
        (frame.f_code, frame.f_lineno)
        if frame is not None and is_user_file(frame.f_code.co_filename)
        else None
    )


def leaves_of(value: Any) -> list[Any]:
    from torch.utils._pytree import tree_leaves

    return list(tree_leaves(value))


def fingerprint(values: Any) -> int | None:
    """A hash of the shape and of a few elements of the first tensor with several elements. None if there is none."""
    import torch

    for tensor in leaves_of(values):
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:
            if not has_values(tensor):
                return None
            elements = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // FINGERPRINT)].tolist()
            return hash((tuple(tensor.shape), *elements))
    return None


def has_values(tensor: Tensor) -> bool:
    """Whether the elements can be read: not on the meta device, and not inside of a transform such as vmap."""
    import torch

    return not tensor.is_meta and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def on_gradient(output: Any, seen: Callable[..., None]) -> bool:
    """Call ``seen`` when a backward pass goes through the output of a module.

    Returns whether the output has a graph, and consists of nothing but tensors and plain values."""
    import torch

    leaves = leaves_of(output)
    if not all(leaf is None or isinstance(leaf, (torch.Tensor, int, float, str)) for leaf in leaves):
        return False
    nodes = [leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    for node in nodes:
        node.register_prehook(seen)
    return bool(nodes)


def sensitivity(scores: Tensor, source: Tensor) -> Tensor | None:
    """The gradient of a weighted sum of the scores with respect to a tensor in their graph, which is kept; None if there
    is none, or if the graph cannot be read twice, such as that of a reentrant checkpoint."""
    import torch

    flat = scores.flatten().float()
    weights = torch.linspace(1.0, 2.0, len(flat), device=flat.device)
    try:
        return torch.autograd.grad(flat @ weights, source, retain_graph=True, allow_unused=True)[0]
    except RuntimeError:
        return None


def graph_numbers(tensors: Iterable[Tensor], most: int = MAX_NODES) -> set[int]:
    """The sequence numbers of the nodes in the graph of tensors, without the leaves."""
    nodes, numbers = [tensor.grad_fn for tensor in tensors], set[int]()
    while nodes and len(numbers) < most:
        node = nodes.pop()
        if node is not None and (number := node._sequence_nr()) < LEAF and number not in numbers:
            numbers.add(number)
            nodes += [following for following, _ in node.next_functions]
    return numbers

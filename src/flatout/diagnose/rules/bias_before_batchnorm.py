"""A layer adds a bias that BatchNorm removes.

What:
    A convolution or linear layer with the default `bias=True` feeds directly into a BatchNorm.
Why it matters:
    BatchNorm subtracts the mean, and the bias with it. The gradient of the bias is zero except for rounding.
    The bias costs an addition over the whole output in the forward pass and a sum over it in the backward
    pass. It also needs memory for its gradient and optimizer state.
How to fix it:
    Set `bias=False` in the layer before a BatchNorm. (Loading a checkpoint with the old biases then needs
    `strict=False`.)
Bad:
    import torch

    block = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3),  # <-
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
    )
Good:
    import torch

    block = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, bias=False),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
    )
Sources:
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#disable-bias-for-convolutions-directly-followed-by-a-batch-norm
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Finding, Severity

LAYERS = {
    "Conv1d": 7,
    "Conv2d": 7,
    "Conv3d": 7,
    "ConvTranspose1d": 7,
    "ConvTranspose2d": 7,
    "ConvTranspose3d": 7,
    "Linear": 2,
}  # position of `bias`
NORMS = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"}


def look(program: ScriptProgram) -> Iterator[Finding]:
    for source, call in program.calls("torch.nn.Sequential"):
        for layer, norm in zip(call.args, call.args[1:], strict=False):
            if (
                isinstance(layer, ast.Call)
                and isinstance(norm, ast.Call)
                and _last(source, norm) in NORMS
                and _has_bias(source, layer)
            ):
                yield _finding(source, layer)
    for source, klass in program.modules_defined():
        yield from _in_forward(program, source, klass)


def _in_forward(program: ScriptProgram, source: SourceFile, klass: ast.ClassDef) -> Iterator[Finding]:
    """Find ``self.bn(self.conv(x))`` where each layer is created once."""
    made = program.values.attributes(source, klass)
    uses = [
        node.attr
        for node in ast.walk(klass)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    ]
    for node in ast.walk(klass):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or len(node.args) != 1:
            continue
        inner = node.args[0]
        if (
            not isinstance(inner, ast.Call)
            or not isinstance(inner.func, ast.Attribute)
            or uses.count(inner.func.attr) != 1
        ):
            continue
        norms, layers = made.get(node.func.attr, []), made.get(inner.func.attr, [])
        if (
            len(norms) == len(layers) == 1
            and isinstance(norms[0].value, ast.Call)
            and isinstance(layers[0].value, ast.Call)
            and _last(source, norms[0].value) in NORMS
            and _has_bias(source, layers[0].value)
        ):
            yield _finding(source, layers[0].value)


def _last(source: SourceFile, call: ast.Call) -> str:
    dotted = source.dotted(call.func)
    return dotted.rpartition(".")[2] if dotted.startswith("torch.nn.") else ""


def _has_bias(source: SourceFile, call: ast.Call) -> bool:
    name = _last(source, call)
    return (
        name in LAYERS
        and len(call.args) <= LAYERS[name]
        and not any(k.arg in ("bias", None) for k in call.keywords)
        and not any(isinstance(a, ast.Starred) for a in call.args)
    )


def _finding(source: SourceFile, layer: ast.Call) -> Finding:
    return RULE.finding(
        f"the bias of this {_last(source, layer)} has no effect: the BatchNorm after it subtracts it",
        source.place(layer),
        f"{source.code(layer)[:-1]}, bias=False)",
    )


RULE = Rule("FL114", "bias_before_batchnorm", Severity.TIME, __doc__, look=look)

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
Example:
    import torch

    block = torch.nn.Sequential(
  -     torch.nn.Conv2d(3, 16, 3),  # <-
  +     torch.nn.Conv2d(3, 16, 3, bias=False),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
    )
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        block(torch.randn(8, 3, 8, 8)).square().mean().backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#disable-bias-for-convolutions-directly-followed-by-a-batch-norm
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rewrites import add_argument
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


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, call in program.calls("torch.nn.Sequential"):
        for layer, norm in zip(call.args, call.args[1:], strict=False):
            if (
                isinstance(layer, ast.Call)
                and isinstance(norm, ast.Call)
                and _last(source, norm) in NORMS
                and _has_bias(source, layer)
            ):
                yield _finding(program, source, layer)
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
            yield _finding(program, source, layers[0].value)


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


def _finding(program: ScriptProgram, source: SourceFile, layer: ast.Call) -> Finding:
    certain = program.step_loops and not _needs_bias(program, _last(source, layer))
    return RULE.finding(
        f"the bias of this {_last(source, layer)} has no effect: the BatchNorm after it subtracts it",
        source.place(layer),
        f"{source.code(layer)[:-1]}, bias=False)",
        edits=add_argument(source, layer, "bias=False") if certain else [],
    )


def _needs_bias(program: ScriptProgram, layer: str) -> bool:
    """Return whether the program loads weights into a module, or may read the bias of such a layer."""
    if any(
        call.func.attr == "load_state_dict"  # type: ignore[attr-defined]
        and not ({"Optimizer", "Scheduler", "GradScaler"} & program.values.kinds(source, call.func.value))  # type: ignore[attr-defined]
        for source, call in program.method_calls("load_state_dict")
    ):
        return True
    for source, node in program.nodes(ast.Attribute, ast.Constant, ast.Call):
        if isinstance(node, ast.Attribute) and node.attr == "bias" and not _guarded(source, node, layer):
            return True
        if isinstance(node, ast.Constant) and str(node.value).endswith(".bias"):
            return True  # the key of a bias
        if (
            isinstance(node, ast.Call)
            and source.code(node.func) == "getattr"
            and "'bias'" in source.code(node)
        ):
            return True
    return False


def _guarded(source: SourceFile, read: ast.Attribute, layer: str) -> bool:
    """Return whether a bias is compared with None, or read below a test for it or for a norm alone."""
    around = source.parent(read)
    if isinstance(around, ast.Compare) and isinstance(around.ops[0], (ast.Is, ast.IsNot)):
        return True
    tests = [found.test for found, arm in source.names.arms(read) if arm == "body"]
    return any(
        f"{source.code(read)} is not None" in source.code(test) or _for_norms(test, layer) for test in tests
    )


def _for_norms(test: ast.expr, layer: str) -> bool:
    """Return whether a test holds for norms and for no such layer: by class, or by the name of the class."""
    nodes = list(ast.walk(test))
    if any(isinstance(node, (ast.Not, ast.NotIn, ast.IsNot)) for node in nodes):
        return False
    if any(isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq) for node in nodes):
        return False  # `name.find("BatchNorm") == -1`
    words = {
        str(getattr(node, "attr", getattr(node, "id", getattr(node, "value", "")))).lower()
        for node in nodes
        if isinstance(node, (ast.Name, ast.Attribute, ast.Constant))
    }
    return any("norm" in word for word in words) and not any(
        len(word) > 2 and word in layer.lower() for word in words
    )


RULE = Rule(
    "FL114",
    "bias_before_batchnorm",
    Severity.TIME,
    __doc__,
    check,
    fix_changes="other initial weights, because no biases are drawn; checkpoints have no such biases",
    weight=-1,
)

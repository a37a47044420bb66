"""An average divides by more samples than there are.

What:
    A count over all samples is divided by `len(loader) * batch_size`.
Why it matters:
    Unless the loader drops it, the last batch is shorter. The denominator is then too large by up to one
    batch, and the accuracy is too low. On a small test set, this error is larger than the difference between
    two models.
How to fix it:
    Divide by `len(loader.dataset)`, or count the samples.
Example:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    model = torch.nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(torch.randn(100, 4), torch.zeros(100)), batch_size=64)
    correct = 0
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum().item()
  - print(correct / (len(loader) * 64))  # <-
  + print(correct / len(loader.dataset))
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, node in program.nodes(ast.BinOp):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        below = node.right
        if isinstance(below, ast.BinOp) and isinstance(below.op, ast.Mult):
            for length, size in ((below.left, below.right), (below.right, below.left)):
                loader = _loader(program, source, length)
                if loader is not None and _is_batch_size(program, source, loader, size):
                    yield RULE.finding(
                        f"`{source.code(below)}` is larger than the number of samples if the last batch is shorter",
                        source.place(node),
                        f"{source.code(node.left)} / len({source.code(loader)}.dataset)",
                    )


def _loader(program: ScriptProgram, source: SourceFile, length: ast.AST) -> ast.AST | None:
    if (
        isinstance(length, ast.Call)
        and isinstance(length.func, ast.Name)
        and length.func.id == "len"
        and length.args
    ):
        return length.args[0] if program.values.is_a(source, length.args[0], "DataLoader") else None
    return None


def _is_batch_size(program: ScriptProgram, source: SourceFile, loader: ast.AST, size: ast.AST) -> bool:
    """Return whether ``size`` is the batch size of the loader, and the loader keeps its last batch."""
    for origin in program.origins(source, loader):
        if not isinstance(origin.node, ast.Call):
            return False
        options = {keyword.arg: keyword.value for keyword in origin.node.keywords}
        given = options.get("batch_size", origin.node.args[1] if len(origin.node.args) > 1 else None)
        if None in options or "drop_last" in options or "batch_sampler" in options or given is None:
            return False
        attribute = (
            isinstance(size, ast.Attribute)
            and size.attr == "batch_size"
            and ast.dump(size.value) == ast.dump(loader)
        )
        if ast.dump(given) != ast.dump(size) and not attribute:
            return False
    return True


RULE = Rule("FL024", "average_over_full_batches", Severity.WRONG, __doc__, check)

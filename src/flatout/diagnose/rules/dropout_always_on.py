"""eval() does not disable this dropout.

What:
    `forward` calls `F.dropout(x, p)` without `training=self.training`, or creates a `torch.nn.Dropout(p)` and
    calls it.
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
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.dropout.html
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity

NAMES = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
CLASSES = {"Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout"}


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, klass in program.modules_defined():
        for call in (
            node
            for method in klass.body
            if isinstance(method, ast.FunctionDef) and method.name != "__init__"
            for node in ast.walk(method)
            if isinstance(node, ast.Call)
        ):
            dotted = source.dotted(call.func)
            last = dotted.rpartition(".")[2]
            if any(
                isinstance(each, (ast.If, ast.IfExp)) and "training" in ast.unparse(each.test)
                for each in source.parents(call)
            ):
                continue  # the program switches it itself
            options = {keyword.arg for keyword in call.keywords}
            if (
                dotted.startswith("torch.nn.functional.")
                and last in NAMES
                and len(call.args) < 3
                and not options & {"training", None}
            ):
                info = ", ".join(
                    [*(source.code(each) for each in [*call.args, *call.keywords]), "training=self.training"]
                )
                yield RULE.finding(
                    f"`{source.code(call)}` is active in evaluation too: `training` defaults to True",
                    source.place(call),
                    f"{source.code(call.func)}({info})",
                )
            elif (
                dotted.startswith("torch.nn.")
                and last in CLASSES
                and isinstance(source.parent(call), ast.Call)
                and source.parent(call).func is call  # type: ignore[union-attr]
            ):
                yield RULE.finding(
                    f"this {last} is created here and is always in training mode: `eval()` cannot disable it",
                    source.place(call),
                    f"self.drop = {source.code(call)}  # in __init__",
                )


RULE = Rule("FL023", "dropout_always_on", Severity.WRONG, __doc__, check)

"""A checkpoint is loaded to the device that saved it.

What:
    A program that runs on a device calls `torch.load(path)` without `map_location`.
Why it matters:
    Every tensor returns to its original device. A checkpoint from a GPU does not load on a machine without
    one, and one from `cuda:3` needs four GPUs. With several processes, all of them fill the memory of the
    first GPU.
How to fix it:
    Use `torch.load(path, map_location=device)`. Or use `map_location="cpu"`, followed by `load_state_dict`,
    which copies to the device of the model.
Example:
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(4, 1).to(device)
  - model.load_state_dict(torch.load("model.pt"))  # <-
  + model.load_state_dict(torch.load("model.pt", map_location=device))
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.load.html
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    """Find loads of weights, straight into ``load_state_dict``, in a program that names a GPU."""
    if not program.mentions("cuda", "cuda:0"):
        return
    for source, call in program.calls("torch.load"):
        user = source.parent(call)
        into = isinstance(user, ast.Call) and isinstance(user.func, ast.Attribute) and user.func.attr
        if (
            into == "load_state_dict"
            and len(call.args) == 1
            and not any(k.arg in ("map_location", None) for k in call.keywords)
        ):
            yield RULE.finding(
                "this checkpoint loads only on a machine that has the device it was saved from",
                source.place(call),
                f'torch.load({source.code(call.args[0])}, map_location="cpu")',
            )


RULE = Rule("FL303", "load_without_map_location", Severity.FRAGILE, __doc__, check)

"""A checkpoint can run arbitrary code.

What:
    The program calls `torch.load(..., weights_only=False)`.
Why it matters:
    The file is unpickled without restrictions. Its author can run any code on this machine, with your
    permissions. Since torch 2.6, the default loads only tensors and plain values.
How to fix it:
    Save a `state_dict` and load it with the default. If a class is really needed, allow it:
    `torch.serialization.add_safe_globals([TheClass])`.
Example:
    import torch

  - state = torch.load("model.pt", map_location="cpu", weights_only=False)  # <-
  + state = torch.load("model.pt", map_location="cpu")
Sources:
    https://docs.pytorch.org/docs/stable/notes/serialization.html#torch-load-with-weights-only-true
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, call in program.calls("torch.load"):
        if any(k.arg == "weights_only" and getattr(k.value, "value", None) is False for k in call.keywords):
            kept = [k for k in call.keywords if k.arg != "weights_only"]
            yield RULE.finding(
                "the author of this file can run any code on this machine",
                source.place(call),
                ast.unparse(ast.Call(call.func, call.args, kept)),
            )


RULE = Rule("FL304", "load_runs_code", Severity.FRAGILE, __doc__, check)

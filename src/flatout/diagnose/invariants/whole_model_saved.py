"""A model is saved as an object, not as its weights.

What:
    `torch.save(model, path)` is given the module itself.
Why it matters:
    The file is a pickle that names your classes and files. If you rename, move or change them, it no longer
    loads. Since torch 2.6, `torch.load` rejects it without `weights_only=False`, which lets a file run any
    code.
How to fix it:
    Use `torch.save(model.state_dict(), path)`, and `model.load_state_dict(torch.load(path))` on a model
    created by the code.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
  - torch.save(model, "model.pt")  # <-
  + torch.save(model.state_dict(), "model.pt")
Sources:
    https://docs.pytorch.org/docs/stable/notes/serialization.html
"""

from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule
from flatout.schema.findings import Severity


class WholeModelSaved(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: dict[Line | None, str] = {}

    def saved(self, saved: Any, file: Any) -> None:
        if isinstance(saved, self.program.torch.nn.Module):
            self.lines[line_here()] = type(saved).__name__

    def findings(self) -> Findings:
        for line, name in self.lines.items():
            yield RULE.finding(
                f"{name} is saved as an object: the file breaks if you rename a class, and loads only with weights_only=False",
                line,
                "torch.save(model.state_dict(), path)",
            )


RULE = rule(WholeModelSaved, "FL302", __doc__, Severity.FRAGILE)

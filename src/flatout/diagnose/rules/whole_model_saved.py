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

from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, call in program.calls("torch.save"):
        if (
            call.args
            and "Module" in (kinds := program.values.kinds(source, call.args[0]))
            and not kinds & {"dict", "list", "Tensor"}
        ):
            info = ", ".join(
                [
                    f"{source.code(call.args[0])}.state_dict()",
                    *(source.code(each) for each in [*call.args[1:], *call.keywords]),
                ]
            )
            yield RULE.finding(
                f"`{source.code(call.args[0])}` is saved as an object: the file breaks if you rename a class, and loads only with "
                "weights_only=False",
                source.place(call),
                f"torch.save({info})",
            )


RULE = Rule("FL302", "whole_model_saved", Severity.FRAGILE, __doc__, check)

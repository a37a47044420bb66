"""A checkpoint for resuming lacks the optimizer.

What:
    The program saves the weights with the epoch and reads the epoch back to resume. Its optimizer has state
    (Adam, or SGD with momentum), and this state is not saved.
Why it matters:
    After resuming, the averages of Adam start at zero, with the bias correction of the first step. The first
    steps are far too large, and the loss jumps. Part of the training before the interruption is undone.
How to fix it:
    Save `optimizer.state_dict()` with the weights, and the state of the scheduler and the scaler. Load them
    when resuming.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    checkpoint = torch.load("last.pt")
    model.load_state_dict(checkpoint["model"])
  + optimizer.load_state_dict(checkpoint["optimizer"])
    start = checkpoint["epoch"]
    for epoch in range(start, 10):
        for _ in range(100):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
  -     torch.save({"epoch": epoch, "model": model.state_dict()}, "last.pt")  # <-
  +     torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
Sources:
    https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.checkpoints import POSITION_KEYS, checkpoint_reads
from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    made = [
        origin
        for source in program.sources
        for call in source.calls
        if "Optimizer" in program.values.kinds(source, call)
        for origin in program.origins(source, call)
        if isinstance(origin.node, ast.Call)
    ]
    if not program.step_loops or not any(
        isinstance(origin.node, ast.Call) and has_state(origin.node) for origin in made
    ):
        return
    read = {key for _, _, key in checkpoint_reads(program)} & POSITION_KEYS
    for source, call in program.calls("torch.save"):
        for origin in program.origins(source, call.args[0]) if call.args else ():
            if isinstance(origin.node, ast.Dict) and _holds_weights_alone(origin.node, read):
                name = next(
                    (
                        source.code(target)
                        for o in made
                        if isinstance(p := o.source.parent(o.node), ast.Assign)
                        for target in p.targets
                    ),
                    "optimizer",
                )
                yield RULE.finding(
                    "the program resumes from this checkpoint, which lacks the state of the optimizer",
                    source.place(call),
                    f'"optimizer": {name}.state_dict(),  # in this dict; load it with the weights',
                )


def _holds_weights_alone(saved: ast.Dict, read: set[str]) -> bool:
    """Return whether a checkpoint has a position that is read back, one state, and no optimizer state."""
    keys = {str(key.value) for key in saved.keys if isinstance(key, ast.Constant)}
    states = [
        value
        for value in saved.values
        if isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr == "state_dict"
    ]
    return (
        len(keys) == len(saved.keys) < 6
        and bool(keys & read)
        and len(states) == 1
        and not any("optim" in key for key in keys)
    )


def has_state(optimizer: ast.Call) -> bool:
    name = (
        optimizer.func.attr
        if isinstance(optimizer.func, ast.Attribute)
        else getattr(optimizer.func, "id", "")
    )
    return name != "SGD" or any(k.arg == "momentum" for k in optimizer.keywords)


RULE = Rule("FL312", "checkpoint_without_optimizer", Severity.FRAGILE, __doc__, check)

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

from flatout.diagnose.rewrites import add_argument
from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Finding, Severity

COPYING = {"Module", "Optimizer", "Scheduler", "GradScaler"}  # their `load_state_dict` keeps their device


def check(program: ScriptProgram) -> Iterator[Finding]:
    if not program.uses_device or program.mentions("offload_to_cpu", "cpu_offload"):
        return
    if any(
        isinstance(call.func, ast.Attribute) and program.values.is_a(source, call.func.value, "Module")
        for source, call in program.method_calls("cpu")
    ):
        return  # it moves its modules to the CPU before it saves them
    loads = list(program.calls("torch.load"))
    placed = {
        _file(source, call)
        for source, call in loads
        if any(keyword.arg == "map_location" for keyword in call.keywords) or len(call.args) > 1
    }
    again = _loaded_again(program)
    for source, call in loads:
        if (
            _are_weights(source, call)
            and len(call.args) == 1
            and not any(keyword.arg in ("map_location", None) for keyword in call.keywords)
            and _file(source, call) not in placed
            and id(call) not in again
        ):
            rest = "".join(f", {source.code(keyword)}" for keyword in call.keywords)
            yield RULE.finding(
                "this checkpoint loads only on a machine that has the device it was saved from",
                source.place(call),
                f'torch.load({source.code(call.args[0])}, map_location="cpu"{rest})',
                edits=add_argument(source, call, 'map_location="cpu"')
                if _only_copied(program, source, call)
                else [],
            )


def _are_weights(source: SourceFile, load: ast.Call) -> bool:
    """Return whether the loaded object goes into a module, or is one; a word table or image has no device."""
    holder = source.parent(load)
    names = (
        {target.id for target in getattr(holder, "targets", []) if isinstance(target, ast.Name)}
        if isinstance(holder, ast.Assign)
        else set()
    )
    for call in source.calls:
        if isinstance(call.func, ast.Name) and call.func.id in names:
            return True
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("load_state_dict", "load_weights"):
            inside = [node for argument in call.args for node in ast.walk(argument)]
            if load in inside or any(isinstance(node, ast.Name) and node.id in names for node in inside):
                return True
    return False


def _only_copied(program: ScriptProgram, source: SourceFile, load: ast.Call) -> bool:
    """Return whether the loaded values are only copied into modules and optimizers, which keep their device."""
    if any(function.name == "load_state_dict" for each in program.sources for function in each.functions):
        return False
    holder = source.parent(load)
    if not isinstance(holder, ast.Assign):
        return _copied(program, source, load)
    if len(holder.targets) != 1 or not isinstance(target := holder.targets[0], ast.Name):
        return False
    scope = source.function(load) or source.tree
    uses = [node for node in ast.walk(scope) if isinstance(node, ast.Name) and node.id == target.id]
    if any(isinstance(node.ctx, ast.Load) and not _copied(program, source, node) for node in uses):
        return False
    stores = [node for node in uses if isinstance(node.ctx, ast.Store)]
    return stores == [target] and (scope is not source.tree or source is program.main)


def _copied(program: ScriptProgram, source: SourceFile, value: ast.expr) -> bool:
    """Return whether a value, or one entry of it, is the argument of a module's `load_state_dict`."""
    around = source.parent(value)
    while isinstance(around, ast.Subscript) and around.value is value:
        value, around = around, source.parent(around)
    return (
        isinstance(around, ast.Call)
        and around.args[:1] == [value]
        and isinstance(around.func, ast.Attribute)
        and around.func.attr == "load_state_dict"
        and all(keyword.arg == "strict" for keyword in around.keywords)
        and len(around.args) < 3
        and bool(COPYING & program.values.kinds(source, around.func.value))
    )


def _file(source: SourceFile, call: ast.Call, place: int = 0) -> str:
    """Return the file that a call reads or writes, as code; for an open file, the path that was opened."""
    if len(call.args) <= place:
        return ""
    given = call.args[place]
    for binding in source.names.reaching(given) if isinstance(given, ast.Name) else ():
        if binding.how == "with" and isinstance(binding.value, ast.Call) and binding.value.args:
            given = binding.value.args[0]
    return ast.unparse(given)


def _loaded_again(program: ScriptProgram) -> set[int]:
    """Return the loads of files that the same run saved before: the device is the same."""
    saved: set[str] = set()
    found = set()
    for event in program.events:
        call = event.node
        if event.kind == "call" and isinstance(call, ast.Call):
            if event.source.dotted(call.func) == "torch.save":
                saved.add(_file(event.source, call, 1))
            elif event.source.dotted(call.func) == "torch.load" and _file(event.source, call) in saved:
                found.add(id(call))
    return found


RULE = Rule("FL303", "load_without_map_location", Severity.FRAGILE, __doc__, check, fix_changes="")

"""A resume leaves out the optimizer's state that the checkpoint has.

What:
    The checkpoints have the state of the optimizer. To resume, the program loads the weights and the epoch, but no
    line ever loads the optimizer's state. Or a function that loads a checkpoint takes an optimizer and never uses it.
Why it matters:
    After every resume, momentum and the statistics of Adam start at zero, and the learning rate at its first value.
    The first steps are far too large, and the loss rises for a while. No error says so.
How to fix it:
    Call `optimizer.load_state_dict(saved["optimizer"])` after the weights are loaded.
Example:
    import torch

    def load(file, model, optimizer=None):
        saved = torch.load(file, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])  # <-
  +     if optimizer is not None:
  +         optimizer.load_state_dict(saved["optimizer"])
        return saved["epoch"] + 1

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    start = load("last.pt", model, optimizer)
    for epoch in range(start, 10):
        for _ in range(100):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, "last.pt")
Sources:
    https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.checkpoints import (
    LOAD_FUNCTIONS,
    POSITION_KEYS,
    checkpoint_reads,
    entry_of,
    is_optimizer,
    optimizer_entries,
)
from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.checkpoint_without_optimizer import has_state
from flatout.probe.kinds import called_like
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.value_paths import argument
from flatout.probe.windows import last_name
from flatout.schema.findings import Finding, Severity

OTHERS = ("model", "net", "module", "sched", "scaler", "ema", "encoder", "decoder", "actor", "critic", "head")
RESTORES = ("load", "resume", "restore", "checkpoint", "prepare", "initialize", "set_optimizer")
READERS = ("print", "len", "type", "isinstance", "list", "sorted")
DICTS = ("ckpt", "check", "state", "saved", "snapshot", "resume", "dict", "data")


def check(program: ScriptProgram) -> Iterator[Finding]:
    reads = [(source, node) for source, node, key in checkpoint_reads(program) if key in POSITION_KEYS]
    saves = optimizer_entries(program)
    for source, function, parameter in _unused(program):
        position = any(home is source and source.function(node) is function for home, node in reads)
        weights = _weights(program, source, function)
        if weights is not None and (position or saves):
            yield RULE.finding(
                f"`{function.name}` takes `{parameter.arg}` and never uses it: the optimizer's state is not loaded",
                source.place(weights),
                f'{parameter.arg}.load_state_dict(saved["optimizer"])  # after this line',
                others=[source.place(parameter)],
            )
            return
    if not saves or not _all_have_state(program) or _may_load(program):
        return
    for source, node in reads:
        weights = _weights(program, source, source.function(node) or source.tree)
        if weights is not None and _resumes(program, source, node):
            saved_in, save = saves[0]
            assert isinstance(save.func, ast.Attribute)
            yield RULE.finding(
                "the program resumes here from a checkpoint with the optimizer's state, but never loads that state",
                source.place(weights),
                f'{saved_in.code(save.func.value)}.load_state_dict(saved["optimizer"])  # after this line',
                others=[saved_in.place(save)],
            )
            return


def _unused(
    program: ScriptProgram,
) -> Iterator[tuple[SourceFile, ast.FunctionDef | ast.AsyncFunctionDef, ast.arg]]:
    """Yield the functions that load a checkpoint and have an optimizer as a parameter that they never use."""
    for source in program.sources:
        for function in source.functions:
            if not _loads_file(source, function):
                continue
            for parameter in [*function.args.args, *function.args.kwonlyargs]:
                used = any(
                    isinstance(node, ast.Name) and node.id == parameter.arg for node in ast.walk(function)
                )
                if (
                    not used
                    and not _delegates(function)
                    and _is_optimizer(program, source, function, parameter)
                ):
                    yield source, function, parameter


def _is_optimizer(
    program: ScriptProgram,
    source: SourceFile,
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    parameter: ast.arg,
) -> bool:
    """Return whether a parameter is an optimizer, by its name or by what the program passes for it."""
    if called_like(parameter.arg, "Optimizer"):
        return True
    given = [
        (home, value)
        for home, call in program.callers(function)
        if (value := argument(source, function, parameter, call)) is not None
    ]
    return any("Optimizer" in program.values.kinds(home, value) for home, value in given)


def _loads_file(source: SourceFile, function: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Call) and source.dotted(node.func) in LOAD_FUNCTIONS
        for node in ast.walk(function)
    )


def _delegates(function: ast.AST) -> bool:
    """Return whether a method calls the one of its base class, which may do the rest, or gives its locals away."""
    return any(
        isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("super", "locals", "vars")
        for node in ast.walk(function)
    )


def _weights(program: ScriptProgram, source: SourceFile, around: ast.AST) -> ast.Call | None:
    """Return the call in a function, or outside all functions, that loads weights from a file."""
    found = [
        call
        for call in source.calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "load_state_dict"
        and (source.function(call) or source.tree) is around
        and not is_optimizer(program, source, call.func.value)
        and not any(word in ast.unparse(call).lower() for word in ("sched", "scaler"))
    ]
    return found[-1] if found and not _delegates(around) else None


def _may_load(program: ScriptProgram) -> bool:
    """Return whether any call, known or not, may load the state of an optimizer."""
    for source in program.sources:
        for call in source.calls:
            name, text = last_name(call.func).lower(), ast.unparse(call).lower()
            if name == "load_state_dict" and isinstance(call.func, ast.Attribute):
                if "opt" in text or not _of_another(program, source, call.func.value, call):
                    return True
            elif "opt" in text and any(word in name for word in RESTORES) and not name.startswith("save"):
                if not program.functions_called(source, call):
                    return True
            elif name in ("load_state", "load_checkpoint", "resume", "restore", "setattr") and not (
                program.functions_called(source, call)
            ):
                return True
        for node in source.nodes:
            entry = entry_of(node)
            if entry is None or "opt" not in entry[1].lower():
                continue
            if any(word in ast.unparse(entry[0]).lower() for word in DICTS) or any(
                origin.dotted in LOAD_FUNCTIONS for origin in program.origins(source, entry[0])
            ):
                return True
    return _hands_on(program)


def _of_another(program: ScriptProgram, source: SourceFile, owner: ast.expr, call: ast.Call) -> bool:
    """Return whether ``load_state_dict`` belongs to something that is certainly no optimizer."""
    entry = entry_of(call.args[0]) if call.args else None
    return (
        entry is not None
        or bool({"Module", "Scheduler", "GradScaler"} & program.values.kinds(source, owner))
        or any(word in ast.unparse(owner).lower() for word in OTHERS)
    )


def _hands_on(program: ScriptProgram) -> bool:
    """Return whether a loaded checkpoint leaves its function as a whole: what others do with it is not visible."""
    waiting, seen = list(program.calls(*LOAD_FUNCTIONS)), 0
    while seen < len(waiting) < 100:
        source, call = waiting[seen]
        seen += 1
        statement, function = source.statement(call), source.function(call)
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        callers = program.callers(function) if function is not None else []
        if any(isinstance(target, ast.Attribute) for target in targets):
            return True
        if isinstance(statement, ast.Return):
            waiting += callers
            if not callers:
                return True
        for node in ast.walk(function or ast.Pass()):
            given = _given_away(program, source, node)
            if any(isinstance(each, ast.Name) and each.id in names for each in given):
                return True
    return False


def _given_away(program: ScriptProgram, source: SourceFile, node: ast.AST) -> list[ast.expr | None]:
    """Return the values that a statement returns or keeps, or that a call hands to an unknown function."""
    if isinstance(node, (ast.Return, ast.Assign, ast.Yield)):
        return list(node.value.elts) if isinstance(node.value, ast.Tuple) else [node.value]
    if isinstance(node, ast.Call) and last_name(node.func) not in READERS:
        return [] if program.functions_called(source, node) else list(node.args)
    return []


def _all_have_state(program: ScriptProgram) -> bool:
    """Return whether some optimizer of the program has state, or none is visible."""
    made = [
        call
        for source in program.sources
        for call in source.calls
        if "Optimizer" in program.values.kinds(source, call) and source.dotted(call.func)
    ]
    return not made or any(has_state(call) for call in made)


def _resumes(program: ScriptProgram, source: SourceFile, node: ast.expr) -> bool:
    """Return whether the training goes on from a position: a range starts there, or the program counts it up."""
    starts, counted = set(), set()
    for home in program.sources:
        for each in home.nodes:
            if (
                isinstance(each, ast.Call)
                and last_name(each.func) in ("range", "trange")
                and len(each.args) > 1
            ):
                starts |= {last_name(part) for part in ast.walk(each.args[0])} - {""}
                if any(
                    origin.node is node
                    for part in ast.walk(each.args[0])
                    if isinstance(part, (ast.Name, ast.Attribute, ast.Call))
                    for origin in program.origins(home, part)
                ):
                    return True
            elif isinstance(each, ast.AugAssign) and isinstance(each.op, ast.Add):
                counted.add(last_name(each.target))
    statement = source.statement(node)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {last_name(target) for target in targets}
    return bool(names & (starts | counted))


RULE = Rule("FL044", "optimizer_not_resumed", Severity.WRONG, __doc__, check)

"""The optimizer holds other parameters than those of the model that trains.

What:
    After `optimizer = Adam(model.parameters())`, the name `model` gets another module, or one of its layers
    is replaced. Or the loop computes its loss with another model than the one whose parameters the optimizer
    holds.
Why it matters:
    The optimizer keeps the parameters it was given and continues to update the old ones. The new parameters
    get gradients but are never updated. The replaced head of a fine-tuned network stays random.
How to fix it:
    Create the optimizer last. (`model.to(device)` in between is fine: it changes the parameters in place.)
Example:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
  + model[1] = torch.nn.Linear(8, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - model[1] = torch.nn.Linear(8, 10)  # <-
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import StepLoop
from flatout.schema.findings import Finding, Severity

WITHOUT_PARAMETERS = {
    "Identity",
    "ReLU",
    "Dropout",
    "Flatten",
    "Softmax",
    "Sigmoid",
    "Tanh",
    "MaxPool2d",
    "AvgPool2d",
    "AdaptiveAvgPool2d",
    "Sequential",
}


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source in program.sources:
        for call in source.calls:
            if (
                "Optimizer" not in program.values.kinds(source, call)
                or program.values.origins(source, call)[0].node is not call
                or not call.args
            ):
                continue
            model = _whose(call.args[0])
            if model is not None:
                yield from _replaced(program, source, call, model)
    for loop in program.step_loops:
        yield from _of_another(program, loop)


def _of_another(program: ScriptProgram, loop: StepLoop) -> Iterator[Finding]:
    """Find a loop whose only optimizer holds the parameters of a module that it never calls."""
    steps = loop.of("step", "scaler_step")
    if not steps or steps[0].subject is None or not loop.one_optimizer(program):
        return
    (made, *others) = program.origins(steps[0].source, steps[0].subject)
    if others or not isinstance(made.node, ast.Call) or made.part or not made.node.args:
        return
    model = _whose(made.node.args[0])
    called = [
        (event, event.node.func)
        for event in loop.of("call")
        if isinstance(event.node, ast.Call) and _has_parameters(program, event.source, event.node.func)
    ]
    if model is None or not called:
        return
    if all(_apart(program, made.source, model, event.source, func) for event, func in called):
        event, func = called[0]
        yield RULE.finding(
            f"the loss comes from `{event.source.code(func)}`, but the optimizer holds the parameters of `{model.id}`",
            steps[0].place,
            f"{made.source.code(made.node.func)}({event.source.code(func)}.parameters(), ...)",
            others=[made.source.place(made.node)],
        )


def _has_parameters(program: ScriptProgram, source: SourceFile, func: ast.expr) -> bool:
    kinds = program.values.kinds(source, func)
    return "Module" in kinds and not kinds & {"Loss", *WITHOUT_PARAMETERS}


def _apart(
    program: ScriptProgram, source: SourceFile, one: ast.expr, other_source: SourceFile, other: ast.expr
) -> bool:
    """Return whether two modules are known to be different ones, and neither is made from the other."""
    if program.values.same(source, one, other_source, other) is not False:
        return False
    for origin in [*program.origins(source, one), *program.origins(other_source, other)]:
        assert isinstance(origin.node, ast.Call)  # otherwise it would not be known that they differ
        given = [*origin.node.args, *(keyword.value for keyword in origin.node.keywords)]
        if any(
            "Module" in program.values.kinds(origin.source, node)
            for argument in given
            for node in ast.walk(argument)
            if isinstance(node, (ast.Name, ast.Attribute))
        ):
            return False
    return True


def _whose(parameters: ast.AST) -> ast.Name | None:
    """Return ``model`` of ``model.parameters()``."""
    if (
        isinstance(parameters, ast.Call)
        and isinstance(parameters.func, ast.Attribute)
        and parameters.func.attr == "parameters"
        and not parameters.args
    ):
        return parameters.func.value if isinstance(parameters.func.value, ast.Name) else None
    return None


def _replaced(
    program: ScriptProgram, source: SourceFile, optimizer: ast.Call, model: ast.Name
) -> Iterator[Finding]:
    """Find later statements of the block that replace parameters, with no optimizer created after them."""
    statement = source.statement(optimizer)
    block = (
        next(
            (
                body
                for name in ("body", "orelse")
                if isinstance(body := getattr(source.parent(statement), name, None), list)
                and statement in body
            ),
            None,
        )
        if statement is not None
        else None
    )
    if block is None or statement is None:
        return
    rest = block[block.index(statement) + 1 :]
    if any(_takes_parameters(later, model.id) for later in rest):
        return
    for later in rest:
        if isinstance(later, ast.Assign) and _gives_new_parameters(program, source, later, model):
            yield RULE.finding(
                f"`{source.code(later.targets[0])}` gets new parameters here, which the optimizer on line {optimizer.lineno} does not have: "
                "they are never trained",
                source.place(later),
                f"{source.code(statement)}  # after this line",
                others=[source.place(optimizer)],
            )
            return


def _takes_parameters(statement: ast.AST, model: str) -> bool:
    """Return whether a statement passes on the model's parameters, or adds a group to an optimizer."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and node.attr == "add_param_group":
            return True
        if isinstance(node, ast.Call):
            owners = [_whose(each) for each in [*node.args, *(keyword.value for keyword in node.keywords)]]
            if any(owner is not None and owner.id == model for owner in owners) and "clip" not in ast.unparse(
                node.func
            ):
                return True
    return False


def _gives_new_parameters(
    program: ScriptProgram, source: SourceFile, statement: ast.Assign, model: ast.Name
) -> bool:
    """Return whether an assignment replaces the model, or part of it, by a new module with parameters."""
    root = statement.targets[0]
    while isinstance(root, (ast.Attribute, ast.Subscript)):
        root = root.value
    value = statement.value
    if (
        not isinstance(root, ast.Name)
        or source.names.lookup(root) is not source.names.lookup(model)
        or not isinstance(value, ast.Call)
    ):
        return False
    if isinstance(value.func, ast.Attribute) and not source.dotted(value.func):
        return False  # model = model.to(device)
    made = program.values.kinds(source, value)
    wrapped = any(
        isinstance(node, ast.Name) and node.id == model.id
        for argument in value.args
        for node in ast.walk(argument)
    )
    return "Module" in made and not made & WITHOUT_PARAMETERS and not wrapped


RULE = Rule("FL020", "optimizer_of_another_model", Severity.WRONG, __doc__, check)

"""The learning rate schedule counts the batches of all processes several times.

What:
    The number of steps comes from `len(loader)` before `accelerator.prepare(loader)` divides the loader among the
    processes. The schedule gets this number times `accelerator.num_processes`.
Why it matters:
    A prepared scheduler advances `num_processes` times per optimizer step, and the prepared loader is shorter by the
    same factor. With n processes, the schedule is n times too long: the learning rate hardly decays.
How to fix it:
    Divide the length first: `math.ceil(len(loader) / accelerator.num_processes)`. Or create the scheduler after
    `prepare`, from the length of the prepared loader.
Example:
    import math
    import torch
    from accelerate import Accelerator
    from transformers import get_scheduler

    def train(model, loader, epochs):
        accelerator = Accelerator()
        optimizer = torch.optim.AdamW(model.parameters())
  -     steps = epochs * len(loader)
  +     steps = epochs * math.ceil(len(loader) / accelerator.num_processes)
        scheduler = get_scheduler(
            "linear", optimizer, num_warmup_steps=0, num_training_steps=steps * accelerator.num_processes  # <-
        )
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        return model, loader
Sources:
    https://huggingface.co/docs/accelerate/concept_guides/performance
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.names import position
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.value_paths import flat
from flatout.schema.findings import Finding, Severity

PROCESSES = "num_processes"
OTHER_COUNTS = ("split_batches", "step_scheduler_with_optimizer")  # options that change one of the two counts


def check(program: ScriptProgram) -> Iterator[Finding]:
    if program.mentions(*OTHER_COUNTS):
        return
    for source in program.sources:
        for call in source.calls:
            products = [each for each in _arguments(call) if _times_processes(each)]
            if not products or not program.values.is_a(source, call, "Scheduler"):
                continue
            around = source.function(call) or source.tree
            lengths = _lengths(program, source, around, call)
            counted = _derived(source, around, call, lengths)
            for product in products:
                if lengths and any(_uses(each, counted, lengths) for each in ast.walk(product)):
                    yield RULE.finding(
                        f"`{source.code(product)}` counts batches before the loader is divided among the processes, "
                        "and multiplies them by their number: the schedule is too long",
                        source.place(product),
                        f"math.ceil({source.code(lengths[0])} / accelerator.{PROCESSES})  # for {source.code(lengths[0])}",
                        others=[source.place(lengths[0])],
                    )
                    break


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _times_processes(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and any(isinstance(each, ast.Attribute) and each.attr == PROCESSES for each in ast.walk(node))
    )


def _lengths(program: ScriptProgram, source: SourceFile, around: ast.AST, call: ast.Call) -> list[ast.Call]:
    """Return the ``len(loader)`` before the scheduler of loaders that ``prepare`` gets later, and not before."""
    prepared = {
        source.code(given): position(each)
        for each in ast.walk(around)
        if isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and each.func.attr == "prepare"
        and program.values.seems(source, each.func.value, "Accelerator")
        for given in reversed(each.args)
    }
    return [
        each
        for each in ast.walk(around)
        if isinstance(each, ast.Call)
        and getattr(each.func, "id", "") == "len"
        and each.args
        and position(each) < prepared.get(source.code(each.args[0]), (0, 0))
        and position(call) < prepared[source.code(each.args[0])]
    ]


def _derived(source: SourceFile, around: ast.AST, call: ast.Call, lengths: list[ast.Call]) -> set[str]:
    """Return the names and attributes that are computed from these lengths, and not divided by the processes."""
    found: set[str] = set()
    statements = [each for each in ast.walk(around) if isinstance(each, ast.Assign)]
    for statement in sorted(statements, key=position):
        if position(statement) > position(call) or PROCESSES in ast.unparse(statement.value):
            continue
        if any(_uses(each, found, lengths) for each in ast.walk(statement.value)):
            found |= {source.code(target) for target in flat(statement.targets)}
    return found


def _uses(node: ast.AST, names: set[str], lengths: list[ast.Call]) -> bool:
    return node in lengths or (isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in names)


RULE = Rule("FL046", "schedule_before_prepare", Severity.WRONG, __doc__, check)

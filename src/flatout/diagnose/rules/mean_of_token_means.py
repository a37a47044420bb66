"""A mean over tokens is averaged over micro-batches with different numbers of tokens.

What:
    The loss of a micro-batch is a mean over its valid tokens: the loss ignores padding or masked labels. The loss
    is divided by the number of micro-batches, and the gradients accumulate.
Why it matters:
    Each micro-batch gets the same weight, whatever its number of valid tokens. A token in a short micro-batch
    counts more than one in a long micro-batch. The result is not that of one large batch, and it changes with the
    number of micro-batches.
How to fix it:
    Use the sum over tokens, and divide the gradients by the number of valid tokens of all micro-batches before the
    step. Across devices, sum that number as well.
Example:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - criterion = torch.nn.CrossEntropyLoss(ignore_index=0)
  + criterion = torch.nn.CrossEntropyLoss(ignore_index=0, reduction="sum")
  + valid = 0
    for i in range(100):
        sentences = [torch.randint(1, 9, (length,)) for length in torch.randint(2, 9, (8,)).tolist()]
        tokens = pad_sequence(sentences, batch_first=True)
  -     loss = criterion(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
  -     (loss / 4).backward()  # <-
  +     criterion(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
  +     valid += (tokens[:, 1:] != 0).sum()
        if (i + 1) % 4 == 0:
  +         for p in model.parameters():
  +             p.grad /= valid
            optimizer.step()
            optimizer.zero_grad()
  +         valid = 0
Sources:
    https://huggingface.co/blog/gradient_accumulation
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.zero_grad_in_window import accumulates, window_test
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.probe.value_paths import iterated
from flatout.probe.values import ValueOrigin
from flatout.probe.windows import last_name, window_of
from flatout.schema.findings import Finding, Severity

LOSSES = (
    "torch.nn.functional.cross_entropy",
    "torch.nn.functional.nll_loss",
    "torch.nn.CrossEntropyLoss",
    "torch.nn.NLLLoss",
)
RESHAPES = {"view", "reshape", "flatten", "transpose", "permute", "mT"}
OF_TOKENS = {"id", "idx", "index", "token", "tokens", "sequence", "labels", "label", "collate"}


def check(program: ScriptProgram) -> Iterator[Finding]:
    filled = any(_is_masked_label(source, node) for source, node in program.nodes(ast.UnaryOp))
    if not filled and not _pads(program):
        return
    for loop in program.step_loops:
        passes = loop.of("backward")
        if len(passes) != 1 or passes[0].subject is None:
            continue
        division, losses = divided(program, passes[0].source, passes[0].subject, _sizes(loop, passes[0]))
        implicit = division is None and _by_accelerator(program, loop, passes[0])
        if (
            not (division or implicit)
            or not losses
            or not all(_ignores(program, each, filled) for each in losses)
        ):
            continue
        source, node = division or (passes[0].source, passes[0].node)
        yield RULE.finding(
            f"`{source.code(node)}` gives every micro-batch the same weight, but its loss is a mean over its valid tokens, and "
            "their number differs",
            source.place(node),
            "# sum the loss over tokens, and divide by the number of valid tokens of all micro-batches",
            others=[passes[0].place] if node is not passes[0].node else [],
        )


def _sizes(loop: StepLoop, backward: ProgramEvent) -> set[str]:
    """Return the names of the number of micro-batches in a step: of a modulo, or the length of an inner loop."""
    inner = backward.loops[-1]
    if inner is not loop.loop:
        if not isinstance(inner.node, ast.For):
            return set()
        over = iterated(inner.node.iter)
        in_range = (
            isinstance(over, ast.Call) and getattr(over.func, "id", "") == "range" and len(over.args) == 1
        )
        return {last_name(over.args[0])} if in_range else {f"len({last_name(over)})"}  # type: ignore[attr-defined]
    tests = (
        [window_test(loop, step) for step in loop.of("step", "scaler_step")] if loop.always(backward) else []
    )
    found = [window_of(test) for test in tests if test is not None]
    return {each.size for each in found if each is not None}


def _by_accelerator(program: ScriptProgram, loop: StepLoop, backward: ProgramEvent) -> bool:
    """Return whether an Accelerator accumulates: it divides each loss by the number of micro-batches."""
    return all(
        any(
            accumulates(program, source, block) and (source, block) in backward.blocks
            for source, block in step.blocks
        )
        for step in loop.of("step", "scaler_step")
    )


def divided(
    program: ScriptProgram, source: SourceFile, loss: ast.expr, sizes: set[str]
) -> tuple[tuple[SourceFile, ast.AST] | None, list[ValueOrigin]]:
    """Return the division of a loss by the number of micro-batches, and the losses before it.

    Any other arithmetic on the way, or a loss that is not divided, gives None.
    """
    division: tuple[SourceFile, ast.AST] | None = None
    found: list[ValueOrigin] = []
    for origin in program.origins(source, loss):
        node = origin.node
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and last_name(node.right) in sizes:
            division = (origin.source, node)
            found += program.origins(origin.source, node.left)
        elif (
            isinstance(node, ast.AugAssign)
            and isinstance(node.op, ast.Div)
            and last_name(node.value) in sizes
        ):
            division = (origin.source, node)
        else:
            found.append(origin)
    return division, found


def _ignores(program: ScriptProgram, origin: ValueOrigin, filled: bool) -> bool:
    """Return whether a loss is a mean over targets of which it ignores some.

    ``filled`` is whether the program sets labels to -100, which these losses ignore by default.
    """
    node = origin.node
    if isinstance(node, ast.Attribute):
        return filled and node.attr == "loss" and _given_labels(program, origin.source, node.value)
    if not isinstance(node, ast.Call) or origin.part:
        return False
    if not _many_targets(origin.source, node):
        return False
    if origin.dotted in LOSSES:
        return _mean_with_ignored(node, filled)
    made = [each for each in program.origins(origin.source, node.func) if each.dotted in LOSSES]
    if made:
        return all(isinstance(each.node, ast.Call) and _mean_with_ignored(each.node, filled) for each in made)
    name = last_name(node.func)  # a loss that the program asks for the target it ignores
    return bool(name) and any(
        isinstance(each, ast.Attribute) and each.attr == "ignore_index" and last_name(each.value) == name
        for _, each in program.nodes(ast.Attribute)
    )


def _many_targets(source: SourceFile, loss: ast.Call) -> bool:
    """Return whether a sample has several targets: the arguments of the loss are flattened or transposed."""
    waiting: list[ast.AST] = [
        *loss.args[:2],
        *(k.value for k in loss.keywords if k.arg in ("input", "target")),
    ]
    seen = set()
    while waiting:
        node = waiting.pop()
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute) and each.attr in RESHAPES:
                return True
            if isinstance(each, ast.Name) and each.id not in seen:
                seen.add(each.id)
                waiting += [binding.value for binding in source.bindings(each) if binding.value is not None]
    return False


def _given_labels(program: ScriptProgram, source: SourceFile, outputs: ast.expr) -> bool:
    """Return whether outputs come from a model that gets the labels, so that it computes the loss itself."""
    return any(
        isinstance(each.node, ast.Call) and {"labels", None} & {keyword.arg for keyword in each.node.keywords}
        for each in program.origins(source, outputs)
    )


def _mean_with_ignored(call: ast.Call, filled: bool) -> bool:
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    reduction = options.get("reduction")
    mean = reduction is None or (isinstance(reduction, ast.Constant) and reduction.value == "mean")
    return mean and None not in options and (filled or "ignore_index" in options)


def _is_masked_label(source: SourceFile, node: ast.AST) -> bool:
    """Return whether this is the -100 in ``labels[mask] = -100`` or ``labels.masked_fill(mask, -100)``."""
    if not (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
        and node.operand.value == 100
    ):
        return False
    statement = source.statement(node)
    return statement is not None and any(
        "label" in word or "target" in word or "ignore_ind" in word
        for each in ast.walk(statement)
        if (word := str(getattr(each, "id", getattr(each, "attr", getattr(each, "arg", "")))).lower())
    )


def _pads(program: ScriptProgram) -> bool:
    """Return whether the program pads sequences of tokens: a name such as ``pad_token_id`` or ``pad_sequence``."""
    for _, node in program.nodes(ast.Name, ast.Attribute, ast.alias, ast.keyword):
        spelled = str(
            getattr(node, "id", getattr(node, "attr", getattr(node, "arg", getattr(node, "name", ""))))
        )
        words = set(spelled.rpartition(".")[2].lower().strip("_").split("_"))
        if words & {"pad", "padding", "padded"} and words & OF_TOKENS:
            return True
    return False


RULE = Rule("FL038", "mean_of_token_means", Severity.WRONG, __doc__, check)

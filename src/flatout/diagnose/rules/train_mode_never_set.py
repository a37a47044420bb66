"""The model is trained in evaluation mode.

What:
    `from_pretrained` returns its model in evaluation mode, or the program calls `eval()` before the training loop or in
    another method. No line ever calls `train()`, and no library does so for the program.
Why it matters:
    Dropout drops nothing and BatchNorm uses frozen statistics while the weights change. Gradient checkpointing of
    Hugging Face models is silently off. The model overfits earlier than with the regularisation in its config.
How to fix it:
    Call `model.train()` before the training loop, and again after each evaluation.
Example:
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained("distilbert-base-uncased")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
  + model.train()
    for batch in torch.load("batches.pt", map_location="cpu", weights_only=True):
        optimizer.zero_grad()
        model(**batch).loss.backward()  # <-
        optimizer.step()
Sources:
    https://huggingface.co/docs/transformers/main_classes/model
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.eval_mode_missing import has_mode
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.schema.findings import Finding, Severity, SourceLocation

IN_EVALUATION_MODE = ("transformers.", "diffusers.")
TRAINERS = (
    "Trainer",
    "LightningModule",
    "Fabric",
    "deepspeed",
    "ignite",
    "fastai",
    "catalyst",
    "get_peft_model",
    "composer",
)
NO_MODELS = ("Tokenizer", "Processor", "Config", "Extractor", "Scheduler", "Pipeline")
NO_GRAD = ("torch.no_grad", "torch.inference_mode")
STEPS = ("step", "scaler_step")


def check(program: ScriptProgram) -> Iterator[Finding]:
    if _sets_training(program) or _of_a_library(program):
        return
    for loop in program.steps:
        if any(event.kind == "eval" for event in [*loop.events, *loop.around]):
            continue  # of train_mode_not_restored
        for event in loop.events:
            asleep = _asleep(program, loop, event)
            if asleep is not None:
                assert isinstance(event.node, ast.Call)
                name = event.source.code(event.node.func)
                yield RULE.finding(
                    f"`{name}` is trained in evaluation mode: {asleep[0]}, and `train()` is never called",
                    event.place,
                    f"{name}.train()  # before the loop",
                    others=[asleep[1]],
                )
                break


def _asleep(program: ScriptProgram, loop: StepLoop, event: ProgramEvent) -> tuple[str, SourceLocation] | None:
    """Return why the model that a call of the step runs is in evaluation mode, and where; None if it is not known to be."""
    call = event.node
    if event.kind != "call" or not isinstance(call, ast.Call) or any(event.within(*NO_GRAD)):
        return None
    model = call.func
    if not isinstance(model, (ast.Name, ast.Attribute)) or not _optimized(program, loop, event.source, model):
        return None
    made = [_pretrained(program, each.source, each.node) for each in program.origins(event.source, model)]
    if made and made[0] is not None and all(each is not None for each in made):
        return "`from_pretrained` returns it so", made[0]
    for other in program.events:
        if (
            other.kind == "eval"
            and other.subject is not None
            and not other.arms
            and program.values.same(other.source, other.subject, event.source, model) is True
            and (_before(program, other, loop) or _beside(program, other, loop))
            and (
                has_mode(program, event.source, model)
                or not any(program.values.classes_of(event.source, model))
            )
        ):
            return f"line {other.place.line} sets it", other.place
    return None


def _before(program: ScriptProgram, event: ProgramEvent, loop: StepLoop) -> bool:
    """Return whether an event comes before the loop in the same run."""
    first = loop.events[0]
    same_run = event.root is first.root and not event.loops
    return same_run and program.events.index(event) < program.events.index(first)


def _beside(program: ScriptProgram, event: ProgramEvent, loop: StepLoop) -> bool:
    """Return whether an event is in another method of the class that trains, and the whole class is in the program."""
    klass = loop.source.klass(loop.loop.node)
    if klass is None or event.source.klass(event.node) is not klass or event.root is loop.events[0].root:
        return False
    bases = [base for base in klass.bases if ast.unparse(base) not in ("object", "ABC", "abc.ABC")]
    return all(any(program.class_named(loop.source, base)) for base in bases)


def _pretrained(program: ScriptProgram, source: SourceFile, node: ast.AST) -> SourceLocation | None:
    """Return where ``from_pretrained`` creates a model, or a part of a module of the program that is not frozen."""
    if not isinstance(node, ast.Call):
        return None
    dotted = source.dotted(node.func)
    if dotted.startswith(IN_EVALUATION_MODE) and dotted.endswith(".from_pretrained"):
        return None if any(word in dotted for word in NO_MODELS) else source.place(node)
    for home, klass in program.class_named(source, node.func):
        if program.mentions("requires_grad", "requires_grad_", "no_grad"):
            return None
        for owner, each in program.values.gradient_sources(home, klass):
            for statements in program.values.attributes(owner, each).values():
                for statement in statements:
                    place = (
                        _pretrained(program, owner, statement.value) if statement.value is not None else None
                    )
                    if place is not None:
                        return place
    return None


def _optimized(program: ScriptProgram, loop: StepLoop, source: SourceFile, model: ast.expr) -> bool:
    """Return whether the optimizer that steps in this loop holds the parameters of a model."""
    for step in loop.of(*STEPS):
        for origin in program.origins(step.source, step.subject) if step.subject is not None else ():
            for node in ast.walk(origin.node) if isinstance(origin.node, ast.Call) else ():
                method = node.func if isinstance(node, ast.Call) else None
                if (
                    isinstance(method, ast.Attribute)
                    and method.attr in ("parameters", "named_parameters")
                    and program.values.same(origin.source, method.value, source, model) is True
                ):
                    return True
    return False


def _sets_training(program: ScriptProgram) -> bool:
    """Return whether any call may set the training mode, whatever its object."""
    for source, call in program.method_calls("train", "set_train", "train_mode", "set_training_mode"):
        off = bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value is False
        if not off and not program.functions_called(source, call):
            return True
    return any(
        getattr(call.func, "id", "") == "getattr" and "'train'" in ast.unparse(call)
        for source in program.sources
        for call in source.calls
    )


def _of_a_library(program: ScriptProgram) -> bool:
    """Return whether a library with a training loop of its own is used."""
    return program.mentions("training", *TRAINERS) or any(
        (getattr(node, "module", "") or "").split(".")[0] in TRAINERS
        for _, node in program.nodes(ast.ImportFrom)
    )


RULE = Rule("FL045", "train_mode_never_set", Severity.WRONG, __doc__, check, weight=-1)

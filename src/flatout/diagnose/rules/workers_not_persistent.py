"""Every epoch restarts the loader's workers.

What:
    A loader with workers is iterated over once in every epoch, without `persistent_workers=True`. Or a class
    makes such a loader for a trainer, in `train_dataloader`.
Why it matters:
    The workers stop at the end of each epoch, and new ones are forked at the start of the next. Forking takes
    longer the larger the program is, and the program then waits for the first batches. With short epochs,
    this takes a noticeable share of the time.
How to fix it:
    Set `persistent_workers=True`.
Example:
    import torch
    from torch.utils.data import DataLoader

    def main():
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  -     loader = DataLoader(torch.randn(64, 4), batch_size=8, num_workers=2)  # <-
  +     loader = DataLoader(torch.randn(64, 4), batch_size=8, num_workers=2, persistent_workers=True)
        for epoch in range(10):
            for x in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    if __name__ == "__main__":
        main()
Sources:
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader
"""

import ast
import re
from collections.abc import Iterable, Iterator

from flatout.diagnose.gains import share_of_step
from flatout.diagnose.rewrites import add_argument
from flatout.diagnose.rule import Rule
from flatout.diagnose.wait_causes import (
    WaitCause,
    gain_without_wait,
    how_measured,
    iterator_start_ms,
    wait_cause,
)
from flatout.probe.names import FUNCTIONS
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.value_paths import iterated, returns
from flatout.schema.findings import Edit, Finding, Severity
from flatout.schema.profile import ProfileRecord

HOOK = re.compile(r"_?(get_|make_|build_|create_)?train(ing)?_(data_?)?loaders?")
OTHER_HOOK = re.compile(
    r"_?(get_|make_|build_|create_)?(val|valid|validation|test|dev|eval)_(data_?)?loaders?"
)


def check_source(program: ScriptProgram) -> Iterator[Finding]:
    seen: set[int] = set()
    for loop in program.step_loops:
        if not loop.outer or not isinstance(loop.loop.node, ast.For):
            continue
        inside = {id(event.node) for event in [*loop.events, *loop.around]}
        for origin in program.origins(loop.source, iterated(loop.loop.node.iter)):
            call = origin.node
            if (
                not isinstance(call, ast.Call)
                or not origin.dotted.endswith("data.DataLoader")
                or id(call) in inside | seen
            ):
                continue
            workers = _workers(call)
            # A number that the source does not show may be 0: persistent_workers=True then raises an error.
            if isinstance(workers, ast.Constant) and not _persistent(call):
                seen.add(id(call))
                code = origin.source.code(call)
                edits: list[Edit] = []
                if _option(call, "persistent_workers") is None:
                    code = f"{code[:-1]}, persistent_workers=True)"
                    edits = add_argument(origin.source, call, "persistent_workers=True")
                said = f"this loader restarts its {workers.value!r} workers in every epoch"
                yield RULE.finding(said, origin.source.place(call), code, edits=edits)
    yield from _data_modules(program, seen)


def _data_modules(program: ScriptProgram, seen: set[int]) -> Iterator[Finding]:
    """Find the loaders that a class makes for a trainer, which iterates over them once in every epoch."""
    for source in program.sources:
        for klass in source.classes:
            makers = {each.name: each for each in klass.body if isinstance(each, FUNCTIONS)}
            training = [each for name, each in makers.items() if HOOK.fullmatch(name)]
            others = [each for name, each in makers.items() if OTHER_HOOK.fullmatch(name)]
            if not training or not (others or _of_a_framework(program, source, klass)):
                continue
            made = [
                call for each in training for call in _loaders(program, source, each) if id(call) not in seen
            ]
            if not made:
                continue
            workers = source.code(_workers(made[0]) or made[0])
            further = [call for each in others for call in _loaders(program, source, each)]
            yield RULE.finding(
                f"the trainer iterates over this loader in every epoch, which restarts its {workers} workers each time",
                source.place(made[0]),
                f"persistent_workers={'True' if workers.isdigit() else workers + ' > 0'}",
                others=[source.place(call) for call in [*made[1:], *further]],
                weight=-1,  # they may be none, or the epochs long
            )


def _of_a_framework(program: ScriptProgram, source: SourceFile, klass: ast.ClassDef) -> bool:
    return any(
        base.endswith(("DataModule", "LightningModule")) for base in program.values.bases(source, klass)
    )


def _loaders(program: ScriptProgram, source: SourceFile, maker: ast.AST) -> Iterator[ast.Call]:
    """Yield the loaders with workers that a method returns, and that are made in its file."""
    for value in returns(maker):
        for origin in program.origins(source, value):
            if (
                isinstance(origin.node, ast.Call)
                and origin.source is source
                and origin.dotted.endswith("data.DataLoader")
                and _workers(origin.node) is not None
                and not _persistent(origin.node)
            ):
                yield origin.node


def _option(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _workers(call: ast.Call) -> ast.expr | None:
    """Return the number of workers; None if there are none, or if options may be hidden."""
    given = _option(call, "num_workers")
    none = isinstance(given, ast.Constant) and (not isinstance(given.value, int) or given.value <= 0)
    return None if none or any(keyword.arg is None for keyword in call.keywords) else given


def _persistent(call: ast.Call) -> bool:
    """Return whether the workers may be kept. ``persistent_workers=False`` is the default, written down."""
    given = _option(call, "persistent_workers")
    return given is not None and not (isinstance(given, ast.Constant) and given.value is False)


def check_profile(profile: ProfileRecord) -> Iterable[Finding]:
    for loader in profile.loaders:
        if wait_cause(profile, loader) is not WaitCause.RESTARTED:
            continue
        epochs = f"{loader.iterators} times for {loader.batches or profile.steps} batches"
        said = f"{loader.workers} workers were started {epochs}, {loader.start_ms:.0f} ms each time until the first batch"
        yield RULE.profile_finding(
            said,
            [loader.place],
            evidence=[f"this takes {share_of_step(profile, iterator_start_ms(profile, loader))}"],
            predicted=gain_without_wait(profile, loader),
            how=how_measured(profile),
        )


RULE = Rule(
    "FL108",
    "workers_not_kept",
    Severity.TIME,
    __doc__,
    check_source,
    check_profile,
    levers=("loader",),
    fix_changes="later epochs draw other random numbers, because their loader draws no new seed",
)

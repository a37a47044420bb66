"""Every epoch creates a new DataLoader.

What:
    `DataLoader(...)` is inside the loop over epochs (or steps), with the same arguments in every pass.
Why it matters:
    Every epoch restarts the workers, and they lose everything they have read or imported.
    `persistent_workers` cannot help, since the loader itself is discarded.
How to fix it:
    Create it once, before the loop, with `persistent_workers=True`. A shuffling loader reshuffles in every
    epoch by itself.
Example:
    import torch
    from torch.utils.data import DataLoader

    def main():
        data = torch.randn(64, 4)
  +     loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(10):
  -         loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True)  # <-
            for x in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    if __name__ == "__main__":
        main()
"""

import ast
from collections.abc import Iterable, Iterator

from flatout.diagnose.gains import share_of_step
from flatout.diagnose.rule import Rule
from flatout.diagnose.wait_causes import WaitCause, gain_without_wait, how_measured, wait_cause
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


def check_source(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        for event in [*loop.around, *loop.events]:
            call = event.node
            if (
                event.kind == "call"
                and isinstance(call, ast.Call)
                and event.source.dotted(call.func).endswith("data.DataLoader")
                and not training_of_its_own(program, loop, event)
                and not _changes(event)
            ):
                yield RULE.finding(
                    "this DataLoader is recreated in every pass of the loop, with the same arguments",
                    event.place,
                    f"{event.source.code(event.source.statement(call) or call)}  # once, before the loop",
                )


def training_of_its_own(program: ScriptProgram, loop: StepLoop, event: ProgramEvent) -> bool:
    """Return whether each pass of the loop creates an optimizer: a separate training (a fold, a setting)."""
    around = event.loops[-1]
    return any(
        each.kind == "call"
        and around in each.loops
        and isinstance(each.node, ast.Call)
        and ".optim." in each.source.dotted(each.node.func)
        for each in [*loop.around, *loop.events]
    )


def _changes(event: ProgramEvent) -> bool:
    """Return whether an argument depends on a name that the loop sets, directly or through functions."""
    call = event.node
    names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
    if any(isinstance(node, ast.Call) and node is not call for node in ast.walk(call)):
        return True
    scope = event.loops[-1].node
    if not any(each is scope for each in event.source.parents(call)):
        return True  # created in a function that the loop calls: its arguments may change
    bound = {
        target.id
        for node in ast.walk(scope)
        for target in ast.walk(node)
        if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
    }
    return bool(names & bound)


def check_profile(profile: ProfileRecord) -> Iterable[Finding]:
    for loader in profile.loaders:
        if wait_cause(profile, loader) is not WaitCause.REMADE:
            continue
        said = f"this line has created {loader.created} loaders for {loader.batches or profile.steps} batches"
        evidence = [
            f"the first batch of each takes {loader.start_ms:.0f} ms",
            f"waiting for data takes {share_of_step(profile, loader.wait_ms)}",
        ]
        yield RULE.profile_finding(
            said,
            [loader.place],
            evidence=evidence,
            predicted=gain_without_wait(profile, loader),
            how=how_measured(profile),
        )


RULE = Rule(
    "FL106",
    "loader_made_in_loop",
    Severity.TIME,
    __doc__,
    check_source,
    check_profile,
    levers=("loader",),
)

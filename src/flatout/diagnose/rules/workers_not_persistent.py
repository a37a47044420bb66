"""Every epoch restarts the loader's workers.

What:
    A loader with workers is iterated over once in every epoch, without `persistent_workers=True`.
Why it matters:
    The workers stop at the end of each epoch, and new ones are forked at the start of the next. Forking takes
    longer the larger the program is, and the program then waits for the first batches. With short epochs,
    this takes a noticeable share of the time.
How to fix it:
    Set `persistent_workers=True`.
Bad:
    import torch
    from torch.utils.data import DataLoader

    def main():
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.randn(64, 4), batch_size=8, num_workers=2)  # <-
        for epoch in range(10):
            for x in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    if __name__ == "__main__":
        main()
Good:
    import torch
    from torch.utils.data import DataLoader

    def main():
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.randn(64, 4), batch_size=8, num_workers=2, persistent_workers=True)
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

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from flatout.diagnose.gains import found, of_step
from flatout.diagnose.rewrites import with_argument
from flatout.diagnose.rule import Rule
from flatout.diagnose.wait_causes import WaitCause, begin_ms, cause, gain_without_wait, how_known
from flatout.probe.program import ScriptProgram
from flatout.probe.value_paths import iterated
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


def look(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        if not loop.outer or not isinstance(loop.loop.node, ast.For):
            continue
        inside = {id(event.node) for event in [*loop.events, *loop.around]}
        for origin in program.origins(loop.source, iterated(loop.loop.node.iter)):
            call = origin.node
            if (
                not isinstance(call, ast.Call)
                or not origin.dotted.endswith("data.DataLoader")
                or id(call) in inside
            ):
                continue
            options = {keyword.arg: keyword.value for keyword in call.keywords}
            workers = options.get("num_workers")
            # A number that the source does not show may be 0: persistent_workers=True then raises an error.
            count = (
                workers.value if isinstance(workers, ast.Constant) and isinstance(workers.value, int) else 0
            )
            if count > 0 and not {None, "persistent_workers"} & options.keys():
                yield RULE.finding(
                    f"this loader restarts its {count} workers in every epoch",
                    origin.source.place(call),
                    f"{origin.source.code(call)[:-1]}, persistent_workers=True)",
                    edits=with_argument(origin.source, call, "persistent_workers=True"),
                )


def judge(profile: ProfileRecord) -> Iterable[Finding]:
    for loader in profile.loaders:
        if cause(profile, loader) is not WaitCause.RESTARTED:
            continue
        epochs = f"{loader.begun} times for {loader.batches or profile.steps} batches"
        said = f"{loader.workers} workers were started {epochs}, {loader.start_ms:.0f} ms each time until the first batch"
        yield found(
            RULE,
            said,
            loader.place,
            evidence=[f"this takes {of_step(profile, begin_ms(profile, loader))}"],
            predicted=gain_without_wait(profile, loader),
            how=how_known(profile),
        )


RULE = Rule(
    "FL108",
    "workers_not_kept",
    Severity.TIME,
    __doc__,
    look=look,
    judge=judge,
    levers=("loader",),
    fix_changes="later epochs draw other random numbers, because their loader draws no new seed",
)

"""Every epoch creates a new DataLoader.

What:
    The program makes a loader with workers again and again, of the same data set with the same arguments, and runs one
    pass over each.
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
  +     loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(4):
  -         loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=1)  # <-
            for x in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    if __name__ == "__main__":
        main()
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from flatout.agent.frames import Line
from flatout.diagnose.gains import share_of_step
from flatout.diagnose.invariant import Findings, Invariant, counted, rule
from flatout.diagnose.wait_causes import WaitCause, gain_without_wait, how_measured, wait_cause
from flatout.schema.findings import Severity
from flatout.schema.profile import ProfileRecord

MIN_LOADERS = 3
SAMPLERS = ("SequentialSampler", "RandomSampler")


@dataclass
class Remade:
    """The loaders that one line has made of one data set."""

    dataset: Any
    arguments: Any  # with the attributes of the data set, and the number of optimizers that were made before
    workers: int
    loaders: int = 0


class LoaderMadeInLoop(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.seen: WeakSet[Any] = WeakSet()
        self.lines: dict[Line | None, Remade] = {}
        self.found: dict[Line | None, Remade] = {}
        self.optimizers = 0

    def optimizer_made(self, optimizer: Any) -> None:
        self.optimizers += 1  # each training may have loaders of its own

    def pass_begins(self, loader: Any) -> None:
        line = self.program.line_of(loader)
        if loader in self.seen:
            self.lines.pop(line, None)  # it serves several passes
            return
        self.seen.add(loader)
        if not loader.num_workers or type(loader.sampler).__name__ not in SAMPLERS:
            return
        before = self.lines.get(line)
        now = Remade(
            loader.dataset,
            (arguments_of(loader), contents_of(loader.dataset), self.optimizers),
            loader.num_workers,
        )
        if before is not None and before.dataset is now.dataset and before.arguments == now.arguments:
            now.loaders = before.loaders
        now.loaders += 1
        self.lines[line] = now
        if now.loaders >= MIN_LOADERS:
            self.found[line] = now

    def findings(self) -> Findings:
        for line, remade in self.found.items():
            yield RULE.finding(
                f"this line has made {remade.loaders} loaders of the same data set with the same arguments, for one pass each; "
                f"each started {counted(remade.workers, 'worker')}",
                line,
                "make the loader once, before the loop, with persistent_workers=True",
            )


def arguments_of(loader: Any) -> tuple[Any, ...]:
    names = ("num_workers", "batch_size", "drop_last", "collate_fn", "worker_init_fn", "timeout")
    return (*(getattr(loader, name) for name in names), type(loader.sampler), type(loader.batch_sampler))


def contents_of(dataset: Any) -> dict[str, int]:
    """The attributes of a data set by their ids: one that was exchanged may need new workers."""
    return {name: id(value) for name, value in getattr(dataset, "__dict__", {}).items()}


def check_profile(profile: ProfileRecord) -> Findings:
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


RULE = rule(
    LoaderMadeInLoop, "FL106", __doc__, Severity.TIME, check_profile=check_profile, levers=("loader",)
)

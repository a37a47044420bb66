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

from collections.abc import Iterable

from flatout.diagnose.gains import share_of_step
from flatout.diagnose.rule import Rule
from flatout.diagnose.wait_causes import (
    WaitCause,
    gain_without_wait,
    how_measured,
    iterator_start_ms,
    wait_cause,
)
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


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
    check_profile=check_profile,
    levers=("loader",),
)

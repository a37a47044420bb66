"""Every rank trains on the same batches.

What:
    The model is wrapped in `DistributedDataParallel`, but each rank gets the same samples in the same order: the
    loader has no distributed sampler.
Why it matters:
    The averaged gradient is that of one device: N devices do N times the work of one, and learn nothing more.
How to fix it:
    Use `sampler=DistributedSampler(dataset)` instead of `shuffle=True`, and call `sampler.set_epoch(epoch)`
    in every epoch.
Example:
    import torch
    from torch.utils.data import DataLoader, TensorDataset
  + from torch.utils.data.distributed import DistributedSampler

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(128, 4))
  - loader = DataLoader(data, batch_size=8, shuffle=True)  # <-
  + loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""

from typing import Any
from weakref import ref

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, digest, rule
from flatout.diagnose.rank_notes import RankNotes, replicas_in

MAX_BATCHES = 64
MIN_BATCHES = 8


class RanksSeeTheSameData(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.notes = RankNotes(program.torch, "batches")
        self.latest: tuple[Any, str] | None = None  # loader, digest of its batch
        self.told: set[str] = set()
        self.equal = self.others = self.ranks = 0
        self.line: Line | None = None

    def batch(self, loader: Any, batch: Any, indices: Any) -> None:
        distributed = self.program.torch.distributed
        ranked = distributed.is_available() and distributed.is_initialized()
        self.latest = (ref(loader), digest(batch)) if ranked and len(self.told) < MAX_BATCHES else None

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        if self.latest is not None and replicas_in(self.program.torch, self.program.roots):
            (loader, batch), self.latest = self.latest, None
            self.line = self.program.line_of(loader())
            if batch not in self.told:  # not data without content
                self.told.add(batch)
                self.notes.tell(str(len(self.told)), batch)
        for _, batches in self.notes.received():
            self.equal, self.others = (
                self.equal + (len(set(batches)) == 1),
                self.others + (len(set(batches)) > 1),
            )
            self.ranks = len(batches)

    def findings(self) -> Findings:
        if self.equal >= MIN_BATCHES and not self.others:
            yield RULE.finding(
                f"the first {self.equal} training batches were the same on {self.ranks} ranks, sample for sample",
                self.line,
                "sampler=torch.utils.data.distributed.DistributedSampler(dataset)  # instead of shuffle=True",
            )


RULE = rule(RanksSeeTheSameData, "FL035", __doc__)

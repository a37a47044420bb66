"""Every rank writes the same file.

What:
    The program is distributed, and `torch.save` writes to the same path in every process.
Why it matters:
    All ranks write to one path at the same time. The file can be mixed or truncated, which shows only when it
    is loaded. On a shared disk, saving also takes N times as long.
How to fix it:
    Put it under `if torch.distributed.get_rank() == 0:`.
Example:
    import os
    import tempfile
    import torch

    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(3, 8, 4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    file = os.path.join(tempfile.gettempdir(), "every_rank.pt")
  - torch.save(model.module.state_dict(), file)  # <-
  + if torch.distributed.get_rank() == 0:
  +     torch.save(model.module.state_dict(), file)
"""

import os
import socket
from threading import Event
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule
from flatout.diagnose.rank_notes import RankNotes
from flatout.schema.findings import Severity

MAX_SAVES = 16
MAX_WAITS = 3  # for the other ranks, each of 0.4 s


class SavedByEveryRank(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.notes = RankNotes(program.torch, "saves")
        self.saves = 0
        self.lines: list[Line | None] = []
        self.same: dict[Line | None, int] = {}  # -> ranks

    def saved(self, saved: Any, file: Any) -> None:
        path = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
        if not isinstance(path, (str, os.PathLike)) or self.saves >= MAX_SAVES:
            return
        self.saves += 1
        self.lines.append(line_here())
        self.notes.tell(str(self.saves), f"{socket.gethostname()}:{os.path.realpath(path)}")
        tries = 20 if self.saves <= MAX_WAITS and self.notes.ranks > 1 and self.notes.rank == 0 else 1
        while tries and self.notes.waiting:
            for name, (own, *others) in self.notes.received():
                if own in others:
                    self.same[self.lines[int(name) - 1]] = 1 + others.count(own)
            tries -= 1
            Event().wait(0.02 * bool(tries and self.notes.waiting))

    def findings(self) -> Findings:
        for line, ranks in self.same.items():
            yield RULE.finding(
                f"{ranks} ranks wrote this file at the same time",
                line,
                "if torch.distributed.get_rank() == 0:",
            )


RULE = rule(SavedByEveryRank, "FL313", __doc__, Severity.FRAGILE)

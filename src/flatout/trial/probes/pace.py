"""A probe for the pace of a rank: steps, data waits, exchanges, size of its shares.

Runs in all ranks at once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from flatout.job.rank_environment import this_rank
from flatout.measure.clock import HostClock, clock_for
from flatout.measure.nests import tensors_in
from flatout.trial.probes.probe import Probe, ProbeUnavailable

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.utils.data import DataLoader


class PaceProbe(Probe):
    """Returns one value per step.

    ``step_ms``, ``data_ms``, ``exchange_ms`` (the part not hidden behind the backward pass), ``samples``,
    ``elements`` (of the model's inputs) and ``sent_bytes``.
    """

    def begin(self) -> None:
        if self.context.data_parallel is None or (here := this_rank()) is None:
            raise ProbeUnavailable("the program does not run as ranks of flatout")
        self.here, self.divided = here, self.context.data_parallel
        self.clock, self.host = clock_for(self.torch, self.context.device), HostClock()
        self.spans: list[list[tuple[str, Any, Any]]] = [[]]
        self.counts: list[dict[str, float]] = [dict.fromkeys(("samples", "elements", "sent_bytes"), 0.0)]
        self.marks = [self.clock.mark()]
        self.open: Any = None

    def tick(self) -> None:
        self.marks.append(self.clock.mark())
        self.spans.append([])
        self.counts.append(dict.fromkeys(self.counts[0], 0.0))

    def data_begin(self, loader: DataLoader) -> None:
        self.open = self.host.mark()

    def data_end(self, loader: DataLoader, batch: object) -> None:
        if self.open is not None:
            self.spans[-1].append(("data_ms", self.open, self.host.mark()))

    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.counts[-1]["elements"] += self.divided.part_of_inputs * sum(
            tensor.numel() for tensor in tensors_in((args, kwargs))
        )

    def exchange_begin(self) -> None:
        self.open = self.clock.mark()

    def exchange_end(self, traffic: Any) -> None:
        self.spans[-1].append(("exchange_ms", self.open, self.clock.mark()))
        self.counts[-1]["samples"] += self.divided.batches.share.size
        self.counts[-1]["sent_bytes"] += traffic.sent_bytes

    def end(self) -> dict[str, Any]:
        super().end()
        self.clock.settle()
        steps = list(zip(self.marks, self.marks[1:], strict=False))
        recorded: dict[str, Any] = {
            "rank": self.here.rank,
            "host": os.uname().nodename,
            "step_ms": [self.clock.elapsed_ms(a, b) for a, b in steps],
        }
        for name in ("data_ms", "exchange_ms"):
            clock = self.host if name == "data_ms" else self.clock
            recorded[name] = [
                sum(clock.elapsed_ms(a, b) for kind, a, b in self.spans[at] if kind == name)
                for at in range(len(steps))
            ]
        return {
            **recorded,
            **{name: [self.counts[at][name] for at in range(len(steps))] for name in self.counts[0]},
        }

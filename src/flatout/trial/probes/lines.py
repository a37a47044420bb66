"""Times the script's own lines between the phases of a step."""

from __future__ import annotations

import sys
from collections import Counter
from functools import wraps
from typing import TYPE_CHECKING, Any

from flatout.agent.frames import Line, is_user_file, place_of
from flatout.measure.line_timer import LineTimer
from flatout.measure.statistics import median
from flatout.trial.probes.probe import Probe

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

NEARBY_LINES = 3  # lines; a loop of a few lines counts as one place
MAX_PLACES = 3


class LineProbe(Probe):
    """Times lines except in data waits, forward and backward passes, optimizer steps and ``zero_grad``.

    A line with one of these calls is left out entirely: the rest of the line takes little time, and tracing
    it has a cost.
    """

    def begin(self) -> None:
        self.timer = LineTimer(is_user_file)
        self.recorded: list[Counter[Line]] = []
        self.phases: set[Line] = set()  # lines on which a phase begins
        self.timer.__enter__()
        self.timer.trace_running(sys._getframe(1))
        self.ledger.on_restore("tracing of lines", lambda: self.timer.__exit__())
        for owner in (self.torch.optim.Optimizer, self.torch.nn.Module):
            self.ledger.set(owner, "zero_grad", self._as_phase(owner.zero_grad))

    def _as_phase(self, zero_grad: Any) -> Any:
        def untimed_zero_grad(*args: object, **kwargs: object) -> None:
            self._begin_phase()
            zero_grad(*args, **kwargs)
            self.timer.paused = False

        return wraps(zero_grad)(untimed_zero_grad)

    def tick(self) -> None:
        self.timer.paused = False  # a step may end without its own backward pass
        self.recorded.append(Counter(self.timer.ns))
        self.timer.ns.clear()

    def data_begin(self, loader: DataLoader) -> None:
        self._begin_phase()

    def data_end(self, loader: DataLoader, batch: object) -> None:
        self.timer.paused = False

    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begin_phase()

    def backward_begin(self, losses: tuple[Any, ...]) -> None:
        self._begin_phase()

    def backward_end(self) -> None:
        self.timer.paused = False

    def optimizer_begin(self, optimizer: Optimizer) -> None:
        self._begin_phase()

    def optimizer_end(self, optimizer: Optimizer) -> None:
        self.timer.paused = False

    def _begin_phase(self) -> None:
        self.timer.paused = True
        if self.timer.line is not None:
            self.phases.add(self.timer.line)

    def end(self) -> dict[str, Any]:
        super().end()
        total = sum(self.recorded, Counter())
        for line in self.phases:
            del total[line]
        if not total:
            return {"between": None}
        top = total.most_common(1)[0][0]
        nearby = sorted(
            (line for line in total if line[0] is top[0] and abs(line[1] - top[1]) <= NEARBY_LINES),
            key=lambda line: -total[line],
        )
        # The median over the steps ignores rare events, such as a validation or a checkpoint.
        ns = median([sum(tick[line] for line in nearby) for tick in self.recorded])
        return {
            "between": {
                "calls": 1.0,
                "ms": ns / 1e6,
                "places": [
                    place.to_json() for line in nearby[:MAX_PLACES] if (place := place_of(line)) is not None
                ],
            }
        }

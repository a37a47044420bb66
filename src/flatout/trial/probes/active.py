"""The open probe: it observes some whole ticks of the running program, returns JSON, and undoes its changes."""

from __future__ import annotations

import math
import sys
from collections import Counter
from functools import wraps
from typing import TYPE_CHECKING, Any

from flatout.agent.frames import Line, is_user_file, location_parts, place_at, place_of
from flatout.agent.lines import OperatorLines
from flatout.agent.synchronisations import SyncRecorder
from flatout.measure.clock import HostClock
from flatout.measure.line_timer import LineTimer
from flatout.measure.operations import ProfilerRecording
from flatout.measure.statistics import median
from flatout.trial.monitor import settings
from flatout.trial.probes.probe import Probe, ProbeTools, ProbeUnavailable

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


class LrRangeProbe(Probe):
    """Gives the first parameter group ``low * factor**k`` in tick k; the others keep their proportion to it.

    The rate is set when each optimizer begins its step, so a scheduler of the script has no effect. The
    original values are restored at the end.
    """

    def begin(self) -> None:
        self.low, self.factor = float(self.requested["low"]), float(self.requested["factor"])
        groups = (group for optimizer in self.context.optimizers for group in optimizer.param_groups)
        self.groups = [group for group in groups if "lr" in group]
        if not self.groups:
            raise ProbeUnavailable(
                "this program updates its parameters without an optimizer that has a learning rate"
            )
        self.original_rates = [float(group["lr"]) for group in self.groups]
        self.ledger.on_restore("learning rates", lambda: self._set_rates(self.original_rates))
        self.losses: list[list[Any]] = [[]]
        self.rates: list[float] = []

    def backward_begin(self, losses: tuple[Any, ...]) -> None:
        self.losses[-1].extend(loss.detach().double().mean() for loss in losses)

    def optimizer_begin(self, optimizer: Optimizer) -> None:
        first = self.original_rates[0]
        self._set_rates([self._next_rate() * (lr / first if first else 1.0) for lr in self.original_rates])

    def tick(self) -> None:
        self.rates.append(self._next_rate())
        self.losses.append([])

    def _next_rate(self) -> float:
        return self.low * self.factor ** len(self.rates)

    def _set_rates(self, rates: list[float]) -> None:
        for group, lr in zip(self.groups, rates, strict=True):
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def end(self) -> dict[str, Any]:
        super().end()
        return self._results()

    def partial_result(self) -> dict[str, Any]:
        """Report a failing program, for example one with a NaN loss, as diverged at this learning rate."""
        self.rates.append(self._next_rate())
        self.losses[len(self.rates) - 1] = []
        return self._results()

    def _results(self) -> dict[str, Any]:
        losses = [
            sum(map(float, step)) / len(step) if step else math.nan for step in self.losses[: len(self.rates)]
        ]
        return {
            "lr": self.rates,
            "losses": [loss if math.isfinite(loss) else None for loss in losses],
            "groups": self.original_rates,
            "optimizer": type(self.context.optimizers[0]).__name__,
        }


class OperationsProbe(Probe):
    """Runs torch's profiler for ``active`` ticks, after ``wait`` undisturbed and ``warmup`` discarded ones.

    One tick before them records the lines of the operators. The profiler's own stacks are off: started in the
    middle of a step, as here, it takes half a minute to stop (torch 2.14), and it names functions instead of
    lines. ``by_line``: operators count apart at each line and for each shape, and the settings are reported.
    """

    def begin(self) -> None:
        self.by_line = bool(self.requested.get("by_line"))
        wait, warmup, self.active = (int(n) for n in self.requested["schedule"])
        self.ticks = 1 + wait + warmup + self.active
        profiler = self.torch.profiler
        self.profile = profiler.profile(
            activities=self.tools.activities(),
            schedule=profiler.schedule(wait=wait, warmup=warmup, active=self.active, repeat=1),
            on_trace_ready=self._on_trace,
            record_shapes=True,
            profile_memory=not self.by_line,
        )
        self.recorded: dict[str, Any] = {}
        self.started = False
        self.lines = OperatorLines(self.torch, self.ledger, HostClock.mark)
        if not self.context.compiled_by_script:  # compilers do not compile under a dispatch mode
            self.lines.install()

    def tick(self) -> None:
        if self.started:
            self.profile.step()
        else:
            self.ledger.restore()
            self.started = True
            self.profile.start()
            self.ledger.on_restore("profiler", self.profile.stop)

    def _on_trace(self, profile: Any) -> None:
        trace = self.requested.get("trace")
        if trace:
            with self.tools.real_files():
                profile.export_chrome_trace(trace)
        lines = {
            key: [location_parts(line) if line is not None else None for line in found]
            for key, found in self.lines.by_operator.items()
        }
        recorded = ProfilerRecording(
            profile.profiler.kineto_results.events(), self.active, lines, place_at, self.by_line
        ).summarise()
        self.recorded = {
            "operations": [operation.to_json() for operation in recorded.operations],
            "operators": recorded.operators / self.active,
            "operators_ms": recorded.operators_ns / 1e6 / self.active,
            "python_share": recorded.python_share,
            "waiting_share": recorded.waiting_share,
            "settings": settings(self.torch, self.context) if self.by_line else {},
            "busy_ms": None if recorded.busy_ns is None else recorded.busy_ns / 1e6 / self.active,
            "device_ms": {work: ns / 1e6 / self.active for work, ns in recorded.device_ns.items()},
            "gaps": [gap.to_json() for gap in recorded.gaps],
        }

    def end(self) -> dict[str, Any]:
        super().end()
        return self.recorded


class SynchronisationProbe(Probe):
    """Records where tensors wait for Python, and what is copied."""

    def begin(self) -> None:
        self._fetching = False
        self.synchronisations = SyncRecorder(
            self.torch, self.ledger, self.context.device_type, HostClock.mark, lambda: self._fetching
        )
        self.synchronisations.install()

    def data_begin(self, loader: DataLoader) -> None:
        self._fetching = True

    def data_end(self, loader: DataLoader, batch: object) -> None:
        self._fetching = False

    def end(self) -> dict[str, Any]:
        super().end()
        return {"synchronisations": [s.to_json() for s in self.synchronisations.records(self.ticks)]}


class ActiveProbe:
    """Holds the open probe, if any. A probe that fails stops observing; its end reports the reason."""

    def __init__(self, tools: ProbeTools) -> None:
        self.tools = tools
        self.probe: Probe | None = None
        self._failure = ""

    def begin(self, requested: dict[str, Any]) -> str:
        """Open a probe; return why it cannot be opened, or ""."""
        probe = make_probe(requested["probe"], self.tools, requested)
        try:
            probe.begin()
        except Exception as error:  # for example, the script's own profiler is running
            probe.undo()
            return _describe(error)
        self.probe, self._failure = probe, ""
        return ""

    def tick(self) -> None:
        assert self.probe is not None
        try:
            if not self._failure:
                self.probe.tick()
        except Exception as error:
            self._failure = _describe(error)

    def end(self) -> dict[str, Any]:
        assert self.probe is not None
        probe, self.probe = self.probe, None
        try:
            recorded = probe.end()
        except Exception as error:
            probe.undo()
            return {"why_not": self._failure or _describe(error)}
        return {"why_not": self._failure} if self._failure else recorded

    def partial_result(self) -> dict[str, Any] | None:
        """The results so far after the program failed; nothing is undone."""
        try:
            return self.probe.partial_result() if self.probe is not None and not self._failure else None
        except Exception:
            return None  # only the program's failure counts


def _describe(error: Exception) -> str:
    if isinstance(error, ProbeUnavailable):
        return str(error)
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0] if first else 'no message'}"


def make_probe(name: str, tools: ProbeTools, requested: dict[str, Any]) -> Probe:
    """A new probe. Raises KeyError for an unknown name."""
    from flatout.trial.probes.gradient_noise import GradientNoiseProbe
    from flatout.trial.probes.leak import LeakProbe
    from flatout.trial.probes.memory import MemoryProbe, PeakMemoryProbe

    probes = {
        "synchronisations": SynchronisationProbe,
        "between": LineProbe,
        "operations": OperationsProbe,
        "memory": MemoryProbe,
        "leak": LeakProbe,
        "lr range": LrRangeProbe,
        "noise": GradientNoiseProbe,
        "peak": PeakMemoryProbe,
    }
    return probes[name](tools, requested)

"""Probes: each observes some whole ticks of the running program, returns JSON, and undoes its changes.

A probe only slows its own ticks; phases and step times come from undisturbed ticks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from flatout.capture.frames import place_at, spelled
from flatout.capture.ledger import Ledger
from flatout.capture.lines import OperatorLines
from flatout.capture.listener import Listener
from flatout.capture.synchronisations import SyncRecorder
from flatout.measure.clock import HostClock
from flatout.measure.operations import ProfilerRecording


@dataclass
class ProbeContext:
    """What a probe may use.

    ``outside()`` lets it write where the program may not; ``ours()`` returns the tensors that flatout keeps.
    """

    torch: Any
    context: Any
    outside: Callable[[], AbstractContextManager[Any]]
    ours: Callable[[], list[Any]] = list

    @property
    def on_device(self) -> bool:
        return bool(self.context.device_type != "cpu")

    def activities(self) -> list[Any]:
        kinds = self.torch.profiler.ProfilerActivity
        return [kinds.CPU, *([kinds.CUDA] if self.context.device_type == "cuda" else [])]


class ProbeUnavailable(Exception):
    """A probe does not work with this program; the message is a sentence without a full stop."""


class Probe(Listener):
    """The base of all probes.

    ``begin`` and ``end`` run between two ticks, ``tick`` after each. ``end`` must undo everything in any
    case.
    """

    def __init__(self, around: ProbeContext, requested: dict[str, Any]) -> None:
        self.around, self.requested = around, requested
        self.torch, self.context = around.torch, around.context
        self.ticks = int(requested.get("ticks", 1))
        self.ledger = Ledger()

    def begin(self) -> None: ...
    def tick(self) -> None: ...

    def end(self) -> dict[str, Any]:
        self.ledger.restore()
        return {}

    def last_words(self) -> dict[str, Any] | None:
        """Return what is known when the program fails, if it is useful. Nothing needs to be undone."""
        return None

    def end_quietly(self) -> None:
        """Undo what can be undone after a failure."""
        try:
            self.ledger.restore()
        except RuntimeError:
            pass  # only the first failure counts


class ActiveProbe:
    """Holds the open probe, if any. A probe that fails stops observing; its end reports the reason."""

    def __init__(self, around: ProbeContext) -> None:
        self.around = around
        self.probe: Probe | None = None
        self._deaf = ""

    def begin(self, requested: dict[str, Any]) -> str:
        """Open a probe; return why it cannot be opened, or ""."""
        probe = make_probe(requested["probe"], self.around, requested)
        try:
            probe.begin()
        except Exception as error:  # for example, the script's own profiler is running
            probe.end_quietly()
            return _named(error)
        self.probe, self._deaf = probe, ""
        return ""

    def tick(self) -> None:
        assert self.probe is not None
        try:
            if not self._deaf:
                self.probe.tick()
        except Exception as error:
            self._deaf = _named(error)

    def end(self) -> dict[str, Any]:
        assert self.probe is not None
        probe, self.probe = self.probe, None
        try:
            recorded = probe.end()
        except Exception as error:
            probe.end_quietly()
            return {"why_not": self._deaf or _named(error)}
        return {"why_not": self._deaf} if self._deaf else recorded

    def last_words(self) -> dict[str, Any] | None:
        """Return the results so far after the program failed; nothing is undone."""
        try:
            return self.probe.last_words() if self.probe is not None and not self._deaf else None
        except Exception:
            return None  # only the program's failure counts


def _named(error: Exception) -> str:
    if isinstance(error, ProbeUnavailable):
        return str(error)
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0] if first else 'no message'}"


class SynchronisationProbe(Probe):
    """Records where tensors wait for Python, and what is copied."""

    def begin(self) -> None:
        self._fetching = False
        self.synchronisations = SyncRecorder(
            self.torch, self.ledger, self.context.device_type, HostClock.mark, lambda: self._fetching
        )
        self.synchronisations.install()

    def data_begin(self, loader: Any) -> None:
        self._fetching = True

    def data_end(self, loader: Any, batch: Any) -> None:
        self._fetching = False

    def end(self) -> dict[str, Any]:
        super().end()
        return {
            "synchronisations": [
                synchronisation.to_json() for synchronisation in self.synchronisations.seen(self.ticks)
            ]
        }


class OperationsProbe(Probe):
    """Runs torch's profiler for ``active`` ticks, after ``wait`` undisturbed and ``warmup`` discarded ones.

    One tick before them records the lines of the operators. The profiler's own stacks are off: started in the
    middle of a step, as here, it takes half a minute to stop (torch 2.14), and it names functions instead of
    lines.
    """

    def begin(self) -> None:
        wait, warmup, self.active = (int(n) for n in self.requested["schedule"])
        self.ticks = 1 + wait + warmup + self.active
        profiler = self.torch.profiler
        self.profile = profiler.profile(
            activities=self.around.activities(),
            schedule=profiler.schedule(wait=wait, warmup=warmup, active=self.active, repeat=1),
            on_trace_ready=self._recorded,
            record_shapes=True,
            profile_memory=True,
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
            self.ledger.call("profiler", self.profile.stop)

    def _recorded(self, profile: Any) -> None:
        trace = self.requested.get("trace")
        if trace:
            with self.around.outside():
                profile.export_chrome_trace(trace)
        lines = {
            key: [spelled(line) if line is not None else None for line in found]
            for key, found in self.lines.by_operator.items()
        }
        recorded = ProfilerRecording(
            profile.profiler.kineto_results.events(), self.active, lines, place_at
        ).observed()
        self.recorded = {
            "operations": [operation.to_json() for operation in recorded.operations],
            "operators": recorded.operators / self.active,
            "operators_ms": recorded.operators_ns / 1e6 / self.active,
            "python_share": recorded.python_share,
            "busy_ms": None if recorded.busy_ns is None else recorded.busy_ns / 1e6 / self.active,
            "gaps": [gap.to_json() for gap in recorded.gaps],
        }

    def end(self) -> dict[str, Any]:
        super().end()
        return self.recorded


def make_probe(name: str, around: ProbeContext, requested: dict[str, Any]) -> Probe:
    """Return a new probe. Raises KeyError for an unknown name."""
    from flatout.trial.line_probe import LineProbe
    from flatout.trial.lr_range_probe import LrRangeProbe
    from flatout.trial.memory_probes import LeakProbe, MemoryProbe
    from flatout.trial.noise_probe import GradientNoiseProbe
    from flatout.trial.pace import PaceProbe
    from flatout.trial.peak_probe import PeakMemoryProbe

    probes = {
        "synchronisations": SynchronisationProbe,
        "between": LineProbe,
        "operations": OperationsProbe,
        "memory": MemoryProbe,
        "leak": LeakProbe,
        "lr range": LrRangeProbe,
        "noise": GradientNoiseProbe,
        "pace": PaceProbe,
        "peak": PeakMemoryProbe,
    }
    return probes[name](around, requested)

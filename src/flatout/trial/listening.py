"""Probes: each observes some whole ticks of the running program, returns JSON, and undoes its changes.

A probe only slows its own ticks; phases and step times come from undisturbed ticks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from flatout.capture.crossings import Crossings
from flatout.capture.frames import place_at, spelled
from flatout.capture.ledger import Ledger
from flatout.capture.lines import OperatorLines
from flatout.capture.listener import Listener
from flatout.measure.clock import HostClock
from flatout.measure.operations import Recording


@dataclass
class Surroundings:
    """What a probe may use.

    ``outside()`` lets it write where the program may not; ``ours()`` returns the tensors that flatout keeps.
    """

    torch: Any
    scene: Any
    outside: Callable[[], AbstractContextManager[Any]]
    ours: Callable[[], list[Any]] = list

    @property
    def on_device(self) -> bool:
        return bool(self.scene.device_type != "cpu")

    def activities(self) -> list[Any]:
        kinds = self.torch.profiler.ProfilerActivity
        return [kinds.CPU, *([kinds.CUDA] if self.scene.device_type == "cuda" else [])]


class CannotHear(Exception):
    """A probe does not work with this program; the message is a sentence without a full stop."""


class Ear(Listener):
    """The base of all probes.

    ``begin`` and ``end`` run between two ticks, ``tick`` after each. ``end`` must undo everything in any
    case.
    """

    def __init__(self, around: Surroundings, wishes: dict[str, Any]) -> None:
        self.around, self.wishes = around, wishes
        self.torch, self.scene = around.torch, around.scene
        self.ticks = int(wishes.get("ticks", 1))
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


class Listening:
    """Holds the open probe, if any. A probe that fails stops observing; its end reports the reason."""

    def __init__(self, around: Surroundings) -> None:
        self.around = around
        self.ear: Ear | None = None
        self._deaf = ""

    def begin(self, wishes: dict[str, Any]) -> str:
        """Open a probe; return why it cannot be opened, or ""."""
        ear = ear_for(wishes["ear"], self.around, wishes)
        try:
            ear.begin()
        except Exception as error:  # for example, the script's own profiler is running
            ear.end_quietly()
            return _named(error)
        self.ear, self._deaf = ear, ""
        return ""

    def tick(self) -> None:
        assert self.ear is not None
        try:
            if not self._deaf:
                self.ear.tick()
        except Exception as error:
            self._deaf = _named(error)

    def end(self) -> dict[str, Any]:
        assert self.ear is not None
        ear, self.ear = self.ear, None
        try:
            heard = ear.end()
        except Exception as error:
            ear.end_quietly()
            return {"why_not": self._deaf or _named(error)}
        return {"why_not": self._deaf} if self._deaf else heard

    def last_words(self) -> dict[str, Any] | None:
        """Return the results so far after the program failed; nothing is undone."""
        try:
            return self.ear.last_words() if self.ear is not None and not self._deaf else None
        except Exception:
            return None  # only the program's failure counts


def _named(error: Exception) -> str:
    if isinstance(error, CannotHear):
        return str(error)
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0] if first else 'no message'}"


class CrossingsEar(Ear):
    """Records where tensors wait for Python, and what is copied."""

    def begin(self) -> None:
        self._fetching = False
        self.crossings = Crossings(self.torch, self.ledger, self.scene.device_type, HostClock.mark, lambda: self._fetching)
        self.crossings.install()

    def data_begin(self, loader: Any) -> None:
        self._fetching = True

    def data_end(self, loader: Any, batch: Any) -> None:
        self._fetching = False

    def end(self) -> dict[str, Any]:
        super().end()
        return {"crossings": [crossing.to_json() for crossing in self.crossings.seen(self.ticks)]}


class OperationsEar(Ear):
    """Runs torch's profiler for ``active`` ticks, after ``wait`` undisturbed and ``warmup`` discarded ones.

    One tick before them records the lines of the operators. The profiler's own stacks are off: started in the
    middle of a step, as here, it takes half a minute to stop (torch 2.14), and it names functions instead of
    lines.
    """

    def begin(self) -> None:
        wait, warmup, self.active = (int(n) for n in self.wishes["schedule"])
        self.ticks = 1 + wait + warmup + self.active
        profiler = self.torch.profiler
        self.profile = profiler.profile(activities=self.around.activities(), schedule=profiler.schedule(wait=wait, warmup=warmup, active=self.active, repeat=1),
                                        on_trace_ready=self._recorded, record_shapes=True, profile_memory=True)
        self.heard: dict[str, Any] = {}
        self.started = False
        self.lines = OperatorLines(self.torch, self.ledger, HostClock.mark)
        if not self.scene.compiled_by_script:  # compilers do not compile under a dispatch mode
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
        trace = self.wishes.get("trace")
        if trace:
            with self.around.outside():
                profile.export_chrome_trace(trace)
        lines = {key: [spelled(line) if line is not None else None for line in found] for key, found in self.lines.by_operator.items()}
        heard = Recording(profile.profiler.kineto_results.events(), self.active, lines, place_at).heard()
        self.heard = {
            "operations": [operation.to_json() for operation in heard.operations], "operators": heard.operators / self.active,
            "operators_ms": heard.operators_ns / 1e6 / self.active, "python_share": heard.python_share,
            "busy_ms": None if heard.busy_ns is None else heard.busy_ns / 1e6 / self.active, "gaps": [gap.to_json() for gap in heard.gaps],
        }

    def end(self) -> dict[str, Any]:
        super().end()
        return self.heard


def ear_for(name: str, around: Surroundings, wishes: dict[str, Any]) -> Ear:
    """Return a new probe. Raises KeyError for an unknown name."""
    from flatout.trial.between import BetweenEar
    from flatout.trial.noise import NoiseEar
    from flatout.trial.pace import PaceEar
    from flatout.trial.peaks import PeakEar
    from flatout.trial.ranging import LrRangeEar
    from flatout.trial.remembering import LeakEar, MemoryEar

    ears = {"crossings": CrossingsEar, "between": BetweenEar, "operations": OperationsEar, "memory": MemoryEar, "leak": LeakEar, "lr range": LrRangeEar,
            "noise": NoiseEar, "pace": PaceEar, "peak": PeakEar}
    return ears[name](around, wishes)

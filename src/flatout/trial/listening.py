"""The steps that are listened to: an Ear hears some whole ticks of the running program, tells what it heard as JSON, and leaves nothing behind.

What an ear costs is in those ticks alone; phases and step times come from quiet ones.
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
    """What an ear may look at. ``outside()`` lets it write where the program itself may not; ``ours()`` are tensors that we keep ourselves."""

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
    """Why an ear has nothing to tell of this program: a sentence for a person, without its stop."""


class Ear(Listener):
    """``begin`` and ``end`` are called between two ticks, ``tick`` after each one. ``end`` must undo everything, whatever happened."""

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
        """What was heard until the program failed, where that is worth telling. Nothing needs to be undone."""
        return None

    def end_quietly(self) -> None:
        """After a failure: undo what can be undone."""
        try:
            self.ledger.restore()
        except RuntimeError:
            pass  # the failure that counts is the first one


class Listening:
    """The ear that is open, if one is. An ear that fails hears no more; why is told at its end."""

    def __init__(self, around: Surroundings) -> None:
        self.around = around
        self.ear: Ear | None = None
        self._deaf = ""

    def begin(self, wishes: dict[str, Any]) -> str:
        """Why the ear cannot be opened, or nothing."""
        ear = ear_for(wishes["ear"], self.around, wishes)
        try:
            ear.begin()
        except Exception as error:  # a profiler of the script's own that is running, say
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
        """The program has failed: nothing is undone any more."""
        try:
            return self.ear.last_words() if self.ear is not None and not self._deaf else None
        except Exception:
            return None  # the failure that counts is the program's


def _named(error: Exception) -> str:
    if isinstance(error, CannotHear):
        return str(error)
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0] if first else 'no message'}"


class CrossingsEar(Ear):
    """Where tensors wait for Python, and what is copied."""

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
    """torch's own profiler around ``active`` ticks, after ``wait`` quiet ones and ``warmup`` ones that it throws away.

    One tick before all of them tells the lines of the operators. The profiler's own stacks are not recorded: begun in the middle of a step, as
    here, it takes half a minute to end (torch 2.14), and names functions instead of lines.
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
        if not self.scene.compiled_by_script:  # a compiler does not compile under a mode
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
    """Raises LookupError for a name that nobody has."""
    from flatout.trial.between import BetweenEar
    from flatout.trial.noise import NoiseEar
    from flatout.trial.pace import PaceEar
    from flatout.trial.peaks import PeakEar
    from flatout.trial.ranging import LrRangeEar
    from flatout.trial.remembering import LeakEar, MemoryEar

    ears = {"crossings": CrossingsEar, "between": BetweenEar, "operations": OperationsEar, "memory": MemoryEar, "leak": LeakEar, "lr range": LrRangeEar,
            "noise": NoiseEar, "pace": PaceEar, "peak": PeakEar}
    return ears[name](around, wishes)

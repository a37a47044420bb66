"""The base of all probes.

A probe only slows its own ticks; phases and step times come from undisturbed ticks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener

if TYPE_CHECKING:
    from flatout.agent.training_context import TrainingContext


@dataclass
class ProbeTools:
    """What a probe may use.

    ``real_files()`` lets it write where the program may not. ``flatout_tensors()`` are those that flatout keeps.
    """

    torch: ModuleType
    context: TrainingContext
    real_files: Callable[[], AbstractContextManager[Any]]
    flatout_tensors: Callable[[], list[Any]] = list

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

    def __init__(self, tools: ProbeTools, requested: dict[str, Any]) -> None:
        self.tools, self.requested = tools, requested
        self.torch, self.context = tools.torch, tools.context
        self.ticks = int(requested.get("ticks", 1))
        self.ledger = Ledger()

    def begin(self) -> None: ...
    def tick(self) -> None: ...

    def end(self) -> dict[str, Any]:
        self.ledger.restore()
        return {}

    def partial_result(self) -> dict[str, Any] | None:
        """What is known when the program fails, if it is useful. Nothing needs to be undone."""
        return None

    def undo(self) -> None:
        """Undo what can be undone after a failure."""
        try:
            self.ledger.restore()
        except RuntimeError:
            pass  # only the first failure counts

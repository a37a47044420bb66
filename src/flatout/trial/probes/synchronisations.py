"""A probe for places where tensors wait for Python."""

from __future__ import annotations

from typing import Any

from flatout.agent.synchronisations import SyncRecorder
from flatout.measure.clock import HostClock
from flatout.trial.probes.probe import Probe


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

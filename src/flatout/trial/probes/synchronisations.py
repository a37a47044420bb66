"""A probe for places where tensors wait for Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatout.agent.synchronisations import SyncRecorder
from flatout.measure.clock import HostClock
from flatout.trial.probes.probe import Probe

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


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

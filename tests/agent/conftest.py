"""A training context in this very process, installed for one test and removed after it."""

import pytest

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext


class RecordingListener(Listener):
    """Records the events that it observes."""

    wants_phases = True

    def __init__(self):
        self.observed = []
        self.losses = []
        self.batches = []

    def data_begin(self, loader):
        self.observed.append("data")

    def data_end(self, loader, batch):
        self.batches.append(batch)

    def forward_begin(self, root, args, kwargs):
        self.observed.append("forward")

    def forward_end(self, root, output):
        self.observed.append("/forward")

    def backward_begin(self, losses):
        self.observed.append("backward")
        self.losses.append(losses[0].detach().clone())

    def backward_end(self):
        self.observed.append("/backward")

    def optimizer_begin(self, optimizer):
        self.observed.append("optimizer")

    def optimizer_end(self, optimizer):
        self.observed.append("/optimizer")

    def step_end(self):
        self.observed.append("step")


@pytest.fixture
def enter():
    """``context, probe = enter()`` installs a training context; the ledger removes it when the test ends."""
    torch = pytest.importorskip("torch")
    ledgers = []

    def install():
        ledgers.append(Ledger())
        probe = RecordingListener()
        context = TrainingContext(torch, probe, ledgers[-1])
        context.install()
        return context, probe

    yield install
    for ledger in reversed(ledgers):  # the last patch is removed first
        ledger.restore()

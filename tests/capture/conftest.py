"""A Scene in this very process: installed for one test, taken out again after it."""

from __future__ import annotations

import pytest

from flatout.capture.ledger import Ledger
from flatout.capture.listener import Listener
from flatout.capture.scene import Scene


class Ear(Listener):
    """Writes down what it hears."""

    wants_phases = True

    def __init__(self):
        self.heard = []
        self.losses = []
        self.batches = []

    def data_begin(self, loader):
        self.heard.append("data")

    def data_end(self, loader, batch):
        self.batches.append(batch)

    def forward_begin(self, root, args, kwargs):
        self.heard.append("forward")

    def forward_end(self, root, output):
        self.heard.append("/forward")

    def backward_begin(self, losses):
        self.heard.append("backward")
        self.losses.append(losses[0].detach().clone())

    def backward_end(self):
        self.heard.append("/backward")

    def optimizer_begin(self, optimizer):
        self.heard.append("optimizer")

    def optimizer_end(self, optimizer):
        self.heard.append("/optimizer")

    def step_end(self):
        self.heard.append("step")


@pytest.fixture
def enter():
    """``scene, ear = enter()``: installs a Scene; the ledger takes it out when the test ends."""
    torch = pytest.importorskip("torch")
    ledgers = []

    def install():
        ledgers.append(Ledger())
        ear = Ear()
        scene = Scene(torch, ear, ledgers[-1])
        scene.install()
        return scene, ear

    yield install
    for ledger in reversed(ledgers):  # what was put over another is taken away first
        ledger.restore()

"""An error in a listener does not reach the program: the listener learns of it once, and training
continues.
"""

from __future__ import annotations

import pytest

from flatout.agent.ledger import Ledger
from flatout.agent.listener import EVENTS, GuardedListener, Listener
from flatout.agent.training_context import TrainingContext

torch = pytest.importorskip("torch")


class Clumsy(Listener):
    wants_phases = True

    def __init__(self, event):
        self.observed: list[str] = []
        self.mistakes: list[Exception] = []
        self.__dict__[event] = self._stumble

    def _stumble(self, *_):
        raise ZeroDivisionError("clumsy")

    def step_end(self):
        self.observed.append("step")

    def on_error(self, error):
        self.mistakes.append(error)


def train(steps=4):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for batch in torch.utils.data.DataLoader(torch.ones(2 * steps, 3), batch_size=2):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "event", [event for event in EVENTS if not event.startswith("exchange")]
)  # one process communicates with none
def test_program_trains_on(event):
    plain = train()
    ledger, listener = Ledger(), Clumsy(event)
    TrainingContext(torch, listener, ledger).install()
    try:
        assert train() == plain
    finally:
        ledger.restore()
    assert [str(error) for error in listener.mistakes] == ["clumsy"]
    assert len(listener.observed) <= 1  # nothing after the error


def test_a_request_to_stop_passes():
    class Stops(Listener):
        def step_end(self):
            raise SystemExit(3)

    with pytest.raises(SystemExit):
        GuardedListener(Stops()).step_end()

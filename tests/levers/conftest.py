"""A small training program in this process with a training context around it: convolution, batch norm,
dropout, a loader.
"""

import gc

import pytest

from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext

BATCH = 8


class Program:
    """Trains on request.

    ``losses`` are hexadecimal; the context has observed everything since before the model was made.
    """

    def __init__(self, torch, device="cpu", optimizer="Adam", model=None, size=12, early=()):
        self.torch, self.device = torch, device
        self.ledger = Ledger()
        self.context = TrainingContext(torch, Listener(), self.ledger)
        self.context.install()
        for lever, value in early:  # before any loader is made
            lever.apply(self.context, value, self.ledger)
        torch.manual_seed(0)
        nn = torch.nn
        if model is None:
            model = nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1),
                nn.BatchNorm2d(8),
                nn.ReLU(inplace=True),
                *(nn.Sequential(nn.Conv2d(8, 8, 1), nn.Tanh()) for _ in range(2)),
                nn.AdaptiveAvgPool2d(2),
                nn.Flatten(),
                nn.Dropout(0.2),
                nn.Linear(32, 5),
            )
        self.model = model.to(device)
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=0.01)
        source = torch.Generator().manual_seed(1)
        data = torch.utils.data.TensorDataset(
            torch.randn(4 * BATCH, 3, size, size, generator=source),
            torch.randint(5, (4 * BATCH,), generator=source),
        )
        self.loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
        self.losses = []

    def train(self, epochs=1):
        """Run epochs of four steps each and return their losses."""
        torch, found = self.torch, []
        for _ in range(epochs):
            for x, y in self.loader:
                x, y = x.to(self.device), y.to(self.device)
                self.optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                found.append(loss.item())
        self.losses += [v.hex() for v in found]
        return found

    def leave(self):
        self.context.stop_observing()
        self.ledger.restore()
        gc.collect()


@pytest.fixture
def program():
    """``program()`` is a Program that has trained one epoch; it takes the options of the class, and
    ``epochs``.
    """
    torch = pytest.importorskip("torch")
    made = []

    def make(epochs=1, **options):
        made.append(Program(torch, **options))
        if epochs:
            made[-1].train(epochs)
        return made[-1]

    yield make
    for each in reversed(made):
        each.leave()


@pytest.fixture
def training(request):
    """``training()`` is one of the file's class ``Training``, with a context and a ledger that are closed at
    the end.
    """
    made = []

    def make(**options):
        made.append(request.module.Training(**options))
        return made[-1]

    yield make
    for each in made:
        each.context.stop_observing()
        each.ledger.restore()
